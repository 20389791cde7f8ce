"""Ready-made simulations with goals: what the scheduler's cores are worth, in numbers.

Each study plays one question through several policies and says which goals were met. A study takes
from seconds to a few minutes; `scale` makes it shorter for a first look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from deploy.plan.simulate.building import homogeneous
from deploy.plan.simulate.image_study import images
from deploy.plan.simulate.loss_study import loss
from deploy.plan.simulate.shift_study import shift
from deploy.plan.simulate.study import PERIOD_S, Goal, Study, case_study_model
from deploy.plan.solve.case_study import H20_PREFILL, KV, STEP_S, case_study_region
from kvmanager.config_files.units import GBIT_PER_S
from scheduler.live.admission import AdmissionConfig, AdmissionPolicy
from scheduler.live.long_term.loop import LongTermConfig
from scheduler.planning.lengths import EmpiricalLengths
from scheduler.planning.prefix_reuse import TracePrompt
from scheduler.planning.region_model import PdClusterModel, Region, Traffic
from scheduler.planning.solve import best_plan
from scheduler.planning.threshold_search import threshold_plan
from scheduler.planning.throughput import Mode
from scheduler.replay.driver import replay
from scheduler.replay.links import LinkChange, OtherTraffic, RateSchedule
from scheduler.replay.model import Policy, ReplayModel, Routing, Slo
from scheduler.replay.results import Outcome
from scheduler.replay.workload import Phase, Workload, drawn, traced

LOADS: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
PICTURED: Final = 0.9
"""The load whose run is kept: each has 100,000 requests."""
STATIC_FACTORS: Final = (0.8, 0.85, 0.9, 0.93, 0.96, 0.98, 1.0, 1.03)
"""The factors on the plan's threshold that are tried for the best static threshold."""
WARM_UP: Final = 0.1


def case_study(seed: int, scale: float) -> Study:
    """TTFT P90 of the router against the best static threshold, and against one site alone."""
    model = case_study_model()
    plan = best_plan(model.region)
    capacity_rps = plan.system_rps(Mode.EXACT)
    wanted = {0.8: -0.08, 0.9: -0.15, 0.95: -0.25}
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    pictures: dict[str, Outcome] = {}
    for load in LOADS:
        workload = _poisson(model.region, load * capacity_rps, 100_000 * scale, seed)
        tokens = plan.threshold_tokens or 0.0
        tried = {f * tokens: _p90_s(model, workload, _static(f * tokens)) for f in STATIC_FACTORS}
        best = min(tried, key=lambda threshold: tried[threshold])
        outcome = replay(model, workload, Policy())
        router_s = _p90_of(outcome)
        if load == PICTURED:
            pictures[f"router, load {load:g}"] = outcome
        change = router_s / tried[best] - 1
        rows.append(
            {
                "load": load,
                "best_static_threshold": best,
                "best_static_ttft_p90_s": tried[best],
                "router_ttft_p90_s": router_s,
                "change": change,
            }
        )
        # At other loads the goal is only to be no worse.
        limit = wanted.get(load, 0.0)
        name = f"TTFT P90 of the router over the best static t, load {load:g}"
        goals.append(Goal(name, f"at most {limit:+.0%}", change, change <= limit))
    goals.append(_against_one_site(model, seed, scale))
    return Study(rows, goals, pictures)


