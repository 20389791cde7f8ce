"""Drops SSD copies that cannot be read, and what cannot stay without them, a few at a time.

The bytes of a lost copy are gone, but its place in the books stays until nobody uses it: then no
chain has a hole. Until that time the copy is condemned, and so is all that cannot stay when it goes
(`Part.goes_with`): copies on SSD above it, and where a block has no sound copy left, every copy
above it. What arrives above a condemned copy later is condemned on arrival (`PartBooks.arrive`).

`PartBooks.to_purge` has the parts to look at: those that were condemned since, and those whose
condemned copy may go now. Each look costs the children of one block, so that a purge of any size
can be carried out in steps. Leaves go first, since a base may go only when nothing stands on it.
"""

from __future__ import annotations

from typing import Final

from kvmanager.pool.nodes import Part
from kvmanager.pool.parts import PartBooks
from kvmanager.pool.records import Tier

MAX_LOST_PER_STEP: Final = 128
"""Parts that one step looks at: a listener may take 20 us for each."""


def drop_condemned(books: PartBooks) -> None:
    """Take one step: look at a few parts and drop the condemned copies that may go."""
    limit = MAX_LOST_PER_STEP
    while books.to_purge and limit > 0:
        part = books.to_purge.pop()
        for tier in (Tier.SSD, Tier.ARENA):
            if part.is_condemned(tier) and books.may_leave(part, tier):
                books.leave(part, tier)
        limit -= 1
        if part.condemned:
            condemn_above(books, part)
            if books.keeps_arena:
                books.purge_later.append(part)


def condemn_above(books: PartBooks, part: Part) -> None:
    """Condemn what stands on the part and cannot stay."""
    if not part.is_kv:
        return
    above = [other for other in part.node.parts[1:] if other is not None]
    above += [child.kv for child in part.node.children() if child.kv is not None]
    for each in above:
        for tier in Tier:
            if each.goes_with(part, tier):
                books.condemn(each, tier)
