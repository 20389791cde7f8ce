"""A fair division of prefill clusters and links among the homes that share them.

It is max-min fair in served over demanded requests (the level of a home): no home can be served
better unless one that is served no better gets less. So the least served home comes first.

At a given level a home needs a number of decode instances. Its other instances prefill, and what
they cannot prefill is offloaded, the longest prompts first. A linear program tells whether the
shared parts carry the offload of all homes. The level of all homes rises until they do not. Homes
that then use a full part stay at their level, and the others rise on.

Prompts that a home offloads have the same mix of lengths at every prefill cluster, because they go
where they are soonest and not by length. The mode is always `exact`. Needs scipy (extra `plan`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduler.planning.lengths import Floats
from scheduler.planning.pair_search import sources_of, threshold_grid
from scheduler.planning.region_model import Home, HomeKey, Region, Uplink

NUM_THRESHOLDS: Final = 400
PRECISION: Final = 1e-4
"""How exactly levels are found, as a share of them."""
MAX_LEVELS: Final = 8
"""How many times homes that cannot rise are told apart from those that can."""
EVEN_ROUNDS: Final = 200
_PLENTY: Final = 2.0
"""Programs do not look for more than this multiple of what is offloaded."""
_NO_PRICE: Final = 1e-7
"""A price below this share of the highest one is the solver's rounding."""
_ROUNDING: Final = 1e-9
_LEAST_DEMAND: Final = 1e-3
"""The demand assumed of a home without any, as a share of the highest demand."""


def fair_shares(
    homes: Sequence[Home], uplinks: Sequence[Uplink], *, whole: bool
) -> dict[HomeKey, Region]:
    """The region of each home with its share, for homes that share something.

    What nobody needs at the levels found is divided in proportion as well.
    """
    most = max(home.rate_rps for home in homes) or 1.0
    offloads = [
        _Offload(home, max(home.rate_rps, _LEAST_DEMAND * most), whole=whole) for home in homes
    ]
    shared = _Shared(offloads, uplinks)
    if not shared.pairs:
        return {home.key: home.region for home in homes}
    usage = shared.usage(_levels(shared))
    carried, parts, _ = usage.carried()
    parts = usage.even(parts / max(carried, 1.0))
    used = usage.of_rows(parts)
    demands = np.array([offloads[h].demand_rps for h, _ in shared.pairs])
    asked = np.bincount(usage.row_of, demands[usage.pair_of], len(used))
    # What is left over is divided like what is used, or by demand where nothing is used.
    taken = np.where(
        used[usage.row_of] > 0,
        usage.of_uses(parts) / np.where(used > 0, used, 1)[usage.row_of],
        demands[usage.pair_of] / asked[usage.row_of],
    )
    entries = iter(taken.tolist())
    sizes: dict[tuple[int, str], tuple[float, float]] = {}
    for (h, s), names in zip(shared.pairs, shared.parts, strict=True):
        instances, *rates = [next(entries) * shared.capacity_of(name) for name in names]
        sizes[h, offloads[h].sources[s][0].name] = instances, min(rates)
    return {
        home.key: _with_sizes(
            home.region, {name: size for (at, name), size in sizes.items() if at == h}
        )
        for h, home in enumerate(homes)
    }


PartName = tuple[str, str, str]
"""Kind (prefill, link or uplink), model of instances, and name of what is shared."""


class _Offload:
    """One home, which says how much it must offload at each level."""

    def __init__(self, home: Home, demand_rps: float, *, whole: bool) -> None:
        region = home.region
        lengths, pd = region.traffic.lengths, region.pd_clusters[0]
        self.home = home
        self.demand_rps = demand_rps
        self.sources = sources_of(region)
        self._whole = whole
        self._num = pd.num_instances
        self._slot_s = pd.step_s * region.traffic.output_tokens / pd.batch_size
        self._least, self._most = home.bounds or (0, pd.num_instances - 1 if whole else self._num)
        grid = threshold_grid(region, NUM_THRESHOLDS)
        # Prompts of any length up to each threshold, per request of the home; then those beyond.
        self._local_s = pd.prefill.sum_to(lengths, grid)
        nbytes = region.kv.size.mean(lengths) - region.kv.size.sum_to(lengths, grid)
        curves = {id(source.prefill): source.prefill for source, _ in self.sources}
        beyond = {
            key: curve.mean(lengths) - curve.sum_to(lengths, grid) for key, curve in curves.items()
        }
        self._beyond = np.array(
            [beyond[id(source.prefill)] for source, _ in self.sources] + [nbytes]
        )
        self.top = self._highest()
        """The highest level, whatever it may offload."""

    def needs(self, level: float) -> tuple[Floats, float] | None:
        """The offload at a level: instance-seconds per second at each source if it took all, and
        bytes/s. None if nothing is offloaded.
        """
        rate = level * self.demand_rps
        if rate <= 0:
            return None
        budget_s = self.num_prefill(level) / rate
        if budget_s >= self._local_s[-1] * (1 - _ROUNDING):
            return None
        place = float(np.interp(budget_s, self._local_s, np.arange(len(self._local_s))))
        below = min(int(place), len(self._local_s) - 2)
        part = place - below
        beyond = (1 - part) * self._beyond[:, below] + part * self._beyond[:, below + 1]
        return rate * beyond[:-1], rate * float(beyond[-1])

    def num_prefill(self, level: float) -> float:
        """The most instances that can prefill at a level."""
        num_decode = level * self.demand_rps * self._slot_s
        if self._whole:
            # Rounding must not ask for one instance more.
            num_decode = math.ceil(num_decode - _ROUNDING)
        return min(self._most, self._num - num_decode)

    def _highest(self) -> float:
        """The level at which decode is full, or local prefill where nothing can be offloaded."""
        top = max(0.0, (self._num - self._least) / self._slot_s) / self.demand_rps
        if any(c.num_instances and k.bytes_per_s for c, k in self.sources):
            return top
        low, high = 0.0, top
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.needs(middle) is None else (low, middle)
        return low


