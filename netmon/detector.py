"""Judges one link's condition with hysteresis: clear, rising, congested or down.

Each sign compares a number of `LinkEstimate` with two bounds of the configuration:

- `rate`: the measured rate has fallen below what the link carried in the last minutes.
- `queue`: the bytes that wait at the sender take longer and longer to send, over several samples.
- `delay`: the round trip is longer than the least one, so a queue stands in the network.
- `loss`: the retransmitted share. Loss alone is no congestion, because BBR carries the full rate of
  a link with a shallow queue and loses a few percent.
- `stall`: bytes wait and nothing is acknowledged.

One sign at its upper bound, or two at their lower bounds, mean congested; one at its lower bound
means rising. A link without connections, or stalled for long, is down.

The condition gets worse as soon as a few samples in a row say so. It gets better by one step at a
time: no sooner than the dwell time after the last change, and only when the signs have stayed below
their bounds by a margin for the calm time. So two steps down are at least the dwell time apart.
Silence changes nothing; the age of the estimate shows it.

Knows no samples, no router and no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from netmon.estimate import LinkCondition, LinkEstimate

_CONDITIONS: Final = tuple(LinkCondition)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorConfig:
    """Bounds and times of the detector. The first of two bounds means rising, the second congested;
    a bound of infinity is never reached. The defaults suit samples every 0.1 to 1 s.
    """

    rate_drop: tuple[float, float] = (0.35, 0.65)
    """Lost share of the reference rate."""
    backlog_s: tuple[float, float] = (0.25, 2.0)
    """Time to send the backlog, while it grows."""
    delay_ratio: tuple[float, float] = (2.0, math.inf)
    """Queueing delay / least round-trip time (`least_rtt_s` where that is shorter)."""
    loss: tuple[float, float] = (0.02, math.inf)
    stalled_s: tuple[float, float] = (0.5, 1.0)
    """Seconds without an acknowledgement; on a long path at least 4 and 8 round trips."""
    down_after_s: float = 3.0
    """A link that is stalled for this long is down, although its connections stand."""
    least_rtt_s: float = 0.005
    reference_s: float = 300.0
    """Time constant with which the reference rate sinks to the present one, so that a link that
    stays slow counts as a slow link in the end.
    """
    evidence_s: float = 5.0
    """A rate that was last measured with a backlog more than this long ago is no sign."""
    silent_s: float = 3.0
    """Estimates that rest on older samples are not judged."""
    num_growing: int = 3
    """A backlog grows when its time rose in this many samples in a row, and by the share
    `backlog_growth` in all.
    """
    backlog_growth: float = 0.05
    num_confirming: int = 2
    """Samples in a row that must agree before the condition gets worse."""
    dwell_s: float = 5.0
    calm_s: float = 3.0
    calm_margin: float = 0.8
    """Signs are calm below this share of their bounds."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            low, high = value if isinstance(value, tuple) else (value, value)
            if not 0 < low <= high:
                raise ValueError(f"{name} must be above 0, and bounds in order: {value}")
        if self.calm_margin > 1:
            raise ValueError(f"calm_margin must be at most 1: {self.calm_margin}")


