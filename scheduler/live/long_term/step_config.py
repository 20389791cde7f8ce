"""How eagerly the long-term loop acts, and the reasons of its steps.

Values only; `loop` has the rules, and `encode_step` those for the encode stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from scheduler.live.long_term.conversion import DWELL_S

NUM_ERRORS: Final = 4.0
"""How many standard errors the measured means may be off. It is above 3, because many steps look at
the same traffic, and chance exceeds 3 within weeks."""
MAX_ERROR: Final = 0.5
"""The largest error assumed of a mean, as a share of it."""
ROUNDING: Final = 1e-9


BUSY_SHARE: Final = 0.5
"""A stage whose instances are less busy than this needs no other one."""


class StepReason(StrEnum):
    """Why instances are converted, or why not. Values are stable: they are metric labels."""

    CONVERT = "convert"
    BEST_ALREADY = "best_already"
    SMALL_GAIN = "small_gain"
    UNSURE = "unsure"
    DWELLING = "dwelling"
    CONVERTING = "converting"
    TOO_FEW_REQUESTS = "too_few_requests"
    NO_ROUTE = "no_route"
    NOT_BUSY = "not_busy"


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTermConfig:
    """How eagerly the loop acts."""

    period_s: float = 300.0
    """The time between two solutions, seconds."""
    min_requests: int = 200
    """Nothing changes before this many requests have been measured."""
    min_gain: float = 0.03
    """The throughput that conversions must gain altogether, as a share of the present one."""
    dwell_s: float = DWELL_S
    """The least time from one conversion of a cluster to its next, seconds. It also holds for
    conversions that operators order. It is less than a period, so that a shift that asks for
    several instances gets one each period.
    """
    reverse_dwell_s: float = 1800.0
    """The least time from a conversion to one in the other direction, seconds."""

    def __post_init__(self) -> None:
        if not (self.period_s > 0 and self.min_requests >= 1):
            raise ValueError(
                f"period_s {self.period_s:g} must be above 0, min_requests {self.min_requests} "
                "at least 1"
            )
        if not 0 <= self.dwell_s <= self.reverse_dwell_s:
            raise ValueError(
                f"dwell_s {self.dwell_s:g} must be at most reverse_dwell_s "
                f"{self.reverse_dwell_s:g}, neither negative"
            )
        if not self.min_gain > 0:
            raise ValueError(f"min_gain {self.min_gain:g} must be above 0")


def gain_of(after_rps: float, before_rps: float) -> float:
    """The gain in throughput, as a share of that before."""
    if before_rps > 0:
        return after_rps / before_rps - 1
    return math.inf if after_rps > 0 else 0.0