def congestion(seed: int, scale: float) -> Study:
    """Throughput within the objective while the link changes, compared with an oracle's.

    `late_samples` are moments more than 3 s after a change at which the oldest transfer took more
    than twice its predicted time. `late_foreseeable` leaves out transfers that began before the
    change: what they emit meets a slower link, which no prediction could know.
    """
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    pictures: dict[str, Outcome] = {}
    admission = AdmissionConfig(ttft_slo_s=Slo().ttft_s)
    policies = (
        replace(_static(None), name="static"),
        Policy(name="router", admission=admission),
        Policy(name="oracle", routing=Routing.ORACLE, admission=admission),
    )
    begin_s, end_s = 600 * scale, 1200 * scale
    for name, schedule in _disturbances(begin_s, end_s).items():
        model = case_study_model(schedule)
        capacity_rps = best_plan(model.region).system_rps(Mode.EXACT)
        workload = _poisson(model.region, 0.8 * capacity_rps, 1440 * capacity_rps * scale, seed)
        good: dict[str, float] = {}
        for policy in policies:
            outcome = replay(model, workload, policy, seed=seed)
            during = outcome.summary(begin_s, end_s)
            good[policy.name] = during.goodput_rps
            late = outcome.lateness
            rows.append(
                {
                    "disturbance": name,
                    "policy": policy.name,
                    "goodput_rps": during.goodput_rps,
                    "good_share": during.good_share,
                    "ttft_p90_s": during.ttft.p90_s,
                    "refused": during.num_refused,
                    "fell_back": during.num_fell_back,
                    "worst_lateness": late.worst,
                    "late_samples": late.num_late,
                    "late_foreseeable": late.num_foreseeable,
                }
            )
            if policy.name == "router":
                pictures[name] = outcome
                title = f"{name}: transfers begun 3 s after a change or later, over 2x predicted"
                found = late.num_foreseeable
                goals.append(Goal(title, "0 samples", found, not found))
        ratio = good["router"] / good["oracle"]
        title = f"{name}: goodput of the router over the oracle's"
        goals.append(Goal(title, "at least 90%", ratio, ratio >= 0.9))
    return Study(rows, goals, pictures)


def steady(seed: int, scale: float) -> Study:
    """A day of constant load: nothing should be converted."""
    model = case_study_model()
    rps = 0.8 * best_plan(model.region).system_rps(Mode.EXACT)
    workload = _poisson(model.region, rps, 86_400 * rps * scale, seed)
    outcome = replay(model, workload, Policy(long_term=LongTermConfig(period_s=PERIOD_S)))
    changes = len(outcome.role_changes)
    row = {
        "requests": len(workload),
        "virtual_hours": outcome.span_s / 3600,
        "role_changes": changes,
        "ttft_p90_s": outcome.summary().ttft.p90_s,
    }
    return Study([row], [Goal("role changes", "0", changes, not changes)], {"steady": outcome})


def overload(seed: int, scale: float, prompts: Sequence[TracePrompt] | None = None) -> Study:
    """8 + 8 instances with twice the load: which refusals let most requests keep the objective?

    `prompts` is a trace, played at double speed. None: drawn traffic at twice the capacity.
    """
    model, workload = _overloaded(seed, scale, prompts)
    rows: list[dict[str, Any]] = []
    good: dict[AdmissionPolicy, int] = {}
    wasted: dict[AdmissionPolicy, float] = {}
    pictures: dict[str, Outcome] = {}
    for policy in AdmissionPolicy:
        admission = AdmissionConfig(policy=policy, ttft_slo_s=model.slo.ttft_s)
        chosen = Policy(name=policy.value, num_prefill=8, admission=admission)
        outcome = pictures[policy.value] = replay(model, workload, chosen, seed=seed)
        found = outcome.summary()
        good[policy], wasted[policy] = found.num_good, outcome.wasted_share
        rows.append(
            {
                "admission": policy.value,
                "good": found.num_good,
                "done": found.num_done,
                "refused": found.num_refused,
                "refused_late": found.num_refused_late,
                "wasted_prefill_share": outcome.wasted_share,
                "ttft_p90_s": found.ttft.p90_s,
                "decode_load_amplitude": amplitude(outcome),
            }
        )
    ours = AdmissionPolicy.PREDICTED
    goals = [
        Goal(
            f"requests within the objective, predicted over {other}",
            "at least 100%",
            good[ours] / max(1, good[other]),
            good[ours] >= good[other],
        )
        for other in (AdmissionPolicy.PRESENT, AdmissionPolicy.AT_DECODE)
    ]
    goals.append(Goal("prefill wasted", "under 1%", wasted[ours], wasted[ours] < 0.01))
    return Study(rows, goals, pictures)


