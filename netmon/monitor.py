"""Watches one link: estimates what it can carry from samples of it, measured and never assumed, and
joins that with the judge of its condition and the planner of its probes.

The main rule: the rate of an interval is the link's rate only if the sender had something to send
for all of it. An interval is *full* when bytes waited at both its ends, a connection was busy
nearly all the time, no connection came or went unseen, and the connections have found their speed:
they have had the time, or losses or a queue in the network show it. A full interval is a
measurement. Every other interval with acknowledgements is a floor (`netmon.rates` defines both).

On an idle link the last rate stays, and its age shows how much it is worth. Knows no socket and no
clock: the caller brings samples and the time.
"""

from __future__ import annotations

import math
from typing import Final

from netmon.detector import CongestionDetector, DetectorConfig
from netmon.estimate import Limit, LinkCondition, LinkEstimate, PathReport, backlog_s
from netmon.probing import RAMP_ROUND_TRIPS, ProbePlanner
from netmon.rates import FadingSum, RateFilter
from netmon.samples import Interval, LinkSample, between

LEAST_INTERVAL_S: Final = 0.02
"""A sample that follows the last one sooner is ignored. Chosen: two ticks of the kernel."""
LONGEST_INTERVAL_S: Final = 5.0
"""A longer interval is a floor: did bytes wait all the time? Chosen: five looks at an idle link."""
LEAST_BUSY: Final = 0.8
"""Busy share of the busiest connection, when the sender never pauses. Chosen: two ticks of the
kernel may be missing at either end of 0.2 s.
"""
QUEUE_SHOWS_S: Final = 0.002
QUEUE_SHOWS_SHARE: Final = 0.25
"""The link is full when its round trip exceeds the least one by both. BBR adds that share by itself
when it probes (pacing gain 1.25). The time is chosen: hosts alone can be that late.
"""
LONGEST_RAMP_S: Final = 2.0
"""Chosen: on paths with a round trip above 0.25 s, a transfer should still measure something."""
LEAST_FLOOR_BYTES: Final = 256 * 1024
"""A floor needs this much in one interval, because handshakes say nothing about a link. Chosen:
above the initial windows (14 KB each) of 16 connections.
"""
LIMITED_SHARE: Final = 0.5
"""A window or a buffer counts as the limit from this share of the busy time on: mostly, that is."""
ACHIEVED_S: Final = 1.0
"""Window of the achieved rate, and the least time for which the last queueing delay counts. Chosen:
several samples of a busy link, one of an idle one.
"""
LOSS_S: Final = 0.5
"""Window of the loss. Chosen: short, so that bytes sent before the link became slower do not hide
the losses after that.
"""
LOSS_LEAST_BYTES: Final = 128 * 1024
"""No loss is reported when less was sent within the window. Chosen: 90 segments, of which one that
is lost stays below the detector's bound.
"""
GAIN_S: Final = 10.0
GAIN_LEAST_BYTES: Final = 16 * 1024 * 1024
"""The gain by coding counts from this many wire bytes within `GAIN_S` on. Chosen: several frames,
because the kernel and the receiver acknowledge the same bytes at different times.
"""
MOST_GAIN: Final = 8.0
"""Most raw bytes per byte on the wire: no codec compresses KVCache further."""


