"""What a study is, and the region that most studies play.

These are values and one constructor. `studies` and `shift_study` have what is played.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from deploy.plan.solve.case_study import STEP_S, case_study_region
from scheduler.replay.links import RateSchedule
from scheduler.replay.model import ReplayModel, Slo
from scheduler.replay.results import Outcome

RTT_S: Final = 0.02
PERIOD_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Goal:
    """One result that a study should show."""

    name: str
    wanted: str
    found: float
    met: bool


@dataclass(frozen=True)
class Study:
    """Rows of numbers, and what they should have been."""

    rows: Sequence[dict[str, Any]]
    goals: Sequence[Goal]
    outcomes: dict[str, Outcome]
    """The runs that are worth a picture."""


def case_study_model(schedule: RateSchedule | None = None) -> ReplayModel:
    """The case study's region, with a round trip, which the paper does not give."""
    region = case_study_region(4, 8)
    region = replace(region, links=(replace(region.links[0], rtt_s=RTT_S),))
    schedules = {} if schedule is None else {region.links[0].name: schedule}
    return ReplayModel(region=region, schedules=schedules, slo=Slo(tbt_s=2 * STEP_S))
