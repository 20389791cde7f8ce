"""A sample of one link at one moment, and what happened between two of them. Knows no clock.

Counters run from the beginning of a connection or a link. Connections come and go between samples.
A new one counts from zero when all its busy time fits into the interval. Otherwise it is older than
the interval, and counts from the next sample on. One that has gone takes along what it carried
since the last sample. Both make the interval *partial*: its bytes are a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from netmon.tcp_info import TcpInfo, together

KERNEL_TICK_S: Final = 0.01
"""The kernel counts busy time in ticks (jiffies) of up to this length (CONFIG_HZ=100)."""
LEAST_BUSY_S: Final = 0.05
"""Bytes that took less time count as if they had taken this long, because shapers let short bursts
pass at full speed. For the same reason the kernel's delivery rate, which it measures over one round
trip, is no floor. Chosen: a quarter of the time between two samples of a busy link.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """The sending end of one link: all connections to one endpoint, and the bytes that wait."""

    connections: Mapping[int, TcpInfo] = field(default_factory=dict)
    """Keyed by a number that no other connection of the link ever gets. Empty where the system has
    no TCP_INFO; then only `acked_bytes` says how fast the link is.
    """
    queued_bytes: int = 0
    """Bytes before coding that are ready to be sent and not yet handed to the kernel."""
    acked_bytes: int = 0
    """Bytes before coding that the receiver has acknowledged since the link began."""
    is_up: bool = True
    """Whether at least one connection stands, or the link is idle and nothing has failed."""

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait at the sender, in its queue or in the kernel."""
        return self.queued_bytes + sum(info.notsent_bytes for info in self.connections.values())


class Interval(NamedTuple):
    """What happened between two samples of one link.

    `payload_bytes` were acknowledged, counted before coding. `carried` has the counters of all
    connections added up; its `rtt_s` is the mean weighted by acknowledged bytes, or 0. `busy_s` is
    that of the busiest connection. Without known connections the payload counts as the bytes on the
    wire, and the whole interval as busy. The link carried at least `floor_bytes_per_s` for a part
    of the interval. `is_backlogged`: bytes waited at both ends. `is_whole`: the link was up at both
    ends, and no connection came or went unseen.
    """

    duration_s: float
    payload_bytes: int
    carried: TcpInfo
    busy_s: float
    floor_bytes_per_s: float
    is_backlogged: bool
    is_whole: bool


def between(before: LinkSample, after: LinkSample, duration_s: float) -> Interval:
    """The interval of `duration_s` (above 0) between two samples."""
    gains: list[TcpInfo] = []
    is_whole = before.is_up and after.is_up and after.acked_bytes >= before.acked_bytes
    for gain in _gains(before, after, duration_s):
        if gain is None:
            is_whole = False
        else:
            gains.append(gain)
    payload_bytes = max(0, after.acked_bytes - before.acked_bytes)
    carried, busy_s = TcpInfo(acked_bytes=payload_bytes, sent_bytes=payload_bytes), duration_s
    if before.connections or after.connections:
        carried = together(gains, _mean_rtt_s(gains))
        busy_s = max((gain.busy_s for gain in gains), default=0.0)
    floor = _floor(gains, carried, duration_s)
    is_backlogged = bool(before.backlog_bytes and after.backlog_bytes)
    return Interval(
        duration_s, payload_bytes, carried, busy_s, floor, is_backlogged, is_whole=is_whole
    )


def _floor(gains: list[TcpInfo], carried: TcpInfo, duration_s: float) -> float:
    # Acknowledgements jump when a lost segment is replaced: such an interval proves nothing.
    if carried.retransmitted_bytes:
        return 0.0
    if not gains:
        return carried.acked_bytes / duration_s
    # Connections may have been busy one after the other, so their times are added.
    busy_s = carried.busy_s + KERNEL_TICK_S * len(gains)
    of_all = carried.acked_bytes / min(duration_s, max(LEAST_BUSY_S, busy_s))
    of_each = (gain.acked_bytes / max(LEAST_BUSY_S, gain.busy_s + KERNEL_TICK_S) for gain in gains)
    return max(of_all, *of_each)


def _mean_rtt_s(gains: list[TcpInfo]) -> float:
    timed = [gain for gain in gains if gain.acked_bytes > 0 and gain.rtt_s > 0]
    weight = sum(gain.acked_bytes for gain in timed)
    return sum(gain.rtt_s * gain.acked_bytes for gain in timed) / weight if weight else 0.0


def _gains(before: LinkSample, after: LinkSample, duration_s: float) -> Iterator[TcpInfo | None]:
    """Each connection's counters over this interval; None where they are not known."""
    earlier = dict(before.connections)
    for number, connection in after.connections.items():
        if (start := earlier.pop(number, None)) is not None:
            yield connection.since(start)
        else:
            is_new = connection.busy_s <= duration_s + KERNEL_TICK_S
            yield connection if is_new else None
    # One that ended with nothing under way has told all it carried in its last sample.
    for gone in earlier.values():
        if gone.unacked_segments or gone.notsent_bytes:
            yield None
