"""Several PD clusters planned together: against brute force, and what holds of every division."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_region import FAST, KV, LENGTHS, SLOW

from scheduler.planning.joint import JointRegion
from scheduler.planning.lengths import EmpiricalLengths
from scheduler.planning.plan import NoRouteError, Plan
from scheduler.planning.region_model import (
    Home,
    Link,
    PdClusterModel,
    PrefillClusterModel,
    Region,
    Traffic,
    Uplink,
)
from scheduler.planning.solve import PRECISION, best_plan
from scheduler.planning.throughput import Mode

GBIT = 1e9 / 8
DRAWN = EmpiricalLengths.of(LENGTHS.quantile((np.arange(2000) + 0.5) / 2000))
"""The paper's lengths as measured ones: their moments take less time."""
WITHIN = 1 + 10 * PRECISION
"""Thresholds are searched on grids, beside the precision of levels."""


def home(
    name: str,
    sources: dict[str, float],
    *,
    instances: int = 8,
    rate_rps: float = 3.0,
    gbps: float = 100.0,
    scale: float = 1.0,
    **fields: Any,
) -> Home:
    """A PD cluster with links to prefill clusters, given with their instances."""
    region = Region(
        tuple(PrefillClusterModel(source, num, FAST) for source, num in sources.items()),
        (PdClusterModel(name, instances, SLOW, 20, 0.025),),
        tuple(Link(source, name, gbps * GBIT, 0.02) for source in sources),
        KV,
        Traffic(DRAWN.scaled(scale), 1024, 27_000),
    )
    return Home(region, rate_rps, **fields)


def least(joint: JointRegion) -> float:
    return min(joint.levels.values())


def instances(joint: JointRegion, name: str, model: str = "") -> dict[str, float]:
    clusters = joint.shares[model, name].prefill_clusters
    return {cluster.name: cluster.num_instances for cluster in clusters}


def sent(joint: JointRegion) -> dict[str, float]:
    """Bytes/s over each link with every home at its highest rate."""
    found: dict[str, float] = {}
    for plan in joint.plans.values():
        of_plan = plan.link_bytes_per_s(Mode.EXACT, plan.system_rps(Mode.EXACT))
        found |= {name: found.get(name, 0.0) + rate for name, rate in of_plan.items()}
    return found


def test_one_home_is_planned_like_its_region() -> None:
    for sources in ({}, {"far": 4}, {"far": 4, "third": 2}):
        one = home("near", sources)
        joint = JointRegion((one,))
        assert joint.shares["", "near"] == one.region
        expected = best_plan(one.region)
        found = joint.plans["", "near"]
        assert found.num_prefill == expected.num_prefill
        assert found.threshold_tokens == expected.threshold_tokens
        assert found.system_rps(Mode.EXACT) == expected.system_rps(Mode.EXACT)


def test_equal_homes_get_equal_shares_and_the_plan_of_half_the_cluster() -> None:
    joint = JointRegion((home("a", {"far": 8}), home("b", {"far": 8})))
    alone = best_plan(home("a", {"far": 4}).region)
    for name in "ab":
        assert instances(joint, name) == {"far": pytest.approx(4)}
        plan = joint.plans["", name]
        assert plan.num_prefill == {name: alone.num_prefill["a"]}
        assert plan.threshold_tokens == pytest.approx(alone.threshold_tokens, rel=1e-3)


def test_homes_that_share_nothing_are_planned_as_if_alone() -> None:
    homes = (home("a", {"x": 4}), home("b", {"y": 2}, rate_rps=9.0), home("c", {}))
    joint = JointRegion(homes, (Uplink("x", "egress", 20 * GBIT), Uplink("c", "ingress", 1.0)))
    assert joint.shares["", "b"] == homes[1].region
    assert joint.shares["", "c"] == homes[2].region
    assert joint.shares["", "a"].links == (
        replace(homes[0].region.links[0], bytes_per_s=20 * GBIT),
    )


