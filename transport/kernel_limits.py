"""This host's limits for TCP, read from /proc/sys/net. Knows no socket."""

from __future__ import annotations

from pathlib import Path

_NET = Path("/proc/sys/net")


def wmem_max_bytes() -> int:
    """Most that SO_SNDBUF may ask for (the kernel then doubles it); 0 when unknown."""
    return _numbers("core/wmem_max")[-1]


def tcp_wmem_bytes() -> int:
    """Largest send buffer that the kernel's autotuning gives a connection; 0 when unknown."""
    return _numbers("ipv4/tcp_wmem")[-1]


def tcp_rmem_bytes() -> int:
    """Largest receive buffer that the kernel's autotuning gives a connection; 0 when unknown."""
    return _numbers("ipv4/tcp_rmem")[-1]


def available_congestion() -> list[str]:
    """Congestion control algorithms that are loaded."""
    return _words("ipv4/tcp_available_congestion_control")


def allowed_congestion() -> list[str]:
    """The algorithms that a process without CAP_NET_ADMIN may choose."""
    return _words("ipv4/tcp_allowed_congestion_control")


def default_congestion() -> str:
    """The algorithm of a socket that chooses none; "" when unknown."""
    return next(iter(_words("ipv4/tcp_congestion_control")), "")


def _words(name: str) -> list[str]:
    # A container may hide parts of /proc/sys/net: 0, "" and [] then mean "unknown".
    try:
        return (_NET / name).read_text().split()
    except OSError:
        return []


def _numbers(name: str) -> list[int]:
    return [int(word) for word in _words(name)] or [0]
