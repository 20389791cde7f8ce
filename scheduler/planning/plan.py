"""A plan: who prefills what, how instances are divided, and what follows from it.

Everything follows from an assignment and the region. Both modes of the throughput model apply to
the same plan. Rates are requests/s of the whole region unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler.planning.assignment import (
    Assignment,
    Classes,
    Resource,
    Route,
    highest_rps,
    resources_of,
    routes_of,
)
from scheduler.planning.lengths import Floats
from scheduler.planning.pair_search import best_of_pair, offloaded_rps
from scheduler.planning.region_model import Region
from scheduler.planning.route_search import NoRouteError, search_routes
from scheduler.planning.throughput import Mode, Split

BINDS_WITHIN = 0.01
"""Parts that are full within this share above the first full one count as bottlenecks, too."""

SHARED_STEP = 0.01
"""How finely a pair's instances are divided where they may share roles, instances."""


@dataclass(frozen=True)
class Ttft:
    """Time to first token of an otherwise empty region, seconds."""

    mean_s: float
    p90_s: float


@dataclass(frozen=True)
class Plan:
    """An assignment and a division of instances for one region."""

    region: Region
    assignment: Assignment
    num_prefill: Mapping[str, float]
    """N_p of each PD cluster."""
    threshold_tokens: float | None
    """The routing threshold, where one threshold describes the plan."""

    def resources(self, mode: Mode) -> list[Resource]:
        return resources_of(self.region, self.assignment, self.num_prefill, mode)

    def system_rps(self, mode: Mode) -> float:
        """Lambda_max of the paper."""
        return highest_rps(self.resources(mode))

    def bottlenecks(self, mode: Mode) -> list[Resource]:
        """The parts that are full at Lambda_max."""
        resources = self.resources(mode)
        top = highest_rps(resources)
        return [r for r in resources if r.system_rps <= top * (1 + BINDS_WITHIN)]

    @property
    def offload_fraction(self) -> float:
        """The share of requests that a prefill cluster prefills."""
        return sum(self.assignment.share(r) for r, _ in self._remote)

    @property
    def mean_offloaded_tokens(self) -> float:
        share = self.offload_fraction
        total = sum(
            self.assignment.share(r) * self.assignment.mean_tokens(r) for r, _ in self._remote
        )
        return total / share if share > 0 else 0.0

    def link_bytes_per_s(self, mode: Mode, rate_rps: float) -> dict[str, float]:
        """The mean egress over each link at this rate, bytes/s."""
        return {
            part.name: part.need * rate_rps for part in self.resources(mode) if part.kind == "link"
        }

    def cost_per_hour(self, rate_rps: float) -> float:
        """The price of all instances, and of the KVCache that crosses links at this rate, per
        hour.
        """
        instances = sum(c.num_instances * c.price_per_instance_hour for c in self.region.clusters)
        prices = {link.name: link.price_per_gb for link in self.region.links}
        egress = self.link_bytes_per_s(Mode.EXACT, rate_rps)
        return instances + sum(
            prices[name] * bytes_per_s * 3600 / 1e9 for name, bytes_per_s in egress.items()
        )

    def empty_ttft(self) -> Ttft:
        """TTFT without any queue or overlap, as in the paper.

        The mean is that of T(L), and P90 is T at the P90 length. A request that crosses a link adds
        the time for its KVCache at the link's rate.
        """
        lengths = self.region.traffic.lengths
        mean_s = 0.0
        for index, route in enumerate(self.assignment.routes):
            mean_s += self.assignment.need(index, route.source.prefill, lengths, Mode.EXACT)
            if route.link is not None:
                kv_bytes = self.assignment.need(index, self.region.kv.size, lengths, Mode.EXACT)
                mean_s += kv_bytes / route.link.bytes_per_s
        length = float(lengths.quantile([0.9])[0])
        # Routes may share this class; P90 follows the one that takes most of it.
        at = int(np.searchsorted(self.assignment.classes.edges, length)) - 1
        route = self.assignment.routes[int(np.argmax(self.assignment.flow[:, at]))]
        p90_s = float(route.source.prefill(length))
        if route.link is not None:
            p90_s += float(self.region.kv.size(length)) / route.link.bytes_per_s
        return Ttft(mean_s, p90_s)

    def lengths_of(self, route: int) -> list[tuple[float, float]]:
        """The ranges of prompt lengths, (from, to], most of whose requests take this route."""
        flow, edges = self.assignment.flow, self.assignment.classes.edges
        mine = flow.argmax(axis=0) == route
        # Where no request is, argmax names the first route.
        mine &= flow[route] > 0
        ranges: list[tuple[float, float]] = []
        for c in np.flatnonzero(mine):
            low, high = float(edges[c]), float(edges[c + 1])
            if ranges and ranges[-1][1] == low:
                ranges[-1] = (ranges[-1][0], high)
            else:
                ranges.append((low, high))
        return ranges

    def routes_at(self, tokens: Floats, draws: Floats) -> NDArray[np.intp]:
        """The route of each prompt. `draws` in [0, 1) decide where a class is divided."""
        edges = self.assignment.classes.edges
        classes = np.clip(np.searchsorted(edges, tokens) - 1, 0, len(edges) - 2)
        upto = np.cumsum(self.assignment.fractions, axis=0)[:, classes]
        taken: NDArray[np.intp] = (draws[None, :] >= upto).sum(axis=0)
        # Rounding may leave the sum of the parts just below 1.
        return np.minimum(taken, len(upto) - 1)

    def kept_in(self, region: Region) -> Plan:
        """This plan's routing and division in a region that has changed, without a new plan."""
        old = self.assignment
        classes = Classes.at(region.traffic.lengths, old.classes.edges)
        middles = (classes.edges[:-1] + classes.edges[1:]) / 2
        # A new class lies within one old class; its middle says which.
        at = np.clip(
            np.searchsorted(old.classes.edges, middles) - 1, 0, len(old.classes.shares) - 1
        )
        routes = tuple(routes_of(region))
        if [r.name for r in routes] != [r.name for r in old.routes]:
            raise ValueError("the region has other clusters or links than the plan")
        flow = old.fractions[:, at] * classes.shares
        return replace(self, region=region, assignment=Assignment(classes, routes, flow))

    @cached_property
    def _remote(self) -> list[tuple[int, Route]]:
        return [(r, route) for r, route in enumerate(self.assignment.routes) if route.link]


