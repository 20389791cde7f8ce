"""Estimates what one link can carry from samples of it: measured, never assumed.

The main rule: the rate of an interval is the link's rate only if the sender had something to send
for all of it. An interval is *full* when bytes waited at both its ends, a connection was busy
nearly all the time, no connection came or went unseen, and the connections have found their speed:
they have had the time, or losses or a queue in the network show it. A full interval is a
measurement. Every other interval with acknowledgements is a floor (`netmon.rates` defines both).

On an idle link the last rate stays, and its age shows how much it is worth. Knows no socket, no
clock, and does not judge whether a rate is too low (`netmon.detector` does).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from netmon.estimate import MAX_BACKLOG_S, Limit, LinkEstimate, LinkTotals
from netmon.intervals import Interval, between
from netmon.rates import DecayingRate, DecayingShare, RateFilter, WindowedMin
from netmon.samples import LinkSample, ProbeResult

_LEAST_BUSY = 0.8
"""Share of an interval that its busiest connection is busy, when the sender never pauses."""

_QUEUE_SHOWS_S = 0.002
_QUEUE_SHOWS_SHARE = 0.25
"""The link is full when its round trip exceeds the least one by both."""

_LIMITED_SHARE = 0.5
"""A window or a buffer counts as the limit from this share of the busy time on."""

_MOST_GAIN = 8.0
"""Most raw bytes per byte on the wire: no codec compresses KVCache further."""

_HEARD_S = 1.0
"""Seconds for which the last queueing delay counts as the present one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorConfig:
    """Times in seconds of link time."""

    least_interval_s: float = 0.02
    """A sample that follows the last one sooner is ignored: too little happens in between."""
    longest_interval_s: float = 5.0
    """A longer interval gives only a floor: nobody knows whether bytes waited all the time."""
    rise_s: float = 1.0
    """Time constant with which the available rate follows a rise; falls are followed at once."""
    achieved_s: float = 1.0
    """Window of the achieved rate."""
    loss_s: float = 0.5
    """Window of the loss share. It is short, so that bytes sent before the link became slower do
    not hide the losses after that.
    """
    loss_least_bytes: int = 128 * 1024
    """No loss is reported when less than this was sent within the window."""
    base_rtt_s: float = 300.0
    """Least time for which the least round-trip time is remembered."""
    ramp_round_trips: float = 8.0
    """Round trips with a backlog after which connections have found their speed."""
    longest_ramp_s: float = 2.0
    least_floor_bytes: int = 256 * 1024
    """A floor needs this much in one interval, because handshakes say nothing about a link."""
    gain_least_bytes: int = 16 * 1024 * 1024
    """The gain by coding counts from this many wire bytes within `gain_s` on."""
    gain_s: float = 10.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0: {getattr(self, name)}")


