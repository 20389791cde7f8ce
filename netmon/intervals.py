"""What happened on a link between two samples. Knows nothing of earlier ones, no clock.

Connections come and go between samples. One that is new counts from zero when all its busy time
fits the interval, otherwise it is older than our knowledge of it and counts from the next sample
on. One that has gone takes along what it carried since the last sample. Either makes the interval
*partial*: its bytes are a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from netmon.samples import ConnectionSample, LinkSample

KERNEL_TICK_S = 0.01
"""The kernel counts busy time in ticks of up to this long."""

_LEAST_BUSY_S = 0.05
"""What is carried in less time counts as carried in this: shapers let short bursts pass at full
speed. For the same reason the kernel's delivery rate, taken over one round trip, is no floor.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Differences between two samples of one link."""

    duration_s: float
    acked_bytes: int
    """On the wire where connections are known, before coding otherwise."""
    payload_bytes: int
    """Acknowledged before coding."""
    sent_bytes: int
    retransmitted_bytes: int
    busy_s: float
    """The busiest connection's; the whole interval where connections are not known."""
    busy_sum_s: float
    rwnd_limited_s: float
    """This and the next are sums over connections, as `busy_sum_s` is."""
    sndbuf_limited_s: float
    fresh_rtt_s: float | None
    """Mean over acknowledged bytes; None when nothing was acknowledged."""
    floor_bytes_per_s: float
    """The link carried at least this for part of the interval."""
    is_partial: bool

    @property
    def bytes_per_s(self) -> float:
        return self.acked_bytes / self.duration_s


def between(before: LinkSample, after: LinkSample, duration_s: float) -> Interval:
    """`duration_s` (above 0) lies between the two. Counters that ran backwards count as new."""
    gains = list(_gains(before, after, duration_s))
    known = [gain for gain in gains if gain is not None]
    payload_bytes = max(0, after.acked_bytes - before.acked_bytes)
    has_connections = bool(before.connections or after.connections)
    acked_bytes = sum(gain.acked_bytes for gain in known) if has_connections else payload_bytes
    retransmitted_bytes = sum(gain.retransmitted_bytes for gain in known)
    busy_sum_s = sum(gain.busy_s for gain in known)
    return Interval(
        duration_s=duration_s,
        acked_bytes=acked_bytes,
        payload_bytes=payload_bytes,
        sent_bytes=sum(gain.sent_bytes for gain in known) if has_connections else payload_bytes,
        retransmitted_bytes=retransmitted_bytes,
        busy_s=max((gain.busy_s for gain in known), default=0.0 if has_connections else duration_s),
        busy_sum_s=busy_sum_s,
        rwnd_limited_s=sum(gain.rwnd_limited_s for gain in known),
        sndbuf_limited_s=sum(gain.sndbuf_limited_s for gain in known),
        fresh_rtt_s=_mean_rtt(known),
        floor_bytes_per_s=_floor(known, acked_bytes, busy_sum_s, duration_s, retransmitted_bytes),
        is_partial=None in gains or after.acked_bytes < before.acked_bytes,
    )


def _floor(
    gains: list[ConnectionSample],
    acked_bytes: int,
    busy_sum_s: float,
    duration_s: float,
    retransmitted_bytes: int,
) -> float:
    """Acknowledgements jump when a lost segment is replaced: such an interval proves nothing."""
    if retransmitted_bytes:
        return 0.0
    # Connections may have been busy one after the other, so their times are added.
    busy_s = busy_sum_s + KERNEL_TICK_S * len(gains) if gains else duration_s
    together = acked_bytes / min(duration_s, max(_LEAST_BUSY_S, busy_s))
    return max(together, max(map(_own_floor, gains), default=0.0))


def _own_floor(gain: ConnectionSample) -> float:
    return gain.acked_bytes / max(_LEAST_BUSY_S, gain.busy_s + KERNEL_TICK_S)


def _mean_rtt(gains: list[ConnectionSample]) -> float | None:
    heard = [gain for gain in gains if gain.acked_bytes > 0 and gain.rtt_s > 0]
    weight = sum(gain.acked_bytes for gain in heard)
    if not weight:
        return None
    return sum(gain.rtt_s * gain.acked_bytes for gain in heard) / weight


def _gains(
    before: LinkSample, after: LinkSample, duration_s: float
) -> Iterator[ConnectionSample | None]:
    """Each connection's counters over this interval; None where they are not known."""
    earlier = {connection.connection_id: connection for connection in before.connections}
    for connection in after.connections:
        known = earlier.pop(connection.connection_id, None)
        if known is not None and not _ran_backwards(known, connection):
            yield _difference(known, connection)
        elif connection.busy_s <= duration_s + KERNEL_TICK_S:
            yield connection  # new: it counts from 0
            if known is not None:
                yield None
        else:
            yield None
    # One that ended with nothing under way has told all it carried in its last sample.
    for gone in earlier.values():
        if gone.unacked_bytes or gone.notsent_bytes:
            yield None


def _ran_backwards(known: ConnectionSample, now: ConnectionSample) -> bool:
    return (
        now.acked_bytes < known.acked_bytes
        or now.sent_bytes < known.sent_bytes
        or now.retransmitted_bytes < known.retransmitted_bytes
        or now.busy_s < known.busy_s
    )


def _difference(known: ConnectionSample, now: ConnectionSample) -> ConnectionSample:
    """`now` with counters that begin at `known`."""
    return replace(
        now,
        acked_bytes=now.acked_bytes - known.acked_bytes,
        sent_bytes=now.sent_bytes - known.sent_bytes,
        retransmitted_bytes=now.retransmitted_bytes - known.retransmitted_bytes,
        busy_s=now.busy_s - known.busy_s,
        rwnd_limited_s=max(0.0, now.rwnd_limited_s - known.rwnd_limited_s),
        sndbuf_limited_s=max(0.0, now.sndbuf_limited_s - known.sndbuf_limited_s),
    )
