"""Whole replays: against the queueing simulation, and what each policy does in each situation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from deploy.plan.solve.case_study import case_study_region
from scheduler.live.admission import AdmissionConfig, AdmissionPolicy
from scheduler.live.long_term.loop import LongTermConfig
from scheduler.planning.lengths import EmpiricalLengths
from scheduler.planning.load.queueing import (
    QueueingLink,
    Requests,
    SlotPool,
    Station,
    System,
    simulate,
)
from scheduler.planning.plan import Plan
from scheduler.planning.prefix_reuse import TracePrompt
from scheduler.planning.region_model import Region
from scheduler.planning.solve import best_plan
from scheduler.planning.throughput import Mode
from scheduler.replay.driver import replay
from scheduler.replay.jobs import Fate
from scheduler.replay.links import LinkChange, RateSchedule
from scheduler.replay.model import Policy, ReplayModel, Routing, Slo
from scheduler.replay.results import Outcome
from scheduler.replay.starting import starting_plan
from scheduler.replay.workload import Phase, Workload, drawn, traced
from scheduler.routing.service import ServiceModel

LINK = "h200 to h20"
GBIT = 1e9 / 8
STATIC = Policy(name="static", routing=Routing.STATIC, order=None)


@cache
def region() -> Region:
    found = case_study_region(4, 8)
    return replace(found, links=(replace(found.links[0], rtt_s=0.02),))


@cache
def plan() -> Plan:
    return best_plan(region())


def poisson(load: float, duration_s: float, seed: int = 1) -> Workload:
    traffic = region().traffic
    phase = Phase(
        duration_s=duration_s,
        rate_rps=load * plan().system_rps(Mode.EXACT),
        lengths=traffic.lengths,
        output_tokens=traffic.output_tokens,
    )
    return drawn([phase], seed)


def model(schedule: RateSchedule | None = None, **fields: Any) -> ReplayModel:
    schedules = {} if schedule is None else {LINK: schedule}
    return ReplayModel(region=region(), schedules=schedules, **fields)


def dropping(at_s: float, until_s: float, gbps: float) -> RateSchedule:
    return RateSchedule.of(
        100 * GBIT,
        [
            LinkChange(at_s=at_s, bytes_per_s=gbps * GBIT),
            LinkChange(at_s=until_s, bytes_per_s=100 * GBIT),
        ],
    )


@pytest.mark.parametrize("gbps", [100.0, 9.0])
def test_with_a_static_threshold_it_is_the_queueing_simulation(gbps: float) -> None:
    here = replace(region(), links=(replace(region().links[0], bytes_per_s=gbps * GBIT),))
    tokens = plan().threshold_tokens or 0.0
    work = poisson(0.85, 1500)
    lengths = np.array(work.prompt_tokens, float)
    is_remote = lengths > tokens
    remote, local = here.prefill_clusters[0].prefill, here.pd_clusters[0].prefill
    num = len(work)
    requests = Requests(
        arrivals_s=np.array(work.arrivals_s),
        station=np.where(is_remote, 1, 0),
        pool=np.zeros(num, int),
        service_s=np.where(is_remote, remote(lengths), local(lengths)),
        decode_s=np.full(num, 1024 * 0.025),
        kv_token_bytes=here.kv.size(lengths) - here.kv.fixed_bytes,
        kv_fixed_bytes=np.full(num, here.kv.fixed_bytes),
    )
    system = System(
        stations=(Station(3), Station(4, {0: 0})),
        pools=(SlotPool(5 * 20, 0.025),),
        links=(QueueingLink(gbps * GBIT, 0.01),),
    )
    expected = simulate(system, requests).timeline
    policy = replace(STATIC, thresholds={"h200": tokens}, num_prefill=3)
    found = replay(ReplayModel(region=here, transfer_timeout_s=1e9), work, policy)
    for name in ("start_s", "landed_s", "slot_s", "done_s"):
        times = np.array([getattr(job, name) for job in found.jobs])
        np.testing.assert_allclose(times, getattr(expected, name), atol=1e-6)


def test_the_same_seed_gives_the_same_outcome() -> None:
    schedule = dropping(30, 60, 5)
    work = poisson(0.8, 100)
    policy = Policy(admission=AdmissionConfig(ttft_slo_s=30), long_term=LongTermConfig(period_s=40))
    shaky = model(schedule, prefill_jitter=0.2)
    one, two, other = (replay(shaky, work, policy, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.ttft_s, two.ttft_s)
    assert one.series == two.series
    assert not np.array_equal(one.ttft_s, other.ttft_s)


def test_queues_tails_and_slots_pass_as_predicted_where_the_profile_is_true() -> None:
    """The predictor and the simulation have one profile: this is about everything around it."""
    found = replay(model(), poisson(0.5, 1500), Policy()).summary()
    assert found.prediction_error < 0.01
    assert found.num_done == found.num_requests


def test_the_router_beats_the_static_threshold_under_load() -> None:
    work = poisson(0.9, 2500)
    static = replay(model(), work, STATIC).summary(400).ttft.p90_s
    router = replay(model(), work, Policy()).summary(400).ttft.p90_s
    assert router < 0.85 * static


def good_share(outcome: Outcome, from_s: float, until_s: float) -> float:
    return outcome.summary(from_s, until_s).good_share


def test_when_the_link_slows_down_the_router_is_close_to_one_who_knew() -> None:
    slow = model(dropping(100, 250, 5))
    work = poisson(0.8, 350)
    admission = AdmissionConfig(ttft_slo_s=30)
    static = replay(slow, work, STATIC)
    router = replay(slow, work, Policy(admission=admission))
    oracle = replay(slow, work, Policy(routing=Routing.ORACLE, admission=admission))
    best = good_share(oracle, 100, 250)
    assert good_share(router, 100, 250) > 0.9 * best
    assert good_share(static, 100, 250) < 0.5 * best
    assert router.lateness.num_foreseeable == 0
    thresholds = router.series.array("threshold:h200")
    at_s = np.array(router.series.at_s)
    assert thresholds[(at_s > 110) & (at_s < 250)].min() > 1.5 * thresholds[at_s < 90][-1]
    assert thresholds[-1] == pytest.approx(plan().threshold_tokens, rel=0.05)


def test_an_outage_brings_requests_home_and_what_was_under_way_is_prefilled_again() -> None:
    cut = RateSchedule.of(100 * GBIT, outages=[(100.0, 150.0)])
    found = replay(model(cut), poisson(0.5, 350), Policy())
    during = [job for job in found.jobs if 105 < job.arrival_s < 145]
    assert not any(job.place for job in during)
    after = [job for job in found.jobs if job.arrival_s > 210]
    assert sum(job.place > 0 for job in after) > 0.3 * len(after)
    assert any(job.fell_back for job in found.jobs)
    assert found.wasted_share > 0
    assert all(job.fate is Fate.DONE for job in found.jobs)


def test_without_local_prefill_what_never_lands_is_lost_and_the_replay_ends() -> None:
    dead = RateSchedule.of(100 * GBIT, [LinkChange(at_s=60, bytes_per_s=0.0)])
    policy = replace(STATIC, num_prefill=0, thresholds={"h200": 0.0})
    found = replay(model(dead), poisson(0.3, 120), policy)
    fates = {job.fate for job in found.jobs}
    assert fates == {Fate.DONE, Fate.LOST}
    assert found.summary().num_lost > 0


@pytest.mark.parametrize("policy", list(AdmissionPolicy))
def test_refusals_keep_the_objective_of_the_others(policy: AdmissionPolicy) -> None:
    admission = AdmissionConfig(policy=policy, ttft_slo_s=20)
    found = replay(model(slo=Slo(ttft_s=20)), poisson(2.0, 300), Policy(admission=admission))
    total = found.summary()
    assert total.num_refused > 0.2 * total.num_requests
    assert total.num_good > 0.9 * total.num_done
    assert (total.num_refused_late > 0) == (policy is AdmissionPolicy.AT_DECODE)
    assert (found.wasted_share > 0) == (policy is AdmissionPolicy.AT_DECODE)


@pytest.mark.parametrize("routing", Routing)
def test_the_long_timescale_converts_for_longer_outputs_and_drains_first(routing: Routing) -> None:
    traffic = region().traffic
    phases = [
        Phase(duration_s=600, rate_rps=2.0, lengths=traffic.lengths, output_tokens=1024),
        Phase(duration_s=1500, rate_rps=1.2, lengths=traffic.lengths, output_tokens=3072),
    ]
    work = drawn(phases, 3)
    policy = Policy(routing=routing, long_term=LongTermConfig(period_s=300))
    found = replay(model(), work, policy)
    assert [change.to_role for change in found.role_changes] == ["decode", "decode"]
    assert all(job.fate is Fate.DONE for job in found.jobs)
    assert found.series.values["num_decode"][-1] == 7
    assert found.rebalances[0].startswith("300 s: no conversion because ")
    assert any("convert h20: prefill to decode; requests=" in line for line in found.rebalances)
    assert found.summary(1800).ttft.p90_s < 30


@pytest.mark.parametrize("factor", [0.6, 1.5])
def test_measured_times_correct_a_profile_that_engines_do_not_keep(factor: float) -> None:
    other = model(prefill_factors={"h20": factor, "h200": factor})
    found = replay(other, poisson(0.5, 2000), Policy())
    # The first is predicted from the profile alone, and is off by all of the factor. No answer has
    # ended by then, so nobody knows what a decode step takes.
    prefill_s = found.ttft_s[0] - 0.025
    assert prefill_s == pytest.approx(factor * found.jobs[0].predicted_ttft_s, rel=0.02)
    assert found.summary(500).prediction_error < 0.02


def test_overhead_passes_between_landing_and_first_decode_step() -> None:
    late = ServiceModel(overhead_s=0.25)
    work = poisson(0.2, 300)
    static = Policy(routing=Routing.STATIC)
    found = replay(model(services={"h20": late, "h200": late}), work, static)
    alone = replay(model(), work, static)
    assert found.ttft_s - alone.ttft_s == pytest.approx(0.25, abs=1e-6)
    assert all(job.fate is Fate.DONE for job in found.jobs)


def test_a_pd_cluster_that_is_lost_before_a_request_is_ready_loses_it() -> None:
    late = ServiceModel(overhead_s=5.0)
    lost = model(services={"h20": late, "h200": late}, lost={"h20": (100.0, 200.0)})
    found = replay(lost, poisson(0.5, 300), Policy())
    assert {job.fate for job in found.jobs if 95 <= job.landed_s < 100} == {Fate.LOST}


def test_engines_that_waver_are_still_predicted_by_their_mean() -> None:
    shaky = model(prefill_factors={"h20": 1.5, "h200": 1.5}, prefill_jitter=0.2)
    found = replay(shaky, poisson(0.5, 2000), Policy()).summary(500)
    assert 0.05 < found.prediction_error < 0.2  # of a single prefill; a factor of 1.5 is 0.33


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_what_others_cost_a_prefill_is_learnt(load: float) -> None:
    beside = ServiceModel(decode_s=0.02, busy_s=0.5)
    crowded = model(services={"h20": beside, "h200": beside}, prefill_jitter=0.1)
    work = poisson(load, 900)
    found, alone = replay(crowded, work, Policy()), replay(model(), work, Policy())
    assert found.summary(0).ttft.p50_s > alone.summary(0).ttft.p50_s
    # After 30 requests, as the first of these were predicted from the profile alone.
    predicted = np.array([job.predicted_ttft_s for job in found.jobs])[30:]
    errors = np.abs(predicted / found.ttft_s[30:] - 1)
    assert np.median(errors) <= 0.15
    assert np.quantile(errors, 0.9) <= 0.40


def test_cached_prefixes_are_neither_computed_nor_sent_again() -> None:
    blocks = list(range(80))
    prompts = [TracePrompt(30.0 * i, 512 * 80, 10, blocks) for i in range(6)]
    work = traced(prompts, 512)
    sizes = {"h200": 1000, "h20": 1000}
    cold = replay(model(), work, Policy())
    warm = replay(model(cache_blocks=sizes), work, Policy())
    assert warm.ttft_s[0] == pytest.approx(cold.ttft_s[0])
    assert warm.ttft_s[1:].max() < 0.5 * cold.ttft_s[1:].min()
    assert sum(warm.egress_bytes.values()) < 0.4 * sum(cold.egress_bytes.values())


def test_a_cached_prefix_that_only_the_prefill_cluster_keeps_moves_to_the_pd_cluster() -> None:
    prompts = [TracePrompt(30.0 * i, 512 * 80, 10, list(range(80))) for i in range(4)]
    work = traced(prompts, 512)
    cold = replay(model(), work, Policy())
    warm = replay(model(cache_blocks={"h200": 1000, "h20": 10}), work, Policy())
    for job in warm.jobs[1:]:
        assert (job.place, job.move_from, job.move_tokens) == (0, 1, 512 * 70 - 1)
        assert job.move_s > job.arrival_s
    assert warm.ttft_s[1:].max() < 0.5 * cold.ttft_s[1:].min()


def test_what_leaves_nobody_to_serve_is_refused() -> None:
    work = poisson(0.5, 60)
    with pytest.raises(ValueError, match="all 8 instances of h20 prefill"):
        replay(model(), work, replace(STATIC, num_prefill=8))
    alone = ReplayModel(region=case_study_region(0, 4))
    with pytest.raises(ValueError, match="nobody prefills"):
        replay(alone, work, replace(STATIC, num_prefill=0))
    with pytest.raises(ValueError, match="no link 'a to b'"):
        ReplayModel(region=region(), schedules={"a to b": RateSchedule.of(1.0)})
    assert starting_plan(model(), Policy(num_prefill=2)).num_prefill == {"h20": 2.0}


def test_one_fixed_length_without_queues_gives_the_time_by_hand() -> None:
    lengths = EmpiricalLengths.of([40_000.0])
    work = drawn([Phase(duration_s=2000, rate_rps=0.01, lengths=lengths, output_tokens=100)], 1)
    found = replay(model(), work, Policy())
    prefill_s = float(region().prefill_clusters[0].prefill(40_000))
    tail_s = region().kv.fixed_bytes / (100 * GBIT) + 0.01
    np.testing.assert_allclose(found.ttft_s, prefill_s + tail_s + 0.025, rtol=1e-9)
    np.testing.assert_allclose(found.tbt_s, 0.025)
    sent = sum(found.egress_bytes.values())
    assert sent == pytest.approx(len(work) * float(region().kv.size(40_000)))


def test_one_engine_that_serves_a_prompt_whole_makes_its_first_token_with_its_last_pass() -> None:
    lengths = EmpiricalLengths.of([10_000.0])
    work = drawn([Phase(duration_s=2000, rate_rps=0.01, lengths=lengths, output_tokens=100)], 1)
    found = replay(
        model(pass_tokens=4096, load_steps=1), work, Policy(hand_off_tokens=10_000, margin_s=9.0)
    )
    assert all(job.is_whole for job in found.jobs)
    prefill_s = float(region().pd_clusters[0].prefill(10_000))
    np.testing.assert_allclose(found.ttft_s, prefill_s, rtol=1e-9)
    done_s = np.array([job.done_s - job.slot_s for job in found.jobs])
    np.testing.assert_allclose(done_s, 99 * 0.025)
    assert sum(found.egress_bytes.values()) == 0
    # One that its engine has not begun is lost with the cluster.
    late = {"h20": ServiceModel(overhead_s=30.0)}
    lost = model(lost={"h20": (100.0, 200.0)}, services=late)
    two = Workload(arrivals_s=[80.0, 250.0], prompt_tokens=[200, 200], output_tokens=[5, 5])
    assert [job.fate for job in replay(lost, two, Policy()).jobs] == [Fate.LOST, Fate.DONE]
