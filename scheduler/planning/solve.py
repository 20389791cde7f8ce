"""The best plan of a region: one linear program, in part with whole numbers. Rates are requests/s.

Prompts are divided into classes by their length. The variables are

    flows     of each class over each route
    rates     of each home: all classes of its prompts together
    N_p       the instances of each PD cluster that prefill
    level     the least rate of a home over its demand; it is maximised

Every part of the region is a row: what the flows need of it is at most what it has. These are
equations 3 to 5 of PrfaaS for any number of clusters, and uplinks are rows like the others. Because
flows are rates, and not shares of a rate, N_p is linear as well. A region without homes is one home
that demands one request a second, so that its level is its rate.

The mode is always `exact`. Needs scipy (extras `gateway` and `plan`). One pair of clusters is
planned without it: `threshold_search` divides no prompts of equal length, as a threshold must.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler.planning.lengths import Floats
from scheduler.planning.plan import Classes, NoRouteError, Plan, Route, routes_of
from scheduler.planning.region_model import Home, Region, Uplink
from scheduler.planning.threshold_search import Bounds, best_threshold_plan
from scheduler.planning.throughput import Mode

PartName: TypeAlias = tuple[str, str, str]
"""Kind and name of a part of the region, and the model of its instances ("" for links)."""
CountName: TypeAlias = tuple[int, str]
"""The position of a home and the name of its PD cluster, whose N_p is counted."""

NUM_CLASSES: Final = 60
FEW_CLASSES: Final = 16
"""Enough for whole numbers and for shares: rates are at most 0.1% lower than with many."""
TIME_LIMIT_S: Final = 60.0
"""No thread of a gateway works on one program for ever."""
ONE_THRESHOLD_COSTS: Final = 0.002
"""The share of the throughput that is given up for one threshold of all prefill clusters."""
PRECISION: Final = 1e-4
"""How exactly levels are searched, as a share of them."""
ROUNDING: Final = 1e-6
"""Shares and levels that differ less are the same, because the solver is no more exact."""
_TASTE: Final = 1e-6
"""The weight of preferences among equal plans, as a share of the level: far above the solver's
rounding, far below what anybody would notice.
"""
_NO_FLOW: Final = 1e-9
"""A share of all requests. A smaller flow is the solver's rounding."""
_NO_LIMIT: Final = 1e9


def is_pair(region: Region) -> bool:
    """Whether the region has one PD cluster and at most one prefill cluster."""
    return len(region.pd_clusters) == 1 and len(region.prefill_clusters) <= 1


def best_plan(region: Region, *, whole: bool = True, bounds: Bounds | None = None) -> Plan:
    """The plan with the highest throughput; `bounds` limit N_p.

    With `whole`, an instance is for prefill or for decode; otherwise instances share roles. All
    prefill clusters have one threshold where that costs next to nothing. Raises `NoRouteError` if
    nothing can be served.
    """
    one = None
    if len(region.pd_clusters) == 1:
        one = best_threshold_plan(region, Mode.EXACT, whole=whole, bounds=bounds)
        if is_pair(region):
            return one
    elif all(pd.num_instances < 1 for pd in region.pd_clusters):
        raise NoRouteError("no PD cluster has an instance: decode needs at least one")
    homes = [Home(region, 1.0)]
    counts: dict[CountName, tuple[float, float]] = {
        (0, pd.name): (0, pd.num_instances) if bounds is None else bounds[pd.name]
        for pd in region.pd_clusters
    }
    coarse = Program(homes, num_classes=FEW_CLASSES)
    if whole:
        best = coarse.search(counts) if one else coarse.solve(counts, whole=True)
        counts = {name: (round(n), round(n)) for name, n in best.num_prefill.items()}
    else:
        best = coarse.solve(counts)
    if best.level <= 0:
        raise NoRouteError("nothing can be served: no PD cluster both gets prompts and decodes")
    if one and one.system_rps(Mode.EXACT) >= best.level * (1 - ONE_THRESHOLD_COSTS):
        return one
    program = Program(homes, num_classes=NUM_CLASSES)
    best = program.solve(counts)
    num_prefill = {name: n for (_, name), n in best.num_prefill.items()}
    flow = best.flows[0] / best.level
    return Plan(region, program.classes[0], np.where(flow > _NO_FLOW, flow, 0.0), num_prefill, None)


def plan_at(region: Region, division: Mapping[str, int]) -> Plan:
    """The best plan with these N_p by PD cluster. Raises `NoRouteError`."""
    return best_plan(region, bounds={name: (n, n) for name, n in division.items()})


