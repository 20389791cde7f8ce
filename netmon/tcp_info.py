"""Parses TCP_INFO (linux/tcp.h), the kernel's numbers of one TCP connection. Knows no socket.

The transport reads it from its sockets. The rates, delays and losses of links come from it: in this
package, in the transport's tuning and in `prfaas doctor link`.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass, replace

SIZE = 280
"""Bytes to ask the kernel for; older kernels give fewer, and the fields beyond them read as 0."""

_COUNTERS = (
    "acked_bytes", "sent_bytes", "retransmitted_bytes",
    "busy_s", "rwnd_limited_s", "sndbuf_limited_s",
)  # fmt: skip
_MIN = struct.Struct("=8B24I")
_RATES = struct.Struct("=4Q6I4Q2I2Q")


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """A snapshot of one connection. Counters run from the connection's beginning."""

    rtt_s: float = 0.0
    """Smoothed round-trip time; 0 before the first sample."""
    min_rtt_s: float = 0.0
    """Least recent round-trip time (tcpi_min_rtt); 0 before the first sample."""
    mss_bytes: int = 0
    unacked_segments: int = 0
    acked_bytes: int = 0
    sent_bytes: int = 0
    """On the wire, retransmissions included."""
    retransmitted_bytes: int = 0
    notsent_bytes: int = 0
    """Bytes handed to the kernel and not yet put on the wire."""
    busy_s: float = 0.0
    """Time with data to send or in flight. The next two are parts of it."""
    rwnd_limited_s: float = 0.0
    """Time in which the receiver's window was the limit."""
    sndbuf_limited_s: float = 0.0
    """Time in which the send buffer was the limit (tcp_wmem, or SO_SNDBUF)."""

    @property
    def loss(self) -> float:
        """Retransmitted share of the bytes sent."""
        return self.retransmitted_bytes / max(1, self.sent_bytes)

    @property
    def rwnd_limited(self) -> float:
        """Share of the busy time in which the receiver's window was the limit."""
        return self.rwnd_limited_s / max(1e-9, self.busy_s)

    @property
    def sndbuf_limited(self) -> float:
        """Share of the busy time in which the send buffer was the limit."""
        return self.sndbuf_limited_s / max(1e-9, self.busy_s)

    def since(self, earlier: TcpInfo) -> TcpInfo:
        """The same connection with byte and time counters that begin at `earlier`."""
        gains = {name: max(0, getattr(self, name) - getattr(earlier, name)) for name in _COUNTERS}
        return replace(self, **gains)


def together(infos: Collection[TcpInfo], rtt_s: float = 0.0) -> TcpInfo:
    """The byte and time counters of several connections added up, and the least `min_rtt_s` seen.

    The caller gives `rtt_s`, since each use weights round trips differently. Fields that describe a
    single connection are 0.
    """
    return TcpInfo(
        rtt_s=rtt_s,
        min_rtt_s=min((info.min_rtt_s for info in infos if info.min_rtt_s), default=0.0),
        **{name: sum(getattr(info, name) for info in infos) for name in _COUNTERS},
    )


def parse(raw: bytes) -> TcpInfo | None:
    """The struct's fields; None when it is shorter than it has been since Linux 4.10."""
    if len(raw) < _MIN.size + 88:
        return None
    fields = _MIN.unpack_from(raw)
    rates = _RATES.unpack(raw[_MIN.size : _MIN.size + _RATES.size].ljust(_RATES.size, b"\0"))
    u32 = fields[8:]
    min_rtt_us = rates[7]
    return TcpInfo(
        rtt_s=u32[15] / 1e6,
        min_rtt_s=0.0 if min_rtt_us == 0xFFFFFFFF else min_rtt_us / 1e6,
        mss_bytes=u32[2],
        unacked_segments=u32[4],
        acked_bytes=rates[2],
        sent_bytes=rates[16],
        retransmitted_bytes=rates[17],
        notsent_bytes=rates[6],
        busy_s=rates[11] / 1e6,
        rwnd_limited_s=rates[12] / 1e6,
        sndbuf_limited_s=rates[13] / 1e6,
    )