class _Shared:
    """All that a group of homes shares, and what each pair of a home and a source uses of it."""

    def __init__(self, homes: Sequence[_Offload], uplinks: Sequence[Uplink]) -> None:
        self.homes = homes
        self.pairs = [(h, s) for h, home in enumerate(homes) for s in range(len(home.sources))]
        sizes: dict[PartName, float] = {}
        self.parts: list[list[PartName]] = []
        """The parts that each pair uses: the instances first, then link and uplinks."""
        for h, s in self.pairs:
            source, link = homes[h].sources[s]
            mine = [(("prefill", homes[h].home.model, source.name), source.num_instances)]
            mine.append((("link", "", link.name), link.bytes_per_s))
            mine += [
                (("uplink", "", up.name), up.bytes_per_s) for up in uplinks if up.carries(link)
            ]
            self.parts.append([name for name, _ in mine])
            sizes |= dict(mine)
        self.rows = {name: row for row, name in enumerate(sizes)}
        self._capacity = np.array(list(sizes.values()))
        # One entry for each use of a part by a pair.
        self._pair_of = np.array([p for p, parts in enumerate(self.parts) for _ in parts])
        self._row_of = np.array([self.rows[name] for parts in self.parts for name in parts])
        self._is_prefill = np.array([n[0] == "prefill" for parts in self.parts for n in parts])
        self._home_of = np.array([h for h, _ in self.pairs])

    def capacity_of(self, name: PartName) -> float:
        """Instances, or bytes/s."""
        return float(self._capacity[self.rows[name]])

    def usage(self, levels: Sequence[float]) -> _Usage:
        """The use that the homes would make of all parts at these levels."""
        seconds, nbytes = np.zeros(len(self.pairs)), np.zeros(len(self.pairs))
        for home in range(len(self.homes)):
            needs = self.homes[home].needs(levels[home])
            if needs is not None:
                mine = self._home_of == home
                seconds[mine], nbytes[mine] = needs
        amounts = np.where(self._is_prefill, seconds[self._pair_of], nbytes[self._pair_of])
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(amounts > 0, amounts / self._capacity[self._row_of], 0.0)
        return _Usage(self._pair_of, self._row_of, self._home_of, shares, len(self.rows))