class LinkEstimator:
    """Estimates one link. All calls take `now_s` from one clock that never runs backwards. A sample
    that is not newer than the last one is ignored.
    """

    def __init__(self, config: EstimatorConfig | None = None) -> None:
        self._config = config = config or EstimatorConfig()
        self._rate = RateFilter(config.rise_s)  # on the wire
        self._achieved = DecayingRate(config.achieved_s)  # before coding
        self._loss = DecayingShare(config.loss_s, config.loss_least_bytes)
        self._coded = DecayingShare(config.gain_s, config.gain_least_bytes)
        self._gain = 1.0  # bytes before coding per byte on the wire; stays while the link is idle
        self._base_rtt = WindowedMin(config.base_rtt_s)
        self._totals = LinkTotals()
        self._sample: LinkSample | None = None
        self._sampled_s = 0.0
        self._rtt_s = 0.0
        self._heard_s = float("-inf")  # last acknowledgement with a round-trip time
        self._backlogged_s: float | None = None  # bytes have waited since
        self._stalled_s: float | None = None  # and nothing was acknowledged since
        self._limited_by = Limit.IDLE

    def totals(self) -> LinkTotals:
        """Counters for metrics."""
        return self._totals

    def observe(self, sample: LinkSample, now_s: float) -> None:
        """Take in a sample that was read at `now_s`."""
        before, duration_s = self._sample, now_s - self._sampled_s
        if before is not None and duration_s < self._config.least_interval_s:
            ignored = self._totals.num_ignored_samples + 1
            self._totals = replace(self._totals, num_ignored_samples=ignored)
            return
        if before is not None:
            interval = between(before, sample, duration_s)
            self._count(interval)
            self._take_in(before, sample, interval, now_s)
        else:
            self._totals = LinkTotals(num_samples=1)
        for connection in sample.connections.values():
            # Kernels report no min_rtt before the first round trip was measured.
            self._base_rtt.add(connection.min_rtt_s or connection.rtt_s, now_s)
        self._note_backlog(sample, now_s)
        self._sample, self._sampled_s = sample, now_s

    def observe_probe(self, result: ProbeResult, now_s: float) -> None:
        """Take in a probe of an idle link. A probe that was long enough for the connections to find
        their speed is a measurement and replaces earlier ones. A shorter probe is a floor.
        """
        bytes_per_s = result.acked_bytes / result.duration_s
        if result.duration_s >= max(self._ramp_s(), self._config.least_interval_s):
            self._rate.replace(bytes_per_s, now_s)
        else:
            self._rate.at_least(bytes_per_s, now_s)

    def estimate(self, now_s: float) -> LinkEstimate:
        """The estimate at `now_s`, which may be later than the last sample."""
        sample = self._sample
        if sample is None:
            sample = LinkSample(link="")
        available = self._available(sample)
        achieved = self._achieved.value(now_s)
        return LinkEstimate(
            available_bytes_per_s=available,
            is_floor=self._rate.is_floor,
            age_s=_since(self._rate.heard_s, now_s),
            full_age_s=_since(self._rate.measured_s, now_s),
            sample_age_s=_since(None if self._sample is None else self._sampled_s, now_s),
            achieved_bytes_per_s=achieved,
            utilisation=min(1.0, achieved / available) if available > 0 else 0.0,
            rtt_s=self._rtt_s,
            base_rtt_s=self._base_rtt.value,
            queueing_delay_s=self._queueing_delay_s() if self._is_heard(now_s) else 0.0,
            backlog_bytes=sample.backlog_bytes,
            backlog_s=self._backlog_s(sample, available),
            loss=min(1.0, self._loss.value(now_s)),
            limited_by=self._limited_by,
            is_up=sample.is_up,
            stalled_s=_since(self._stalled_s, now_s) or 0.0,
        )

    def _take_in(
        self, before: LinkSample, sample: LinkSample, interval: Interval, now_s: float
    ) -> None:
        wire_bytes = interval.carried.acked_bytes
        self._achieved.add(interval.payload_bytes, interval.duration_s, now_s)
        self._loss.add(interval.carried.retransmitted_bytes, interval.carried.sent_bytes, now_s)
        if wire_bytes:
            self._note_gain(interval.payload_bytes, wire_bytes, now_s)
        if interval.carried.rtt_s:
            self._rtt_s = interval.carried.rtt_s
            self._heard_s = now_s
        if wire_bytes > 0 or not sample.backlog_bytes:
            self._stalled_s = None
        elif self._stalled_s is None:
            self._stalled_s = self._sampled_s
        self._limited_by = _limit(before, sample, interval)
        if self._is_full(before, sample, interval, now_s):
            self._rate.measure(interval.bytes_per_s, interval.duration_s, now_s)
        elif wire_bytes >= self._config.least_floor_bytes:
            self._rate.at_least(interval.floor_bytes_per_s, now_s)

    def _is_full(
        self, before: LinkSample, sample: LinkSample, interval: Interval, now_s: float
    ) -> bool:
        """Whether the interval measures the link; otherwise it is a floor."""
        if not (before.backlog_bytes and sample.backlog_bytes and before.is_up and sample.is_up):
            return False
        # The bytes of some connections are missing, or there were pauses that nobody saw.
        if interval.is_partial or interval.duration_s > self._config.longest_interval_s:
            return False
        # The sender paused: what was carried is what was asked for, not what the link can do.
        if interval.busy_s < _LEAST_BUSY * interval.duration_s:
            return False
        # Losses or a queue in the network show that the connections have found the link's limit.
        if interval.carried.retransmitted_bytes or self._is_queueing(now_s):
            return True
        began_s = self._backlogged_s
        return began_s is not None and self._sampled_s - began_s >= self._ramp_s()

    def _note_gain(self, payload_bytes: int, wire_bytes: int, now_s: float) -> None:
        self._coded.add(payload_bytes, wire_bytes, now_s)
        share = self._coded.value(now_s)
        if share > 0:
            self._gain = min(_MOST_GAIN, max(1.0, share))

    def _note_backlog(self, sample: LinkSample, now_s: float) -> None:
        if not sample.backlog_bytes:
            self._backlogged_s = None
        elif self._backlogged_s is None:
            self._backlogged_s = now_s

    def _available(self, sample: LinkSample) -> float:
        return self._rate.bytes_per_s * self._gain if sample.is_up else 0.0

    def _backlog_s(self, sample: LinkSample, available: float) -> float:
        if not sample.backlog_bytes or self._rate.heard_s is None:
            return 0.0
        if available <= 0:
            return MAX_BACKLOG_S
        return min(MAX_BACKLOG_S, sample.backlog_bytes / available)

    def _queueing_delay_s(self) -> float:
        return max(0.0, self._rtt_s - self._base_rtt.value)

    def _is_heard(self, now_s: float) -> bool:
        return now_s - self._heard_s <= max(_HEARD_S, 4 * self._rtt_s)

    def _is_queueing(self, now_s: float) -> bool:
        least_s = max(_QUEUE_SHOWS_S, _QUEUE_SHOWS_SHARE * self._base_rtt.value)
        return self._is_heard(now_s) and self._queueing_delay_s() >= least_s

    def _ramp_s(self) -> float:
        ramp_s = self._config.ramp_round_trips * self._base_rtt.value
        return min(self._config.longest_ramp_s, ramp_s)

    def _count(self, interval: Interval) -> None:
        old = self._totals
        self._totals = replace(
            old,
            acked_bytes=old.acked_bytes + interval.payload_bytes,
            sent_bytes=old.sent_bytes + interval.carried.sent_bytes,
            retransmitted_bytes=old.retransmitted_bytes + interval.carried.retransmitted_bytes,
            num_samples=old.num_samples + 1,
        )


def _since(then_s: float | None, now_s: float) -> float | None:
    return None if then_s is None else max(0.0, now_s - then_s)


def _limit(before: LinkSample, sample: LinkSample, interval: Interval) -> Limit:
    if not (before.backlog_bytes and sample.backlog_bytes):
        return Limit.IDLE
    if interval.carried.rwnd_limited >= _LIMITED_SHARE:
        return Limit.RECEIVER_WINDOW
    if interval.carried.sndbuf_limited >= _LIMITED_SHARE:
        return Limit.SEND_BUFFER
    return Limit.LINK
