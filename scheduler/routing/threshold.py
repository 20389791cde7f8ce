"""The routing threshold t of one link between two solutions of the plan.

The plan gives a base t. The present state of the link multiplies it by a factor of 1 or more:

- The target factor is the greater of two: what the link's state asks for, and the planned rate over
  the available one, where that was measured. A link that carries half of what the plan sends over
  it should be given half. A rate that is only a floor says nothing.
- The factor rises at once, because queues build up within seconds. It falls slowly, exponentially
  in its logarithm with a time constant, so that a link that has just recovered is not filled at
  once.
- It never exceeds `max_factor`, which is the factor of a link that is down. A view that is too old
  asks for nothing and lets nothing fall: t stays where it was.

A slower link or a worse state never lowers t, whatever came before (PrfaaS 3.4.3: "bandwidth- and
cache-aware routing"). Pure; time is an argument. This file knows no requests and no queues.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView


class ThresholdReason(StrEnum):
    """What t is based on. Values are stable: they are metric labels."""

    PLAN = "plan"
    STATE = "link_state"
    RATE = "link_rate"
    RETURNING = "returning"
    LINK_DOWN = "link_down"
    LINK_STALE = "link_stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdConfig:
    """How t follows a link. Factors multiply the plan's t."""

    rising_factor: float = 1.1
    """The factor on the threshold while a link is about to be congested."""
    congested_factor: float = 1.5
    """The factor on the threshold while a link is congested."""
    max_factor: float = 16.0
    """The highest factor on the threshold, whatever the link does."""
    return_s: float = 10.0
    """Time constant with which the threshold falls back when a link is well again, seconds."""
    max_age_s: float = 5.0
    """A view of the link that is older than this is not used, seconds."""

    def __post_init__(self) -> None:
        factors = (1.0, self.rising_factor, self.congested_factor, self.max_factor)
        if list(factors) != sorted(factors) or not factors[-1] < math.inf:
            raise ValueError(
                f"rising_factor {self.rising_factor:g}, congested_factor "
                f"{self.congested_factor:g} and max_factor {self.max_factor:g} must ascend from 1"
            )
        if not (self.return_s > 0 and self.max_age_s > 0):
            raise ValueError(f"return_s {self.return_s:g} and max_age_s must be above 0")


class Threshold(msgspec.Struct, frozen=True):
    """t now, and why. `target_factor` and `planned_bytes_per_s` are None where the link's state is
    too old to ask for anything.
    """

    plan_tokens: float
    factor: float
    reason: ThresholdReason
    link: LinkView
    target_factor: float | None = None
    planned_bytes_per_s: float | None = None

    @property
    def tokens(self) -> float:
        """t itself."""
        return self.plan_tokens * self.factor

    @property
    def numbers(self) -> Mapping[str, float]:
        """What the reason rests on."""
        found = {
            "plan_tokens": self.plan_tokens,
            "factor": self.factor,
            "target_factor": self.target_factor,
            "planned_bytes_per_s": self.planned_bytes_per_s,
            "available_bytes_per_s": self.link.available_bytes_per_s,
            "link_age_s": self.link.age_s,
        }
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        return str(self.reason) + "".join(f"; {key}={value}" for key, value in self.numbers.items())


class ThresholdController:
    """t of one link. Single-threaded. If time goes back, it stands still here."""

    def __init__(self, config: ThresholdConfig | None = None) -> None:
        self._config = config or ThresholdConfig()
        self._factor = 1.0
        self._at_s: float | None = None
        self._last: Threshold | None = None

    @property
    def factor(self) -> float:
        """The factor on the plan's t, as of the last update."""
        return self._factor

    def update(
        self, base_tokens: float, link: LinkView, planned_bytes_per_s: float, now_s: float
    ) -> Threshold:
        """t for the present view of a link.

        `base_tokens` is the plan's t. `planned_bytes_per_s` is what the plan sends over the link
        for the traffic it was made for; 0 means unknown, and then only the link's state counts.
        """
        elapsed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s if self._at_s is None else max(now_s, self._at_s)
        last = self._last
        # Every route asks, and nothing happens between two views once t has arrived.
        if (
            last is not None
            and last.link is link
            and last.factor == last.target_factor
            and last.plan_tokens == base_tokens
            and last.planned_bytes_per_s == planned_bytes_per_s
        ):
            return last
        found = self._last = self._updated(base_tokens, link, planned_bytes_per_s, elapsed_s)
        return found

    def _updated(
        self, base_tokens: float, link: LinkView, planned_bytes_per_s: float, elapsed_s: float
    ) -> Threshold:
        # An unknown state can neither raise t nor let it fall.
        if link.age_s > self._config.max_age_s:
            return Threshold(base_tokens, self._factor, ThresholdReason.LINK_STALE, link)
        target, reason = self._target(link, planned_bytes_per_s)
        returning = target
        if self._factor > target:
            # Linear in the logarithm: half of the way back from 16 is 4, not 8.
            left = math.exp(-elapsed_s / self._config.return_s)
            returning = target * (self._factor / target) ** left
        # The exponential never reaches its target; within a thousandth it has arrived.
        if returning > target * 1.001:
            reason = ThresholdReason.RETURNING
        else:
            returning = target
        self._factor = returning
        return Threshold(base_tokens, returning, reason, link, target, planned_bytes_per_s)

    def _target(self, link: LinkView, planned_bytes_per_s: float) -> tuple[float, ThresholdReason]:
        """The factor that the present view of the link asks for, without history."""
        config = self._config
        available = link.available_bytes_per_s
        if link.state is LinkCondition.DOWN or available == 0:
            return config.max_factor, ThresholdReason.LINK_DOWN
        by_state = 1.0
        if link.state is LinkCondition.RISING:
            by_state = config.rising_factor
        elif link.state is LinkCondition.CONGESTED:
            by_state = config.congested_factor
        # A floor is the rate that was asked of the link. That is low just when t is high, so t
        # would keep itself up.
        by_rate = 1.0
        if available and not link.is_floor:
            by_rate = planned_bytes_per_s / available
        if max(by_state, by_rate) <= 1:
            return 1.0, ThresholdReason.PLAN
        reason = ThresholdReason.RATE if by_rate > by_state else ThresholdReason.STATE
        return min(max(by_state, by_rate), config.max_factor), reason
