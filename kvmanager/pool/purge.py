"""Drops SSD copies that cannot be read, and the copies that cannot stay without them, in steps.

The bytes of a lost copy are gone, but its record stays until nobody uses it, so that no chain has a
hole. Until then the copy is condemned, and so are the copies that cannot stay without it
(`Part.goes_with`): copies on SSD that build on it, and, where a block has no sound copy left, every
copy that builds on it. A copy that arrives later on a condemned one is condemned on arrival
(`PartBooks.arrive`).

`PartBooks.to_purge` has the parts to check: newly condemned ones, and those whose condemned copy
may go now. A check costs the children of one block, so that a purge of any size can be done in
steps. Leaves go first, because a base may go only when nothing builds on it.
"""

from __future__ import annotations

from typing import Final

from kvmanager.pool.nodes import Part
from kvmanager.pool.parts import PartBooks
from kvmanager.pool.records import Tier

MAX_LOST_PER_STEP: Final = 128
"""Parts that one step checks; a listener may take 20 us for each."""


def drop_condemned(books: PartBooks) -> None:
    """Take one step: look at a few parts and drop the condemned copies that may go."""
    limit = MAX_LOST_PER_STEP
    while books.to_purge and limit > 0:
        # The last one: `condemn_above` appends what builds on a part and must go before it.
        part = books.to_purge.pop()
        for tier in (Tier.SSD, Tier.ARENA):
            if part.is_condemned(tier) and books.may_leave(part, tier):
                books.leave(part, tier)
        limit -= 1
        if part.condemned:
            condemn_above(books, part)
            # It may go only after `HybridPool.release_arena`, which queues it again.
            if books.keeps_arena:
                books.purge_later.append(part)


def condemn_above(books: PartBooks, part: Part) -> None:
    """Condemn the copies that build on the part and cannot stay."""
    if not part.is_kv:
        return
    above = [other for other in part.node.parts[1:] if other is not None]
    above += [child.kv for child in part.node.children() if child.kv is not None]
    for each in above:
        for tier in Tier:
            if each.goes_with(part, tier):
                books.condemn(each, tier)
