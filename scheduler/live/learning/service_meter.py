"""Learns the `ServiceModel` of one place from first tokens. Its state does not grow.

Each first token gives one equation for the five numbers, divided by the measured TTFT, so that
relative errors count. The meter keeps the weighted sums of these equations and solves them with
no number below zero:

- An equation weighs less the more it is off (beyond `_CLOSE`), so that the fit follows the median
  and a stall teaches little.
- It weighs as much less as the share of queue and transfer tail in the TTFT: their errors are not
  those of the place.
- Older equations are forgotten, with a half-life in requests. That is the slow time constant.
- Errors of one sign that add up to more than chance (a CUSUM test) mean that something has changed,
  such as the lengths of prompts or another tenant of the host. Most of what was learnt is forgotten
  then, so that a few requests are enough. That is the fast one.
- Each number is held to the one without contention by a few requests' worth of evidence.

Pure; it knows no places and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from scheduler.planning.lengths import Floats
from scheduler.routing.prediction import Prediction
from scheduler.routing.service import ALONE, ServiceModel

MIN_SEEN: Final = 3
"""The number of first tokens that are needed. An engine's first request often is a stall."""
_NUM: Final = len(ALONE) - 1
"""The numbers that are solved for: all but the bound."""
_HALF_LIFE: Final = 100.0
_KEPT: Final = 0.5 ** (1 / _HALF_LIFE)
_CLOSE: Final = 0.1
"""A relative error within which all equations weigh alike."""
_MOST_ERROR: Final = 1.0
"""An error beyond this counts as this, in logarithms."""
_PRIOR: Final = 0.5
"""How many requests of typical size the prior of each number weighs."""
_SMALL: Final = 1e-9
_SAME: Final = 1e-6
"""The relative error of a prediction that counts as right."""
_SOLVE_EVERY: Final = 4
"""After the first `_FEW`, so many equations are added between two solutions: one takes longer than
a routing decision.
"""
_SLACK: Final = 1.0
_ALARM: Final = 12.0
"""The CUSUM test, in mean absolute errors: what one request may be off at no cost, and the sum that
is no chance. After a change by three mean errors it takes six requests.
"""
_LEAST_SCATTER: Final = 0.05
_SCATTER_GAIN: Final = 0.03
_AFTER_CHANGE: Final = 0.2
"""The share of what was learnt that counts after a change."""
_FEW: Final = 10
_LEAST_WEIGHT: Final = 0.4
"""What each of the first `_FEW` equations weighs at least, at the start and after a change: they
are off because little is known yet.
"""
_PRIOR_MODEL: Final = np.array(ALONE[:_NUM])
_MOST_KEPT: Final = 0.98
"""What of the bound is left after each first token that came sooner."""


class ServiceState(msgspec.Struct, frozen=True, array_like=True):
    """A meter as it is kept and sent."""

    num_seen: int
    weight: float
    matrix: list[list[float]]
    wanted: list[float]
    scatter: float
    drift: tuple[float, float]
    num_fresh: int
    model: ServiceModel
    most_s: float


