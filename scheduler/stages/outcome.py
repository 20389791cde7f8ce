"""What became of the requests of a simulation: who kept the objectives, and where the time went.

Pure values. A request is judged by HydraInfer's rule: its first token within the TTFT objective,
and 90% of its further tokens within the TPOT objective after the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from scheduler.planning.lengths import Floats
from scheduler.stages.instance import Instance, Running
from scheduler.stages.profile import StageSlo
from scheduler.stages.traffic import StageRequest

LATE_SHARE: Final = 0.1
"""The share of a request's tokens that may come late."""
WARM_UP: Final = 0.25
"""The first share of the arrivals, which is not judged: the instances are empty then."""


@dataclass(frozen=True)
class StageOutcome:
    """One simulation. Arrays have one value for each judged request that is done."""

    num_judged: int
    """Requests that arrived after the warm-up, done or not."""
    num_good: int
    num_late_first: int
    """Those whose first token was late."""
    num_late_tokens: int
    """Those of whose tokens too many were late."""
    ttft_s: Floats
    tpot_s: Floats
    """The mean over a request's tokens; without requests that have one token."""
    embedding_pull_s: Floats
    """Time to pull a request's embeddings, with the pulls before it; of those that were pulled."""
    kv_pull_s: Floats
    request_s: Floats
    backlog_growth: float
    """How many more requests were under way at the last arrival than when half of the time had
    passed, over the arrivals between."""
    used: dict[str, float]
    """The share of the time that the instances of each group computed."""
    is_whole: bool
    """Whether it was played to the end."""

    @property
    def attainment(self) -> float:
        """The share of the judged requests that kept the objectives."""
        return self.num_good / self.num_judged if self.num_judged else 1.0

    @property
    def moved_share(self) -> float:
        """The share of all requests' time that was spent in pulls."""
        total_s = float(self.request_s.sum())
        pulled_s = float(self.embedding_pull_s.sum() + self.kv_pull_s.sum())
        return pulled_s / total_s if total_s else 0.0


class Judge:
    """Counts requests as they end, so that a hopeless simulation can end early."""

    def __init__(self, slo: StageSlo, requests: Sequence[StageRequest], stop_below: float) -> None:
        self._slo = slo
        end_s = requests[-1].arrival_s
        self._from_s = WARM_UP * end_s
        self._middle_s = end_s / 2
        self._arrivals = [one.arrival_s for one in requests]
        self._num_before_middle = sum(at_s < self._middle_s for at_s in self._arrivals)
        self._num_judged = sum(at_s >= self._from_s for at_s in self._arrivals)
        self._most_bad = (1 - stop_below) * self._num_judged
        self._num_good = self._num_bad = 0
        self._num_late_first = self._num_late_tokens = 0
        self._done: list[Running] = []

    @property
    def is_decided(self) -> bool:
        """Whether too many requests have missed their objectives."""
        return self._num_bad > self._most_bad

    def done(self, running: Running, now_s: float) -> None:
        """A request has all its tokens."""
        running.done_s = now_s
        self._done.append(running)
        request = running.request
        if request.arrival_s < self._from_s:
            return
        # The first token of a request that another cluster prefilled is that one's.
        is_late = (
            not request.is_prefilled
            and running.first_token_s - request.arrival_s > self._slo.ttft_s
        )
        is_slow = running.late_steps > LATE_SHARE * (request.output_tokens - 1)
        self._num_late_first += is_late
        self._num_late_tokens += is_slow
        if is_late or is_slow:
            self._num_bad += 1
        else:
            self._num_good += 1

    def outcome(self, now_s: float, instances: Sequence[Instance]) -> StageOutcome:
        """All that was found."""
        judged = [one for one in self._done if one.request.arrival_s >= self._from_s]
        first = [one for one in judged if not one.request.is_prefilled]
        longer = [one for one in judged if one.request.output_tokens > 1]
        groups: dict[str, list[float]] = {}
        for one in instances:
            groups.setdefault(one.group, []).append(one.busy_s)
        return StageOutcome(
            num_judged=self._num_judged,
            num_good=self._num_good,
            num_late_first=self._num_late_first,
            num_late_tokens=self._num_late_tokens,
            ttft_s=_array([one.first_token_s - one.request.arrival_s for one in first]),
            tpot_s=_array([_tpot_s(one) for one in longer]),
            embedding_pull_s=_array(
                [one.embedding_pull_s for one in judged if one.embedding_pull_s]
            ),
            kv_pull_s=_array([one.kv_pull_s for one in judged if one.kv_pull_s]),
            request_s=_array([one.done_s - one.request.arrival_s for one in judged]),
            backlog_growth=self._backlog_growth(),
            used={name: sum(busy) / (len(busy) * now_s or 1.0) for name, busy in groups.items()},
            is_whole=len(self._done) == len(self._arrivals),
        )

    def _backlog_growth(self) -> float:
        arrived = len(self._arrivals) - self._num_before_middle
        ends = np.sort(_array([one.done_s for one in self._done]))
        done = np.diff(np.searchsorted(ends, (self._middle_s, self._arrivals[-1])))
        return (arrived - int(done[0])) / max(1, arrived)


def _array(values: list[float]) -> Floats:
    return np.array(values, np.float64)


def _tpot_s(running: Running) -> float:
    begin_s = running.decode_s if running.request.is_prefilled else running.first_token_s
    return (running.done_s - begin_s) / (running.request.output_tokens - 1)
