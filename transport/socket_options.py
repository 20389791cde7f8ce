"""The TCP options of the transport's sockets: timeouts, congestion control, pacing and buffers."""

from __future__ import annotations

import logging
import socket
import struct

from netmon import tcp_info
from transport import kernel_limits
from transport.config import MIB, NEAR_RTT_S, TransportConfig

logger = logging.getLogger("prfaas.transport")

# Options of Linux that Python does not name.
SO_SNDBUFFORCE, SO_MAX_PACING_RATE = 32, 47
MIN_SEND_BUFFER_BYTES, MAX_SEND_BUFFER_BYTES = 8 * MIB, 64 * MIB
NEAR_LOWAT_BYTES = 1 * MIB
"""TCP_NOTSENT_LOWAT on a near path, at least."""


def prepare(sock: socket.socket, config: TransportConfig) -> None:
    """Set the TCP options that both ends use."""
    tcp = socket.IPPROTO_TCP
    # Without it Nagle's algorithm holds short frames (ACK, OPEN, the end of DATA) back for an
    # acknowledgement of the frame before.
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    lifetime_s = config.ack_timeout_s
    if idle_s := config.keepalive_idle_s:
        interval_s, probes = config.keepalive_interval_s, config.keepalive_probes
        keep_alive(sock, idle_s=idle_s, interval_s=interval_s, probes=probes)
        # With a user timeout the kernel does not count probes (tcp(7)): at a shorter one, the first
        # probe that is lost would end an idle connection. `ack_timeout_s` is watched by the sender.
        lifetime_s = idle_s + interval_s * probes
    # RFC 5482: without it the kernel retransmits into a dead path for about 15 minutes
    # (tcp_retries2).
    sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, max(1, int(lifetime_s * 1000)))


def keep_alive(sock: socket.socket, *, idle_s: int, interval_s: int, probes: int) -> None:
    """Let the kernel probe the connection when nothing is said on it: a host that is gone without a
    word is noticed, and a NAT's entry stays.
    """
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(tcp, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(tcp, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(tcp, socket.TCP_KEEPCNT, probes)


def prepare_to_send(sock: socket.socket, config: TransportConfig) -> None:
    """Set the TCP options of the end that sends data, before it connects."""
    prepare(sock, config)
    tcp = socket.IPPROTO_TCP
    if config.notsent_lowat_bytes:
        sock.setsockopt(tcp, socket.TCP_NOTSENT_LOWAT, config.notsent_lowat_bytes)
    if config.pace_bytes_per_s:
        # The link keeps the rate itself; this keeps a connection from sending a frame as a burst.
        paced = min(int(1.1 * config.pace_bytes_per_s), 0xFFFFFFFF)
        # Packed, because Python takes only numbers that fit an int.
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=I", paced))
    # Every socket begins with the near algorithm, and `suit_to_distance` changes it later: the
    # kernel goes on pacing a socket that had bbr once, even after it was given another algorithm.
    if config.near_congestion:
        sock.setsockopt(tcp, socket.TCP_CONGESTION, config.near_congestion.encode())


def suit_to_distance(sock: socket.socket, config: TransportConfig) -> None:
    """Set what depends on the measured round trip."""
    tcp = socket.IPPROTO_TCP
    if is_near(sock):
        # Here nothing waits for long, but the sender would wake for every 64 KiB of room.
        if config.notsent_lowat_bytes:
            lowat_bytes = max(NEAR_LOWAT_BYTES, config.notsent_lowat_bytes)
            sock.setsockopt(tcp, socket.TCP_NOTSENT_LOWAT, lowat_bytes)
    elif config.congestion:
        sock.setsockopt(tcp, socket.TCP_CONGESTION, config.congestion.encode())


def is_near(sock: socket.socket) -> bool:
    """Whether the measured round trip is that of one host or site."""
    info = tcp_info.parse(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, tcp_info.SIZE))
    return info is not None and 0 < info.rtt_s < NEAR_RTT_S


def grow_send_buffer(sock: socket.socket) -> int:
    """Double SO_SNDBUF within the kernel's limits; returns its size in bytes."""
    level = socket.SOL_SOCKET
    size = sock.getsockopt(level, socket.SO_SNDBUF)
    # The kernel doubles the value of SO_SNDBUF (socket(7)) and stops autotuning a buffer that was
    # set by hand. So a value below the one that autotuning may reach would be a loss.
    wanted = min(MAX_SEND_BUFFER_BYTES, max(MIN_SEND_BUFFER_BYTES, 2 * size))
    if size >= wanted:
        return size
    try:
        sock.setsockopt(level, SO_SNDBUFFORCE, wanted // 2)
    except PermissionError:
        if 2 * kernel_limits.wmem_max_bytes() > max(size, kernel_limits.tcp_wmem_bytes()):
            sock.setsockopt(level, socket.SO_SNDBUF, wanted // 2)
    return sock.getsockopt(level, socket.SO_SNDBUF)


def usable_congestion(name: str | None) -> str | None:
    """`name` if this process may choose it (root, or tcp_allowed_congestion_control), else None."""
    if name is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError as error:
            logger.warning("kernel refuses TCP congestion control %r: %s", name, error.strerror)
            return None
    return name
