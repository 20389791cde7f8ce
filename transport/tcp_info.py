"""What the kernel knows of one TCP connection (TCP_INFO, linux/tcp.h), parsed. Knows no socket."""

from __future__ import annotations

import struct
from dataclasses import dataclass

SIZE = 280
"""Bytes to ask the kernel for; older kernels give fewer, and the fields beyond them read as 0."""

_MIN = struct.Struct("=8B24I")
_RATES = struct.Struct("=4Q6I4Q2I2Q")


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """A snapshot; counters run from the connection's beginning."""

    rtt_s: float
    """Smoothed round-trip time."""
    rtt_var_s: float
    min_rtt_s: float
    """Least round-trip time lately seen; 0 before the first sample."""
    mss_bytes: int
    cwnd_segments: int
    unacked_segments: int
    retransmitted_segments: int
    sent_segments: int
    """Segments with data, retransmissions included."""
    acked_bytes: int
    sent_bytes: int
    retransmitted_bytes: int
    notsent_bytes: int
    """Handed to the kernel and not put on the wire yet."""
    delivery_bytes_per_s: int
    pacing_bytes_per_s: int
    busy_s: float
    """Time with data to send; the two below are parts of it."""
    rwnd_limited_s: float
    """The receiver's window was the limit."""
    sndbuf_limited_s: float
    """The send buffer was the limit (tcp_wmem, or SO_SNDBUF)."""


def parse(raw: bytes) -> TcpInfo | None:
    """None when the kernel gave less than struct tcp_info has had since Linux 4.10."""
    if len(raw) < _MIN.size + 88:
        return None
    fields = _MIN.unpack_from(raw)
    rates = _RATES.unpack(raw[_MIN.size : _MIN.size + _RATES.size].ljust(_RATES.size, b"\0"))
    u32 = fields[8:]
    min_rtt_us = rates[7]
    return TcpInfo(
        rtt_s=u32[15] / 1e6,
        rtt_var_s=u32[16] / 1e6,
        min_rtt_s=0.0 if min_rtt_us == 0xFFFFFFFF else min_rtt_us / 1e6,
        mss_bytes=u32[2],
        cwnd_segments=u32[18],
        unacked_segments=u32[4],
        retransmitted_segments=u32[23],
        sent_segments=rates[9],
        acked_bytes=rates[2],
        sent_bytes=rates[16],
        retransmitted_bytes=rates[17],
        notsent_bytes=rates[6],
        delivery_bytes_per_s=rates[10],
        pacing_bytes_per_s=rates[0] if rates[0] != 0xFFFFFFFFFFFFFFFF else 0,
        busy_s=rates[11] / 1e6,
        rwnd_limited_s=rates[12] / 1e6,
        sndbuf_limited_s=rates[13] / 1e6,
    )
