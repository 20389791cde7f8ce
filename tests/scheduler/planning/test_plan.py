"""A pair of clusters: the grid against brute force and the linear program, corners, kept plans."""

from dataclasses import replace

import numpy as np
import pytest
from paper_region import FAST, KV, LENGTHS, SLOW

from scheduler.planning.lengths import EmpiricalLengths
from scheduler.planning.load.queueing_model import links_of
from scheduler.planning.load.study import (
    at_rate,
    draw,
    highest_load_within,
    simulate_plan,
    study_load,
    system_of,
)
from scheduler.planning.plan import TARGET_LOAD, NoRouteError
from scheduler.planning.region_model import (
    Link,
    PdClusterModel,
    PrefillClusterModel,
    Region,
    Traffic,
)
from scheduler.planning.solve import best_plan
from scheduler.planning.threshold_search import (
    best_threshold_plan,
    search_thresholds,
    threshold_plan,
)
from scheduler.planning.throughput import Mode


def pair(num_fast: int = 4, num_slow: int = 8, gbps: float = 100) -> Region:
    return Region(
        (PrefillClusterModel("far", num_fast, FAST, 30.0),) if num_fast else (),
        (PdClusterModel("near", num_slow, SLOW, 20, 0.025, 10.0),),
        (Link("far", "near", gbps * 1e9 / 8, 0.02, 0.01),) if num_fast else (),
        KV,
        Traffic(LENGTHS, 1024, 27_000),
    )


def several() -> Region:
    one = pair()
    return replace(
        one,
        prefill_clusters=(*one.prefill_clusters, PrefillClusterModel("third", 3, FAST.scaled(0.6))),
        pd_clusters=(*one.pd_clusters, PdClusterModel("other", 6, SLOW.scaled(0.8), 24, 0.025)),
        links=(
            *one.links,
            Link("far", "other", 3e9),
            Link("third", "other", 1e8),
        ),
    )


@pytest.mark.parametrize("mode", list(Mode))
def test_the_search_finds_what_brute_force_finds(mode: Mode) -> None:
    region = pair()
    plan = best_threshold_plan(region, mode)
    every = search_thresholds(region, mode, np.arange(100, 131_000, 25), np.arange(8))
    most_rps = every.system_rps.max()
    assert most_rps <= plan.system_rps(mode) == pytest.approx(most_rps, rel=1e-3)
    row, column = every.best
    assert plan.num_prefill == {"near": every.num_prefill[column]}
    assert plan.threshold_tokens == pytest.approx(every.split.threshold_tokens[row], abs=50)


@pytest.mark.parametrize("gbps", [1, 5, 100])
def test_the_linear_program_agrees_with_the_grid(gbps: float) -> None:
    region = pair(gbps=gbps)
    # Nothing uses the second PD cluster, which makes it a region of several clusters.
    unlinked = PdClusterModel("unlinked", 1, SLOW, 20, 0.025)
    several = replace(region, pd_clusters=(*region.pd_clusters, unlinked))
    expected = best_plan(region)
    plan = best_plan(several, bounds={"near": (0, 8), "unlinked": (1, 1)})
    rps = expected.system_rps(Mode.EXACT)
    assert plan.system_rps(Mode.EXACT) == pytest.approx(rps, rel=1e-3)
    assert plan.num_prefill["near"] == expected.num_prefill["near"]


def test_the_balance_of_equation_7_holds_at_the_optimum() -> None:
    plan = best_threshold_plan(pair(), Mode.PAPER)
    assert {(part.kind, part.name) for part in plan.bottlenecks(Mode.PAPER)} == {
        ("prefill", "far"),
        ("prefill", "near"),
    }


def test_without_a_prefill_cluster_everything_stays() -> None:
    plan = best_threshold_plan(pair(num_fast=0, num_slow=12), Mode.PAPER)
    assert plan.offload_fraction == 0
    assert plan.num_prefill == {"near": 9}
    assert plan.system_rps(Mode.PAPER) == pytest.approx(2.11, rel=0.01)


def test_naive_offloading_is_a_corner_that_is_chosen_where_it_is_best() -> None:
    region = replace(pair(num_fast=40), traffic=Traffic(LENGTHS.scaled(0.2), 1024, 27_000))
    plan = best_plan(region)
    assert plan.num_prefill == {"near": 0}
    assert plan.offload_fraction == pytest.approx(1)
    assert plan.threshold_tokens == 0


def test_a_dead_slow_link_means_no_offloading() -> None:
    plan = best_plan(pair(gbps=1e-6))
    alone = best_plan(pair(num_fast=0))
    assert plan.offload_fraction < 1e-6
    assert plan.system_rps(Mode.EXACT) == pytest.approx(alone.system_rps(Mode.EXACT), rel=1e-3)


def test_shared_instances_are_never_worse() -> None:
    whole, shared = (best_plan(pair(), whole=w) for w in (True, False))
    assert shared.system_rps(Mode.EXACT) > whole.system_rps(Mode.EXACT)
    assert shared.num_prefill["near"] != round(shared.num_prefill["near"])


def test_several_clusters_use_what_they_have() -> None:
    region = several()
    plan = best_plan(region)
    assert plan.threshold_tokens is None
    assert plan.flow.sum() == pytest.approx(1)
    rps = plan.system_rps(Mode.EXACT)
    for left_out in ("far", "third"):
        fewer = replace(
            region,
            prefill_clusters=tuple(c for c in region.prefill_clusters if c.name != left_out),
            links=tuple(k for k in region.links if k.source != left_out),
        )
        assert best_plan(fewer).system_rps(Mode.EXACT) < rps
    shares = {r.name: plan.share(i) for i, r in enumerate(plan.routes)}
    assert shares["third to other"] > 0
    relaxed = best_plan(region, whole=False)
    assert relaxed.system_rps(Mode.EXACT) >= rps * (1 - 1e-6)


