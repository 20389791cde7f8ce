"""The highest rate that keeps the objectives, and the arrangement and division that has it.

A rate is kept if enough requests are within their objectives and the number under way does not
grow: a queue that grows breaks the objective later, though not in a short simulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from scheduler.stages.arrangement import DISAGGREGATED, Arrangement, Division, divisions
from scheduler.stages.capacity import StageWork, bound_rps
from scheduler.stages.outcome import StageOutcome
from scheduler.stages.simulation import StageModel, simulate
from scheduler.stages.traffic import Drawn, StageRequest

MOST_GROWTH: Final = 0.05
"""The most requests that a kept rate may leave over, of those that arrive, beside chance."""
RATE_STEP: Final = 1.04
"""Rates are found to this factor."""
SHORTLIST: Final = 2
"""The divisions of an arrangement that are simulated: those with the highest bounds."""


_FEWEST: Final = 40
"""Requests of a simulation."""
_LOWEST: Final = 50
"""A goodput below this part of the bound counts as none."""
_SPREAD: Final = 0.05


class Binding(StrEnum):
    """What is missed first above the goodput."""

    TTFT = "TTFT"
    TPOT = "TPOT"
    THROUGHPUT = "throughput"  # more come than are done


@dataclass(frozen=True)
class Goodput:
    """The goodput of one division. `outcomes` are at that rate; empty: no rate is kept."""

    division: Division
    rate_rps: float
    bound_rps: float
    binding: Binding
    outcomes: tuple[StageOutcome, ...]

    @property
    def used(self) -> dict[str, float]:
        """The share of the time that the instances of each group compute."""
        return {
            group: sum(one.used[group] for one in self.outcomes) / len(self.outcomes)
            for group, _ in self.division.groups
            if self.outcomes
        }

    def quantile(self, name: str, share: float) -> float:
        """A quantile of one of the outcomes' arrays; 0 if it is empty."""
        values = np.concatenate([getattr(one, name) for one in self.outcomes] or [np.empty(0)])
        return float(np.quantile(values, share)) if len(values) else 0.0


@dataclass(frozen=True, slots=True)
class Samples:
    """The requests that rates are tried with: several draws, each with `seconds` of arrivals and no
    more requests than were drawn.
    """

    draws: tuple[Drawn, ...]
    seconds: float

    def at_rate(self, rate_rps: float) -> Iterator[list[StageRequest]]:
        """The requests of each draw at this rate."""
        num = max(_FEWEST, round(rate_rps * self.seconds))
        for drawn in self.draws:
            yield drawn.at_rate(rate_rps, min(num, len(drawn.requests)))


def goodput(model: StageModel, division: Division, samples: Samples, highest_rps: float) -> Goodput:
    """Search the goodput of one division between 0 and its bound `highest_rps`."""
    kept: tuple[StageOutcome, ...] = ()
    # A bound of means is no bound of what a short sample needs.
    low, high = 0.0, highest_rps * 1.1
    binding = Binding.THROUGHPUT
    rate = highest_rps * 0.8
    while high > low * RATE_STEP and high > highest_rps / _LOWEST:
        outcomes = _played(model, division, samples, rate)
        missed = missed_of(outcomes, model.slo.share)
        if missed is None:
            low, kept = rate, outcomes
        else:
            high, binding = rate, missed
        rate = (low + high) / 2
    return Goodput(division, low, highest_rps, binding, kept)


def _played(
    model: StageModel, division: Division, samples: Samples, rate_rps: float
) -> tuple[StageOutcome, ...]:
    outcomes: list[StageOutcome] = []
    for requests in samples.at_rate(rate_rps):
        # A draw may be somewhat below the wanted share, if the others are above it.
        stop_below = model.slo.share - _SPREAD
        outcomes.append(simulate(model, division, requests, stop_below=stop_below))
        if not outcomes[-1].is_whole:
            break
    return tuple(outcomes)


def missed_of(outcomes: Sequence[StageOutcome], share: float) -> Binding | None:
    """What is missed at a rate; None if it is kept."""
    judged = sum(one.num_judged for one in outcomes)
    good = sum(one.num_good for one in outcomes)
    if not all(one.is_whole for one in outcomes) or good < share * judged:
        late_tokens = sum(one.num_late_tokens for one in outcomes)
        late_first = sum(one.num_late_first for one in outcomes)
        return Binding.TPOT if late_tokens > late_first else Binding.TTFT
    growth = sum(one.backlog_growth for one in outcomes) / len(outcomes)
    # The number under way changes by chance, too: about the root of the arrivals.
    chance = 1 / math.sqrt(judged)
    return Binding.THROUGHPUT if growth > MOST_GROWTH + chance else None


def best_division(
    model: StageModel,
    candidates: Iterable[Division],
    samples: Samples,
    work: StageWork,
    *,
    shortlist: int = SHORTLIST,
) -> Goodput | None:
    """The division with the highest goodput, of those with the highest bounds; None without any."""
    ordered = sorted(candidates, key=lambda one: bound_rps(work, one), reverse=True)
    best: Goodput | None = None
    for division in ordered[:shortlist]:
        highest_rps = bound_rps(work, division)
        if best is not None and best.rate_rps >= highest_rps:
            break
        found = goodput(model, division, samples, highest_rps)
        if best is None or found.rate_rps > best.rate_rps:
            best = found
    return best


def search(
    model: StageModel,
    num_instances: int,
    samples: Samples,
    work: StageWork,
    *,
    arrangements: Sequence[Arrangement] = DISAGGREGATED,
    shortlist: int = SHORTLIST,
) -> list[Goodput]:
    """The best division of each arrangement that so many instances allow."""
    found = [
        best_division(model, divisions(one, num_instances), samples, work, shortlist=shortlist)
        for one in arrangements
    ]
    return [one for one in found if one is not None]
