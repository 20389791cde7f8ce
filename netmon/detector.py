"""Judges one link's condition with hysteresis: clear, rising, congested or down.

Each sign compares a number of `LinkEstimate` with two bounds of the configuration:

- rate: the measured rate has fallen below what the link carried in the last minutes.
- queue: the bytes that wait at the sender take longer and longer to send, over several samples.
- delay: the round trip is longer than the least one, so a queue stands in the network.
- loss: the retransmitted share. Loss alone is no congestion, because BBR carries the full rate of
  a link with a shallow queue and loses a few percent.
- stall: bytes wait and nothing is acknowledged.

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
from typing import Final, NamedTuple

from netmon.estimate import LinkCondition, LinkEstimate

SILENT_S: Final = 3.0
"""Chosen: three intervals between samples of an idle link."""
_CONDITIONS: Final = tuple(LinkCondition)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorConfig:
    """Bounds and times of the detector. The first of two bounds means rising, the second congested;
    a bound of infinity is never reached. The defaults suit samples every 0.1 to 1 s.
    """

    # Chosen: a third and two thirds; a neighbour that takes half of the link makes it rising.
    rate_drop: tuple[float, float] = (0.35, 0.65)
    """Lost share of the reference rate."""
    # Chosen: the first is above what one sample of a busy link finds waiting, the second is what
    # a first token may be late.
    backlog_s: tuple[float, float] = (0.25, 2.0)
    """Time to send the backlog, while it grows."""
    # BBR keeps two bandwidth-delay products under way (cwnd_gain), which is a ratio of 1. A ratio
    # alone is no congestion, since a deep buffer that stands full still carries the whole rate.
    delay_ratio: tuple[float, float] = (2.0, math.inf)
    """Queueing delay / least round-trip time (`least_rtt_s` where that is shorter)."""
    # The loss above which BBR sends no faster (BBRLossThresh of draft-ietf-ccwg-bbr).
    loss: tuple[float, float] = (0.02, math.inf)
    # One and two retransmissions in vain: Linux sends again after 0.2 s (TCP_RTO_MIN) and 0.6 s.
    stalled_s: tuple[float, float] = (0.5, 1.0)
    """Seconds without an acknowledgement; on a long path at least 4 and 8 round trips."""
    # Four retransmissions in vain, after 0.2, 0.6, 1.4 and 3.0 s.
    down_after_s: float = 3.0
    """A link that is stalled for this long is down, although its connections stand."""
    # Chosen: on a short path the scheduling of the two hosts alone can double a round trip.
    least_rtt_s: float = 0.005
    # Chosen: as long as the kernel remembers the least round trip (tcp_min_rtt_wlen).
    reference_s: float = 300.0
    """Time constant with which the reference rate sinks to the present one, so that a link that
    stays slow counts as a slow link in the end.
    """
    # Chosen: some pauses between transfers are not to hide that the link is slow.
    evidence_s: float = 5.0
    """A rate that was last measured with a backlog more than this long ago is no sign."""
    # Chosen: with samples every 0.2 s, more than half a second of arrivals above the rate.
    num_growing: int = 3
    """A backlog grows when its time rose in this many samples in a row, and by the share
    `backlog_growth` in all.
    """
    backlog_growth: float = 0.05
    # Two are the fewest by which a single odd sample changes nothing.
    num_confirming: int = 2
    """Samples in a row that must agree before the condition gets worse."""
    # Chosen: two steps down take longer than a prefill, so that routing is not led back and forth.
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


class Sign(NamedTuple):
    """A number that is the stronger a sign of congestion the greater it is."""

    value: float
    bounds: tuple[float, float]
    text: str

    def level(self, margin: float = 1.0) -> LinkCondition:
        low, high = self.bounds
        if self.value >= high * margin:
            return LinkCondition.CONGESTED
        return LinkCondition.RISING if self.value >= low * margin else LinkCondition.CLEAR


class CongestionDetector:
    """Judges one link. Feed it every new estimate, in order of time."""

    def __init__(self, config: DetectorConfig) -> None:
        self._config = config
        self.condition = LinkCondition.CLEAR
        self.reason = "nothing was observed yet"
        """Why the link has its condition. The numbers are those of the last signs."""
        self.since_s: float | None = None
        """When the condition last changed, or the first estimate was observed."""
        self.num_changes = dict.fromkeys(LinkCondition, 0)
        """How often each condition began."""
        self.reference_bytes_per_s = 0.0
        """The highest rate that the link carried in the last minutes."""
        self._backlogs_s: deque[float] = deque(maxlen=config.num_growing + 1)
        self._levels: deque[LinkCondition] = deque(maxlen=config.num_confirming)
        self._calm_since_s: float | None = None  # below the present condition, by the margin
        self._observed_s = 0.0

    def observe(self, estimate: LinkEstimate, now_s: float) -> None:
        """Judge a new estimate."""
        if self.since_s is None:
            self.since_s = self._observed_s = now_s
            self.reason = "no sign of congestion yet"
        passed_s, self._observed_s = now_s - self._observed_s, now_s
        if passed_s > SILENT_S:
            self._calm_since_s = None  # nobody knows whether it was calm
        self._backlogs_s.append(estimate.backlog_s)
        age_s = estimate.full_age_s
        is_evidence = estimate.is_up and age_s is not None and age_s <= self._config.evidence_s
        self._refer(estimate, passed_s, is_evidence=is_evidence)
        # No second sample has to confirm that a link is down: connections stand or do not.
        if not estimate.is_up:
            self._become(LinkCondition.DOWN, "no connection stands", now_s)
        elif estimate.stalled_s >= self._config.down_after_s:
            waits = f"{estimate.backlog_bytes} bytes wait"
            why = f"{waits}, none acknowledged for {estimate.stalled_s:.1f} s"
            self._become(LinkCondition.DOWN, why, now_s)
        else:
            self._weigh(list(self._signs(estimate, is_evidence=is_evidence)), now_s)

    def _weigh(self, signs: list[Sign], now_s: float) -> None:
        level = _judge(signs)
        self._levels.append(level)
        if _judge(signs, self._config.calm_margin).severity >= self.condition.severity:
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s = now_s
        if level is self.condition is not LinkCondition.CLEAR:
            self.reason = _why(signs)  # the present numbers
        # Worse must show in several samples in a row: one burst of losses is no congestion.
        least = min(self._levels, key=lambda each: each.severity)
        is_sure = len(self._levels) == self._config.num_confirming
        if is_sure and least.severity > self.condition.severity:
            self._become(least, _why(signs), now_s)
        elif self._calm_since_s is not None:
            self._ease(signs, now_s - self._calm_since_s, now_s)

    def _ease(self, signs: list[Sign], calm_s: float, now_s: float) -> None:
        """One step down, if it is time for that."""
        config, since_s = self._config, self.since_s
        # Both must have passed, so that a link on the edge does not flap.
        if since_s is None or now_s - since_s < config.dwell_s or calm_s < config.calm_s:
            return
        # One step at a time: from congested to clear a link has to be calm twice.
        below = _CONDITIONS[self.condition.severity - 1]
        left = _why(signs, config.calm_margin)
        self._become(below, f"calm for {calm_s:.1f} s" + (f"; {left}" if left else ""), now_s)

    def _become(self, condition: LinkCondition, reason: str, now_s: float) -> None:
        self.reason = reason
        self._calm_since_s = None
        if condition is not self.condition:
            self.condition, self.since_s = condition, now_s
            self.num_changes[condition] += 1

    def _refer(self, estimate: LinkEstimate, passed_s: float, *, is_evidence: bool) -> None:
        rate = estimate.available_bytes_per_s
        # A floor may come from a burst. Only a rate that lasted is a reference.
        if estimate.is_floor:
            rate = min(rate, estimate.achieved_bytes_per_s)
        if rate >= self.reference_bytes_per_s:
            self.reference_bytes_per_s = rate
        # Only a full link shows that it became slower: an idle link carries what it is asked to.
        elif is_evidence:
            share = math.exp(-passed_s / self._config.reference_s)
            self.reference_bytes_per_s = rate + share * (self.reference_bytes_per_s - rate)

    def _signs(self, estimate: LinkEstimate, *, is_evidence: bool) -> Iterator[Sign]:
        config, reference = self._config, self.reference_bytes_per_s
        if reference and is_evidence:
            rate = estimate.available_bytes_per_s
            text = f"carries {_mbit(rate)} of {_mbit(reference)} Mbit/s"
            yield Sign(1 - rate / reference, config.rate_drop, text)
        if self._is_growing():
            text = f"backlog of {estimate.backlog_s:.2f} s grows"
            yield Sign(estimate.backlog_s, config.backlog_s, text)
        base_s = max(config.least_rtt_s, estimate.base_rtt_s)
        text = f"{estimate.queueing_delay_s * 1e3:.0f} ms queueing over {base_s * 1e3:.0f} ms"
        yield Sign(estimate.queueing_delay_s / base_s, config.delay_ratio, text)
        yield Sign(estimate.loss, config.loss, f"{estimate.loss:.1%} retransmitted")
        low, high = config.stalled_s
        # Acknowledgements come a round trip later at best, however long that is.
        bounds = (max(low, 4 * estimate.base_rtt_s), max(high, 8 * estimate.base_rtt_s))
        text = f"nothing acknowledged for {estimate.stalled_s:.1f} s"
        yield Sign(estimate.stalled_s, bounds, text)

    def _is_growing(self) -> bool:
        backlogs, config = self._backlogs_s, self._config
        is_long = backlogs[-1] >= (1 + config.backlog_growth) * backlogs[0]
        rises = all(before < after for before, after in pairwise(backlogs))
        return len(backlogs) > config.num_growing and rises and is_long


def _judge(signs: list[Sign], margin: float = 1.0) -> LinkCondition:
    levels = [sign.level(margin) for sign in signs]
    # Two weak signs of different kinds weigh as much as a strong one.
    if LinkCondition.CONGESTED in levels or levels.count(LinkCondition.RISING) >= 2:
        return LinkCondition.CONGESTED
    return LinkCondition.RISING if LinkCondition.RISING in levels else LinkCondition.CLEAR


def _why(signs: list[Sign], margin: float = 1.0) -> str:
    return ", ".join(sign.text for sign in signs if sign.level(margin) is not LinkCondition.CLEAR)


def _mbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:.0f}"
