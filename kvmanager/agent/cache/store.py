"""The bytes of cached parts: their checksums, the journal of them, and their copies on SSD.

It does not know who asks for a part or fills it. Everything slow runs on threads; the pool's books
change on the event loop only. Without a journal and an SSD nothing is checked and nothing waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from kvmanager.agent.transfer_io import now_s
from kvmanager.arena import Arena
from kvmanager.hashing import KEY_BYTES
from kvmanager.pool.index import PoolIndex
from kvmanager.pool.index_records import Dropped, Stored, part_checksum
from kvmanager.pool.pool import HybridPool
from kvmanager.pool.records import BlockPart, PoolChange, Slot, Spill, Tier
from kvmanager.pool.shape import CacheShape, PartKind
from kvmanager.pool.ssd import SsdEntry, SsdStore
from kvmanager.transfers.blocks import BlockAllocator, Run

logger = logging.getLogger("prfaas.kvmanager.agent")

NUM_THREADS: Final = 2
MAX_SPILLING: Final = 32
MAX_READING: Final = 64
"""Parts of one fetch whose reads are begun: enough for the SSD, few enough to begin at once."""
FETCHED_PER_FILL: Final = 128
"""Parts that are given memory in one turn of the event loop: some 5 ms."""
RESTORE_BATCH: Final = 64

_PartId = tuple[bytes, int]
ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class StoreUse:
    """Counters of what went to and came from SSD, in parts, and of bytes that were found wrong."""

    ssd_reads: int = 0
    ssd_writes: int = 0
    ssd_failures: int = 0
    wrong_parts: int = 0


class PartStore:
    """The parts' bytes, checksums and files. Use it on one event loop, after `attach`."""

    def __init__(
        self, arena: Arena, index: PoolIndex | None = None, ssd: SsdStore | None = None
    ) -> None:
        self.use = StoreUse()
        self._arena = arena
        self._index = index
        self._ssd = ssd
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prfaas-cache")
        self._pool: HybridPool | None = None
        self._checksums: dict[_PartId, int] = {}
        self._ended: dict[_PartId, None] = {}
        """What was filled: its checksum may not be needed any more."""
        self._on_ssd: dict[_PartId, SsdEntry] = {}
        self._fetching: dict[_PartId, asyncio.Task[None]] = {}
        self._num_spilling = 0
        self._spilling: dict[_PartId, int] = {}
        """The latest spill of each part that is being copied to SSD."""
        self._restoring = False
        self._scanning = False
        self._dropping = False
        self._closed = False

    def attach(self, pool: HybridPool) -> None:
        """The pool whose parts these are."""
        self._pool = pool

    @property
    def has_slow_tier(self) -> bool:
        return self._ssd is not None

    @property
    def checks(self) -> bool:
        """Whether checksums are needed before a part is committed."""
        return self._index is not None or self._ssd is not None

    def views(self, shape: CacheShape, part: int, runs: Sequence[Run]) -> list[memoryview]:
        """The arena memory of a part."""
        nbytes = shape.parts[part].nbytes
        return self._arena.view(runs, nbytes).views(0, nbytes)

    # ---- what the pool says

    def part_changed(self, change: PoolChange) -> None:
        """Journal a change of the arena, remember or remove a file of the SSD."""
        part_id = change.key, change.part
        if change.tier is Tier.SSD:
            self._ssd_changed(part_id, change)
        elif not change.stored:
            self._checksums.pop(part_id, None)
            if self._index is not None:
                self._index.append(Dropped(change.key, change.part))
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
                    self._checksums[part_id],
                )
            )

    def _ssd_changed(self, part_id: _PartId, change: PoolChange) -> None:
        if change.stored:
            self._on_ssd[part_id] = self._entry(change)
            return
        self._on_ssd.pop(part_id, None)
        if self._ssd is not None:
            self._ssd.remove(change.key, change.part)

    def _entry(self, change: PoolChange) -> SsdEntry:
        return SsdEntry(
            change.key,
            change.parent,
            change.index,
            change.part,
            change.shape.parts[change.part].nbytes,
            self._checksums.get((change.key, change.part), 0),
            change.shape,
        )

    # ---- checksums

    async def seal(self, shape: CacheShape, keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        """Take the checksums of parts that are written to the last byte, before their commit."""
        if not self.checks:
            return
        sums = await self.run(self._sums, [(shape, slot.part, slot.runs) for slot in slots])
        for slot, checksum in zip(slots, sums, strict=True):
            self._checksums[keys[slot.index], slot.part] = checksum

    def forget(self, keys: Sequence[bytes], slots: Iterable[Slot]) -> None:
        """The fill of these is over: what of it does not enter the pool needs no checksum."""
        self._ended |= dict.fromkeys((keys[slot.index], slot.part) for slot in slots)
        self._drop_checksums()

    def _drop_checksums(self) -> None:
        """What waits for its base enters without another word, and needs its checksum then."""
        for part_id in [part for part in self._ended if not self._books.is_filling(*part)]:
            del self._ended[part_id]
            if self._books.lookup(*part_id) is None:
                self._checksums.pop(part_id, None)

    def _sums(self, parts: Iterable[tuple[CacheShape, int, Sequence[Run]]]) -> list[int]:
        return [part_checksum(self.views(*part)) for part in parts]

    # ---- SSD

    async def fetch(
        self, shape: CacheShape, keys: Sequence[bytes], parts: Iterable[BlockPart]
    ) -> None:
        """Bring what of these parts is on SSD only into the arena, as far as it has room.

        Goes on when the caller does not wait any longer.
        """
        if self._ssd is None:
            return
        absent = [p for p in parts if self._books.lookup(keys[p[0]], p[1]) is None]
        tasks = {t for i, p in absent if (t := self._fetching.get((keys[i], p)))}
        mine = [(i, p) for i, p in absent if (keys[i], p) not in self._fetching]
        if mine:
            task = asyncio.create_task(self._fetch(shape, keys, mine))
            tasks.add(task)
            for index, part in mine:
                self._fetching[keys[index], part] = task
        if tasks:
            await asyncio.wait(tasks)

    async def _fetch(
        self, shape: CacheShape, keys: Sequence[bytes], parts: Sequence[BlockPart]
    ) -> None:
        try:
            for start in range(0, len(parts), FETCHED_PER_FILL):
                some = parts[start : start + FETCHED_PER_FILL]
                if not await self._fetch_some(shape, keys, some):
                    return
        finally:
            for index, part in parts:
                self._fetching.pop((keys[index], part), None)

    async def _fetch_some(
        self, shape: CacheShape, keys: Sequence[bytes], parts: Sequence[BlockPart]
    ) -> bool:
        """Fetch these; whether all of them are in the arena then."""
        pool = self._books
        fill = pool.reserve(shape, bytes(KEY_BYTES), 0, keys, parts, now_s())
        lost: list[_PartId] = []
        try:
            async with contextlib.aclosing(self._read(shape, keys, fill.slots)) as reads:
                async for slot, is_read in reads:
                    if is_read:
                        await self.seal(shape, keys, [slot])
                        pool.commit(fill.fill_id, slot.index, slot.part, now_s())
                        self.use.ssd_reads += 1
                        continue
                    lost.append((keys[slot.index], slot.part))
                    if shape.parts[slot.part].kind is PartKind.KV:
                        return False  # the rest stands on it
        finally:
            pool.abort(fill.fill_id)
            self.forget(keys, fill.slots)
            if lost and not self._closed:  # a closed store reads nothing
                self.use.ssd_failures += len(lost)
                pool.ssd.lost(lost)
        return all(pool.lookup(keys[index], part) is not None for index, part in parts)

    async def _read(
        self, shape: CacheShape, keys: Sequence[bytes], slots: Sequence[Slot]
    ) -> AsyncGenerator[tuple[Slot, bool]]:
        """Read what of the slots is on SSD, in order; whether each part's bytes are there.

        At its end, or when it is closed, nobody writes into the slots any more.
        """
        assert self._ssd is not None
        reading: deque[tuple[Slot, asyncio.Future[bool]]] = deque()
        ids = ((slot, (keys[slot.index], slot.part)) for slot in slots)
        left = ((slot, self._on_ssd[part_id]) for slot, part_id in ids if part_id in self._on_ssd)
        try:
            while True:
                for slot, entry in itertools.islice(left, MAX_READING - len(reading)):
                    future = self._ssd.read(entry, self.views(shape, slot.part, slot.runs))
                    reading.append((slot, asyncio.wrap_future(future)))
                if not reading:
                    return
                slot, read = reading[0]
                is_read = await read
                reading.popleft()
                yield slot, is_read
        finally:
            # The memory belongs to the store's threads until every read is over.
            await asyncio.gather(*(read for _, read in reading), return_exceptions=True)

    async def drop_lost(self) -> None:
        """Drop what stands on parts that could not be read, in steps; one call at a time."""
        if self._dropping:
            return
        self._dropping = True
        try:
            while not self._closed and self._books.has_lost:
                self._books.drop_lost()
                await asyncio.sleep(0)  # others' turn
        finally:
            self._dropping = False

    def spill(self) -> None:
        """Begin to copy to SSD what is worth it. Call a few times a second."""
        ssd = self._ssd
        if ssd is None or self._scanning or self._num_spilling >= MAX_SPILLING:
            return  # a file that is written while they are listed could be taken for a torn one
        loop = asyncio.get_running_loop()
        for spill in self._books.ssd.choose(MAX_SPILLING - self._num_spilling):
            change = spill.change
            views = self.views(change.shape, change.part, change.runs)
            future = ssd.write(self._entry(change), views)
            if future is None:
                self._books.ssd.not_stored(spill)
                continue
            self._spilling[change.key, change.part] = spill.spill_id
            self._num_spilling += 1
            future.add_done_callback(partial(_post, loop, self._spilled, spill))

    def _spilled(self, spill: Spill, is_written: bool) -> None:
        self._num_spilling -= 1
        if self._closed:
            return
        key, part = spill.change.key, spill.change.part
        if is_written:
            self.use.ssd_writes += 1
            is_kept = self._books.ssd.stored(spill)
        else:
            self.use.ssd_failures += 1
            self._books.ssd.not_stored(spill)
            is_kept = False
        is_latest = self._spilling[key, part] == spill.spill_id
        if is_latest:
            del self._spilling[key, part]
        # Later attempts write the same file after this one: removing it would take theirs.
        if self._ssd is not None and is_latest and not is_kept and (key, part) not in self._on_ssd:
            self._ssd.remove(key, part)

    # ---- the former life

    async def restore(
        self,
        stored: Sequence[Stored],
        allocator: BlockAllocator,
        on_left: Callable[[Sequence[Run]], object] = lambda _runs: None,
    ) -> None:
        """Enter what the SSD and the index have, in restore order; what is wrong is dropped.

        The blocks of `stored` are taken and are given back here, each just before its part enters.
        `on_left` is told at once which of them are free now since their part did not enter. Every
        part's checksum is compared before, at the speed of memory.
        """
        files = await self._scan()
        everything: list[Stored | SsdEntry] = [*files, *stored]
        for start in range(0, len(everything), RESTORE_BATCH):
            if self._closed:
                return  # the journal still has the rest
            batch = everything[start : start + RESTORE_BATCH]
            right = await self.run(self._are_right, batch)
            for record, is_right in zip(batch, right, strict=True):
                if isinstance(record, SsdEntry):
                    self._restore_file(record)
                else:
                    self._restore_part(record, is_right, allocator)
                    if self._books.lookup(record.key, record.part) != record.runs:
                        on_left(record.runs)
        if everything:
            logger.info("%d cached parts are back, %d wrong", len(everything), self.use.wrong_parts)

    async def _scan(self) -> list[SsdEntry]:
        if self._ssd is None:
            return []
        self._scanning = True
        try:
            return await self.run(self._ssd.scan)
        finally:
            self._scanning = False

    def _are_right(self, records: Sequence[Stored | SsdEntry]) -> list[bool]:
        def is_right(record: Stored | SsdEntry) -> bool:
            if isinstance(record, SsdEntry):
                return True  # verified whenever it is read
            shape = self._journal.shape(record.shape_id)
            return part_checksum(self.views(shape, record.part, record.runs)) == record.checksum

        return [is_right(record) for record in records]

    def _restore_part(self, record: Stored, is_right: bool, allocator: BlockAllocator) -> None:
        allocator.free(record.runs)
        part_id = record.key, record.part
        if not is_right:
            self.use.wrong_parts += 1
            logger.warning("cached part %s.%d is damaged: dropped", record.key.hex(), record.part)
        elif part_id not in self._checksums:  # else it is being stored anew
            self._checksums[part_id] = record.checksum
            shape = self._journal.shape(record.shape_id)
            if not self._restored(_change(record, Tier.ARENA, shape, record.runs)):
                del self._checksums[part_id]
        if self._books.lookup(*part_id) is None:
            self._journal.append(Dropped(*part_id))

    def _restore_file(self, entry: SsdEntry) -> None:
        is_known = (entry.key, entry.part) in self._on_ssd  # copied there again meanwhile
        if is_known or self._ssd is None:
            return
        if not self._restored(_change(entry, Tier.SSD, entry.shape, ())):
            self._ssd.remove(entry.key, entry.part)

    def _restored(self, change: PoolChange) -> bool:
        self._restoring = True
        try:
            return self._books.restore(change, now_s())
        finally:
            self._restoring = False

    # ---- shell

    def flush(self) -> None:
        """Hand the journal to the kernel. Call a few times a second."""
        self._drop_checksums()
        if self._index is not None:
            self._index.flush()

    async def stop(self) -> None:
        """Begin nothing any more, and close the SSD."""
        self._closed = True
        if self._ssd is not None:
            await asyncio.to_thread(self._ssd.close)

    def close(self) -> None:
        """Call it after `stop`, when nobody waits. The index's owner closes the index."""
        self.flush()
        self._threads.shutdown()

    async def run(self, work: Callable[..., ResultT], *arguments: object) -> ResultT:
        """The result of `work` on one of the store's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    @property
    def _books(self) -> HybridPool:
        assert self._pool is not None, "attach() comes first"
        return self._pool

    @property
    def _journal(self) -> PoolIndex:
        assert self._index is not None, "there is no index"
        return self._index


def _post(
    loop: asyncio.AbstractEventLoop,
    function: Callable[[Spill, bool], None],
    spill: Spill,
    done: Future[bool],
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is gone, and the cache with it
        loop.call_soon_threadsafe(function, spill, done.result())


def _change(
    placed: Stored | SsdEntry, tier: Tier, shape: CacheShape, runs: tuple[Run, ...]
) -> PoolChange:
    return PoolChange(
        stored=True,
        tier=tier,
        key=placed.key,
        parent=placed.parent,
        index=placed.index,
        part=placed.part,
        shape=shape,
        runs=runs,
    )
