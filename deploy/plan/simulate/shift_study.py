"""The study of traffic that shifts: does the long timescale follow, and how closely could it?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from deploy.plan.simulate.building import traffic_of
from deploy.plan.simulate.study import PERIOD_S, Goal, Study, case_study_model
from scheduler.live.long_term.loop import LongTermConfig
from scheduler.planning.lengths import EmpiricalLengths
from scheduler.planning.region_model import Region, Traffic
from scheduler.planning.solve import best_plan
from scheduler.planning.threshold_search import Bounds, threshold_plan
from scheduler.planning.throughput import Mode
from scheduler.replay.driver import replay
from scheduler.replay.model import Policy
from scheduler.replay.results import Outcome
from scheduler.replay.workload import Phase, Workload, drawn

SETTLED_S: Final = 2.2 * PERIOD_S
"""Two steps of the long timescale, and the time of a drain, seconds."""
SHIFTS: Final = (
    (3.0, 1.0),
    (1 / 3, 1.0),
    (1.0, 3.0),
    (1.0, 1 / 3),
    (3.0, 3.0),
    (1 / 3, 1 / 3),
    (1 / 3, 3.0),
    (3.0, 1 / 3),
)
"""Factors on prompt lengths and on output lengths."""
MOST_CHANGES: Final = 2


def shift(seed: int, scale: float) -> Study:
    """Lengths and outputs change by 3x at half time: does the long timescale follow?

    Capacities are those of a setting (t and division) in the new traffic, over the best there is.
    `bound` is the best that two conversions can reach, since some optima are further away.
    `hindsight` is the value of the best setting for the requests of the two periods, within the
    same reach: some hundreds of requests say only so much about their distribution.
    """
    model = case_study_model()
    region = model.region
    before_rps = best_plan(region).system_rps(Mode.EXACT)
    # The shift is at the end of a period, so the next steps see one and two periods of new traffic.
    half_s = PERIOD_S * max(1, round(12 * scale))
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    pictures: dict[str, Outcome] = {}
    for lengths, outputs in SHIFTS:
        after = replace(region, traffic=traffic_of(region, lengths, outputs))
        # Like the loop, never without an instance of each role.
        bounds = {pd.name: (1, pd.num_instances - 1) for pd in after.pd_clusters}
        optimum_rps = best_plan(after, bounds=bounds).system_rps(Mode.EXACT)
        workload = _shifted(region, after, (0.8 * before_rps, 0.8 * optimum_rps), half_s, seed)
        outcome = replay(model, workload, Policy(long_term=LongTermConfig(period_s=PERIOD_S)))
        share = _reached_rps(outcome, after, half_s + SETTLED_S) / optimum_rps
        near = _near(outcome, after, half_s)
        bound = best_plan(after, bounds=near).system_rps(Mode.EXACT) / optimum_rps
        hindsight = _hindsight_rps(after, near, workload, half_s) / optimum_rps
        times_s = [change.at_s for change in outcome.role_changes if change.at_s >= half_s]
        # The goal is for the first two periods. Later changes are only reported.
        changes = sum(at_s <= half_s + SETTLED_S for at_s in times_s)
        late = outcome.summary(half_s + SETTLED_S)
        name = f"lengths x{lengths:.2g}, outputs x{outputs:.2g}"
        rows.append(
            {
                "shift": name,
                "optimum_rps": optimum_rps,
                "capacity_reached": share,
                "bound": bound,
                "hindsight": hindsight,
                "role_changes": changes,
                "changes_later": len(times_s) - changes,
                "good_share_afterwards": late.good_share,
                "ttft_p90_s_afterwards": late.ttft.p90_s,
            }
        )
        pictures[name] = outcome
        title = f"{name}: capacity after two periods over the optimum"
        wanted = f"at least 95%; bound {bound:.1%}, hindsight {hindsight:.1%}"
        goals.append(Goal(title, wanted, share, share >= 0.95))
        title = f"{name}: role changes within two periods"
        goals.append(Goal(title, f"at most {MOST_CHANGES}", changes, changes <= MOST_CHANGES))
    return Study(rows, goals, pictures)


def _shifted(
    before: Region, after: Region, rates_rps: tuple[float, float], half_s: float, seed: int
) -> Workload:
    # The second half holds two steps and what follows them, however small the scale.
    spans_s = (half_s, max(half_s, 3 * PERIOD_S))
    phases = [
        Phase(
            duration_s=span_s,
            rate_rps=rate,
            lengths=region.traffic.lengths,
            output_tokens=region.traffic.output_tokens,
        )
        for region, rate, span_s in zip((before, after), rates_rps, spans_s, strict=True)
    ]
    return drawn(phases, seed)


def _reached_rps(outcome: Outcome, after: Region, at_s: float) -> float:
    """The capacity in the new traffic of the region's settings at that moment, requests/s."""
    num_prefill = _recorded(outcome, "num_prefill", at_s)
    plan = threshold_plan(after, _recorded(outcome, "threshold:h200", at_s), num_prefill)
    return plan.system_rps(Mode.EXACT)


def _near(outcome: Outcome, after: Region, half_s: float) -> Bounds:
    """The divisions within reach of few enough conversions, with an instance for each role."""
    num_prefill, pd = round(_recorded(outcome, "num_prefill", half_s)), after.pd_clusters[0]
    least, most = num_prefill - MOST_CHANGES, num_prefill + MOST_CHANGES
    return {pd.name: (max(1, least), min(pd.num_instances - 1, most))}


def _hindsight_rps(after: Region, near: Bounds, workload: Workload, half_s: float) -> float:
    """The capacity in the new traffic of the best plan for what came within two periods,
    requests/s.
    """
    begin, end = np.searchsorted(workload.arrivals_s, (half_s, half_s + 2 * PERIOD_S)).tolist()
    tokens = workload.prompt_tokens[begin:end]
    came = Traffic(
        EmpiricalLengths.of(list(tokens)), after.traffic.output_tokens, sum(tokens) / len(tokens)
    )
    best = best_plan(replace(after, traffic=came), bounds=near)
    assert best.threshold_tokens is not None
    # Found for the requests that came, but judged by the distribution behind them.
    plan = threshold_plan(after, best.threshold_tokens, best.num_prefill[after.pd_clusters[0].name])
    return plan.system_rps(Mode.EXACT)


def _recorded(outcome: Outcome, name: str, at_s: float) -> float:
    """One value of the time series, at that moment or just after it."""
    series = outcome.series
    at = min(int(np.searchsorted(series.at_s, at_s)), len(series.at_s) - 1)
    return series.values[name][at]