def test_no_instance_at_all_is_an_error() -> None:
    with pytest.raises(NoRouteError, match="near has no instance"):
        best_plan(pair(num_slow=0))


def test_todays_plan_in_another_region() -> None:
    plan = best_plan(pair())
    kept = plan.kept_in(pair(gbps=5))
    assert kept.offload_fraction == pytest.approx(plan.offload_fraction)
    best = best_plan(pair(gbps=5)).system_rps(Mode.EXACT)
    assert kept.system_rps(Mode.EXACT) < 0.7 * best
    shorter = replace(pair(), traffic=Traffic(LENGTHS.scaled(0.5), 1024, 27_000))
    kept = plan.kept_in(shorter)
    share = 1 - LENGTHS.moments_to([2 * (plan.threshold_tokens or 0)])[0, 0]
    assert kept.offload_fraction == pytest.approx(share)
    with pytest.raises(ValueError, match="other clusters or links"):
        plan.kept_in(several())


def test_routes_of_prompts_follow_the_threshold() -> None:
    plan = threshold_plan(pair(), 20_000, 3)
    tokens = np.array([128.0, 19_999, 20_000, 20_001, 131_072])
    assert plan.routes_at(tokens, np.zeros(5)).tolist() == [0, 0, 0, 1, 1]
    assert plan.routes_at(tokens, np.full(5, 0.999)).tolist() == [0, 0, 0, 1, 1]
    assert plan.lengths_of(1) == [(20_000, 131_072)]


def test_cost_counts_instances_and_egress() -> None:
    plan = threshold_plan(pair(), 20_000, 3)
    egress = plan.link_bytes_per_s(Mode.EXACT, 2.0)["far to near"]
    per_request = KV.size.mean(LENGTHS) - KV.size.sum_to(LENGTHS, [20_000])[0]
    assert egress == pytest.approx(2 * per_request)
    expected = 4 * 30 + 8 * 10 + egress * 3600 / 1e9 * 0.01
    assert plan.cost_per_hour(2.0) == pytest.approx(expected)


def test_first_tokens_take_longer_under_load() -> None:
    plan = best_plan(pair())
    idle, *points = study_load(plan, (0.05, 0.3, 0.7, 0.95), num_requests=8000)
    assert points[0].ttft.p90_s < points[1].ttft.p90_s < points[2].ttft.p90_s
    empty = plan.empty_ttft()
    assert idle.ttft.mean_s == pytest.approx(empty.mean_s, rel=0.1)
    load = highest_load_within(plan, 6.0, num_requests=8000)
    assert points[0].load < load < points[2].load
    assert highest_load_within(plan, 0.5, num_requests=4000) == 0


def test_a_simulated_plan_is_as_busy_as_the_model_says() -> None:
    plan = best_plan(several())
    rate_rps = 0.6 * plan.system_rps(Mode.EXACT)
    made = at_rate(draw(plan, 150_000, seed=1), rate_rps)
    line = simulate_plan(plan, rate_rps, num_requests=150_000).timeline
    # Without the first tenth, in which the region fills, and without the time in which it drains.
    first_s, last_s = made.arrivals_s[15_000], made.arrivals_s[-1]
    inside = (line.start_s >= first_s) & (line.start_s < last_s)
    assert 0.9 < np.mean(inside[15_000:]) <= 1
    used = {
        (p.kind, p.name): p.need * rate_rps / p.capacity
        for p in plan.resources(Mode.EXACT)
        if p.capacity
    }
    system = system_of(plan)
    for index, name in enumerate(("far", "third", "near", "other")):
        busy_s = np.sum(made.service_s, where=inside & (made.station == index))
        could_s = system.stations[index].num_servers * (last_s - first_s)
        busy = busy_s / could_s if could_s else 0
        assert busy == pytest.approx(used.get(("prefill", name), 0), abs=0.03)
    crossed, kv_bytes = links_of(system, made), made.kv_token_bytes + made.kv_fixed_bytes
    for index, link in enumerate(several().links):
        sent_bytes = np.sum(kv_bytes, where=inside & (crossed == index))
        share = sent_bytes / (link.bytes_per_s * (last_s - first_s))
        assert share == pytest.approx(used[("link", link.name)], abs=0.03)


def test_few_distinct_lengths_are_planned_exactly() -> None:
    region = replace(
        pair(), traffic=Traffic(EmpiricalLengths.of([1000, 1000, 60_000]), 256, 21_000)
    )
    every = [threshold_plan(region, t, n) for t in (0, 1000, 60_000) for n in range(8)]
    best_rps = max(plan.system_rps(Mode.EXACT) for plan in every)
    assert best_plan(region).system_rps(Mode.EXACT) == pytest.approx(best_rps)


def test_a_load_asks_for_instances_in_proportion() -> None:
    """At its target load a part needs the instances that it has."""
    plan = best_plan(pair())
    for part in plan.resources(Mode.EXACT):
        if part.kind != "link":
            needed = plan.needed_instances(TARGET_LOAD * part.system_rps, part.kind)
            assert needed[part.name] == pytest.approx(part.capacity)
    for kind, names in (("prefill", {"far", "near"}), ("decode", {"near"})):
        none, once, twice = (plan.needed_instances(rate_rps, kind) for rate_rps in (0.0, 1.0, 2.0))
        assert once.keys() == names
        assert set(none.values()) == {0.0}
        assert twice == pytest.approx({name: 2 * num for name, num in once.items()})
