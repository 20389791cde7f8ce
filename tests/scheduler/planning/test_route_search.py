"""The linear program on regions so small that its plans can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler.planning.curves import Curve
from scheduler.planning.lengths import EmpiricalLengths, LogNormalLengths
from scheduler.planning.region_model import (
    KvSize,
    Link,
    PdClusterModel,
    PrefillClusterModel,
    Region,
    Traffic,
)
from scheduler.planning.route_search import (
    NoRouteError,
    RouteSearch,
    _divisions_near,
    search_routes,
)

NEAR = PdClusterModel("near", 4, Curve.quadratic(1.0), batch_size=2, step_s=0.1)
"""A prefill takes 1 s of an instance, a decode of 10 tokens half a second of one."""
FAR = PrefillClusterModel("far", 3, Curve.quadratic(0.5))
"""6 requests a second."""
KV = KvSize(Curve.quadratic(50.0), 0.0)


def region(
    *links: Link,
    pds: tuple[PdClusterModel, ...] = (NEAR,),
    prefills: tuple[PrefillClusterModel, ...] = (FAR,),
    lengths: tuple[float, ...] = (1000.0,),
) -> Region:
    traffic = Traffic(EmpiricalLengths.of(lengths), output_tokens=10, input_tokens=1000)
    return Region(prefills if links else (), pds, links, KV, traffic)


ALONE = region()
NARROW = region(Link("far", "near", 100.0))
"""The link carries 2 requests a second."""
WIDE = region(Link("far", "near", 1e6))


def shares(found: RouteSearch) -> dict[str, float]:
    plan = found.assignment
    return {route.name: round(plan.share(i), 6) for i, route in enumerate(plan.routes)}


def test_a_cluster_alone_is_divided_by_what_both_roles_take() -> None:
    relaxed = search_routes(ALONE, whole=False)
    assert relaxed.num_prefill == {"near": pytest.approx(8 / 3)}
    assert relaxed.system_rps == pytest.approx(8 / 3)
    whole = search_routes(ALONE)
    assert (whole.num_prefill, whole.system_rps) == ({"near": 2.0}, pytest.approx(2.0))
    assert shares(whole) == {"near": 1.0}


def test_a_narrow_link_limits_what_is_sent() -> None:
    found = search_routes(NARROW)
    assert (found.num_prefill, found.system_rps) == ({"near": 2.0}, pytest.approx(4.0))
    assert shares(found) == {"near": 0.5, "far to near": 0.5}
    relaxed = search_routes(NARROW, whole=False)
    assert (relaxed.num_prefill, relaxed.system_rps) == ({"near": 2.0}, pytest.approx(4.0))


def test_a_wide_link_leaves_prefill_to_the_prefill_cluster() -> None:
    relaxed = search_routes(WIDE, whole=False)
    assert relaxed.num_prefill == {"near": pytest.approx(2 / 3)}
    assert relaxed.system_rps == pytest.approx(20 / 3)
    found = search_routes(WIDE)
    assert (found.num_prefill, found.system_rps) == ({"near": 0.0}, pytest.approx(6.0))
    assert shares(found) == {"near": 0.0, "far to near": 1.0}


def test_among_equal_divisions_the_first_is_taken() -> None:
    for first, second in ((2.0, 3.0), (3.0, 2.0)):
        found = search_routes(ALONE, divisions=[{"near": first}, {"near": second}])
        assert found.num_prefill == {"near": first}


def test_the_best_of_the_given_divisions_is_taken_wherever_it_is_named() -> None:
    divisions = [{"near": 1.0}, {"near": 2.0}, {"near": 1.0}]
    found = search_routes(ALONE, divisions=divisions)
    assert (found.num_prefill, found.system_rps) == ({"near": 2.0}, pytest.approx(2.0))
    only = search_routes(ALONE, whole=False, divisions=[{"near": 1.0}])
    assert (only.num_prefill, only.system_rps) == ({"near": 1.0}, pytest.approx(1.0))


def test_a_cluster_that_a_division_does_not_name_has_no_prefill_instance() -> None:
    found = search_routes(NARROW, divisions=[{}])
    assert (found.num_prefill, found.system_rps) == ({}, pytest.approx(2.0))


@pytest.mark.parametrize("num_prefill", [0.0, 4.0])
def test_a_division_that_serves_nothing_has_no_rate(num_prefill: float) -> None:
    found = search_routes(ALONE, divisions=[{"near": num_prefill}])
    assert (found.system_rps, found.num_prefill) == (0.0, {"near": num_prefill})
    assert found.assignment.flow.shape == (1, len(found.assignment.classes.shares))
    assert not found.assignment.flow.any()


def test_among_equal_plans_the_one_that_sends_least_is_taken() -> None:
    """Decode allows 4 requests a second; both places could prefill more of them."""
    found = search_routes(WIDE, divisions=[{"near": 2.0}])
    assert found.system_rps == pytest.approx(4.0)
    assert shares(found) == {"near": 0.5, "far to near": 0.5}


def test_long_prompts_are_sent_where_all_lengths_cost_the_same() -> None:
    link = Link("far", "near", 1e6)
    found = search_routes(region(link, lengths=(100.0, 1000.0)), divisions=[{"near": 2.0}])
    plan = found.assignment
    assert plan.mean_tokens(0) == pytest.approx(100.0)
    assert plan.mean_tokens(1) == pytest.approx(1000.0)
    assert set(np.unique(plan.flow)) == {0.0, 0.5}


def test_every_link_and_every_cluster_is_a_limit_of_its_own() -> None:
    """Two prefill locally at `other`, one at `near`; each link carries what it can."""
    other = replace(NEAR, name="other")
    links = (Link("far", "near", 100.0), Link("far", "other", 50.0), Link("third", "other", 25.0))
    third = PrefillClusterModel("third", 1, Curve.quadratic(0.5))
    found = search_routes(
        region(*links, pds=(NEAR, other), prefills=(FAR, third)),
        divisions=[{"near": 1.0, "other": 2.0}],
    )
    assert found.system_rps == pytest.approx(2 + 1 + 1 + 2 + 0.5)
    sent = {name: round(share * 6.5, 4) for name, share in shares(found).items()}
    assert sent == {
        "near": 1.0,
        "other": 2.0,
        "far to near": 2.0,
        "far to other": 1.0,
        "third to other": 0.5,
    }


def test_each_cluster_has_a_division_of_its_own() -> None:
    fast = replace(NEAR, name="fast", prefill=Curve.quadratic(0.5))
    relaxed = search_routes(region(pds=(NEAR, fast)), whole=False)
    assert relaxed.num_prefill == {"near": pytest.approx(8 / 3), "fast": pytest.approx(2.0)}
    assert relaxed.system_rps == pytest.approx(8 / 3 + 4)


def test_one_instance_can_decode_what_another_cluster_prefills() -> None:
    one = replace(NEAR, num_instances=1)
    found = search_routes(region(Link("far", "near", 1e6), pds=(one,)))
    assert (found.num_prefill, found.system_rps) == ({"near": 0.0}, pytest.approx(2.0))


@pytest.mark.parametrize("pds", [(), (replace(NEAR, num_instances=0),)])
def test_without_an_instance_to_decode_there_is_no_plan(pds: tuple[PdClusterModel, ...]) -> None:
    with pytest.raises(NoRouteError, match="no PD cluster has an instance"):
        search_routes(region(pds=pds))


def test_an_empty_cluster_beside_another_is_no_obstacle() -> None:
    empty = replace(NEAR, name="empty", num_instances=0)
    found = search_routes(region(pds=(empty, NEAR)))
    assert found.system_rps == pytest.approx(2.0)


def sized(*sizes: int) -> Region:
    pds = tuple(replace(NEAR, name=f"pd{i}", num_instances=n) for i, n in enumerate(sizes))
    return region(pds=pds)


def counts(region_: Region, *relaxed: float) -> list[tuple[float, ...]]:
    near = {f"pd{i}": number for i, number in enumerate(relaxed)}
    return [tuple(division.values()) for division in _divisions_near(region_, near)]


def test_all_divisions_are_tried_while_they_are_few_but_none_without_decode() -> None:
    assert counts(sized(15), 3.0) == [(float(n),) for n in range(15)]
    assert counts(sized(1, 2), 0.0, 0.0) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("relaxed", "expected"),
    [(5.5, [4, 5, 6, 7]), (0.2, [0, 1, 2]), (15.7, [14, 15]), (1.0, [0, 1, 2, 3])],
)
def test_of_many_divisions_those_next_to_the_fractional_one_are_tried(
    relaxed: float, expected: list[float]
) -> None:
    assert counts(sized(16), relaxed) == [(float(n),) for n in expected]


def test_prompts_are_told_apart_in_two_hundred_classes() -> None:
    traffic = Traffic(LogNormalLengths(9.9, 1, 128, 131072), 10, 1000)
    found = search_routes(replace(ALONE, traffic=traffic), divisions=[{"near": 2.0}])
    assert len(found.assignment.classes.shares) == 200
    assert found.system_rps == pytest.approx(2.0)