class LinkMonitor:
    """Watches one link. All calls take `now_s` from one clock that never runs backwards. A sample
    that is not newer than the last one is ignored. Not thread-safe.
    """

    def __init__(self, endpoint: str, config: DetectorConfig | None = None) -> None:
        self._endpoint = endpoint
        self._detector = CongestionDetector(config or DetectorConfig())
        self._planner = ProbePlanner()
        self._rate = RateFilter()  # on the wire
        self._achieved = FadingSum(ACHIEVED_S)  # before coding
        self._sent, self._resent = FadingSum(LOSS_S), FadingSum(LOSS_S)
        self._payload, self._wire = FadingSum(GAIN_S), FadingSum(GAIN_S)
        self._gain = 1.0  # bytes before coding per byte on the wire; stays while the link is idle
        self._base_rtt_s = 0.0
        self._rtt_s, self._rtt_at_s = 0.0, -math.inf
        self._sample: LinkSample | None = None
        self._sampled_s = 0.0
        self._backlogged_s: float | None = None  # bytes have waited since
        self._stalled_s: float | None = None  # and nothing was acknowledged since
        self._limited_by = Limit.IDLE
        self._acked_bytes = self._sent_bytes = self._retransmitted_bytes = 0
        self._num_samples = self._num_ignored = 0

    @property
    def condition(self) -> LinkCondition:
        return self._detector.condition

    @property
    def reason(self) -> str:
        """Why the link has its condition, with numbers."""
        return self._detector.reason

    def observe(self, sample: LinkSample, now_s: float) -> None:
        """Take in a sample that was read at `now_s`."""
        before, duration_s = self._sample, now_s - self._sampled_s
        if before is not None and duration_s < LEAST_INTERVAL_S:
            self._num_ignored += 1
            return
        self._num_samples += 1
        if before is not None:
            self._take_in(between(before, sample, duration_s), sample, now_s)
        # The kernel keeps the least one for 300 s (tcp_min_rtt_wlen); new connections have none.
        rtts_s = [info.min_rtt_s or info.rtt_s for info in sample.connections.values()]
        self._base_rtt_s = min(filter(None, rtts_s), default=self._base_rtt_s)
        if not sample.backlog_bytes:
            self._backlogged_s = None
        elif self._backlogged_s is None:
            self._backlogged_s = now_s
        self._sample, self._sampled_s = sample, now_s
        self._detector.observe(self.estimate(now_s), now_s)

    def observe_probe(self, acked_bytes: int, duration_s: float, now_s: float) -> None:
        """Take in a probe of the idle link: `acked_bytes` were acknowledged within `duration_s`
        (above 0) of the first byte sent. One that was long enough for the connections to find their
        speed is a measurement and replaces earlier ones. A shorter one is a floor.
        """
        if duration_s >= max(self._ramp_s(), LEAST_INTERVAL_S):
            self._rate.replace(acked_bytes / duration_s, now_s)
        else:
            self._rate.at_least(acked_bytes / duration_s, now_s)
        self._detector.observe(self.estimate(now_s), now_s)

    def due_probe_bytes(self, now_s: float) -> int:
        """The size of the probe that is due now, 0 if none is. It counts as sent. Ask about once a
        second.
        """
        return self._planner.due_bytes(self.estimate(now_s), self.condition, now_s)

    def report(self, now_s: float) -> PathReport:
        """The report, but for what only the sender knows."""
        detector = self._detector
        return PathReport(
            endpoint=self._endpoint,
            condition=detector.condition,
            reason=detector.reason,
            condition_s=0.0 if detector.since_s is None else max(0.0, now_s - detector.since_s),
            reference_bytes_per_s=detector.reference_bytes_per_s,
            estimate=self.estimate(now_s),
            num_changes=dict(detector.num_changes),
        )

    def estimate(self, now_s: float) -> LinkEstimate:
        """The estimate at `now_s`, which may be later than the last sample."""
        sample, rate = self._sample or LinkSample(), self._rate
        available = rate.bytes_per_s * self._gain if sample.is_up else 0.0
        achieved, sent_bytes = self._achieved.value(now_s), self._sent.value(now_s)
        is_known, has_sent = rate.confirmed_s is not None, sent_bytes >= LOSS_LEAST_BYTES
        return LinkEstimate(
            available_bytes_per_s=available,
            is_floor=rate.is_floor,
            age_s=_since(rate.confirmed_s, now_s),
            full_age_s=_since(rate.measured_s, now_s),
            sample_age_s=_since(None if self._sample is None else self._sampled_s, now_s),
            achieved_bytes_per_s=achieved,
            utilisation=min(1.0, achieved / available) if available else 0.0,
            rtt_s=self._rtt_s,
            base_rtt_s=self._base_rtt_s,
            queueing_delay_s=self._queueing_delay_s(now_s),
            backlog_bytes=sample.backlog_bytes,
            backlog_s=backlog_s(sample.backlog_bytes, available) if is_known else 0.0,
            loss=min(1.0, self._resent.value(now_s) / sent_bytes) if has_sent else 0.0,
            limited_by=self._limited_by,
            is_up=sample.is_up,
            stalled_s=_since(self._stalled_s, now_s) or 0.0,
            acked_bytes=self._acked_bytes,
            sent_bytes=self._sent_bytes,
            retransmitted_bytes=self._retransmitted_bytes,
            num_samples=self._num_samples,
            num_ignored_samples=self._num_ignored,
        )

    def _take_in(self, interval: Interval, sample: LinkSample, now_s: float) -> None:
        wire_bytes = interval.carried.acked_bytes
        self._count(interval, now_s)
        if interval.carried.rtt_s:
            self._rtt_s, self._rtt_at_s = interval.carried.rtt_s, now_s
        if wire_bytes or not sample.backlog_bytes:
            self._stalled_s = None
        elif self._stalled_s is None:
            self._stalled_s = self._sampled_s
        self._limited_by = _limit(interval)
        if self._is_full(interval, now_s):
            self._rate.measure(wire_bytes / interval.duration_s, interval.duration_s, now_s)
        elif wire_bytes >= LEAST_FLOOR_BYTES:
            self._rate.at_least(interval.floor_bytes_per_s, now_s)

    def _count(self, interval: Interval, now_s: float) -> None:
        carried, payload_bytes = interval.carried, interval.payload_bytes
        self._acked_bytes += payload_bytes
        self._sent_bytes += carried.sent_bytes
        self._retransmitted_bytes += carried.retransmitted_bytes
        self._sent.add(carried.sent_bytes, now_s)
        self._resent.add(carried.retransmitted_bytes, now_s)
        # The bytes came evenly over the interval, so that part of them has faded already.
        share = 1 - math.exp(-interval.duration_s / ACHIEVED_S)
        self._achieved.add(share * payload_bytes / interval.duration_s, now_s)
        if carried.acked_bytes:
            self._payload.add(payload_bytes, now_s)
            self._wire.add(carried.acked_bytes, now_s)
        if self._wire.value(now_s) >= GAIN_LEAST_BYTES:
            gain = self._payload.value(now_s) / self._wire.value(now_s)
            self._gain = min(MOST_GAIN, max(1.0, gain))

    def _is_full(self, interval: Interval, now_s: float) -> bool:
        """Whether the interval measures the link; otherwise it is a floor."""
        # The bytes of some connections are missing, or there were pauses that nobody saw.
        if not interval.is_whole or interval.duration_s > LONGEST_INTERVAL_S:
            return False
        # The sender paused: what was carried is what was asked for, not what the link can do.
        if not interval.is_backlogged or interval.busy_s < LEAST_BUSY * interval.duration_s:
            return False
        # Losses or a queue in the network show that the connections have found the link's limit.
        queue_s = max(QUEUE_SHOWS_S, QUEUE_SHOWS_SHARE * self._base_rtt_s)
        if interval.carried.retransmitted_bytes or self._queueing_delay_s(now_s) >= queue_s:
            return True
        began_s = self._backlogged_s
        return began_s is not None and self._sampled_s - began_s >= self._ramp_s()

    def _queueing_delay_s(self, now_s: float) -> float:
        """By how much the last round trip exceeds the least one; 0 if it is long ago."""
        is_recent = now_s - self._rtt_at_s <= max(ACHIEVED_S, 4 * self._rtt_s)
        return max(0.0, self._rtt_s - self._base_rtt_s) if is_recent else 0.0

    def _ramp_s(self) -> float:
        return min(LONGEST_RAMP_S, RAMP_ROUND_TRIPS * self._base_rtt_s)


def _since(then_s: float | None, now_s: float) -> float | None:
    return None if then_s is None else max(0.0, now_s - then_s)


def _limit(interval: Interval) -> Limit:
    if not interval.is_backlogged:
        return Limit.IDLE
    if interval.carried.rwnd_limited >= LIMITED_SHARE:
        return Limit.RECEIVER_WINDOW
    return Limit.SEND_BUFFER if interval.carried.sndbuf_limited >= LIMITED_SHARE else Limit.LINK