def test_a_home_with_more_demand_gets_more() -> None:
    joint = JointRegion((home("a", {"far": 8}, rate_rps=4.0), home("b", {"far": 8}, rate_rps=2.0)))
    assert instances(joint, "a")["far"] > 2 * instances(joint, "b")["far"]
    assert joint.levels["", "a"] == pytest.approx(least(joint), rel=1e-3)


def test_a_home_that_needs_nothing_leaves_its_part_to_others() -> None:
    """`idle` has decode for one request a second at most, and prefills that alone."""
    small = home("idle", {"far": 4}, instances=16, rate_rps=0.01)
    joint = JointRegion((home("busy", {"far": 4}), small))
    alone = best_plan(home("busy", {"far": 4}).region).system_rps(Mode.EXACT)
    assert joint.plans["", "busy"].system_rps(Mode.EXACT) == pytest.approx(alone, rel=0.02)
    assert joint.levels["", "idle"] > joint.levels["", "busy"]


@pytest.mark.parametrize("way", ["egress", "ingress"])
def test_an_uplink_is_one_limit_of_all_its_links(way: Any) -> None:
    if way == "egress":
        homes = (home("a", {"x": 4}), home("b", {"x": 4}))
        uplink = Uplink("x", "egress", 3 * GBIT)
    else:
        homes = (home("a", {"x": 4, "y": 4}),)
        uplink = Uplink("a", "ingress", 3 * GBIT)
    # Whole instances may leave a part of the uplink unused.
    free, limited = (JointRegion(homes, ups, whole=False) for ups in ((), (uplink,)))
    assert sum(sent(free).values()) > uplink.bytes_per_s
    assert sum(sent(limited).values()) <= uplink.bytes_per_s * WITHIN
    assert sum(sent(limited).values()) > 0.98 * uplink.bytes_per_s
    assert least(limited) < least(free)


def test_models_share_links_but_not_instances() -> None:
    def both(gbps: float) -> JointRegion:
        one = home("near", {"far": 4}, gbps=gbps, model="one")
        return JointRegion((one, home("near", {"far": 2}, gbps=gbps, rate_rps=1.0, model="two")))

    wide = both(100)
    assert instances(wide, "near", "one") == {"far": pytest.approx(4)}
    assert instances(wide, "near", "two") == {"far": pytest.approx(2)}
    assert sent(both(4))["far to near"] <= 4 * GBIT * WITHIN


def test_a_link_without_any_rate_carries_nothing() -> None:
    joint = JointRegion((home("a", {"far": 4}, gbps=0.0), home("b", {"far": 4})))
    assert joint.plans["", "a"].offload_fraction == 0
    assert instances(joint, "b")["far"] == pytest.approx(4)


def test_bounds_keep_a_division() -> None:
    held = [home(name, {"far": 6}, bounds=(5, 5)) for name in "ab"]
    joint = JointRegion(tuple(held))
    free = JointRegion(tuple(replace(h, bounds=None) for h in held))
    assert instances(joint, "a") == {"far": pytest.approx(3)}
    assert least(free) >= least(joint)


def test_without_an_instance_that_decodes_there_is_no_plan() -> None:
    joint = JointRegion((home("a", {"far": 4}), home("b", {"far": 4}, instances=0)))
    with pytest.raises(NoRouteError, match="b has no instance"):
        _ = joint.plans


@pytest.mark.parametrize("rates", [(3.0, 3.0), (4.0, 1.0)])
@pytest.mark.parametrize("gbps", [2.0, 100.0])
def test_the_least_level_is_what_brute_force_finds(rates: tuple[float, float], gbps: float) -> None:
    """Every share of the cluster and of its uplink, every division, every threshold."""
    homes = [
        home("a", {"far": 5}, rate_rps=rates[0]),
        home("b", {"far": 5}, rate_rps=rates[1], instances=5, scale=0.7),
    ]

    def levels(one: Home, parts: np.ndarray[Any, Any]) -> list[float]:
        found = []
        for part in parts:
            region = one.region
            far = replace(region.prefill_clusters[0], num_instances=5 * part)
            link = replace(region.links[0], bytes_per_s=gbps * GBIT * part)
            there = replace(region, prefill_clusters=(far,), links=(link,))
            found.append(best_plan(there).system_rps(Mode.EXACT) / one.rate_rps)
        return found

    parts = np.linspace(0.0, 1.0, 51)
    brute = max(map(min, levels(homes[0], parts), levels(homes[1], 1 - parts)))
    found = least(JointRegion(tuple(homes), (Uplink("far", "egress", gbps * GBIT),)))
    # Brute force divides instances and the uplink alike, and no finer than its grid.
    assert found >= brute / WITHIN
    assert found == pytest.approx(brute, rel=0.03)


