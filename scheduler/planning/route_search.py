"""The best flow of every length class over any number of clusters and links.

For a fixed division of each PD cluster the best flow is a linear program: classes of prompts are
spread over routes, every prefill cluster, link and decode pool has a capacity, and the common rate
is maximised. Its dual prices say what one more unit of each capacity is worth, so each class takes
the route with the lowest marginal cost. Divisions are tried around the best fractional one, which
is a linear program as well. The mode is always `exact`. Needs scipy (extra `plan`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler.planning.assignment import Assignment, Classes, Route, routes_of
from scheduler.planning.lengths import Floats
from scheduler.planning.region_model import Region

NUM_CLASSES = 200
MAX_DIVISIONS = 16
"""Up to this many divisions are all tried; of more, only those next to the best fractional one."""
_ROUNDING = 1e-9
_NO_FLOW = 1e-12
"""A share of all requests. A smaller flow is the solver's rounding."""
_TASTE = 1e-6
"""The weight of preferences among equal plans, seconds per request: far below the cost of a
request, far above the solver's rounding.
"""


class NoRouteError(ValueError):
    """The region cannot serve anything. The message says what is missing."""


@dataclass(frozen=True)
class RouteSearch:
    """The best plan found. `num_prefill` is N_p of each PD cluster by name."""

    assignment: Assignment
    num_prefill: Mapping[str, float]
    system_rps: float


def search_routes(
    region: Region, *, whole: bool = True, divisions: Sequence[Mapping[str, float]] = ()
) -> RouteSearch:
    """The plan with the highest rate at which all prompts can be served.

    With `whole`, instances are not shared between roles. `divisions` are N_p by PD cluster; where
    given, one of them is chosen, the first among equals. Raises `NoRouteError` if no instance could
    decode or prefill.
    """
    routes = tuple(routes_of(region))
    if all(pd.num_instances < 1 for pd in region.pd_clusters):
        raise NoRouteError("no PD cluster has an instance: decode needs at least one")
    program = _Program(region, routes)
    if not divisions:
        relaxed = program.solve(None)
        if not whole:
            return relaxed
        divisions = _divisions_near(region, relaxed.num_prefill)
    found = [program.solve(division) for division in divisions]
    best = max(plan.system_rps for plan in found)
    # The last digits of the solver must not choose between equal divisions.
    return next(plan for plan in found if plan.system_rps >= best * (1 - _ROUNDING))


def _divisions_near(region: Region, relaxed: Mapping[str, float]) -> list[dict[str, float]]:
    """All whole divisions if they are few, else those next to the fractional optimum."""
    sizes = {pd.name: pd.num_instances for pd in region.pd_clusters}
    every = [range(size + 1) for size in sizes.values()]
    if np.prod([len(options) for options in every]) > MAX_DIVISIONS:
        every = [
            # One further than both roundings: the best whole division need not be one of them.
            range(max(0, int(relaxed[name]) - 1), min(size, int(relaxed[name]) + 2) + 1)
            for name, size in sizes.items()
        ]
    return [
        dict(zip(sizes, map(float, division), strict=True))
        for division in itertools.product(*every)
        # At least one PD cluster must keep an instance that decodes.
        if any(n < size for n, size in zip(division, sizes.values(), strict=True))
    ]


@dataclass(frozen=True)
class _Limit:
    """One part of the region, and what a unit of flow of each class needs of it, by route."""

    kind: str
    """prefill (of a prefill cluster), link, local (prefill of a PD cluster) or decode."""
    name: str
    capacity: float
    per_flow: dict[int, Floats | float]


