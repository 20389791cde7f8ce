"""The copies of parts on SSD: which must be made, which were made, which are lost.

It chooses and records copies and does not make them; it knows no files. `kvmanager.pool.parts`
decides which copies may go for a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvmanager.pool import listing, purge
from kvmanager.pool.nodes import Part
from kvmanager.pool.parts import PartBooks
from kvmanager.pool.records import Spill, Tier


class Spills:
    """The SSD's side of one pool. One thread only."""

    def __init__(self, books: PartBooks, ids: Iterator[int]) -> None:
        self._books = books
        self._ids = ids

    def choose(self, limit: int) -> list[Spill]:
        """At most `limit` parts that should be copied from the arena to SSD, bases first.

        Each is returned once, and the caller must then call `stored`, `not_stored` or `no_room` for
        it. Nothing keeps the part's memory meanwhile: if the part leaves the arena, its copy is not
        wanted any more (`spill_id`). A part that is older than all copies on a full SSD is not
        returned.
        """
        chosen: list[Part] = []
        to_spill = self._books.to_spill
        while to_spill and len(chosen) < limit:
            part, _ = to_spill.popitem(last=False)
            if not self._books.may_go_to_ssd(part):
                continue
            # The lowest base first: a copy on SSD cannot stay without its base there.
            for each in reversed(list(_without_ssd_copy(part))[-(limit - len(chosen)) :]):
                each.spill_id = next(self._ids)
                to_spill.pop(each, None)
                chosen.append(each)
            # If the limit cut the part off, it is queued again.
            self._books.wants_spill(part)
        return [Spill(part.spill_id, listing.change(part, Tier.ARENA)) for part in chosen]

    def stored(self, spill: Spill) -> bool:
        """Record a copy that is on SSD now, for which less recently used ones may go.

        False: it is not wanted, because the part has left the arena since `choose` (it may be
        back), because there is no room, or because its base is not on SSD.
        """
        found = self._part_of(spill)
        if found is None:
            return False
        base = found.node.base(found.number)
        # If the base is still being copied and that fails, `not_stored` condemns this copy too.
        is_based = base is None or base.on_ssd or base.is_spilling
        if not is_based or not self._books.make_ssd_room(found):
            self.not_stored(spill)
            return False
        self._books.arrive(found, Tier.SSD)
        return True

    def not_stored(self, spill: Spill) -> None:
        """The copy could not be written. Copies that build on it go too."""
        found = self._part_of(spill)
        if found is None:
            return
        found.spill_id = 0
        purge.condemn_above(self._books, found)
        purge.drop_condemned(self._books)

    def no_room(self, spill: Spill) -> None:
        """The copy could not be written, since the disk is full before its limit is reached. Less
        recently used copies give way, and the part is to be copied again if that helped.
        """
        books, found = self._books, self._part_of(spill)
        nbytes = spill.change.shape.parts[spill.change.part].nbytes
        # Copies that are being written need room beside those that are there, so that each failure
        # lowers the limit once more.
        books.ssd_room_bytes = max(0, min(books.ssd_room_bytes, books.held_ssd_bytes) - nbytes)
        self.not_stored(spill)
        if found is not None and books.make_ssd_room(found):
            books.wants_spill(found)

    def use_whole_limit(self) -> None:
        """The disk may have more room again."""
        self._books.ssd_room_bytes = self._books.ssd_bytes

    def lost(self, parts: Iterable[tuple[bytes, int]]) -> None:
        """Drop the SSD copies of these (key, part), which cannot be read, and what builds on them.

        Parts in use go when their use has ended. If there is much to drop, the caller must call
        `HybridPool.drop_lost` for the rest.
        """
        for key, number in parts:
            found = self._books.part(key, number)
            if found is not None:
                self._books.condemn(found, Tier.SSD)
        purge.drop_condemned(self._books)

    def _part_of(self, spill: Spill) -> Part | None:
        """The part, if this spill of it is still the present one."""
        found = self._books.part(spill.change.key, spill.change.part)
        return found if found is not None and found.spill_id == spill.spill_id else None


def _without_ssd_copy(part: Part) -> Iterator[Part]:
    """The part and its bases, downwards, as far as none is on SSD or on its way there."""
    each: Part | None = part
    while each is not None and not each.on_ssd and not each.is_spilling:
        yield each
        each = each.node.base(each.number)
