"""Which prompts go where, and what that needs of every part of a region.

Prompt lengths are divided into classes. A `Route` is a place to prefill and a place to decode. An
`Assignment` says which share of all requests each class sends over each route. From it follow the
load of every `Resource` (prefill instances, links, decode instances) and the highest rate that the
region sustains. These are equations 3 to 6 of PrfaaS for any number of clusters; one pair of
clusters and a threshold is the simplest case.

This file searches nothing; `pair_search` and `route_search` do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from scheduler.planning.curves import Curve
from scheduler.planning.lengths import Floats, Lengths
from scheduler.planning.region_model import Cluster, Link, PdClusterModel, Region
from scheduler.planning.throughput import Mode, mean_of


@dataclass(frozen=True)
class Classes:
    """Prompts by length: class i holds those in (edges[i], edges[i + 1]]."""

    edges: Floats
    shares: Floats
    """The probability of each class; they add up to 1."""
    token_sums: Floats
    """E[L; L in the class], tokens."""

    @classmethod
    def at(cls, lengths: Lengths, edges: ArrayLike) -> Classes:
        """Classes between these lengths. The first and the last class take what is beyond."""
        inner = np.unique(np.asarray(edges, np.float64))
        # The ends join below; edges at or beyond them would only make classes without weight.
        inner = inner[(inner > 0) & (inner < lengths.max_tokens)]
        full = np.concatenate([[0.0], inner, [lengths.max_tokens]])
        moments = np.diff(lengths.moments_to(full), axis=1)
        return cls(full, moments[0], moments[1])

    @classmethod
    def even(cls, lengths: Lengths, num: int) -> Classes:
        """About `num` classes of equal weight."""
        return cls.at(lengths, lengths.quantile(np.arange(1, num) / num))

    def sums(self, curve: Curve, lengths: Lengths) -> Floats:
        """E[curve(L); L in the class] of each class."""
        return np.diff(curve.sum_to(lengths, self.edges))

    def means(self, curve: Curve, lengths: Lengths) -> Floats:
        """The mean of the curve over each class; 0 for a class without weight."""
        return mean_of(self.sums(curve, lengths), self.shares)

    @property
    def mean_tokens(self) -> Floats:
        """The mean length of each class; 0 for a class without weight."""
        return mean_of(self.token_sums, self.shares)


@dataclass(frozen=True)
class Route:
    """Prefill in `source`, decode in `target`. `link` is None where they are one PD cluster."""

    source: Cluster
    target: PdClusterModel
    link: Link | None = None

    @property
    def name(self) -> str:
        return f"{self.source.name} to {self.target.name}" if self.link else self.target.name


def routes_of(region: Region) -> list[Route]:
    """All routes that a request can take: local ones first, then those over a link."""
    local = [Route(cluster, cluster) for cluster in region.pd_clusters]
    remote = [
        Route(source, target, link)
        for source in region.prefill_clusters
        for target in region.pd_clusters
        if (link := region.link(source.name, target.name)) is not None
    ]
    return local + remote


@dataclass(frozen=True)
class Assignment:
    """`flow[r, c]` is the share of all requests that are of class c and take route r."""

    classes: Classes
    routes: tuple[Route, ...]
    flow: Floats

    def share(self, route: int) -> float:
        """The share of all requests on this route."""
        return float(self.flow[route].sum())

    def mean_tokens(self, route: int) -> float:
        """The mean length on this route; 0 where no request takes it."""
        share = self.share(route)
        return float(self.flow[route] @ self.classes.mean_tokens) / share if share > 0 else 0.0

    def need(self, route: int, curve: Curve, lengths: Lengths, mode: Mode) -> float:
        """What requests on this route need of `curve`, per request of any route."""
        # The paper puts all requests of a route at their mean length, l_long or l_short (3.4.1).
        if mode is Mode.PAPER:
            share = self.share(route)
            return share * float(curve(self.mean_tokens(route))) if share > 0 else 0.0
        return float(self.flow[route] @ self.classes.means(curve, lengths))

    @property
    def fractions(self) -> Floats:
        """The part of each class that takes each route.

        A class without weight is routed like the next class with shorter prompts.
        """
        total = self.flow.sum(axis=0)
        weighty = np.flatnonzero(total > 0)
        # A threshold lies where the route changes, so an empty class next to it follows the
        # shorter side.
        last = weighty[np.maximum(np.searchsorted(weighty, np.arange(len(total)), "right") - 1, 0)]
        parts: Floats = self.flow[:, last] / total[last]
        return parts


@dataclass(frozen=True, slots=True)
class Resource:
    """A part of the region that can be the bottleneck.

    `capacity` is instance-seconds per second for instances, and bytes per second for a link. `need`
    is how much of it one request takes on average, over all requests.
    """

    kind: str
    """prefill, link or decode."""
    name: str
    capacity: float
    need: float
    share: float
    """The share of all requests that use it."""

    @property
    def system_rps(self) -> float:
        """The rate of the region at which this part is full, requests/s."""
        return self.capacity / self.need if self.need > 0 else float("inf")

    @property
    def theta_rps(self) -> float:
        """Its own throughput in requests that use it: Theta of the paper."""
        return self.system_rps * self.share if self.need > 0 else 0.0


def resources_of(
    region: Region, assignment: Assignment, num_prefill: Mapping[str, float], mode: Mode
) -> list[Resource]:
    """Every part of the region under the plan. `num_prefill` gives N_p of each PD cluster by
    name.
    """
    lengths = region.traffic.lengths
    by_source: dict[str, list[int]] = {}
    by_target: dict[str, list[int]] = {}
    for index, route in enumerate(assignment.routes):
        by_source.setdefault(route.source.name, []).append(index)
        by_target.setdefault(route.target.name, []).append(index)

    def need(routes: Sequence[int], curve: Curve) -> float:
        return sum(assignment.need(r, curve, lengths, mode) for r in routes)

    def share(routes: Sequence[int]) -> float:
        return sum(assignment.share(r) for r in routes)

    found: list[Resource] = []
    for cluster in region.clusters:
        routes = by_source.get(cluster.name, [])
        # Equations 3 and 4. A prefill cluster has no N_p: all of its instances prefill.
        instances = num_prefill.get(cluster.name, cluster.num_instances)
        found.append(
            Resource(
                "prefill", cluster.name, instances, need(routes, cluster.prefill), share(routes)
            )
        )
    for index, route in enumerate(assignment.routes):
        # The second term of equation 3, B_out / S_kv. As a part of its own, so that a plan can name
        # the link as its bottleneck.
        if route.link is not None:
            found.append(
                Resource(
                    "link",
                    route.link.name,
                    route.link.bytes_per_s,
                    need([index], region.kv.size),
                    share([index]),
                )
            )
    for pd in region.pd_clusters:
        part = share(by_target.get(pd.name, []))
        # Equation 5 per slot: how long one request holds its share of an instance.
        slot_s = pd.step_s * region.traffic.output_tokens / pd.batch_size
        instances = pd.num_instances - num_prefill[pd.name]
        found.append(Resource("decode", pd.name, instances, part * slot_s, part))
    return found


def highest_rps(resources: Sequence[Resource]) -> float:
    """Equation 6: the rate at which the first part is full."""
    return min(resource.system_rps for resource in resources)
