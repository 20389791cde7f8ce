"""A plan: who prefills what, how instances are divided, and what follows from it.

Prompts are divided into classes by their length. A `Route` is a place to prefill and a place to
decode. A `Plan` says which share of all requests each class sends over each route. From it follow
the load of every `Resource` (prefill instances, links, decode instances) and the highest rate that
the region sustains: equations 3 to 6 of PrfaaS for any number of clusters. One pair of clusters and
a threshold is the simplest case. Both modes of the throughput model apply to the same plan.

Rates are requests/s of the whole region unless a name says otherwise. This file searches nothing;
`threshold_search` and `solve` do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler.planning.curves import Curve
from scheduler.planning.lengths import Floats, Lengths
from scheduler.planning.region_model import Cluster, Link, PdClusterModel, Region
from scheduler.planning.throughput import Mode, mean_of

BINDS_WITHIN: Final = 0.01
"""Parts that are full within this share above the first full one count as bottlenecks, too."""
TARGET_LOAD: Final = 0.8
"""The share of its time for which an instance should work. Queues grow without bound towards 1."""
_ONE: Final = Curve.quadratic(1.0)
_TOKENS: Final = Curve.quadratic(0.0, 1.0)


class NoRouteError(ValueError):
    """The region cannot serve anything. The message says what is missing."""


@dataclass(frozen=True)
class Classes:
    """Prompts by length: class i holds those in (edges[i], edges[i + 1]]."""

    lengths: Lengths
    edges: Floats
    _means: dict[bytes, Floats] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def at(cls, lengths: Lengths, edges: ArrayLike) -> Classes:
        """Classes between these lengths. The first and the last class take what is beyond."""
        inner = np.unique(np.asarray(edges, np.float64))
        # The ends join below; edges at or beyond them would only make classes without weight.
        inner = inner[(inner > 0) & (inner < lengths.max_tokens)]
        return cls(lengths, np.concatenate([[0.0], inner, [lengths.max_tokens]]))

    @classmethod
    def even(cls, lengths: Lengths, num: int) -> Classes:
        """About `num` classes of equal weight."""
        return cls.at(lengths, lengths.quantile(np.arange(1, num) / num))

    @cached_property
    def shares(self) -> Floats:
        """The probability of each class; they add up to 1."""
        return np.diff(_ONE.sum_to(self.lengths, self.edges))

    def means(self, curve: Curve) -> Floats:
        """The mean of the curve over each class; 0 for a class without weight."""
        # Clusters of one kind have the same curve, and plans ask for the same means many times.
        key = curve.coefficients.tobytes() + curve.starts.tobytes()
        if key not in self._means:
            sums = np.diff(curve.sum_to(self.lengths, self.edges))
            self._means[key] = mean_of(sums, self.shares)
        return self._means[key]


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
    return [Route(pd, pd) for pd in region.pd_clusters] + [
        Route(source, target, link)
        for source in region.prefill_clusters
        for target in region.pd_clusters
        if (link := region.link(source.name, target.name)) is not None
    ]


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
        return self.capacity / self.need if self.need > 0 else math.inf

    @property
    def theta_rps(self) -> float:
        """Its own throughput in requests that use it: Theta of the paper."""
        return self.system_rps * self.share if self.need > 0 else 0.0


@dataclass(frozen=True)
class Ttft:
    """Time to first token of an otherwise empty region, seconds."""

    mean_s: float
    p90_s: float


@dataclass(frozen=True)
class Plan:
    """The route of every class and the division of instances for one region.

    `flow[r, c]` is the share of all requests that are of class c and take route r of `routes`.
    `num_prefill` is N_p of each PD cluster. `threshold_tokens` is the routing threshold, where one
    threshold describes the plan.
    """

    region: Region
    classes: Classes
    flow: Floats
    num_prefill: Mapping[str, float]
    threshold_tokens: float | None

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """All routes of the region, also those that nothing takes."""
        return tuple(routes_of(self.region))

    def share(self, route: int) -> float:
        """The share of all requests on this route."""
        return float(self.flow[route].sum())

    def mean_tokens(self, route: int) -> float:
        """The mean length on this route; 0 where no request takes it."""
        share = self.share(route)
        return self._need([route], _TOKENS) / share if share > 0 else 0.0

    def resources(self, mode: Mode) -> list[Resource]:
        """Every part of the region under the plan."""
        found: list[Resource] = []

        def add(kind: str, name: str, capacity: float, used: list[int], curve: Curve) -> None:
            need, share = self._need(used, curve, mode), sum(map(self.share, used))
            found.append(Resource(kind, name, capacity, need, share))

        for cluster in self.region.clusters:
            # Equations 3 and 4. A prefill cluster has no N_p: all of its instances prefill.
            num = self.num_prefill.get(cluster.name, cluster.num_instances)
            used = [i for i, r in enumerate(self.routes) if r.source.name == cluster.name]
            add("prefill", cluster.name, num, used, cluster.prefill)
        for index, route in enumerate(self.routes):
            # The second term of equation 3, B_out / S_kv. As a part of its own, so that a plan can
            # name the link as its bottleneck.
            if route.link is not None:
                size = self.region.kv.size
                add("link", route.link.name, route.link.bytes_per_s, [index], size)
        for pd in self.region.pd_clusters:
            num = pd.num_instances - self.num_prefill[pd.name]
            used = [i for i, r in enumerate(self.routes) if r.target.name == pd.name]
            # Equation 5 per slot: how long one request holds its share of an instance.
            slot_s = pd.step_s * self.region.traffic.output_tokens / pd.batch_size
            add("decode", pd.name, num, used, Curve.quadratic(slot_s))
        return found

    def system_rps(self, mode: Mode) -> float:
        """Equation 6, Lambda_max of the paper: the rate at which the first part is full."""
        return min(part.system_rps for part in self.resources(mode))

    def bottlenecks(self, mode: Mode) -> list[Resource]:
        """The parts that are full at Lambda_max."""
        resources = self.resources(mode)
        top = min(part.system_rps for part in resources)
        return [part for part in resources if part.system_rps <= top * (1 + BINDS_WITHIN)]

    @property
    def offload_fraction(self) -> float:
        """The share of requests that a prefill cluster prefills."""
        return sum(self.share(r) for r in self._remote)

    @property
    def mean_offloaded_tokens(self) -> float:
        share = self.offload_fraction
        return self._need(self._remote, _TOKENS) / share if share > 0 else 0.0

    def thresholds(self) -> dict[str, float]:
        """The threshold of each prefill cluster: the longest prompt that the plan keeps from it.

        Where the plan sends it nothing, that is the longest prompt there is.
        """
        found = {c.name: self.classes.lengths.max_tokens for c in self.region.prefill_clusters}
        for index in self._remote:
            ranges, name = self.lengths_of(index), self.routes[index].source.name
            if self.threshold_tokens is not None and self.share(index) > 0:
                found[name] = self.threshold_tokens
            elif ranges:
                # A cluster may have several links; the shortest prompt over any of them counts.
                found[name] = min(found[name], ranges[0][0])
        return found

    def needed_instances(self, rate_rps: float, kind: str) -> dict[str, float]:
        """Instances by cluster that work for `TARGET_LOAD` of their time at this rate, whatever
        there are now. `kind` is "prefill" or "decode".

        The routes stay those of the plan, so the numbers of all parts change in proportion to the
        rate (equations 3 to 5 of the paper, solved for N).
        """
        parts = [part for part in self.resources(Mode.EXACT) if part.kind == kind]
        return {part.name: rate_rps * part.need / TARGET_LOAD for part in parts}

    def link_bytes_per_s(self, mode: Mode, rate_rps: float) -> dict[str, float]:
        """The mean egress over each link at this rate, bytes/s."""
        links = [part for part in self.resources(mode) if part.kind == "link"]
        return {part.name: part.need * rate_rps for part in links}

    def cost_per_hour(self, rate_rps: float) -> float:
        """The price of all instances, and of the KVCache that crosses links at this rate, per
        hour.
        """
        instances = sum(c.num_instances * c.price_per_instance_hour for c in self.region.clusters)
        egress = self.link_bytes_per_s(Mode.EXACT, rate_rps)
        # Links of other models' clusters carry nothing.
        per_s = sum(link.price_per_gb * egress.get(link.name, 0.0) for link in self.region.links)
        return instances + per_s * 3600 / 1e9

    def empty_ttft(self) -> Ttft:
        """TTFT without any queue or overlap, as in the paper.

        The mean is that of T(L), and P90 is T at the P90 length. A request that crosses a link adds
        the time for its KVCache at the link's rate.
        """
        kv_size = self.region.kv.size
        mean_s = 0.0
        for index, route in enumerate(self.routes):
            mean_s += self._need([index], route.source.prefill)
            if route.link is not None:
                mean_s += self._need([index], kv_size) / route.link.bytes_per_s
        length = float(self.classes.lengths.quantile([0.9])[0])
        # Routes may share this class; P90 follows the one that takes most of it.
        at = int(np.searchsorted(self.classes.edges, length)) - 1
        route = self.routes[int(np.argmax(self.flow[:, at]))]
        p90_s = float(route.source.prefill(length))
        if route.link is not None:
            p90_s += float(kv_size(length)) / route.link.bytes_per_s
        return Ttft(mean_s, p90_s)

    def lengths_of(self, route: int) -> list[tuple[float, float]]:
        """The ranges of prompt lengths, (from, to], most of whose requests take this route."""
        edges, ranges = self.classes.edges, list[tuple[float, float]]()
        # Where no request is, argmax names the first route.
        mine = (self.flow.argmax(axis=0) == route) & (self.flow[route] > 0)
        for c in np.flatnonzero(mine):
            low, high = float(edges[c]), float(edges[c + 1])
            if ranges and ranges[-1][1] == low:
                low = ranges.pop()[0]
            ranges.append((low, high))
        return ranges

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

    def routes_at(self, tokens: Floats, draws: Floats) -> NDArray[np.intp]:
        """The route of each prompt. `draws` in [0, 1) decide where a class is divided."""
        upto = np.cumsum(self.fractions, axis=0)[:, self._classes_at(tokens)]
        taken: NDArray[np.intp] = (draws[None, :] >= upto).sum(axis=0)
        # Rounding may leave the sum of the parts just below 1.
        return np.minimum(taken, len(upto) - 1)

    def kept_in(self, region: Region) -> Plan:
        """This plan's routing and division in a region that has changed, without a new plan."""
        if [r.name for r in routes_of(region)] != [r.name for r in self.routes]:
            raise ValueError("the region has other clusters or links than the plan")
        classes = Classes.at(region.traffic.lengths, self.classes.edges)
        # A new class lies within one old class; its middle says which.
        at = self._classes_at((classes.edges[:-1] + classes.edges[1:]) / 2)
        flow = self.fractions[:, at] * classes.shares
        return replace(self, region=region, classes=classes, flow=flow)

    @cached_property
    def _remote(self) -> list[int]:
        """The routes over links."""
        return [index for index, route in enumerate(self.routes) if route.link is not None]

    def _classes_at(self, tokens: Floats) -> NDArray[np.intp]:
        edges = self.classes.edges
        return np.clip(np.searchsorted(edges, tokens) - 1, 0, len(edges) - 2)

    def _need(self, routes: list[int], curve: Curve, mode: Mode = Mode.EXACT) -> float:
        """What requests on these routes need of the curve, per request of any route."""
        # The paper puts all requests of a route at their mean length, l_long or l_short (3.4.1).
        if mode is Mode.PAPER:
            used = [r for r in routes if self.share(r) > 0]
            return sum(self.share(r) * float(curve(self.mean_tokens(r))) for r in used)
        return float(self.flow[routes].sum(axis=0) @ self.classes.means(curve))
