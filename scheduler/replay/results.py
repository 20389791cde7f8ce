"""The result of a replay: every request's times, the state of the region over time, and a summary.

It knows how to add up, not what the result should be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler.planning.lengths import Floats
from scheduler.replay.jobs import Fate, Job
from scheduler.replay.model import Slo

LATE_RATIO = 2.0
"""A transfer is late when it is older than this many times its predicted time."""
LATE_GRACE_S = 3.0
"""The time after a change of a link in which the scheduler cannot know of it yet, seconds."""


@dataclass(frozen=True, slots=True)
class ReplayedRoleChange:
    """An instance of the PD cluster got another role."""

    at_s: float
    instance: str
    to_role: str


@dataclass(slots=True)
class Lateness:
    """Ages of the oldest transfers over their predicted times, sample by sample, after the grace.

    A late transfer that began before the end of the grace was predicted before the scheduler could
    know of the change. `num_foreseeable` counts the others.
    """

    num_seen: int = 0
    num_late: int = 0
    num_foreseeable: int = 0
    worst: float = 0.0

    def see(self, age_s: float, expected_s: float, since_change_s: float) -> None:
        """Note the oldest transfer of a link that last changed `since_change_s` ago."""
        if since_change_s <= LATE_GRACE_S:
            return
        ratio = age_s / expected_s
        self.num_seen += 1
        self.worst = max(self.worst, ratio)
        if ratio > LATE_RATIO:
            self.num_late += 1
            self.num_foreseeable += age_s < since_change_s - LATE_GRACE_S


@dataclass(slots=True)
class Series:
    """Values at the times `at_s`, by name. All lists have the same length."""

    at_s: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, at_s: float, row: dict[str, float]) -> None:
        self.at_s.append(at_s)
        for name, value in row.items():
            self.values.setdefault(name, []).append(value)

    def array(self, name: str) -> Floats:
        return np.array(self.values[name])


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean and percentiles of a time in seconds; nan if there are no values."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, values: Floats) -> Percentiles:
        if not len(values):
            return cls(math.nan, math.nan, math.nan, math.nan)
        p50_s, p90_s, p99_s = np.quantile(values, (0.5, 0.9, 0.99)).tolist()
        return cls(float(values.mean()), p50_s, p90_s, p99_s)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The requests that arrived within a span. Rates are per second of the span."""

    num_requests: int
    num_done: int
    num_good: int
    """Requests that were done and kept both objectives."""
    num_refused: int
    num_refused_late: int
    num_lost: int
    num_fell_back: int
    """Requests whose KVCache did not land in time, so that the PD cluster prefilled them again."""
    num_remote: int
    offered_rps: float
    goodput_rps: float
    ttft: Percentiles
    tbt: Percentiles
    prediction_error: float
    """Median of |predicted - real| / real TTFT; nan if nothing was predicted."""

    @property
    def good_share(self) -> float:
        """The share of all requests that kept the objectives."""
        return self.num_good / self.num_requests if self.num_requests else math.nan


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """Everything that a replay leaves. Arrays have one entry per request, in order of arrival."""

    slo: Slo
    jobs: Sequence[Job]
    series: Series
    span_s: float
    """The time from 0 until the last arrival, seconds."""
    egress_bytes: dict[str, float]
    """The bytes sent over each link until the end, by its name."""
    prefill_busy_s: float
    wasted_prefill_s: float
    """The prefill time of requests that were refused after it or prefilled again."""
    role_changes: Sequence[ReplayedRoleChange]
    rebalances: Sequence[str]
    """What the long timescale said, step by step."""
    lateness: Lateness
    pd_names: Sequence[str] = ()
    """The PD clusters, by their places."""
    arrival_s: Floats = field(init=False)
    ttft_s: Floats = field(init=False)
    """nan where there was no first token."""
    tbt_s: Floats = field(init=False)
    fate: NDArray[np.int8] = field(init=False)

    def __post_init__(self) -> None:
        jobs = self.jobs
        done = [job.fate is Fate.DONE for job in jobs]
        arrays = {
            "arrival_s": np.array([job.arrival_s for job in jobs]),
            "ttft_s": np.array([job.slot_s + job.step_s - job.arrival_s for job in jobs]),
            "tbt_s": np.array([(job.done_s - job.slot_s) / job.output_tokens for job in jobs]),
            "fate": np.array([job.fate for job in jobs], np.int8),
        }
        arrays["ttft_s"][~np.array(done)] = np.nan
        for name, values in arrays.items():
            object.__setattr__(self, name, values)

    @property
    def wasted_share(self) -> float:
        """The share of all prefill time that was in vain."""
        return self.wasted_prefill_s / self.prefill_busy_s if self.prefill_busy_s else 0.0

    def summary(self, from_s: float = 0.0, until_s: float = math.inf) -> Summary:
        """The summary of the requests that arrived from `from_s` on and before `until_s`."""
        at = (self.arrival_s >= from_s) & (self.arrival_s < until_s)
        fate, ttft_s, tbt_s = self.fate[at], self.ttft_s[at], self.tbt_s[at]
        done = fate == Fate.DONE
        # nan compares as false, without a warning: requests that were not done are not good.
        with np.errstate(invalid="ignore"):
            # A constant step may equal the objective but for rounding.
            good = done & (ttft_s <= self.slo.ttft_s) & (tbt_s <= self.slo.tbt_s * (1 + 1e-9))
        chosen = [self.jobs[i] for i in np.flatnonzero(at)]
        predicted = np.array([job.predicted_ttft_s for job in chosen])
        known = done & np.isfinite(predicted)
        errors = np.abs(predicted[known] - ttft_s[known]) / ttft_s[known]
        span_s = max(1e-9, min(until_s, self.span_s) - from_s)
        return Summary(
            num_requests=len(chosen),
            num_done=int(done.sum()),
            num_good=int(good.sum()),
            num_refused=int((fate == Fate.REFUSED).sum()),
            num_refused_late=int((fate == Fate.REFUSED_LATE).sum()),
            num_lost=int((fate == Fate.LOST).sum()),
            num_fell_back=sum(job.fell_back for job in chosen),
            num_remote=sum(job.place > 0 for job in chosen),
            offered_rps=len(chosen) / span_s,
            goodput_rps=float(good.sum()) / span_s,
            ttft=Percentiles.of(ttft_s[done]),
            tbt=Percentiles.of(tbt_s[done]),
            prediction_error=float(np.median(errors)) if len(errors) else math.nan,
        )
