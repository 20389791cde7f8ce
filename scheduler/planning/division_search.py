"""The best routing for given divisions of the PD clusters, and the best division within bounds.

These are the planner's own searches (`pair_search`, `route_search`) with the division fixed or
bounded, for a running region: its instances have roles already, and each role keeps at least one.
They always use `exact` mode, because a running system needs what hardware really sustains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from scheduler.planning.plan import Plan, best_threshold_plan, has_one_threshold
from scheduler.planning.region_model import Region
from scheduler.planning.route_search import search_routes
from scheduler.planning.throughput import Mode

Division = Mapping[str, int]
"""N_p of each PD cluster by name. Its other instances decode."""
Bounds = Mapping[str, tuple[int, int]]
"""The least and the most N_p of each PD cluster."""


def best_at(region: Region, divisions: Sequence[Division]) -> Plan:
    """The plan with the highest throughput among these divisions. Raises `NoRouteError`."""
    if has_one_threshold(region):
        name = region.pd_clusters[0].name
        return best_threshold_plan(region, Mode.EXACT, [division[name] for division in divisions])
    as_floats = [{name: float(n) for name, n in division.items()} for division in divisions]
    found = search_routes(region, divisions=as_floats)
    return Plan(region, found.assignment, found.num_prefill, None)


def best_within(region: Region, bounds: Bounds) -> Plan:
    """The plan with the highest throughput of any division within bounds. Raises `NoRouteError`.

    With one threshold the search is exhaustive. For several clusters it tries divisions next
    to the best fractional one: each N_p rounded to the nearest, and one at a time the other way.
    """
    if has_one_threshold(region):
        name = region.pd_clusters[0].name
        low, high = bounds[name]
        return best_at(region, [{name: n} for n in range(low, high + 1)])
    relaxed = search_routes(region, whole=False).num_prefill
    nearest = {name: round(n) for name, n in relaxed.items()}
    tried = [nearest]
    for name, n in relaxed.items():
        other = math.floor(n) if nearest[name] > n else math.ceil(n)
        tried.append({**nearest, name: other})
    inside = [{name: int(np.clip(n, *bounds[name])) for name, n in d.items()} for d in tried]
    # Bounds may make several of them equal.
    return best_at(region, [d for i, d in enumerate(inside) if d not in inside[:i]])


def thresholds_of(plan: Plan) -> dict[str, float]:
    """The threshold of each prefill cluster: the longest prompt that the plan keeps from it.

    Where the plan sends it nothing, that is the longest prompt there is.
    """
    found = {c.name: plan.region.traffic.lengths.max_tokens for c in plan.region.prefill_clusters}
    for index, route in enumerate(plan.assignment.routes):
        if route.link is None:
            continue
        ranges = plan.lengths_of(index)
        if plan.threshold_tokens is not None:
            if plan.assignment.share(index) > 0:
                found[route.source.name] = plan.threshold_tokens
        elif ranges:
            # A cluster may have several links; the shortest prompt over any of them counts.
            found[route.source.name] = min(found[route.source.name], ranges[0][0])
    return found
