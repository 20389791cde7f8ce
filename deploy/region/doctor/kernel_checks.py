"""Which settings of kernels should be different, for a measured path or for any long one. Pure.

A check of a path compares the present value with the value that a rate needs at its round-trip
time; `is_wrong` is set only where it holds this path back. A check of a host compares with what a
long path at least needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.region.doctor.measurement import Measurement
from deploy.region.doctor.windows import (
    RECEIVE_PAYLOAD_SHARE,
    SEND_PAYLOAD_SHARE,
    path_rtt_s,
    send_buffer_bytes,
)
from kvmanager.agent.probe_messages import KernelTcp
from transport.config import NEAR_RTT_S

MIB = 1 << 20
LEAST_BUFFER_BYTES = 4 * MIB
_FIRST_TWO = {"net.ipv4.tcp_wmem": "4096 16384", "net.ipv4.tcp_rmem": "4096 131072"}
"""The default minimum and initial size of buffers, which a sysctl needs before the maximum."""


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """One setting: its present value, the value to set, and the command with the exact number.

    `wanted` and `fix` are empty if it may stay.
    """

    host: str
    """ "sender" or "receiver" of a path, or the name of a node."""
    name: str
    present: str
    wanted: str
    fix: str
    is_wrong: bool


def kernel_checks(measured: Measurement, target_bytes_per_s: float) -> list[KernelCheck]:
    """All settings that matter for sending at this rate."""
    checks = _buffer_checks(measured, target_bytes_per_s)
    kernel, wanted = measured.sender_kernel, measured.wanted_congestion
    # Sockets to near hosts use the kernel's default on purpose.
    is_far = measured.path.min_rtt_s >= NEAR_RTT_S
    has_other = bool(wanted and measured.path.congestion) and set(measured.path.congestion) != {
        wanted
    }
    checks.append(_congestion_check("sender", kernel, wanted, is_wrong=is_far and has_other))
    used = set(measured.path.congestion) or {measured.sender_kernel.default_congestion}
    if used & {"cubic", "reno"} and measured.path.min_rtt_s >= NEAR_RTT_S:
        checks.append(_idle_check("sender", is_wrong=measured.sender_kernel.slow_start_after_idle))
    return checks


def host_kernel_checks(host: str, kernel: KernelTcp, wanted: str) -> list[KernelCheck]:
    """The settings that links to other hosts need at least. `wanted`: the congestion control that
    the agent's configuration names.
    """
    reachable, receive = send_buffer_bytes(kernel), kernel.tcp_rmem_bytes
    is_short_send = 0 < reachable < LEAST_BUFFER_BYTES
    is_short_receive = 0 < receive < LEAST_BUFFER_BYTES
    usable = {*kernel.allowed_congestion, kernel.default_congestion}
    if kernel.may_exceed:
        usable |= set(kernel.available_congestion)
    # A container may hide /proc/sys/net: what is unknown is not wrong.
    has_other = bool(wanted and kernel.default_congestion) and wanted not in usable
    return [
        _size_check(
            host, "net.ipv4.tcp_wmem", kernel.tcp_wmem_bytes, LEAST_BUFFER_BYTES, is_short_send
        ),
        _size_check(host, "net.ipv4.tcp_rmem", receive, LEAST_BUFFER_BYTES, is_short_receive),
        _congestion_check(host, kernel, wanted, is_wrong=has_other),
        _idle_check(host, is_wrong=has_other and kernel.slow_start_after_idle),
    ]


def _buffer_checks(measured: Measurement, target_bytes_per_s: float) -> list[KernelCheck]:
    in_flight = target_bytes_per_s * path_rtt_s(measured) / max(1, measured.width)
    sender, receiver = measured.sender_kernel, measured.receiver_kernel
    send, receive = in_flight / SEND_PAYLOAD_SHARE, in_flight / RECEIVE_PAYLOAD_SHARE
    # One of the two is enough: the sender asks for what tcp_wmem does not give it (SO_SNDBUF).
    reachable = max(send_buffer_bytes(sender), measured.path.send_buffer_bytes)
    is_short_send = 0 < reachable < send
    is_short_receive = 0 < receiver.tcp_rmem_bytes < receive
    # SO_SNDBUF doubles what it is asked for, so half of the size is enough for wmem_max.
    wmem, rmem = _power_of_two(send), _power_of_two(receive)
    return [
        _size_check("sender", "net.ipv4.tcp_wmem", sender.tcp_wmem_bytes, wmem, is_short_send),
        _size_check("sender", "net.core.wmem_max", sender.wmem_max_bytes, wmem // 2, is_short_send),
        _size_check(
            "receiver", "net.ipv4.tcp_rmem", receiver.tcp_rmem_bytes, rmem, is_short_receive
        ),
    ]


def _size_check(host: str, name: str, present: int, wanted: int, is_wrong: bool) -> KernelCheck:
    is_wrong = is_wrong and present < wanted
    first_two = _FIRST_TWO.get(name, "")
    value = f"{first_two} {wanted}".strip()
    unit = " max" if first_two else ""
    return KernelCheck(
        host=host,
        name=name + unit,
        present=_size(present) if present else "unknown",
        wanted=_size(wanted) if is_wrong else "",
        fix=f"on {_the(host)}: sysctl -w {name}={_quoted(value)}" if is_wrong else "",
        is_wrong=is_wrong,
    )


def _congestion_check(host: str, kernel: KernelTcp, wanted: str, *, is_wrong: bool) -> KernelCheck:
    name = "net.ipv4.tcp_allowed_congestion_control"
    allowed = " ".join([*kernel.allowed_congestion, wanted])
    load = "" if wanted in kernel.available_congestion else f"modprobe tcp_{wanted} && "
    return KernelCheck(
        host=host,
        name=name,
        present=" ".join(kernel.allowed_congestion) or "unknown",
        wanted=allowed if is_wrong else "",
        fix=(
            f"on {_the(host)}: {load}sysctl -w {name}={_quoted(allowed)}, then restart its agent"
            if is_wrong
            else ""
        ),
        is_wrong=is_wrong,
    )


def _idle_check(host: str, *, is_wrong: bool) -> KernelCheck:
    name = "net.ipv4.tcp_slow_start_after_idle"
    return KernelCheck(
        host=host,
        name=name,
        present=str(int(is_wrong)),
        wanted="0" if is_wrong else "",
        fix=f"on {_the(host)}: sysctl -w {name}=0 (not needed with bbr)" if is_wrong else "",
        is_wrong=is_wrong,
    )


def _the(host: str) -> str:
    return f"the {host}" if host in ("sender", "receiver") else host


def _power_of_two(nbytes: float) -> int:
    size = LEAST_BUFFER_BYTES
    while size < nbytes:
        size *= 2
    return size


def _size(nbytes: int) -> str:
    return f"{nbytes / MIB:.4g} MiB" if nbytes >= MIB else f"{nbytes >> 10} KiB"


def _quoted(value: str) -> str:
    return f'"{value}"' if " " in value else value
