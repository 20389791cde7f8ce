"""Computes what happened on a link between two samples. Knows no earlier sample and no clock.

Connections come and go between samples. A new connection counts from zero when all its busy time
fits into the interval. Otherwise it is older than the interval, and counts from the next sample on.
A connection that has gone takes along what it carried since the last sample. Both make the interval
*partial*: its bytes are a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from netmon.samples import LinkSample
from netmon.tcp_info import TcpInfo, together

KERNEL_TICK_S = 0.01
"""The kernel counts busy time in ticks (jiffies) of up to this length."""

_LEAST_BUSY_S = 0.05
"""Bytes that took less time count as if they had taken this long, because shapers let short bursts
pass at full speed. For the same reason the kernel's delivery rate, which it measures over one round
trip, is no floor.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What happened between two samples of one link."""

    duration_s: float
    payload_bytes: int
    """Bytes acknowledged, counted before coding."""
    carried: TcpInfo
    """The counters of all connections over the interval, added up. `rtt_s` is the mean weighted by
    acknowledged bytes, or 0 when nothing was acknowledged. Without known connections the payload
    counts as the bytes on the wire.
    """
    busy_s: float
    """Busy time of the busiest connection; without known connections the whole interval."""
    floor_bytes_per_s: float
    """The link carried at least this rate for a part of the interval."""
    is_partial: bool

    @property
    def bytes_per_s(self) -> float:
        """Wire bytes acknowledged per second."""
        return self.carried.acked_bytes / self.duration_s


def between(before: LinkSample, after: LinkSample, duration_s: float) -> Interval:
    """The interval of `duration_s` (above 0) between two samples. A counter that ran backwards
    counts as new.
    """
    gains = list(_gains(before, after, duration_s))
    known = [gain for gain in gains if gain is not None]
    payload_bytes = max(0, after.acked_bytes - before.acked_bytes)
    has_connections = bool(before.connections or after.connections)
    if has_connections:
        carried = together(known, _mean_rtt_s(known))
    else:
        carried = TcpInfo(acked_bytes=payload_bytes, sent_bytes=payload_bytes)
    return Interval(
        duration_s=duration_s,
        payload_bytes=payload_bytes,
        carried=carried,
        busy_s=max((gain.busy_s for gain in known), default=0.0 if has_connections else duration_s),
        floor_bytes_per_s=_floor(known, carried, duration_s),
        is_partial=None in gains or after.acked_bytes < before.acked_bytes,
    )


def _floor(gains: list[TcpInfo], carried: TcpInfo, duration_s: float) -> float:
    # Acknowledgements jump when a lost segment is replaced: such an interval proves nothing.
    if carried.retransmitted_bytes:
        return 0.0
    # Connections may have been busy one after the other, so their times are added.
    busy_s = carried.busy_s + KERNEL_TICK_S * len(gains) if gains else duration_s
    at_least = carried.acked_bytes / min(duration_s, max(_LEAST_BUSY_S, busy_s))
    return max(at_least, max(map(_own_floor, gains), default=0.0))


def _own_floor(gain: TcpInfo) -> float:
    return gain.acked_bytes / max(_LEAST_BUSY_S, gain.busy_s + KERNEL_TICK_S)


def _mean_rtt_s(gains: list[TcpInfo]) -> float:
    heard = [gain for gain in gains if gain.acked_bytes > 0 and gain.rtt_s > 0]
    weight = sum(gain.acked_bytes for gain in heard)
    return sum(gain.rtt_s * gain.acked_bytes for gain in heard) / weight if weight else 0.0


def _gains(before: LinkSample, after: LinkSample, duration_s: float) -> Iterator[TcpInfo | None]:
    """Each connection's counters over this interval; None where they are not known."""
    earlier = dict(before.connections)
    for number, connection in after.connections.items():
        known = earlier.pop(number, None)
        if known is not None and not _ran_backwards(known, connection):
            yield connection.since(known)
        elif connection.busy_s <= duration_s + KERNEL_TICK_S:
            yield connection  # new: it counts from 0
            if known is not None:
                yield None
        else:
            yield None
    # One that ended with nothing under way has told all it carried in its last sample.
    for gone in earlier.values():
        if gone.unacked_segments or gone.notsent_bytes:
            yield None


def _ran_backwards(known: TcpInfo, now: TcpInfo) -> bool:
    return (
        now.acked_bytes < known.acked_bytes
        or now.sent_bytes < known.sent_bytes
        or now.retransmitted_bytes < known.retransmitted_bytes
        or now.busy_s < known.busy_s
    )
