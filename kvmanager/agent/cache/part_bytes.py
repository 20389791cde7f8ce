"""The arena bytes of cached parts, and their checksums.

It does not know where else a part is kept, nor who asks for it or fills it. Threads read many
bytes; the pool's records change only on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from kvmanager.arena import Arena
from kvmanager.pool.index_records import part_checksum
from kvmanager.pool.pool import HybridPool
from kvmanager.pool.records import Slot
from kvmanager.pool.shape import CacheShape
from kvmanager.transfers.blocks import Run

NUM_THREADS: Final = 2

PartId = tuple[bytes, int]
"""The key of a block, and the number of one of its parts."""
ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class StoreUse:
    """Counters, in parts: written to SSD, read from it, failed, and found damaged."""

    ssd_reads: int = 0
    ssd_writes: int = 0
    ssd_failures: int = 0
    wrong_parts: int = 0


class PartBytes:
    """The bytes of one pool's parts. Use it on one event loop, after `attach`."""

    def __init__(self, arena: Arena, *, checks: bool) -> None:
        self.checks = checks
        """Whether checksums are needed before a part is committed."""
        self.checksums: dict[PartId, int] = {}
        self.use = StoreUse()
        self.is_closed = False
        """Whether no new work may begin."""
        self._arena = arena
        self._pool: HybridPool | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prfaas-cache")
        self._ended: dict[PartId, None] = {}
        """Parts of ended fills, whose checksums may not be needed any more."""

    def attach(self, pool: HybridPool) -> None:
        """The pool whose parts these are."""
        self._pool = pool

    @property
    def pool(self) -> HybridPool:
        assert self._pool is not None, "attach() comes first"
        return self._pool

    def views(self, shape: CacheShape, part: int, runs: Sequence[Run]) -> list[memoryview]:
        """The arena memory of a part."""
        nbytes = shape.parts[part].nbytes
        return self._arena.view(runs, nbytes).views(0, nbytes)

    async def seal(self, shape: CacheShape, keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        """Take the checksums of completely written parts, before their commit."""
        if not self.checks:
            return
        sums = await self.run(self._sums, [(shape, slot.part, slot.runs) for slot in slots])
        for slot, checksum in zip(slots, sums, strict=True):
            self.checksums[keys[slot.index], slot.part] = checksum

    def _sums(self, parts: Iterable[tuple[CacheShape, int, Sequence[Run]]]) -> list[int]:
        return [part_checksum(self.views(*part)) for part in parts]

    def forget(self, keys: Sequence[bytes], slots: Iterable[Slot]) -> None:
        """The fill of these slots is over: drop the checksums of parts that are not in the pool."""
        self._ended |= dict.fromkeys((keys[slot.index], slot.part) for slot in slots)
        self.drop_checksums()

    def drop_checksums(self) -> None:
        """Drop the checksums of ended fills whose parts did not enter the pool."""
        # A committed part whose parent is still being filled enters the pool later by itself, and
        # needs its checksum then.
        for part_id in [part for part in self._ended if not self.pool.is_filling(*part)]:
            del self._ended[part_id]
            if self.pool.lookup(*part_id) is None:
                self.checksums.pop(part_id, None)

    async def run(self, work: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Run `work` on a thread of this object and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def close(self) -> None:
        """End the threads. Call it when nobody waits for them."""
        self._threads.shutdown()
