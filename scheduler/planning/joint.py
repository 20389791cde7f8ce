"""Divides shared prefill clusters and links among PD clusters.

A `Home` is a PD cluster with the requests of one model that decode there. Homes share the instances
of prefill clusters, links (where they serve several models) and uplinks. `JointRegion.shares` gives
each home its part of them as a region of its own, which the searches for one PD cluster then plan.

Homes that share nothing with others are planned as if alone. Homes that do are served max-min fair
(`fair_shares`). Then all prefill clusters of a home have the same threshold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from scheduler.planning.fair_shares import fair_shares
from scheduler.planning.pair_search import sources_of
from scheduler.planning.plan import Plan, best_plan
from scheduler.planning.region_model import Home, HomeKey, Region, Uplink
from scheduler.planning.throughput import Mode


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

        A home that shares nothing keeps its region as it is. A prefill cluster of which a home has
        no part stays in its share, with no instance.
        """
        found: dict[HomeKey, Region] = {}
        for homes in _groups(self.homes, self.uplinks):
            one = homes[0]
            if len(homes) == 1 and not any(_joins_links(up, one) for up in self.uplinks):
                found[one.key] = _narrowed(one.region, self.uplinks)
            else:
                found |= fair_shares(homes, self.uplinks, whole=self.whole)
        return MappingProxyType({home.key: found[home.key] for home in self.homes})

    @cached_property
    def plans(self) -> Mapping[HomeKey, Plan]:
        """The best plan of each home for its share."""
        plans = {
            key: best_plan(share, Mode.EXACT, whole=self.whole)
            for key, share in self.shares.items()
        }
        return MappingProxyType(plans)

    @property
    def levels(self) -> Mapping[HomeKey, float]:
        """The highest rate of each home over its demand; infinite without demand."""
        return {
            home.key: rps / home.rate_rps if home.rate_rps else math.inf
            for home in self.homes
            for rps in [self.plans[home.key].system_rps(Mode.EXACT)]
        }


def _shared_by(home: Home, uplinks: Sequence[Uplink]) -> Iterator[tuple[str, ...]]:
    """The names of all that the home may share with others."""
    for source, link in sources_of(home.region):
        yield "prefill", home.model, source.name
        yield "link", link.name
        yield from (("uplink", up.name) for up in uplinks if up.carries(link))


def _joins_links(uplink: Uplink, home: Home) -> bool:
    """Whether several links of the home share the uplink."""
    return sum(uplink.carries(link) for _, link in sources_of(home.region)) > 1


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


def _narrowed(region: Region, uplinks: Sequence[Uplink]) -> Region:
    """The region with links that carry no more than the uplinks that they alone use."""
    links = tuple(
        replace(k, bytes_per_s=min(k.bytes_per_s, *limits)) if limits else k
        for k in region.links
        for limits in [[up.bytes_per_s for up in uplinks if up.carries(k)]]
    )
    return replace(region, links=links)
