"""The best flow of every length class over any number of clusters and links.

For a fixed division of each PD cluster the best flow is a linear program: classes of prompts over
routes, every prefill cluster, link and decode pool a capacity, the common rate to be maximised.
Its dual prices say what one more unit of each capacity is worth, so each class ends on the route
whose marginal cost is lowest. Divisions are tried around the best fractional one, which is a
linear program as well. Always in `exact` mode; needs scipy (extra `plan`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.assignment import Assignment, Classes, Route, routes_of
from scheduler.lengths import Floats
from scheduler.region_model import Region

NUM_CLASSES = 200
MAX_DIVISIONS = 16
"""Tried one by one; of more only those next to the best fractional one."""
_ROUNDING = 1e-9
_TASTE = 1e-6
"""Seconds per request; far below what a request costs, far above what a solver rounds."""


class NoRouteError(ValueError):
    """The region cannot serve anything; the message says what is missing."""


@dataclass(frozen=True)
class RouteSearch:
    """The best plan found. `num_prefill` is N_p of each PD cluster by name."""

    assignment: Assignment
    num_prefill: Mapping[str, float]
    system_rps: float
    num_divisions: int
    """How many divisions of the PD clusters were tried."""


def search_routes(
    region: Region, *, whole: bool = True, num_prefill: Mapping[str, float] | None = None
) -> RouteSearch:
    """The plan with the highest rate that all prompts can be served at.

    `whole`: instances are not shared between roles. `num_prefill` fixes the division. Raises
    `NoRouteError` when no instance could decode or prefill.
    """
    routes = tuple(routes_of(region))
    if not routes or all(pd.num_instances < 1 for pd in region.pd_clusters):
        raise NoRouteError("no PD cluster has an instance: decode needs at least one")
    classes = Classes.even(region.traffic.lengths, NUM_CLASSES)
    if num_prefill is not None:
        return _solve(region, routes, classes, num_prefill, 1)
    relaxed = _solve(region, routes, classes, None, 1)
    if not whole:
        return relaxed
    divisions = _divisions_near(region, relaxed.num_prefill)
    found = [_solve(region, routes, classes, division, len(divisions)) for division in divisions]
    best = max(plan.system_rps for plan in found)
    return next(plan for plan in found if plan.system_rps >= best * (1 - _ROUNDING))


def _divisions_near(region: Region, relaxed: Mapping[str, float]) -> list[dict[str, float]]:
    """All whole divisions if they are few, else those next to the fractional optimum."""
    sizes = {pd.name: pd.num_instances for pd in region.pd_clusters}
    every = [range(size + 1) for size in sizes.values()]
    if np.prod([len(options) for options in every]) > MAX_DIVISIONS:
        every = [
            range(max(0, int(relaxed[name]) - 1), min(size, int(relaxed[name]) + 2) + 1)
            for name, size in sizes.items()
        ]
    return [
        dict(zip(sizes, map(float, division), strict=True))
        for division in itertools.product(*every)
        if any(n < size for n, size in zip(division, sizes.values(), strict=True))
    ]


def _solve(
    region: Region,
    routes: Sequence[Route],
    classes: Classes,
    division: Mapping[str, float] | None,
    num_divisions: int,
) -> RouteSearch:
    """One linear program. Variables: flow[r, c], then U = 1 / rate, then U N_p of each PD cluster
    when the division is free (N_p times U, so that the program stays linear).
    """
    from scipy.optimize import linprog
    from scipy.sparse import lil_matrix

    num_classes, num_flows = len(classes.shares), len(routes) * len(classes.shares)
    pds = region.pd_clusters
    num_variables = num_flows + 1 + (len(pds) if division is None else 0)
    needs = _needs(region, routes, classes)
    free = {pd.name: num_flows + 1 + i for i, pd in enumerate(pds)} if division is None else {}
    limits = lil_matrix((len(needs) + len(free), num_variables))
    for row, ((kind, name, capacity), per_flow) in enumerate(needs.items()):
        for index, per_class in per_flow.items():
            limits[row, index * num_classes : (index + 1) * num_classes] = per_class
        if kind in ("local", "decode") and name in free:
            limits[row, free[name]] = 1 if kind == "decode" else -1
            limits[row, num_flows] = -capacity if kind == "decode" else 0
        else:
            fixed = 0.0 if division is None else division.get(name, 0.0)
            here = {"local": fixed, "decode": capacity - fixed}.get(kind, capacity)
            limits[row, num_flows] = -here
    for row, pd in enumerate(pds[: len(free)], start=len(needs)):
        limits[row, free[pd.name]] = 1
        limits[row, num_flows] = -pd.num_instances
    balance = lil_matrix((num_classes, num_variables))
    for c in range(num_classes):
        balance[c, c:num_flows:num_classes] = 1
    cost = np.zeros(num_variables)
    cost[num_flows] = 1
    # Among equal plans the one that sends least, then one whose routes take few ranges of lengths.
    shorter = 1 - (np.cumsum(classes.shares) - classes.shares / 2)
    for index, route in enumerate(routes):
        taste = float(route.link is not None) + index * shorter / len(routes)
        cost[index * num_classes : (index + 1) * num_classes] = _TASTE * taste
    result = linprog(
        cost,
        A_ub=limits.tocsr(),
        b_ub=np.zeros(limits.shape[0]),
        A_eq=balance.tocsr(),
        b_eq=classes.shares,
        method="highs",
    )
    if result.status != 0:
        return RouteSearch(
            Assignment(classes, tuple(routes), np.zeros((len(routes), num_classes))),
            dict(division or {}),
            0.0,
            num_divisions,
        )
    slowness = result.x[num_flows]
    flow = np.where(result.x[:num_flows] > _ROUNDING * 1e-3, result.x[:num_flows], 0.0)
    counts = (
        {pd.name: result.x[free[pd.name]] / slowness for pd in pds}
        if division is None
        else dict(division)
    )
    assignment = Assignment(classes, tuple(routes), flow.reshape(len(routes), num_classes))
    return RouteSearch(assignment, counts, 1 / slowness, num_divisions)


def _needs(
    region: Region, routes: Sequence[Route], classes: Classes
) -> dict[tuple[str, str, float], dict[int, Floats | float]]:
    """For each (kind, name, capacity): what a unit of flow of each class asks for, by route."""
    lengths = region.traffic.lengths

    def means(sums: Floats) -> Floats:
        shares = classes.shares
        return np.divide(sums, shares, out=np.zeros(len(shares)), where=shares > 0)

    needs: dict[tuple[str, str, float], dict[int, Floats | float]] = {}
    kv_bytes = means(classes.sums(region.kv.size, lengths))
    for index, route in enumerate(routes):
        source, target = route.source, route.target
        kind = "local" if route.link is None else "remote"
        seconds = means(classes.sums(source.prefill, lengths))
        needs.setdefault((kind, source.name, source.num_instances), {})[index] = seconds
        slot_s = target.step_s * region.traffic.output_tokens / target.batch_size
        needs.setdefault(("decode", target.name, target.num_instances), {})[index] = slot_s
        if route.link is not None:
            needs[("link", route.link.name, route.link.bytes_per_s)] = {index: kv_bytes}
    return needs