def is_pair(region: Region) -> bool:
    """Whether the region has one PD cluster and at most one prefill cluster."""
    return len(region.pd_clusters) == 1 and len(region.prefill_clusters) <= 1


def has_one_threshold(region: Region) -> bool:
    """Whether one threshold describes every plan of this region."""
    return is_pair(region) or region.is_share


def threshold_plan(region: Region, threshold_tokens: float, num_prefill: float) -> Plan:
    """The plan that offloads prompts longer than the threshold, for `has_one_threshold`.

    Several prefill clusters take them in proportion to what they sustain.
    """
    routes = tuple(routes_of(region))
    longest = region.traffic.lengths.max_tokens
    classes = Classes.at(region.traffic.lengths, [threshold_tokens])
    flow: Floats = np.zeros((len(routes), len(classes.shares)))
    remote = classes.edges[1:] > threshold_tokens
    parts = _offloaded_parts(region, threshold_tokens)
    # Nothing can be offloaded.
    if not parts:
        remote[:] = False
    flow[0, ~remote] = classes.shares[~remote]
    for route, part in enumerate(parts, 1):
        flow[route, remote] = part * classes.shares[remote]
    return Plan(
        region,
        Assignment(classes, routes, flow),
        {region.pd_clusters[0].name: num_prefill},
        threshold_tokens if remote.any() else longest,
    )


def _offloaded_parts(region: Region, threshold_tokens: float) -> list[float]:
    """The part of the offloaded prompts that each of `sources_of` takes."""
    split = Split.at(region.traffic.lengths, [threshold_tokens])
    rates = np.array([float(rps[0]) for rps in offloaded_rps(region, Mode.EXACT, split)])
    if len(rates) < 2:
        return [1.0] * len(rates)
    # Without an offloaded prompt the rates are infinite, and with dead links they are 0.
    if not (np.isfinite(rates).all() and rates.any()):
        rates = np.ones(len(rates))
    return [float(part) for part in rates / rates.sum()]


def best_threshold_plan(region: Region, mode: Mode, num_prefill: ArrayLike | None = None) -> Plan:
    """The best plan of a region with `has_one_threshold`. `num_prefill` are the N_p to choose from;
    None: all whole numbers. Raises `NoRouteError`.
    """
    pd = region.pd_clusters[0]
    if pd.num_instances < 1:
        raise NoRouteError(f"{pd.name} has no instance: decode needs at least one")
    threshold, chosen, _ = best_of_pair(region, mode, num_prefill=num_prefill)
    return threshold_plan(region, threshold, chosen)


def best_plan(region: Region, mode: Mode, *, whole: bool = True) -> Plan:
    """The plan with the highest throughput.

    With `whole`, an instance is for prefill or for decode; otherwise instances share roles. Several
    clusters of a kind are always planned in `exact` mode. Raises `route_search.NoRouteError` if
    nothing can be served.
    """
    if has_one_threshold(region):
        instances = region.pd_clusters[0].num_instances
        shares = None if whole else np.arange(0, instances, SHARED_STEP)
        return best_threshold_plan(region, mode, shares)
    found = search_routes(region, whole=whole)
    return Plan(region, found.assignment, found.num_prefill, None)