@st.composite
def joints(draw: st.DrawFn) -> JointRegion:
    sources = {name: draw(st.integers(0, 6)) for name in ("x", "y", "z")[: draw(st.integers(1, 3))]}
    homes = []
    for name in ("a", "b", "c")[: draw(st.integers(2, 3))]:
        linked = draw(st.sets(st.sampled_from(sorted(sources)), min_size=1))
        homes.append(
            home(
                name,
                {source: sources[source] for source in sorted(linked)},
                instances=draw(st.integers(2, 9)),
                rate_rps=draw(st.floats(0.5, 8)),
                gbps=draw(st.floats(0.5, 50)),
                scale=draw(st.sampled_from([0.5, 1.0])),
            )
        )
    uplinks = [Uplink(name, "egress", draw(st.floats(1, 50)) * GBIT) for name in sources]
    return JointRegion(tuple(homes), tuple(uplinks))


few = settings(max_examples=15, deadline=None)


@few
@given(joints())
def test_nothing_is_given_out_twice(joint: JointRegion) -> None:
    for source in {c.name for h in joint.homes for c in h.region.prefill_clusters}:
        sizes = [
            c.num_instances
            for h in joint.homes
            for c in h.region.prefill_clusters
            if c.name == source
        ]
        given_out = sum(instances(joint, h.key[1]).get(source, 0.0) for h in joint.homes)
        assert given_out <= sizes[0] * WITHIN
    over = sent(joint)
    for up in joint.uplinks:
        rate = sum(over.get(f"{up.cluster} to {h.key[1]}", 0.0) for h in joint.homes)
        assert rate <= up.bytes_per_s * WITHIN


@few
@given(joints(), st.floats(1, 4), st.sampled_from(["links", "uplinks"]))
def test_more_bandwidth_never_serves_the_least_served_home_worse(
    joint: JointRegion, factor: float, what: str
) -> None:
    if what == "uplinks":
        ups = [replace(up, bytes_per_s=up.bytes_per_s * factor) for up in joint.uplinks]
        wider = replace(joint, uplinks=tuple(ups))
    else:
        wider = replace(joint, homes=tuple(_widened(h, factor) for h in joint.homes))
    assert least(wider) >= least(joint) / WITHIN


def _widened(one: Home, factor: float) -> Home:
    links = [replace(k, bytes_per_s=k.bytes_per_s * factor) for k in one.region.links]
    return replace(one, region=replace(one.region, links=tuple(links)))


@few
@given(joints())
def test_names_and_their_order_change_nothing(joint: JointRegion) -> None:
    def renamed(one: Home) -> Home:
        region = one.region
        (pd,) = region.pd_clusters
        return replace(
            one,
            region=replace(
                region,
                prefill_clusters=region.prefill_clusters[::-1],
                pd_clusters=(replace(pd, name=f"other-{pd.name}"),),
                links=tuple(replace(k, target=f"other-{k.target}") for k in region.links[::-1]),
            ),
        )

    other = replace(joint, homes=tuple(renamed(h) for h in joint.homes[::-1]))
    for key, plan in joint.plans.items():
        found: Plan = other.plans["", f"other-{key[1]}"]
        rps = plan.system_rps(Mode.EXACT)
        assert found.system_rps(Mode.EXACT) == pytest.approx(rps, rel=5e-3)