@dataclass(frozen=True, slots=True)
class Sign:
    """A number that is the stronger a sign of congestion the greater it is."""

    name: str
    value: float
    bounds: tuple[float, float]
    text: str

    def level(self, margin: float = 1.0) -> LinkCondition:
        low, high = self.bounds
        if self.value >= high * margin:
            return LinkCondition.CONGESTED
        return LinkCondition.RISING if self.value >= low * margin else LinkCondition.CLEAR


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the condition, with its reason in words and numbers."""

    before: LinkCondition
    after: LinkCondition
    at_s: float
    reason: str


class CongestionDetector:
    """Judges one link. Feed it every new estimate, in order of time."""

    def __init__(self, config: DetectorConfig | None = None) -> None:
        self._config = config or DetectorConfig()
        self.condition = LinkCondition.CLEAR
        self.reason = "nothing was observed yet"
        """Why the link has its condition. The numbers are those of the last signs."""
        self.since_s: float | None = None
        """When the condition last changed, or the first estimate was seen."""
        self.reference_bytes_per_s = 0.0
        """The highest rate that the link carried in the last minutes."""
        self._referred_s: float  # from the first estimate on
        self._backlogs_s: deque[float] = deque(maxlen=self._config.num_growing + 1)
        self._levels: deque[LinkCondition] = deque(maxlen=self._config.num_confirming)
        self._calm_since_s: float | None = None  # below the present condition, by the margin
        self._seen_s: float  # from the first estimate on

    def observe(self, estimate: LinkEstimate, now_s: float) -> Change | None:
        """Judge a new estimate. Returns the change of condition, or None."""
        if self.since_s is None:
            self.since_s, self._seen_s, self._referred_s = now_s, now_s, now_s
            self.reason = "no sign of congestion yet"
        if now_s - self._seen_s > self._config.silent_s:
            self._calm_since_s = None  # nobody knows whether it was calm
        self._seen_s = now_s
        # Old numbers are no sign of congestion, and no sign of calm either.
        if _is_silent(estimate, self._config.silent_s):
            self._calm_since_s = None
            return None
        self._backlogs_s.append(estimate.backlog_s)
        self._refer(estimate, now_s)
        # No second sample has to confirm this: connections either stand or do not.
        if (why := self._why_down(estimate)) is not None:
            return self._become(LinkCondition.DOWN, why, now_s)
        return self._weigh(list(self._signs(estimate)), now_s)

    def _weigh(self, signs: list[Sign], now_s: float) -> Change | None:
        self._levels.append(_judge(signs))
        self._note_calm(signs, now_s)
        is_sure = len(self._levels) == self._config.num_confirming
        # Worse must show in several samples in a row: one burst of losses is no congestion.
        least = min(self._levels, key=_severity) if is_sure else LinkCondition.CLEAR
        if _judge(signs) is self.condition is not LinkCondition.CLEAR:
            self.reason = _why(signs, 1.0)  # the present numbers
        if least.severity > self.condition.severity:
            return self._become(least, _why(signs, 1.0), now_s)
        return self._ease(signs, now_s)

    def _ease(self, signs: list[Sign], now_s: float) -> Change | None:
        """One step down, if it is time for that."""
        config, calm_s = self._config, self._calm_since_s
        if calm_s is None or self.since_s is None:
            return None
        # Both must have passed, so that a link on the edge does not flap.
        if now_s - self.since_s < config.dwell_s or now_s - calm_s < config.calm_s:
            return None
        # One step at a time: from congested to clear a link has to be calm twice.
        below = _CONDITIONS[self.condition.severity - 1]
        why = f"calm for {now_s - calm_s:.1f} s"
        left = _why(signs, config.calm_margin)
        return self._become(below, f"{why}; {left}" if left else why, now_s)

    def _note_calm(self, signs: list[Sign], now_s: float) -> None:
        calmest = _judge(signs, self._config.calm_margin)
        if calmest.severity >= self.condition.severity:
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s = now_s

    def _become(self, condition: LinkCondition, reason: str, now_s: float) -> Change | None:
        self.reason = reason
        self._calm_since_s = None
        if condition is self.condition:
            return None
        change = Change(self.condition, condition, now_s, reason)
        self.condition, self.since_s = condition, now_s
        return change

    def _why_down(self, estimate: LinkEstimate) -> str | None:
        if not estimate.is_up:
            return "no connection stands"
        if estimate.stalled_s >= self._config.down_after_s:
            waits = f"{estimate.backlog_bytes} bytes wait"
            return f"{waits}, none acknowledged for {estimate.stalled_s:.1f} s"
        return None

    def _refer(self, estimate: LinkEstimate, now_s: float) -> None:
        rate, passed_s = estimate.available_bytes_per_s, now_s - self._referred_s
        # A floor may come from a burst. Only a rate that lasted is a reference.
        if estimate.is_floor:
            rate = min(rate, estimate.achieved_bytes_per_s)
        self._referred_s = now_s
        if rate >= self.reference_bytes_per_s:
            self.reference_bytes_per_s = rate
        # Only a full link shows that it became slower: an idle link carries what it is asked to.
        elif self._is_evidence(estimate):
            share = math.exp(-passed_s / self._config.reference_s)
            self.reference_bytes_per_s = rate + share * (self.reference_bytes_per_s - rate)

    def _is_evidence(self, estimate: LinkEstimate) -> bool:
        age_s = estimate.full_age_s
        return estimate.is_up and age_s is not None and age_s <= self._config.evidence_s

    def _signs(self, estimate: LinkEstimate) -> Iterator[Sign]:
        config = self._config
        reference = self.reference_bytes_per_s
        if reference and self._is_evidence(estimate):
            rate = estimate.available_bytes_per_s
            text = f"carries {_mbit(rate)} of {_mbit(reference)} Mbit/s"
            yield Sign("rate", 1 - rate / reference, config.rate_drop, text)
        if self._is_growing():
            text = f"backlog of {estimate.backlog_s:.2f} s grows"
            yield Sign("queue", estimate.backlog_s, config.backlog_s, text)
        # On a short path the scheduling of the two hosts alone can double a round trip.
        base_s = max(config.least_rtt_s, estimate.base_rtt_s)
        text = f"{estimate.queueing_delay_s * 1e3:.0f} ms queueing over {base_s * 1e3:.0f} ms"
        yield Sign("delay", estimate.queueing_delay_s / base_s, config.delay_ratio, text)
        yield Sign("loss", estimate.loss, config.loss, f"{estimate.loss:.1%} retransmitted")
        low, high = config.stalled_s
        # Acknowledgements come a round trip later at best, however long that is.
        bounds = (max(low, 4 * estimate.base_rtt_s), max(high, 8 * estimate.base_rtt_s))
        text = f"nothing acknowledged for {estimate.stalled_s:.1f} s"
        yield Sign("stall", estimate.stalled_s, bounds, text)

    def _is_growing(self) -> bool:
        backlogs = self._backlogs_s
        if len(backlogs) <= self._config.num_growing:
            return False
        rises = all(before < after for before, after in pairwise(backlogs))
        return rises and backlogs[-1] >= (1 + self._config.backlog_growth) * backlogs[0]


def _judge(signs: list[Sign], margin: float = 1.0) -> LinkCondition:
    levels = [sign.level(margin) for sign in signs]
    # Two weak signs of different kinds weigh as much as a strong one.
    if LinkCondition.CONGESTED in levels or levels.count(LinkCondition.RISING) >= 2:
        return LinkCondition.CONGESTED
    return LinkCondition.RISING if LinkCondition.RISING in levels else LinkCondition.CLEAR


def _why(signs: list[Sign], margin: float) -> str:
    return ", ".join(sign.text for sign in signs if sign.level(margin) is not LinkCondition.CLEAR)


def _severity(condition: LinkCondition) -> int:
    return condition.severity


def _is_silent(estimate: LinkEstimate, silent_s: float) -> bool:
    return estimate.sample_age_s is None or estimate.sample_age_s > silent_s


def _mbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:.0f}"