def amplitude(outcome: Outcome) -> float:
    """The standard deviation of the share of decode slots in use, after the first tenth."""
    used = outcome.series.array("decode_used") / np.maximum(1, outcome.series.array("decode_slots"))
    return float(np.std(used[len(used) // 10 :]))


STUDIES: Final[dict[str, Callable[[int, float], Study]]] = {
    "case-study": case_study,
    "congestion": congestion,
    "shift": shift,
    "steady": steady,
    "overload": overload,
    "loss": loss,
    "images": images,
}


def _static(threshold_tokens: float | None) -> Policy:
    thresholds = None if threshold_tokens is None else {"h200": threshold_tokens}
    # The paper's model: first come, first served, and no admission.
    return Policy(routing=Routing.STATIC, order=None, thresholds=thresholds)


def _poisson(region: Region, rate_rps: float, num_requests: float, seed: int) -> Workload:
    traffic = region.traffic
    phase = Phase(
        duration_s=num_requests / rate_rps,
        rate_rps=rate_rps,
        lengths=traffic.lengths,
        output_tokens=traffic.output_tokens,
    )
    return drawn([phase], seed)


def _p90_s(model: ReplayModel, workload: Workload, policy: Policy) -> float:
    return _p90_of(replay(model, workload, policy))


def _p90_of(outcome: Outcome) -> float:
    return outcome.summary(WARM_UP * outcome.span_s).ttft.p90_s


def _against_one_site(model: ReplayModel, seed: int, scale: float) -> Goal:
    """The router at a rate close to the most that one site alone can take."""
    alone = homogeneous(model)
    # A rate that both can serve. Above it the queue of the one site would grow without end.
    rps = 0.9 * best_plan(alone.region).system_rps(Mode.EXACT)
    workload = _poisson(model.region, rps, 50_000 * scale, seed)
    change = _p90_s(model, workload, Policy()) / _p90_s(alone, workload, _static(None)) - 1
    name = f"TTFT P90 of the router over one site with 12 instances, {rps:.2f} requests/s"
    return Goal(name, "at most -64%", change, change <= -0.64)


def _disturbances(begin_s: float, end_s: float) -> dict[str, RateSchedule]:
    full, slow = 100 * GBIT_PER_S, 5 * GBIT_PER_S
    span_s = end_s - begin_s
    bursts = [
        OtherTraffic(
            from_s=begin_s + i * span_s / 10,
            until_s=begin_s + (i + 1 / 3) * span_s / 10,
            bytes_per_s=full - slow,
        )
        for i in range(10)
    ]
    drop = [LinkChange(at_s=begin_s, bytes_per_s=slow), LinkChange(at_s=end_s, bytes_per_s=full)]
    loss = [LinkChange(at_s=begin_s, loss=0.01), LinkChange(at_s=end_s, loss=0.0)]
    return {
        "100 to 5 Gbit/s": RateSchedule.of(full, drop),
        "bursts of other traffic": RateSchedule.of(full, (), bursts),
        "1% loss": RateSchedule.of(full, loss),
        "outage": RateSchedule.of(full, outages=[(begin_s, begin_s + span_s / 5)]),
    }


def _overloaded(
    seed: int, scale: float, prompts: Sequence[TracePrompt] | None
) -> tuple[ReplayModel, Workload]:
    """8 instances that prefill and 8 that decode, with slots so that both can be the bottleneck."""
    slots = 6
    if prompts is not None:
        lengths = EmpiricalLengths.of([prompt.input_tokens for prompt in prompts])
        mean_output = sum(prompt.output_tokens for prompt in prompts) / len(prompts)
        mean_input = sum(prompt.input_tokens for prompt in prompts) / len(prompts)
        traffic = Traffic(lengths, mean_output, mean_input)
        # The Mooncake trace has blocks of 512 tokens.
        workload = traced(prompts[: max(1, round(len(prompts) * scale))], 512, 2.0)
    else:
        traffic = case_study_region(0, 16).traffic
    pd = PdClusterModel("pd", 16, H20_PREFILL, slots, STEP_S)
    region = Region((), (pd,), (), KV, traffic)
    model = ReplayModel(region=region, slo=Slo(ttft_s=30.0, tbt_s=0.1))
    if prompts is None:
        longest = traffic.lengths.max_tokens
        # With the longest prompt as threshold nothing is offloaded: the region has one site.
        rps = 2 * threshold_plan(region, longest, 8).system_rps(Mode.EXACT)
        workload = _poisson(region, rps, 12_000 * scale, seed)
    return model, workload