@dataclass(frozen=True)
class _Usage:
    """The needs of homes at some level, if one pair carried all of its home's offload.

    `shares` are shares of the parts' capacities, one for each use; infinite where a part has none.
    """

    pair_of: NDArray[np.intp]
    row_of: NDArray[np.intp]
    home_of: NDArray[np.intp]
    """The home of each pair."""
    shares: Floats
    num_rows: int

    @cached_property
    def usable(self) -> NDArray[np.bool_]:
        """The pairs that could carry anything."""
        worst = np.zeros(len(self.home_of))
        np.maximum.at(worst, self.pair_of, self.shares)
        found: NDArray[np.bool_] = (worst > 0) & np.isfinite(worst)
        return found

    @cached_property
    def offloading(self) -> NDArray[np.intp]:
        """The homes that offload anything."""
        return np.unique(self.home_of[self.pair_of[self.shares > 0]])

    def of_uses(self, parts: Floats) -> Floats:
        """The share of each use if pairs carry these parts of their homes' offload."""
        # Nothing is carried over what has no capacity.
        taken: Floats = np.where(self.usable[self.pair_of], self.shares, 0.0) * parts[self.pair_of]
        return taken

    def of_rows(self, parts: Floats) -> Floats:
        """How full each part is then."""
        return np.bincount(self.row_of, self.of_uses(parts), self.num_rows).astype(np.float64)

    def carried(self) -> tuple[float, Floats, NDArray[np.intp]]:
        """The largest part of everybody's offload that can be carried, at most `_PLENTY`; the part
        of its home's offload that each pair then carries; and the homes whose offload makes it no
        larger.
        """
        # Imported here, since only homes that share something need scipy.
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix

        num, homes = len(self.home_of), self.offloading
        if not len(homes):
            return _PLENTY, np.zeros(num), homes
        kept = self.usable[self.pair_of]
        limits = csr_matrix(
            (self.shares[kept], (self.row_of[kept], self.pair_of[kept])),
            shape=(self.num_rows, num + 1),
        )
        # Each home's parts add up to the carried part, which is the last variable.
        at = np.searchsorted(homes, self.home_of)
        mine = np.flatnonzero(self.usable & np.isin(self.home_of, homes))
        rows = np.concatenate([at[mine], np.arange(len(homes))])
        columns = np.concatenate([mine, np.full(len(homes), num)])
        values = np.concatenate([np.ones(len(mine)), -np.ones(len(homes))])
        cost = np.zeros(num + 1)
        cost[num] = -1
        result = linprog(
            cost,
            A_ub=limits,
            b_ub=np.ones(self.num_rows),
            A_eq=csr_matrix((values, (rows, columns)), shape=(len(homes), num + 1)),
            b_eq=np.zeros(len(homes)),
            bounds=[*((0, None if usable else 0) for usable in self.usable), (0, _PLENTY)],
            method="highs",
        )
        prices = np.abs(result.eqlin.marginals)
        binding = homes[prices > _NO_PRICE * max(prices.max(), _NO_PRICE)]
        return float(result.x[num]), result.x[:num], binding

    def even(self, parts: Floats) -> Floats:
        """Parts that are as good as these, but spread over all sources as evenly as possible.

        A linear program gives a home the fewest sources that will do. More of them wait less for
        each other's queues, and equal homes get equal shares.
        """
        wanted = np.zeros(len(self.home_of))
        np.maximum.at(wanted, self.pair_of, self.shares)
        spread = np.where(self.usable, 1 / np.where(wanted > 0, wanted, 1), 0.0)
        for _ in range(EVEN_ROUNDS):
            total = np.bincount(self.home_of, spread, self.home_of.max() + 1)[self.home_of]
            spread = np.divide(spread, total, out=np.zeros(len(spread)), where=total > 0)
            over = np.maximum(self.of_rows(spread), 1)
            if over.max() <= 1 + _ROUNDING:
                break
            worst = np.ones(len(spread))
            np.maximum.at(worst, self.pair_of, over[self.row_of])
            spread = spread / worst
        total = np.bincount(self.home_of, spread, self.home_of.max() + 1)[self.home_of]
        spread = np.divide(spread, total, out=np.zeros(len(spread)), where=total > 0)
        # As far from the program's parts towards the even ones as no part overflows.
        now, then = self.of_rows(parts), self.of_rows(spread)
        grows = then > np.maximum(now, 1)
        room = np.maximum(0, 1 - now[grows]) / (then[grows] - now[grows])
        way = float(min(room.min(initial=1.0), 1.0))
        mixed: Floats = parts + way * (spread - parts)
        return mixed


def _levels(shared: _Shared) -> list[float]:
    """The max-min fair level of each home."""
    homes = shared.homes
    levels = [0.0] * len(homes)
    rising = set(range(len(homes)))
    low = 0.0

    def at(level: float, held: Set[int] = frozenset()) -> list[float]:
        """All levels where those that rise are at `level`, and those of them in `held` at `low`."""
        return [
            min(low if h in held else level, home.top) if h in rising else levels[h]
            for h, home in enumerate(homes)
        ]

    for _ in range(MAX_LEVELS):
        high = max(homes[h].top for h in rising)
        carried, _, full = shared.usage(at(high)).carried()
        if carried >= 1:
            return at(high)
        room, lack = 1.0, 1 - carried
        while high - low > PRECISION * high:
            # Where a straight line would cross, but never so close to an end that the other one
            # hardly moves.
            middle = low + (high - low) * min(max(room / (room + lack), 0.1), 0.9)
            carried, _, found = shared.usage(at(middle)).carried()
            if carried >= 1:
                low, room = middle, carried - 1
            else:
                high, lack, full = middle, 1 - carried, found
        # Homes that would need one more decode instance above this level may be all that stops it.
        steps = {h for h in rising if homes[h].num_prefill(low) != homes[h].num_prefill(high)}
        if steps and shared.usage(at(high, steps)).carried()[0] >= 1:
            stuck = steps
        else:
            stuck = {h for h in rising if h in full or homes[h].top <= low} or set(rising)
        for h in stuck:
            levels[h] = min(low, homes[h].top)
        rising -= stuck
        if not rising:
            return levels
    return at(low)


def _with_sizes(region: Region, sizes: Mapping[str, tuple[float, float]]) -> Region:
    """The share with these instances of prefill clusters, and bytes/s of the links from them."""
    clusters = tuple(
        replace(c, num_instances=sizes[c.name][0]) if c.name in sizes else c
        for c in region.prefill_clusters
    )
    links = tuple(
        replace(k, bytes_per_s=sizes[k.source][1]) if k.source in sizes else k for k in region.links
    )
    return replace(region, prefill_clusters=clusters, links=links, is_share=True)
