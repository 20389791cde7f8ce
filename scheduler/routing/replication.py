"""Which cached prefixes get another copy in their cluster ahead of need, and which copies go.

Prefixes that many requests resume from get copies, within a budget of bytes. Copies that few
requests use are dropped. Every result has a reason, also doing nothing. Pure: it does not know how
bytes move, and reads no clock. `scheduler.routing.candidates` decides what a single request fetches
from another cluster.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvmanager.pool.shape import CacheShape
from scheduler.routing.prefix_demand import CachedPrefix, Demand

BlockPart = tuple[int, int]
"""(index of the block, index of its part)."""

NodeName = tuple[str, str]
"""(cluster, node)."""

MIN_PER_S: Final = 0.05
"""Requests a second for a prefix from which on it gets a copy."""
REQUESTS_PER_COPY_PER_S: Final = 0.5
"""One more copy for each so many requests a second beyond the first copy."""
MAX_COPIES: Final = 3
"""Copies of a prefix in one cluster."""
MAX_REPLICATIONS: Final = 2
"""Moves ahead of need that may run at a time."""
KEEP_PER_S: Final = 0.25 * MIN_PER_S
"""A copy stays while its prefix is used as often. It is below `MIN_PER_S`, so that a rate around
`MIN_PER_S` does not make and drop copies by turns."""


class ByteBudget:
    """Bytes that may be sent ahead of need: a token bucket of `per_s` and `burst_bytes`."""

    def __init__(self, per_s: float, burst_bytes: float) -> None:
        if per_s <= 0 or burst_bytes <= 0:
            raise ValueError(f"a budget of {per_s} bytes/s, at most {burst_bytes} bytes")
        self._per_s = per_s
        self._burst_bytes = burst_bytes
        self._bytes = burst_bytes
        self._at_s: float | None = None

    def available_bytes(self, now_s: float) -> int:
        """What may be sent now. Negative after `spend` took more than there was."""
        if self._at_s is not None:
            self._bytes = min(self._burst_bytes, self._bytes + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return math.floor(self._bytes)

    def spend(self, nbytes: int) -> None:
        """Count bytes that are sent."""
        self._bytes -= nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """A node that may get a copy. `load` is comparable between the nodes of a cluster."""

    cluster: str
    node: str
    load: float
    is_healthy: bool = True

    @property
    def name(self) -> NodeName:
        return self.cluster, self.node


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix in demand, the composition of its blocks, and how many of its blocks each node can
    resume from its own pool.
    """

    demand: Demand
    shape: CacheShape
    usable_blocks: Mapping[NodeName, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationState:
    """What is under way and remembered.

    `moving` and `barred` (failed lately) are pairs of a prefix's key and a destination. `replicas`
    are the copies that a plan made. `budget_bytes` may be sent now.
    """

    budget_bytes: int
    moving: Collection[tuple[bytes, NodeName]] = ()
    barred: Collection[tuple[bytes, NodeName]] = ()
    replicas: Collection[tuple[CachedPrefix, NodeName]] = ()


@dataclass(frozen=True, slots=True)
class Replicate:
    """Send these parts from one node of a cluster to another; `nbytes` if it has none of them."""

    prefix: CachedPrefix
    cluster: str
    source: str
    destination: str
    parts: tuple[BlockPart, ...]
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Demote:
    """Drop a copy, except its first `keep_blocks`, which another prefix in demand shares."""

    prefix: CachedPrefix
    cluster: str
    node: str
    keep_blocks: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicationPlan:
    """What to do now. `notes` say why it is not more."""

    replicate: tuple[Replicate, ...] = ()
    demote: tuple[Demote, ...] = ()
    notes: tuple[str, ...] = ()


def plan_replication(
    hot: Sequence[HotPrefix],
    nodes: Sequence[NodeLoad],
    state: ReplicationState,
) -> ReplicationPlan:
    """Copies to make for the prefixes in `hot` (hottest first), and copies of them to drop.

    It plans only inside clusters. Between clusters a prefix moves when it pays for one request.
    """
    planner = _Planner(state)
    for prefix in hot:
        for cluster in sorted({node.cluster for node in nodes}):
            planner.consider(prefix, [node for node in nodes if node.cluster == cluster])
    demote = tuple(_demotions(hot, state))
    notes = planner.notes or ([] if hot else ["nothing is in demand"])
    return ReplicationPlan(tuple(planner.replicate), demote, tuple(notes))


def plan_evacuation(
    hot: Sequence[HotPrefix], leaving: NodeName, nodes: Sequence[NodeLoad], budget_bytes: int
) -> ReplicationPlan:
    """Copies of what a leaving node has of the prefixes in `hot` (hottest first) and no other node
    of its cluster has, to the least loaded ones, within `budget_bytes`.
    """
    takers = [n for n in nodes if n.cluster == leaving[0] and n.name != leaving and n.is_healthy]
    planned: dict[NodeName, int] = {}
    copies: list[Replicate] = []
    notes = [] if takers else [f"no healthy node is left in {leaving[0]}"]
    for prefix in hot if takers else ():
        num_blocks = min(prefix.usable_blocks.get(leaving, 0), prefix.demand.prefix.num_blocks)
        if any(prefix.usable_blocks.get(node.name, 0) >= num_blocks for node in takers):
            continue
        parts = tuple(prefix.shape.resume_parts(num_blocks))
        nbytes = sum(prefix.shape.parts[part].nbytes for _, part in parts)
        if nbytes > budget_bytes:
            notes.append(f"{nbytes} bytes, {budget_bytes} may be sent")
            continue
        budget_bytes -= nbytes
        taker = min(takers, key=lambda node: (node.load + planned.get(node.name, 0), node.node))
        planned[taker.name] = planned.get(taker.name, 0) + 1
        reason = f"{prefix.demand.per_s:.3g} requests/s, and {leaving[1]} leaves"
        found = prefix.demand.prefix.first(num_blocks)
        copies.append(Replicate(found, *leaving, taker.node, parts, nbytes, reason))
    return ReplicationPlan(tuple(copies), notes=tuple(notes))


class _Planner:
    """Collects the copies that fit the limits."""

    def __init__(self, state: ReplicationState) -> None:
        self.replicate: list[Replicate] = []
        self.notes: list[str] = []
        self._state = state
        self._left_bytes = state.budget_bytes
        self._load: dict[NodeName, int] = {}

    def consider(self, hot: HotPrefix, nodes: Sequence[NodeLoad]) -> None:
        """Plan one more copy of this prefix in one cluster, or note why not."""
        prefix, per_s = hot.demand.prefix, hot.demand.per_s
        cluster = nodes[0].cluster
        holders = [node for node in nodes if self._holds(hot, node)]
        coming = [node for node in nodes if (prefix.key, node.name) in self._state.moving]
        wanted = self._num_copies(per_s, len(nodes))
        why_not = ""
        if per_s < MIN_PER_S:
            why_not = f"{per_s:.3g} requests/s are fewer than {MIN_PER_S:.3g}"
        elif not holders:
            why_not = "no node there has it"
        elif len(holders) + len(coming) >= wanted:
            why_not = f"{len(holders)} copies, {len(coming)} coming, {wanted} wanted"
        if why_not:
            self._note(prefix, cluster, why_not)
            return
        self._place(hot, holders, [node for node in nodes if node not in holders + coming])

    def _place(
        self, hot: HotPrefix, holders: Sequence[NodeLoad], others: Iterable[NodeLoad]
    ) -> None:
        prefix, cluster = hot.demand.prefix, holders[0].cluster
        takers = [node for node in others if node.is_healthy and not self._is_barred(prefix, node)]
        sources = [node for node in holders if node.is_healthy]
        parts = tuple(hot.shape.resume_parts(prefix.num_blocks))
        nbytes = sum(hot.shape.parts[part].nbytes for _, part in parts)
        if not takers or not sources:
            self._note(prefix, cluster, "no healthy node to send it from or to")
        elif len(self._state.moving) + len(self.replicate) >= MAX_REPLICATIONS:
            self._note(prefix, cluster, f"{MAX_REPLICATIONS} moves run already")
        elif nbytes > self._left_bytes:
            self._note(prefix, cluster, f"{nbytes} bytes, {max(0, self._left_bytes)} may be sent")
        else:
            source, taker = min(sources, key=self._busy), min(takers, key=self._busy)
            self._left_bytes -= nbytes
            for node in (source, taker):
                self._load[node.name] = self._load.get(node.name, 0) + 1
            reason = f"{hot.demand.per_s:.3g} requests/s, {len(holders)} of {len(holders) + 1}"
            self.replicate.append(
                Replicate(prefix, cluster, source.node, taker.node, parts, nbytes, reason)
            )

    def _busy(self, node: NodeLoad) -> tuple[float, str]:
        """The load, where each move that was just planned counts as a request."""
        return node.load + self._load.get(node.name, 0), node.node

    def _num_copies(self, per_s: float, num_nodes: int) -> int:
        more = math.ceil(per_s / REQUESTS_PER_COPY_PER_S)
        return max(1, min(1 + more, num_nodes, MAX_COPIES))

    def _holds(self, hot: HotPrefix, node: NodeLoad) -> bool:
        return hot.usable_blocks.get(node.name, 0) >= hot.demand.prefix.num_blocks

    def _is_barred(self, prefix: CachedPrefix, node: NodeLoad) -> bool:
        return (prefix.key, node.name) in self._state.barred

    def _note(self, prefix: CachedPrefix, cluster: str, why_not: str) -> None:
        self.notes.append(f"{prefix.key.hex()[:12]} in {cluster}: {why_not}")


def _demotions(hot: Sequence[HotPrefix], state: ReplicationState) -> Iterable[Demote]:
    """Copies whose prefix is hardly used any more. The only copy in a cluster stays."""
    by_key = {prefix.demand.prefix.key: prefix for prefix in hot}
    for prefix, (cluster, node) in state.replicas:
        known = by_key.get(prefix.key)
        if known is None or known.demand.per_s >= KEEP_PER_S:
            continue
        others = [
            other
            for other, usable in known.usable_blocks.items()
            if other[0] == cluster and other[1] != node and usable >= prefix.num_blocks
        ]
        if others:
            reason = f"{known.demand.per_s:.3g} requests/s, {len(others)} other copies"
            yield Demote(prefix, cluster, node, _shared_blocks(prefix, hot), reason)


def _shared_blocks(prefix: CachedPrefix, hot: Sequence[HotPrefix]) -> int:
    """How many leading blocks it shares with another prefix that is still in use."""
    wanted = [
        other.demand.prefix
        for other in hot
        if other.demand.per_s >= KEEP_PER_S and other.demand.prefix.root == prefix.root
    ]
    return max((_num_common(prefix.block_keys, other.block_keys) for other in wanted), default=0)


def _num_common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    pairs = zip(one, other, strict=False)
    differs = (index for index, (mine, theirs) in enumerate(pairs) if mine != theirs)
    return next(differs, min(len(one), len(other)))