class ServiceMeter:
    """The service model of one place."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.num_changes = 0
        """How often what was learnt was found to hold no longer, since this object was made."""
        self._weight = 0.0
        self._matrix: Floats = np.zeros((_NUM, _NUM))
        self._wanted: Floats = np.zeros(_NUM)
        self._scatter = 0.2
        self._drift = (0.0, 0.0)
        self._num_fresh = 0
        self._most_s = 0.0
        self._model = ALONE

    @classmethod
    def restored(cls, state: ServiceState) -> ServiceMeter:
        """The meter that `state` was made of. ValueError for a state that is none."""
        found = cls()
        found.num_seen, found._weight = state.num_seen, state.weight
        found._matrix, found._wanted = np.array(state.matrix), np.array(state.wanted)
        if found._matrix.shape != (_NUM, _NUM) or found._wanted.shape != (_NUM,):
            raise ValueError(f"a service model has {_NUM} numbers, not {len(state.wanted)}")
        found._scatter, found._drift = state.scatter, state.drift
        found._num_fresh = state.num_fresh
        found._most_s = state.most_s
        found._model = state.model
        return found

    def state(self) -> ServiceState:
        """The argument of `restored`."""
        matrix: list[list[float]] = self._matrix.tolist()
        wanted: list[float] = self._wanted.tolist()
        return ServiceState(
            self.num_seen,
            self._weight,
            matrix,
            wanted,
            self._scatter,
            self._drift,
            self._num_fresh,
            self._model,
            self._most_s,
        )

    @property
    def model(self) -> ServiceModel:
        """The best estimate now; `ALONE` before there are `MIN_SEEN` first tokens."""
        return self._model if self.num_seen >= MIN_SEEN else ALONE

    def observe(self, predicted: Prediction, measured_s: float) -> None:
        """A first token came after `measured_s`. Of the prediction, its parts count and the load,
        not what was learnt here. Impossible values are ignored.
        """
        fixed_s = predicted.ttft_s - predicted.prefill_s
        fixed_s -= predicted.overhead_s + predicted.contention_s
        parts = (1.0, predicted.prefill_s, *predicted.load)
        if not (0 < measured_s < math.inf and math.isfinite(fixed_s + sum(parts))):
            return
        expected_s = fixed_s + sum(a * b for a, b in zip(self._model[:_NUM], parts, strict=True))
        rest_s = measured_s - fixed_s - predicted.prefill_s
        self._most_s = max(rest_s, _MOST_KEPT * self._most_s)
        error = 1 / _CLOSE
        if expected_s > 0:
            error = max(-_MOST_ERROR, min(math.log(expected_s / measured_s), _MOST_ERROR))
        if self.num_seen >= MIN_SEEN:
            self._judge(error)
        self.num_seen += 1
        self._num_fresh += 1
        weight = _CLOSE / max(_CLOSE, abs(error))
        if self._num_fresh <= _FEW:
            weight = max(_LEAST_WEIGHT, weight)
        # The rest is queue and tail, which say nothing of how the place serves.
        weight *= max(0.0, 1 - (predicted.queue_s + predicted.tail_s) / measured_s)
        row = np.array(parts) / measured_s
        self._weight = _KEPT * self._weight + weight
        self._matrix = _KEPT * self._matrix + weight * np.outer(row, row)
        # What is certain cannot take longer than the whole.
        rest = max(0.0, 1 - fixed_s / measured_s)
        self._wanted = _KEPT * self._wanted + (weight * rest) * row
        is_due = self._num_fresh <= _FEW or self._num_fresh % _SOLVE_EVERY == 0
        if is_due and abs(error) > _SAME:
            self._model = self._solved()

    def _judge(self, error: float) -> None:
        """Forget most of what was learnt if errors say that it holds no longer."""
        relative = error / self._scatter
        self._scatter += _SCATTER_GAIN * (abs(error) - self._scatter)
        self._scatter = max(_LEAST_SCATTER, self._scatter)
        above, below = self._drift
        above = max(0.0, above + relative - _SLACK)
        below = max(0.0, below - relative - _SLACK)
        if max(above, below) > _ALARM:
            self.num_changes += 1
            self._num_fresh = 0
            above = below = 0.0
            self._weight *= _AFTER_CHANGE
            self._matrix = _AFTER_CHANGE * self._matrix
            self._wanted = _AFTER_CHANGE * self._wanted
        self._drift = above, below

    def _solved(self) -> ServiceModel:
        if not self._weight:
            return ALONE
        # Every number is measured by what it typically adds to a TTFT: seconds and ratios alike.
        typical = np.sqrt(self._matrix.diagonal() / self._weight) + _SMALL
        ridge = _PRIOR * typical**2
        matrix = self._matrix + np.diag(ridge)
        wanted = self._wanted + ridge * _PRIOR_MODEL
        scaled = matrix / np.outer(typical, typical)
        found = _least(scaled, wanted / typical) / typical
        found[0] = min(found[0], self._most_s)
        return ServiceModel(*found.tolist())._replace(most_s=self._most_s)


def _least(matrix: Floats, wanted: Floats) -> Floats:
    """The x >= 0 with about the least x'Mx - 2 w'x: what would be below zero is 0, one by one."""
    active = list(range(len(wanted)))
    found = np.zeros(len(wanted))
    while active:
        solved: Sequence[float] = np.linalg.solve(
            matrix[np.ix_(active, active)], wanted[active]
        ).tolist()
        lowest = min(solved)
        if lowest >= 0:
            found[active] = solved
            break
        del active[solved.index(lowest)]
    return found
