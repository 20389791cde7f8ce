"""Lists the contents of a pool, for people and for copies of its contents.

Reads nodes and changes nothing. Everything here visits all blocks; `prefixes` does so in steps.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final

from kvmanager.pool.nodes import Node, Part
from kvmanager.pool.records import ListedPrefix, Order, PoolChange, Tier
from kvmanager.pool.shape import PartKind

NODES_PER_STEP: Final = 2000
"""Blocks that one step of a listing looks at."""

Listing = Generator[None, None, tuple[list[ListedPrefix], int]]


def change(part: Part, tier: Tier, stored: bool = True) -> PoolChange:
    """The change that the part's copy in `tier` was stored, or dropped."""
    node = part.node
    return PoolChange(
        stored=stored,
        tier=tier,
        key=node.key,
        parent=node.parent,
        index=node.index,
        part=part.number,
        shape=node.geometry.shape,
        runs=part.runs if tier is Tier.ARENA else (),
    )


def changes(nodes: Iterable[Node]) -> list[PoolChange]:
    """All copies as if they had just been stored: SSD before the arena, and bases first."""
    ordered = sorted(nodes, key=lambda node: node.index)
    return [
        change(part, tier)
        for tier in (Tier.SSD, Tier.ARENA)
        for node in ordered
        for part in node.parts
        if part is not None and part.is_in(tier)
    ]


def prefixes(nodes: Mapping[bytes, Node], order: Order, limit: int, now_s: float) -> Listing:
    """The first `limit` prefixes in that order, and how many there are.

    It is a generator of steps of a few milliseconds each. The pool may change in between, so the
    result may miss recent changes.
    """
    everything = list(nodes.values())
    num_next: Counter[bytes] = Counter()
    for some in _in_steps(everything):
        num_next.update(node.parent for node in some if node.present)
        yield
    leaves: list[Node] = []
    for some in _in_steps(everything):
        leaves += [node for node in some if node.present and node.key not in num_next]
        yield
    first: list[tuple[float, int, Node]] = []
    num_visited = 0
    for number, leaf in enumerate(leaves):
        # The last block alone says the size, which spares the walk down each prefix.
        own = list(_own(nodes, num_next, leaf)) if order != "size" else [leaf]
        # The unique number decides between equal ranks, and keeps nodes from being compared.
        heapq.heappush(first, (_rank(order, own), -number, leaf))
        if len(first) > limit:
            heapq.heappop(first)
        num_visited += len(own)
        if num_visited >= NODES_PER_STEP:
            num_visited = 0
            yield
    found = []
    for _, _, leaf in sorted(first, reverse=True):
        # The pool may have evicted it between two steps.
        if leaf.present:
            found.append(_prefix(nodes, num_next, leaf, now_s))
        num_visited += leaf.index + 1
        if num_visited >= NODES_PER_STEP:
            num_visited = 0
            yield
    return found, len(leaves)


def _rank(order: Order, own: Sequence[Node]) -> float:
    """`own`: a prefix's own blocks, the last first."""
    match order:
        case "hits":
            return max(_hits(node) for node in own)
        case "size":
            return (own[0].index + 1) * own[0].geometry.shape.parts[0].nbytes
        case "recent":
            return max(node.last_used_s for node in own)


def _in_steps(nodes: Sequence[Node]) -> Iterator[Sequence[Node]]:
    for start in range(0, len(nodes), NODES_PER_STEP):
        yield nodes[start : start + NODES_PER_STEP]


def _prefix(
    nodes: Mapping[bytes, Node], num_next: Mapping[bytes, int], leaf: Node, now_s: float
) -> ListedPrefix:
    chain = list(_down(nodes, leaf))
    own = list(_own(nodes, num_next, leaf))
    nbytes: Counter[tuple[Tier, PartKind]] = Counter()
    masks = [0] * (leaf.index + 1)
    for node in chain:
        masks[node.index] = node.present
        for part in node.parts:
            for tier in Tier:
                if part is not None and part.is_in(tier):
                    nbytes[tier, part.kind] += part.nbytes
    block_tokens = leaf.geometry.shape.block_tokens
    return ListedPrefix(
        key=leaf.key,
        num_tokens=(leaf.index + 1) * block_tokens,
        nbytes=dict(nbytes),
        num_hits=max(_hits(node) for node in own),
        idle_s=now_s - max(node.last_used_s for node in own),
        branch_tokens=own[-1].index * block_tokens if len(own) < len(chain) else 0,
        resumable_tokens=leaf.geometry.num_usable_blocks(masks) * block_tokens,
        is_pinned=any(part is not None and part.num_pins for node in own for part in node.parts),
    )


def _down(nodes: Mapping[bytes, Node], leaf: Node) -> Iterator[Node]:
    """The prefix's blocks, last first, as far as they are known."""
    node: Node | None = leaf
    while node is not None:
        yield node
        node = nodes.get(node.parent) if node.index else None


def _own(nodes: Mapping[bytes, Node], num_next: Mapping[bytes, int], leaf: Node) -> Iterator[Node]:
    """The prefix's blocks that no other prefix has, the last one first."""
    for node in _down(nodes, leaf):
        if node is not leaf and num_next[node.key] > 1:
            return
        yield node


def _hits(node: Node) -> int:
    return max((part.num_hits for part in node.parts if part is not None), default=0)