@dataclass(frozen=True)
class Solution:
    """What a program found: `flows[h][r, c]` is the flow of class c of home h over its route r.

    `prices` say by how much the level would rise if a home demanded less; that of a home that does
    not hold up the level is 0.
    """

    level: float
    flows: list[Floats]
    num_prefill: dict[CountName, float]
    prices: Floats


class Program:
    """The linear program of some homes and of the uplinks that they share.

    Every row says that a sum is at most a limit. The level and the rates are only held back by what
    the flows need, so that it does no harm that a row lets flows be more than the rate.
    """

    def __init__(
        self, homes: Sequence[Home], uplinks: Sequence[Uplink] = (), *, num_classes: int
    ) -> None:
        self.homes = homes
        self.routes = [routes_of(home.region) for home in homes]
        lengths = [home.region.traffic.lengths for home in homes]
        self.classes = [Classes.even(each, num_classes) for each in lengths]
        self.capacities: dict[PartName, float] = {}
        self.needs: list[dict[int, dict[PartName, Floats]]] = [{} for _ in homes]
        """The share of each shared part that 1 request/s of each class uses, by home and route."""
        self._num_columns = 0
        self._flows = [
            self._columns(len(routes), len(classes.shares))
            for routes, classes in zip(self.routes, self.classes, strict=True)
        ]
        self._rates = self._columns(len(homes))
        self._evens = self._columns(len(homes))
        """The largest share that a home uses of any prefill cluster."""
        names = [(h, pd.name) for h, home in enumerate(homes) for pd in home.region.pd_clusters]
        self._counts = dict(zip(names, self._columns(len(names)).tolist(), strict=True))
        (self._level,) = self._columns(1).tolist()
        self._cost = np.zeros(self._num_columns)
        self._cost[self._level] = -1
        self._rows: dict[Any, int] = {}
        self._limits: list[float] = []
        self._entries: list[list[NDArray[Any]]] = []
        for h in range(len(homes)):
            self._add_home(h, uplinks)

    def solve(
        self,
        counts: Mapping[CountName, tuple[float, float]],
        held: Mapping[int, float] = MappingProxyType({}),
        *,
        whole: bool = False,
    ) -> Solution:
        """The flows with the highest level of all homes but those that are `held` at a level. N_p
        are within bounds, and whole numbers with `whole`. Raises `NoRouteError` if the solver fails
        or takes too long.
        """
        # Imported here, since one pair of clusters needs no scipy.
        from scipy.optimize import linprog

        bounds = np.stack([np.zeros(self._num_columns), np.full(self._num_columns, np.inf)], axis=1)
        for name, count in self._counts.items():
            bounds[count] = counts[name]
        limits = np.array(self._limits)
        levels = [self._rows["level", h] for h in range(len(self.homes))]
        for h, level in held.items():
            # The last digits of a level may be the solver's rounding.
            bounds[self._rates[h], 0] = level * self.homes[h].rate_rps * (1 - 1e-6)
            limits[levels[h]] = _NO_LIMIT
        is_whole = np.zeros(self._num_columns)
        is_whole[list(self._counts.values())] = whole
        result = linprog(
            self._cost,
            self._matrix,
            limits,
            bounds=bounds,
            integrality=is_whole if whole else None,
            # What presolving saves is less than what it takes.
            options={"time_limit": TIME_LIMIT_S, "presolve": not whole},
        )
        if result.status != 0:
            raise NoRouteError(f"the solver found no plan: {result.message}")
        return Solution(
            float(result.x[self._level]),
            [np.maximum(result.x[flows], 0.0) for flows in self._flows],
            {name: float(np.clip(result.x[n], *counts[name])) for name, n in self._counts.items()},
            np.zeros(len(levels)) if whole else -result.ineqlin.marginals[levels],
        )

    def search(
        self,
        counts: Mapping[CountName, tuple[float, float]],
        held: Mapping[int, float] = MappingProxyType({}),
    ) -> Solution:
        """`solve` with whole N_p, for homes of one PD cluster each.

        At a given level a home decodes with as few instances as will do. So of whole N_p, only the
        highest ones for some level can be the best, and a search over levels finds them in a few
        programs, however many homes there are.
        """
        solutions: dict[tuple[int, ...], Solution] = {}

        def at(level: float) -> Solution:
            whole = {name: self._most_prefill(name, counts[name], level) for name in counts}
            key = tuple(whole.values())
            if key not in solutions:
                solutions[key] = self.solve({name: (n, n) for name, n in whole.items()}, held)
            return solutions[key]

        low, high = 0.0, self.solve(counts, held).level
        level = high
        while high - low > PRECISION * high:
            reached = at(level).level
            if reached >= level * (1 - ROUNDING):
                low = level
            else:
                low, high = max(low, reached), level
            level = (low + high) / 2
        # With the most instances that prefill at the level, only what holds it up has a price.
        return at(low)

    def _most_prefill(self, name: CountName, bounds: tuple[float, float], level: float) -> int:
        """The most instances of a home that can prefill at this level, within bounds."""
        home = self.homes[name[0]]
        (pd,), output_tokens = home.region.pd_clusters, home.region.traffic.output_tokens
        busy = level * home.rate_rps * pd.step_s * output_tokens / pd.batch_size
        # Rounding must not ask for one instance more.
        num = pd.num_instances - math.ceil(busy - ROUNDING)
        return round(max(bounds[0], min(bounds[1], num)))

    @cached_property
    def _matrix(self) -> Any:
        from scipy.sparse import coo_matrix

        rows, columns, values = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        return coo_matrix((values, (rows, columns)), (len(self._limits), self._num_columns)).tocsr()

    def _columns(self, *shape: int) -> NDArray[np.intp]:
        start = self._num_columns
        self._num_columns += math.prod(shape)
        return np.arange(start, self._num_columns).reshape(shape)

    def _add(self, name: Any, columns: ArrayLike, values: ArrayLike, limit: float = 0.0) -> None:
        """Let columns count in the row of a name, each with its value."""
        row = self._rows.setdefault(name, len(self._limits))
        if row == len(self._limits):
            self._limits.append(limit)
        self._entries.append([np.ravel(each) for each in np.broadcast_arrays(row, columns, values)])

    def _add_home(self, h: int, uplinks: Sequence[Uplink]) -> None:
        home, classes, flows, rate = self.homes[h], self.classes[h], self._flows[h], self._rates[h]
        has_one_pd = len(home.region.pd_clusters) == 1
        for pd in home.region.pd_clusters:
            count, num = self._counts[h, pd.name], pd.num_instances
            self._add(("local", h, pd.name), count, -1.0)
            self._add(("decode", h, pd.name), count, 1.0, num)
        for i, route in enumerate(self.routes[h]):
            pd = route.target
            slot_s = pd.step_s * home.region.traffic.output_tokens / pd.batch_size
            self._add(("decode", h, pd.name), flows[i], slot_s)
            if route.link is None:
                self._add(("local", h, pd.name), flows[i], classes.means(pd.prefill))
            for name, capacity, need in _shared_needs(home, classes, route, uplinks):
                # Without any capacity, numbers of the size of 1 are still easier for the solver.
                scale = capacity or float(need.max()) or 1.0
                self.capacities[name] = capacity
                self.needs[h].setdefault(i, {})[name] = need / scale
                self._add(name, flows[i], need / scale, capacity / scale)
                # Several sources wait less for each other's queues, if that is as good.
                if name[0] == "prefill" and has_one_pd:
                    self._add(("even", h, i), flows[i], need / scale)
                    self._add(("even", h, i), self._evens[h], -1.0)
            # Among equal plans, little over links, and the longer prompts over later routes, so
            # that each has few ranges of lengths.
            longer = np.cumsum(classes.shares) * i / len(flows)
            self._cost[flows[i]] = _TASTE * (1 + (route.link is not None) - longer) / home.rate_rps
        self._cost[self._evens[h]] = _TASTE
        for c, share in enumerate(classes.shares):
            self._add(("class", h, c), [rate, *flows[:, c]], [share, *-np.ones(len(flows))])
        self._add(("level", h), [self._level, rate], [1.0, -1 / home.rate_rps])


def _shared_needs(
    home: Home, classes: Classes, route: Route, uplinks: Sequence[Uplink]
) -> Iterator[tuple[PartName, float, Floats]]:
    """The parts that a route may share with others: the name of each, what there is of it, and what
    a request of each class needs.
    """
    source, link = route.source, route.link
    if link is None:
        return
    yield ("prefill", source.name, home.model), source.num_instances, classes.means(source.prefill)
    nbytes = classes.means(home.region.kv.size)
    yield ("link", link.name, ""), link.bytes_per_s, nbytes
    for uplink in uplinks:
        if uplink.carries(link):
            yield ("uplink", uplink.name, ""), uplink.bytes_per_s, nbytes
