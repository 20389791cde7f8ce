"""Parts that are being written, and what waits for them.

A part whose base is being filled too may be written first: then it waits, and comes or is lost with
its base (`kvmanager.pool.pool`, rules 1 and 3). Knows neither keys' order nor eviction.
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
        """What each fill has still to commit or abort."""
        self.waiting: dict[bytes, list[Part]] = {}
        """What builds on a block whose KV is being filled and was filled too, by the block's key.

        Some of it may be over already."""
        self.num_blocks = 0
        """Arena blocks that some writer may be at."""
        self._books = books

    def start(
        self, fill_id: int, parts: Mapping[BlockPart, Part], runs: Sequence[tuple[Run, ...]]
    ) -> None:
        """Open a fill of these parts, bases first; each goes into its runs."""
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
        """Take the part as written; whether it is, or will be, present (`HybridPool.commit`)."""
        filling = self.unwritten[fill_id].pop(at)
        self.num_blocks -= filling.num_blocks
        part = filling.part
        if part is None:
            self._books.free(filling.runs)
            return False
        base = part.node.base(part.number)
        if base is not None and not base.is_present:
            filling.is_written = True
        else:
            self._settle(part, now_s)
        return True

    def abort(self, fill_id: int) -> None:
        """End the fill and free what is not committed (`HybridPool.abort`)."""
        for filling in self.unwritten.pop(fill_id, {}).values():
            part, filling.part = filling.part, None
            self.num_blocks -= filling.num_blocks
            self._books.free(filling.runs)
            if part is not None:
                part.filling = None
                self._came_to_nothing(part)

    def _settle(self, part: Part, now_s: float) -> None:
        """The part's bytes are there and so is its base: it is present, and what waited for it."""
        settled = [part]
        while settled:
            part = settled.pop()
            assert part.filling is not None
            runs, part.filling = part.filling.runs, None
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
        """The part is not filled any more; unless it is on SSD, nor is what waits for it."""
        self._books.unneeded_by(part)
        if part.is_present:
            self._books.offer(part)
            return
        lost = [part]
        while lost:
            part = lost.pop()
            self._books.forget(part)
            for each in self.waiting.pop(part.node.key, ()) if part.is_kv else ():
                # What waits for a base that is not here is not on SSD either.
                if (filling := each.filling) is not None:
                    each.filling = filling.part = None
                    if filling.is_written:
                        self._books.free(filling.runs)
                    self._books.unneeded_by(each)
                    lost.append(each)
