"""Drops everything that stands on one block's KV, from the leaves down.

Needed where a copy turns out to be worthless. Goes through all blocks of a pool to find what stands
on what, since nodes have links to the block before only.
"""

from __future__ import annotations

from kvmanager.pool.nodes import Node, Part
from kvmanager.pool.parts import PartBooks
from kvmanager.pool.records import Tier


def drop_above(books: PartBooks, kv: Part, tier: Tier) -> None:
    """Drop what must not stay when the copy of `kv` in `tier` goes, except what is in use.

    With its last copy that is everything above it; with its SSD copy, the SSD copies above it, and
    all above a block whose KV is on SSD alone.
    """
    other = Tier.SSD if tier is Tier.ARENA else Tier.ARENA
    if tier is Tier.ARENA and kv.is_in(other):
        return
    lost = set() if kv.is_in(other) else {kv.node.key}
    above = _above(books, kv.node)
    for node in above:
        below = node.kv
        if node.parent in lost or (below is not None and not below.runs):
            lost.add(node.key)
    for node in reversed([kv.node, *above]):
        tiers = tuple(Tier) if node.key in lost else (Tier.SSD,)
        for part in reversed(node.parts):
            for place in tiers if part is not kv else ():
                if part is not None and books.may_leave(part, place):
                    books.leave(part, place)


def _above(books: PartBooks, node: Node) -> list[Node]:
    """All blocks that continue this one, each after the one that it continues."""
    following: dict[bytes, list[Node]] = {}
    for each in books.nodes.values():
        following.setdefault(each.parent, []).append(each)
    above = list(following.get(node.key, ()))
    for each in above:
        above += following.get(each.key, ())
    return above
