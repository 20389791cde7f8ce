"""Divides shared prefill clusters and links among PD clusters.

A `Home` is a PD cluster with the requests of one model that decode there. Homes share the instances
of prefill clusters, links (where they serve several models) and uplinks. `JointRegion.shares` gives
each home its part of them as a region of its own, which is then planned like any other.

The division is max-min fair in served over demanded requests (the level of a home): no home can be
served better unless one that is served no better gets less. The program of `solve` finds the
highest level that all homes can have. Homes that hold it up stay there, and the others rise on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from scheduler.planning.lengths import Floats
from scheduler.planning.plan import Plan
from scheduler.planning.region_model import Home, HomeKey, Region, Uplink
from scheduler.planning.solve import FEW_CLASSES, ROUNDING, CountName, PartName, Program, best_plan
from scheduler.planning.threshold_search import sources_of
from scheduler.planning.throughput import Mode

_Used: TypeAlias = dict[tuple[int, int], dict[PartName, float]]
"""The share of each shared part that is used, by home and route."""

MAX_LEVELS: Final = 8
"""How many times homes that cannot rise are told apart from those that can."""
SAME_MIX_COSTS: Final = 0.002
"""How much more of a part may be used so that all sources of a home get the same mix of lengths."""
_NO_PRICE: Final = 1e-4
"""A lower price is one of tastes, not of the level."""
_LEAST_DEMAND: Final = 1e-3
"""The demand assumed of a home without any, as a share of the highest demand."""


@dataclass(frozen=True)
class JointRegion:
    """All homes of a region, and the uplinks that their links share.

    With `whole`, an instance is for prefill or for decode; otherwise instances share roles.
    """

    homes: tuple[Home, ...]
    uplinks: tuple[Uplink, ...] = ()
    whole: bool = True

    @cached_property
    def shares(self) -> Mapping[HomeKey, Region]:
        """The region of each home with its share of what it shares with others.

        What nobody needs is divided in proportion as well. A prefill cluster of which a home has no
        part stays in its share, with no instance.
        """
        found: dict[HomeKey, Region] = {}
        for homes in _groups(self.homes, self.uplinks):
            found |= _shares(homes, self.uplinks, whole=self.whole)
        return MappingProxyType({home.key: found[home.key] for home in self.homes})

    @cached_property
    def plans(self) -> Mapping[HomeKey, Plan]:
        """The best plan of each home for its share."""
        return MappingProxyType(
            {key: best_plan(r, whole=self.whole) for key, r in self.shares.items()}
        )

    @property
    def levels(self) -> Mapping[HomeKey, float]:
        """The highest rate of each home over its demand; infinite without demand."""
        return {
            home.key: rps / home.rate_rps if home.rate_rps else math.inf
            for home in self.homes
            for rps in [self.plans[home.key].system_rps(Mode.EXACT)]
        }


def _groups(homes: Sequence[Home], uplinks: Sequence[Uplink]) -> list[list[Home]]:
    """The homes by groups that share something."""
    group = list(range(len(homes)))
    user: dict[tuple[str, ...], int] = {}
    for index, home in enumerate(homes):
        names = list(_shared_by(home, uplinks))
        joined = {group[user[name]] for name in names if name in user}
        group = [index if number in joined else number for number in group]
        user |= dict.fromkeys(names, index)
    return [[homes[i] for i, n in enumerate(group) if n == number] for number in sorted(set(group))]


def _shared_by(home: Home, uplinks: Sequence[Uplink]) -> Iterator[tuple[str, ...]]:
    """The names of all that the home may share with others."""
    for source, link in sources_of(home.region):
        yield "prefill", home.model, source.name
        yield "link", link.name
        yield from (("uplink", up.name) for up in uplinks if up.carries(link))


def _shares(
    homes: Sequence[Home], uplinks: Sequence[Uplink], *, whole: bool
) -> dict[HomeKey, Region]:
    """The share of each home of a group."""
    most = max(home.rate_rps for home in homes) or 1.0
    homes = [replace(h, rate_rps=max(h.rate_rps, _LEAST_DEMAND * most)) for h in homes]
    if not any(sources_of(home.region) for home in homes):
        return {home.key: home.region for home in homes}
    program = Program(homes, uplinks, num_classes=FEW_CLASSES)
    used = _used_by(program, _fair_flows(program, whole=whole))
    total = _sum_of(used.values())
    asked = _sum_of(dict.fromkeys(parts, homes[h].rate_rps) for (h, _), parts in used.items())
    regions = {home.key: home.region for home in homes}
    for (h, i), parts in used.items():
        sizes: dict[str, float] = {}
        for name, share in parts.items():
            # What is left over is divided like what is used, or by demand where nothing is used.
            is_used = total[name] > ROUNDING
            part = share / total[name] if is_used else homes[h].rate_rps / asked[name]
            part = part if part > ROUNDING else 0.0
            kind = "prefill" if name[0] == "prefill" else "link"
            sizes[kind] = min(part * program.capacities[name], sizes.get(kind, math.inf))
        key = homes[h].key
        regions[key] = _sized(regions[key], program.routes[h][i].source.name, sizes)
    return regions


def _fair_flows(program: Program, *, whole: bool) -> list[Floats]:
    """The flows of each home at its max-min fair level."""
    bounds: dict[CountName, tuple[float, float]] = {}
    for h, home in enumerate(program.homes):
        (pd,) = home.region.pd_clusters
        bounds[h, pd.name] = home.bounds or (0, max(0, pd.num_instances - whole))
    held: dict[int, float] = {}
    for _ in range(MAX_LEVELS):
        best = program.search(bounds, held) if whole else program.solve(bounds, held)
        rising = {(h, pd) for h, pd in bounds if h not in held}
        stuck = {(h, pd) for h, pd in rising if best.prices[h] > _NO_PRICE} or rising
        for name in stuck:
            held[name[0]] = best.level
            if whole:
                bounds[name] = best.num_prefill[name], best.num_prefill[name]
        if stuck == rising:
            break
    return best.flows


def _used_by(program: Program, flows: Sequence[Floats]) -> _Used:
    """What these flows use: with the same mix of lengths from all sources of a home, where that
    uses hardly more of anything. With one threshold, prompts go where they are soonest, and not by
    length.
    """
    used: _Used = {}
    for h, flow in enumerate(flows):
        used |= _used_of(program, h, flow)
    for h, flow in enumerate(flows):
        mixed = used | _used_of(program, h, _same_mix(program, h, flow))
        if max(_sum_of(mixed.values()).values()) <= 1 + SAME_MIX_COSTS:
            used = mixed
    return used


def _used_of(program: Program, h: int, flow: Floats) -> _Used:
    return {
        (h, i): {name: float(need @ flow[i]) for name, need in needs.items()}
        for i, needs in program.needs[h].items()
    }


def _sum_of(used: Iterable[Mapping[PartName, float]]) -> dict[PartName, float]:
    total: dict[PartName, float] = {}
    for parts in used:
        for name, share in parts.items():
            total[name] = total.get(name, 0.0) + share
    return total


def _same_mix(program: Program, h: int, flow: Floats) -> Floats:
    """The flow with each source working as much as before, but for all lengths alike."""
    offloaded, work = flow[list(program.needs[h])].sum(axis=0), np.zeros(len(flow))
    for i, needs in program.needs[h].items():
        need = needs["prefill", program.routes[h][i].source.name, program.homes[h].model]
        work[i] = need @ flow[i] / (need @ offloaded or 1.0)
    mixed = np.outer(work / (work.sum() or 1.0), offloaded)
    return np.where(work[:, None] > 0, mixed, flow)


def _sized(region: Region, source: str, sizes: Mapping[str, float]) -> Region:
    """The share with so many instances of a prefill cluster, and bytes/s of the link from it."""
    clusters = tuple(
        replace(c, num_instances=sizes["prefill"]) if c.name == source else c
        for c in region.prefill_clusters
    )
    links = tuple(
        replace(k, bytes_per_s=sizes["link"]) if k.source == source else k for k in region.links
    )
    return replace(region, prefill_clusters=clusters, links=links)
