"""Keeps a journal of cached parts, and copies of them on SSD.

With the journal the next agent can take the arena over (`restore`). It does not know who asks for a
part or fills it. Without a journal and an SSD it takes no checksums and never waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from kvmanager.agent.cache.part_bytes import PartBytes
from kvmanager.agent.cache.ssd_copies import SsdCopies
from kvmanager.agent.transfer_io import now_s
from kvmanager.arena import Arena
from kvmanager.pool.index import PoolIndex
from kvmanager.pool.index_records import Dropped, Stored, part_checksum
from kvmanager.pool.pool import HybridPool
from kvmanager.pool.records import PoolChange, Tier
from kvmanager.pool.shape import CacheShape
from kvmanager.pool.ssd import SsdEntry, SsdStore
from kvmanager.transfers.blocks import BlockAllocator, Run

logger = logging.getLogger("prfaas.kvmanager.agent")

RESTORE_BATCH: Final = 64


class PartStore:
    """The journal of one pool's parts, with their bytes and SSD copies. One event loop only."""

    def __init__(
        self, arena: Arena, index: PoolIndex | None = None, ssd: SsdStore | None = None
    ) -> None:
        self.parts = PartBytes(arena, checks=index is not None or ssd is not None)
        self.ssd = SsdCopies(self.parts, ssd)
        self._index = index
        self._restoring = False

    def attach(self, pool: HybridPool) -> None:
        """Set the pool whose parts these are. Call it before everything else."""
        self.parts.attach(pool)

    def part_changed(self, change: PoolChange) -> None:
        """Journal a change in the arena; remember or remove a file on SSD."""
        part_id = change.key, change.part
        if change.tier is Tier.SSD:
            self.ssd.changed(change)
        elif not change.stored:
            self.parts.checksums.pop(part_id, None)
            if self._index is not None:
                self._index.append(Dropped(*part_id))
        # The journal already has a part that is being restored from it.
        elif self._index is not None and not self._restoring:
            self._index.append(
                Stored(
                    change.key,
                    change.parent,
                    change.index,
                    change.part,
                    self._index.shape_id(change.shape),
                    change.runs,
                    change.shape.parts[change.part].nbytes,
                    self.parts.checksums[part_id],
                )
            )

    # ---- the former life

    async def restore(
        self,
        stored: Sequence[Stored],
        allocator: BlockAllocator,
        on_left: Callable[[Sequence[Run]], object] = lambda _runs: None,
    ) -> None:
        """Enter the parts of the SSD and of the journal into the pool, in the order that chains
        need. Damaged parts are dropped.

        The blocks of `stored` must be taken. They are given back here, each just before its part
        enters. `on_left` is called at once with blocks that are free now because their part did not
        enter. Every part's checksum is compared before, at the speed of memory.
        """
        files = await self.ssd.scan()
        everything: list[Stored | SsdEntry] = [*files, *stored]
        for start in range(0, len(everything), RESTORE_BATCH):
            if self.parts.is_closed:
                return  # the journal keeps the other parts for the next agent
            batch = everything[start : start + RESTORE_BATCH]
            right = await self.parts.run(self._are_right, batch)
            for record, is_right in zip(batch, right, strict=True):
                if isinstance(record, SsdEntry):
                    self.ssd.restore(record)
                else:
                    self._restore_part(record, is_right, allocator)
                    if self.parts.pool.lookup(record.key, record.part) != record.runs:
                        on_left(record.runs)
        if everything:
            num_wrong = self.parts.use.wrong_parts
            logger.info("%d cached parts are back, %d wrong", len(everything), num_wrong)

    def _are_right(self, records: Sequence[Stored | SsdEntry]) -> list[bool]:
        # A file's checksum is compared whenever the file is read.
        return [isinstance(each, SsdEntry) or self._is_right(each) for each in records]

    def _is_right(self, record: Stored) -> bool:
        shape = self._journal.shape(record.shape_id)
        views = self.parts.views(shape, record.part, record.runs)
        return part_checksum(views) == record.checksum

    def _restore_part(self, record: Stored, is_right: bool, allocator: BlockAllocator) -> None:
        allocator.free(record.runs)
        part_id = record.key, record.part
        if not is_right:
            self.parts.use.wrong_parts += 1
            logger.warning("cached part %s.%d is damaged: dropped", record.key.hex(), record.part)
        # A known checksum means that somebody stores the part again just now.
        elif part_id not in self.parts.checksums:
            self.parts.checksums[part_id] = record.checksum
            shape = self._journal.shape(record.shape_id)
            if not self._entered(record, shape):
                del self.parts.checksums[part_id]
        if self.parts.pool.lookup(*part_id) is None:
            self._journal.append(Dropped(*part_id))

    def _entered(self, record: Stored, shape: CacheShape) -> bool:
        key, parent, index, part = record.key, record.parent, record.index, record.part
        change = PoolChange(True, Tier.ARENA, key, parent, index, part, shape, record.runs)
        self._restoring = True
        try:
            return self.parts.pool.restore(change, now_s())
        finally:
            self._restoring = False

    # ---- shell

    def flush(self) -> None:
        """Write the journal to the kernel. Call a few times a second."""
        self.parts.drop_checksums()
        if self._index is not None:
            self._index.flush()

    async def stop(self) -> None:
        """Begin no new work, and close the SSD."""
        self.parts.is_closed = True
        await self.ssd.stop()

    def close(self) -> None:
        """End the threads. Call it after `stop`, when nobody waits for them. The owner of the index
        closes it.
        """
        self.flush()
        self.parts.close()

    @property
    def _journal(self) -> PoolIndex:
        assert self._index is not None, "there is no index"
        return self._index
