"""How much payload the kernels let connections have in flight, and the rate that allows. Pure.

Buffers also count the kernel's overhead, so they hold less payload than their size. Of a full send
buffer about two thirds were measured to be payload. Of a receive buffer the kernel advertises about
half (net.ipv4.tcp_adv_win_scale = 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.region.doctor.measurement import Measurement
from kvmanager.agent.probe_messages import KernelTcp
from transport.config import NEAR_RTT_S
from transport.socket_options import MAX_SEND_BUFFER_BYTES

SEND_PAYLOAD_SHARE = 0.65
RECEIVE_PAYLOAD_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Windows:
    """The payload of one connection in flight, and the rate of all at the path's round-trip
    time.
    """

    send_bytes: float
    receive_bytes: float
    send_bytes_per_s: float
    receive_bytes_per_s: float

    @property
    def bytes_per_s(self) -> float:
        return min(self.send_bytes_per_s, self.receive_bytes_per_s)


def windows_of(measured: Measurement) -> Windows:
    """The windows that connections can grow to. An unknown limit counts as no limit."""
    send = SEND_PAYLOAD_SHARE * max(
        send_buffer_bytes(measured.sender_kernel), measured.path.send_buffer_bytes
    )
    receive = RECEIVE_PAYLOAD_SHARE * measured.receiver_kernel.tcp_rmem_bytes
    per_window = measured.width / max(1e-6, path_rtt_s(measured))
    return Windows(
        send_bytes=send,
        receive_bytes=receive,
        send_bytes_per_s=send * per_window if send else float("inf"),
        receive_bytes_per_s=receive * per_window if receive else float("inf"),
    )


def send_buffer_bytes(kernel: KernelTcp) -> int:
    """The largest send buffer that our sender can get from this kernel; 0: unknown."""
    # With CAP_NET_ADMIN, SO_SNDBUFFORCE may exceed wmem_max.
    if kernel.may_exceed:
        return max(kernel.tcp_wmem_bytes, MAX_SEND_BUFFER_BYTES)
    return max(kernel.tcp_wmem_bytes, min(2 * kernel.wmem_max_bytes, MAX_SEND_BUFFER_BYTES))


def path_rtt_s(measured: Measurement) -> float:
    """The round trip for computing windows, seconds.

    It is that of the empty path if the path is long, and that of the loaded path if only CPUs are
    in between.
    """
    path = measured.path
    return path.min_rtt_s if path.min_rtt_s >= NEAR_RTT_S else path.rtt_s