class _Program:
    """The linear program of one region.

    The variables are the flow of each class over each route, route by route; then U = 1 / rate,
    which is minimised; then, where the division is free, U N_p of each PD cluster (N_p alone would
    make the constraints quadratic). The constraints: each class goes somewhere, and no part is used
    for more than U times its capacity.
    """

    def __init__(self, region: Region, routes: Sequence[Route]) -> None:
        self._region = region
        self._routes = tuple(routes)
        self._classes = Classes.even(region.traffic.lengths, NUM_CLASSES)
        self._num_classes = len(self._classes.shares)
        self._slowness = len(routes) * self._num_classes
        """The index of U."""
        self._limits = self._limits_of_parts()

    def solve(self, division: Mapping[str, float] | None) -> RouteSearch:
        """The best flow for this division of the PD clusters; None: for the best division."""
        # Imported here, since only regions with several clusters need scipy.
        from scipy.optimize import linprog

        pds = self._region.pd_clusters
        free = {}
        if division is None:
            free = {pd.name: self._slowness + 1 + i for i, pd in enumerate(pds)}
        limits = self._limit_rows(division, free)
        result = linprog(
            self._cost(len(free)),
            A_ub=limits,
            b_ub=np.zeros(limits.shape[0]),
            A_eq=self._balance_rows(len(free)),
            b_eq=self._classes.shares,
            method="highs",
        )
        shape = (len(self._routes), self._num_classes)
        # Infeasible: this division leaves no instance for something that every prompt needs.
        if result.status != 0:
            nothing = Assignment(self._classes, self._routes, np.zeros(shape))
            return RouteSearch(nothing, dict(division or {}), 0.0)
        slowness = result.x[self._slowness]
        flow = result.x[: self._slowness].reshape(shape)
        counts = {name: float(result.x[at] / slowness) for name, at in free.items()}
        return RouteSearch(
            Assignment(self._classes, self._routes, np.where(flow > _NO_FLOW, flow, 0.0)),
            counts if division is None else dict(division),
            float(1 / slowness),
        )

    def _limits_of_parts(self) -> list[_Limit]:
        found: dict[tuple[str, str], _Limit] = {}

        def ask(kind: str, name: str, capacity: float, route: int, need: Floats | float) -> None:
            limit = found.setdefault((kind, name), _Limit(kind, name, capacity, {}))
            limit.per_flow[route] = need

        region = self._region
        lengths = region.traffic.lengths
        kv_bytes = self._classes.means(region.kv.size, lengths)
        for index, route in enumerate(self._routes):
            source, target, link = route.source, route.target, route.link
            kind = "local" if link is None else "prefill"
            seconds = self._classes.means(source.prefill, lengths)
            ask(kind, source.name, source.num_instances, index, seconds)
            slot_s = target.step_s * region.traffic.output_tokens / target.batch_size
            ask("decode", target.name, target.num_instances, index, slot_s)
            if link is not None:
                ask("link", link.name, link.bytes_per_s, index, kv_bytes)
        return list(found.values())

    def _limit_rows(self, division: Mapping[str, float] | None, free: Mapping[str, int]) -> Any:
        """One row for each part: flow times need, less U times its capacity, is at most 0.

        The row of a PD cluster's decode also keeps its N_p to the instances that it has.
        """
        from scipy.sparse import lil_matrix

        rows = lil_matrix((len(self._limits), self._slowness + 1 + len(free)))
        for row, limit in enumerate(self._limits):
            for route, need in limit.per_flow.items():
                rows[row, route * self._num_classes : (route + 1) * self._num_classes] = need
            capacity = limit.capacity
            num_prefill = 0.0 if division is None else division.get(limit.name, 0.0)
            if limit.kind == "local":
                capacity = num_prefill
            elif limit.kind == "decode":
                capacity -= num_prefill
            rows[row, self._slowness] = -capacity
            if limit.kind in ("local", "decode") and limit.name in free:
                # The variable is U N_p: what the cluster's prefill gains by it, its decode loses.
                rows[row, free[limit.name]] = 1 if limit.kind == "decode" else -1
        return rows.tocsr()

    def _balance_rows(self, num_free: int) -> Any:
        """One row for each class: its flows over all routes add up to its share."""
        from scipy.sparse import lil_matrix

        rows = lil_matrix((self._num_classes, self._slowness + 1 + num_free))
        for c in range(self._num_classes):
            rows[c, c : self._slowness : self._num_classes] = 1
        return rows.tocsr()

    def _cost(self, num_free: int) -> Floats:
        """U, and as preferences among equal plans: little over links, and few ranges of
        lengths a route.
        """
        longer = np.cumsum(self._classes.shares)
        cost = np.zeros(self._slowness + 1 + num_free)
        cost[self._slowness] = 1
        for index, route in enumerate(self._routes):
            # The second term gives the longer prompts to later routes, so that each has few ranges.
            taste = float(route.link is not None) - index * longer / len(self._routes)
            cost[index * self._num_classes : (index + 1) * self._num_classes] = _TASTE * taste
        return cost
