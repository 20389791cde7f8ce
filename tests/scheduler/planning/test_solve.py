"""Plans of several clusters: worked out by hand, and against brute force on small regions."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.planning.curves import Curve
from scheduler.planning.lengths import EmpiricalLengths, Floats, LogNormalLengths
from scheduler.planning.plan import NoRouteError, Plan
from scheduler.planning.region_model import (
    Home,
    KvSize,
    Link,
    PdClusterModel,
    PrefillClusterModel,
    Region,
    Traffic,
)
from scheduler.planning.solve import Program, best_plan, plan_at
from scheduler.planning.throughput import Mode

NEAR = PdClusterModel("near", 4, Curve.quadratic(1.0), batch_size=2, step_s=0.1)
"""A prefill takes 1 s of an instance, a decode of 10 tokens half a second of one."""
OTHER = replace(NEAR, name="other")
FAR = PrefillClusterModel("far", 3, Curve.quadratic(0.5))
"""6 requests a second."""
KV = KvSize(Curve.quadratic(50.0), 0.0)


def region(
    *links: Link,
    pds: tuple[PdClusterModel, ...] = (NEAR, OTHER),
    prefills: tuple[PrefillClusterModel, ...] = (FAR,),
    lengths: tuple[float, ...] = (1000.0,),
) -> Region:
    traffic = Traffic(EmpiricalLengths.of(lengths), output_tokens=10, input_tokens=1000)
    return Region(prefills if links else (), pds, links, KV, traffic)


def rps(plan: Plan) -> float:
    return plan.system_rps(Mode.EXACT)


def sent_rps(plan: Plan) -> dict[str, float]:
    """The requests/s of each route at the highest rate."""
    return {
        route.name: round(plan.share(i) * rps(plan), 4)
        for i, route in enumerate(plan.routes)
        if plan.share(i) > 1e-6
    }


def test_each_cluster_alone_is_divided_by_what_both_roles_take() -> None:
    shared = best_plan(region(), whole=False)
    assert shared.num_prefill == pytest.approx({"near": 8 / 3, "other": 8 / 3})
    assert rps(shared) == pytest.approx(16 / 3)
    whole = best_plan(region())
    assert rps(whole) == pytest.approx(4.0)
    assert sent_rps(whole) == {"near": 2.0, "other": 2.0}


def test_every_link_and_every_cluster_is_a_limit_of_its_own() -> None:
    """Two prefill locally at `other`, one at `near`; each link carries what it can."""
    links = (Link("far", "near", 100.0), Link("far", "other", 50.0), Link("third", "other", 25.0))
    third = PrefillClusterModel("third", 1, Curve.quadratic(0.5))
    plan = plan_at(region(*links, prefills=(FAR, third)), {"near": 1, "other": 2})
    assert sent_rps(plan) == {
        "near": 1.0,
        "other": 2.0,
        "far to near": 2.0,
        "far to other": 1.0,
        "third to other": 0.5,
    }


def test_among_equal_plans_the_one_that_sends_least_is_taken() -> None:
    """Decode allows 4 requests a second at each; both places could prefill more of them."""
    links = (Link("far", "near", 1e6), Link("far", "other", 1e6))
    plan = plan_at(region(*links), {"near": 2, "other": 2})
    assert rps(plan) == pytest.approx(8.0)
    assert plan.offload_fraction == pytest.approx(0.5)


def test_long_prompts_are_sent_where_all_lengths_cost_the_same() -> None:
    links = (Link("far", "near", 1e6), Link("far", "other", 1e6))
    plan = plan_at(region(*links, lengths=(100.0, 1000.0)), {"near": 2, "other": 2})
    assert plan.thresholds() == {"far": 100.0}


def test_all_prefill_clusters_have_one_threshold_where_that_is_as_good() -> None:
    lengths = LogNormalLengths(9.9, 1, 128, 131072)
    slow, fast = Curve.quadratic(0.4, 1.3e-4), Curve.quadratic(0.4, 4e-5)
    twins = tuple(PrefillClusterModel(name, 2, fast) for name in ("one", "two"))
    links = tuple(Link(c.name, "near", 1e9) for c in twins)
    alike = replace(
        region(*links, pds=(replace(NEAR, num_instances=9, prefill=slow),), prefills=twins),
        traffic=Traffic(lengths, 10, 27_000),
    )
    plan = best_plan(alike)
    assert plan.threshold_tokens is not None
    assert set(plan.thresholds().values()) == {plan.threshold_tokens}
    # One that is no faster than the PD cluster does better with prompts of its own lengths.
    unlike = replace(alike, prefill_clusters=(twins[0], replace(twins[1], prefill=slow)))
    assert len(set(best_plan(unlike).thresholds().values())) == 2


def test_without_an_instance_to_decode_there_is_no_plan() -> None:
    empty = replace(NEAR, num_instances=0)
    for pds in ((), (empty, replace(empty, name="other"))):
        with pytest.raises(NoRouteError, match="no PD cluster has an instance"):
            best_plan(region(pds=pds))
    # One beside another is no obstacle.
    assert rps(best_plan(region(pds=(empty, OTHER)))) == pytest.approx(2.0)


def test_a_division_that_serves_nothing_is_no_plan() -> None:
    with pytest.raises(NoRouteError, match="nothing can be served"):
        plan_at(region(), {"near": 4, "other": 0})


def test_what_the_solver_cannot_solve_is_no_plan() -> None:
    program = Program([Home(region(), 1.0)], num_classes=1)
    with pytest.raises(NoRouteError, match=r"the solver found no plan: .*infeasible"):
        program.solve({(0, "near"): (0, 4), (0, "other"): (0, 4)}, held={0: 1e6})


def test_a_dead_link_and_an_empty_prefill_cluster_carry_nothing() -> None:
    links = (Link("far", "near", 0.0), Link("third", "near", 1e6), Link("far", "other", 1e6))
    empty = PrefillClusterModel("third", 0, Curve.quadratic(0.5))
    plan = best_plan(region(*links, prefills=(FAR, empty)))
    assert set(sent_rps(plan)) <= {"near", "other", "far to other"}


def brute_rps(there: Region, steps: int) -> float:
    """The best of all divisions and of all flows in whole steps, by the equations of each part."""
    lengths = there.traffic.lengths
    assert isinstance(lengths, EmpiricalLengths)
    tokens, shares = lengths.tokens, lengths.weights / lengths.weights.sum()
    routes = [(pd.name, pd) for pd in there.pd_clusters]
    routes += [
        (k.source, next(p for p in there.pd_clusters if p.name == k.target)) for k in there.links
    ]
    choices = [
        np.array(parts) / steps
        for parts in itertools.product(range(steps + 1), repeat=len(routes))
        if sum(parts) == steps
    ]
    # flow[i, r, c]
    flow = np.stack(
        [
            np.stack(parts, axis=1) * shares
            for parts in itertools.product(choices, repeat=len(tokens))
        ]
    )
    curves = {c.name: c.prefill(tokens) for c in there.clusters}
    rates = np.full(len(flow), np.inf)

    def limit(has: float, used: list[int], need: Floats) -> None:
        amount = flow[:, used].sum(axis=1) @ need
        np.minimum(
            rates,
            np.divide(has, amount, out=np.full(len(flow), np.inf), where=amount > 0),
            out=rates,
        )

    remote = len(there.pd_clusters)
    for source in there.prefill_clusters:
        used = [i for i, (name, _) in enumerate(routes) if i >= remote and name == source.name]
        limit(source.num_instances, used, curves[source.name])
    for i, link in enumerate(there.links, remote):
        limit(link.bytes_per_s, [i], there.kv.size(tokens))
    of_links, best = rates.copy(), 0.0
    for division in itertools.product(*(range(pd.num_instances + 1) for pd in there.pd_clusters)):
        rates[:] = of_links
        for i, (pd, num) in enumerate(zip(there.pd_clusters, division, strict=True)):
            slot_s = pd.step_s * there.traffic.output_tokens / pd.batch_size
            limit(num, [i], curves[pd.name])
            decoded = [j for j, (_, target) in enumerate(routes) if target is pd]
            limit(pd.num_instances - num, decoded, np.full(len(tokens), slot_s))
        best = max(best, float(rates.max()))
    return best


@st.composite
def regions(draw: st.DrawFn) -> Region:
    """Two clusters of one kind, one of the other, and two lengths."""

    def curve() -> Curve:
        return Curve.quadratic(draw(st.floats(0.1, 1)), draw(st.floats(1e-5, 3e-4)))

    num_sources, num_pds = draw(st.sampled_from([(2, 1), (1, 2)]))
    prefills = tuple(
        PrefillClusterModel(f"far{i}", draw(st.integers(1, 3)), curve()) for i in range(num_sources)
    )
    pds = tuple(
        replace(NEAR, name=f"pd{i}", num_instances=draw(st.integers(2, 4)), prefill=curve())
        for i in range(num_pds)
    )
    links = [Link(s.name, pd.name, draw(st.floats(20, 500))) for s in prefills for pd in pds]
    lengths = (draw(st.floats(100, 3000)), draw(st.floats(3000, 20_000)))
    return region(*links, pds=pds, prefills=prefills, lengths=lengths)


@settings(max_examples=25, deadline=None)
@given(regions())
def test_no_division_and_no_flow_is_better(there: Region) -> None:
    steps = 8 if len(there.links) + len(there.pd_clusters) == 3 else 6
    best, brute = rps(best_plan(there)), brute_rps(there, steps)
    # Brute force knows no flows between its steps.
    assert brute * (1 - 0.003) <= best <= brute * 1.25
    assert best <= rps(best_plan(there, whole=False)) * (1 + 1e-3)
