"""Parts that are being written, and parts that wait for them.

A part may be written before its base is. Then it waits, and becomes present or is lost together
with its base (`kvmanager.pool.pool`, rules 1 and 3). Knows neither the order of keys nor eviction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvmanager.pool.nodes import Filling, Part
from kvmanager.pool.parts import PartBooks
from kvmanager.pool.records import BlockPart, Tier
from kvmanager.transfers.blocks import Run


class Fills:
    """The open fills of one pool, by id."""

    def __init__(self, books: PartBooks) -> None:
        self.unwritten: dict[int, dict[BlockPart, Filling]] = {}
        """For each fill, the parts that it must still commit or abort."""
        self.waiting: dict[bytes, list[Part]] = {}
        """Parts that were filled while their base was being filled, by the key of the base's block.
        Some of them may be over already.
        """
        self.num_blocks = 0
        """Arena blocks of parts that are not present yet, and so cannot be evicted."""
        self._books = books

    def start(
        self, fill_id: int, parts: Mapping[BlockPart, Part], runs: Sequence[tuple[Run, ...]]
    ) -> None:
        """Open a fill of these parts, bases first. Each part is written into its runs."""
        fill = self.unwritten[fill_id] = {}
        for (at, part), piece in zip(parts.items(), runs, strict=True):
            fill[at] = part.filling = Filling(part, piece)
            self.num_blocks += part.num_blocks
            if not part.is_kv:
                part.node.num_needs += 1
            base = part.node.base(part.number)
            if base is not None and not base.is_present:
                self.waiting.setdefault(base.node.key, []).append(part)

    def commit(self, fill_id: int, at: BlockPart, now_s: float) -> bool:
        """Note that the part is written. Returns whether it is, or will be, present."""
        filling = self.unwritten[fill_id].pop(at)
        part = filling.part
        # The prefix was lost meanwhile; only now does nobody write here any more (doomed, rule 3).
        if part is None:
            self._free(filling)
            return False
        base = part.node.base(part.number)
        if base is not None and not base.is_present:
            filling.is_written = True
        else:
            self._settle(part, now_s)
        return True

    def abort(self, fill_id: int) -> None:
        """End the fill and free the parts that are not committed."""
        for filling in self.unwritten.pop(fill_id, {}).values():
            part, filling.part = filling.part, None
            self._free(filling)
            if part is not None:
                part.filling = None
                self._came_to_nothing(part)

    def _settle(self, part: Part, now_s: float) -> None:
        """Make the part present, whose bytes and base are there, and the parts that waited for
        it.
        """
        # A list and no recursion: as many blocks as a long prompt has may wait in a chain.
        settled = [part]
        while settled:
            part = settled.pop()
            assert part.filling is not None
            runs, part.filling = part.filling.runs, None
            self.num_blocks -= part.num_blocks
            self._books.unneeded_by(part)
            part.node.last_used_s = max(part.node.last_used_s, now_s)
            self._books.arrive(part, Tier.ARENA, runs)
            if part.is_kv:
                settled += [
                    each
                    for each in self.waiting.pop(part.node.key, ())
                    if each.filling is not None and each.filling.is_written
                ]

    def _came_to_nothing(self, part: Part) -> None:
        """The part's filling has failed. Unless it is on SSD, parts that wait for it fail too."""
        self._books.unneeded_by(part)
        if part.is_present:
            self._books.offer(part)
            return
        lost = [part]
        while lost:
            part = lost.pop()
            self._books.forget(part)
            for each in self.waiting.pop(part.node.key, ()) if part.is_kv else ():
                # A part on SSD has its base there too, so a part that waits here is not on SSD.
                if (filling := each.filling) is not None:
                    each.filling = filling.part = None
                    if filling.is_written:
                        self._free(filling)
                    self._books.unneeded_by(each)
                    lost.append(each)

    def _free(self, filling: Filling) -> None:
        self.num_blocks -= filling.num_blocks
        self._books.free(filling.runs)
