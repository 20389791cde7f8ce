"""The copies of cached parts on SSD: written in the background, read when a prompt needs them.

It does not know prompts or who asks. The threads of `SsdStore` read and write files; the pool's
records change only on the event loop. Without an SSD the methods do nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

from kvmanager.agent.cache.part_bytes import PartBytes, PartId
from kvmanager.agent.transfer_io import now_s
from kvmanager.hashing import KEY_BYTES
from kvmanager.pool.records import BlockPart, PoolChange, Slot, Spill, Tier
from kvmanager.pool.shape import CacheShape, PartKind
from kvmanager.pool.ssd import SsdEntry, SsdStore
from transport.tasks import start_task

MAX_SPILLING: Final = 32
FULL_FOR_S: Final = 60.0
"""How long a disk that was full is not filled any further."""
MAX_READING: Final = 64
"""Reads of one fetch that are under way: enough to keep the SSD busy, few enough to begin in one
turn of the event loop.
"""
FETCHED_PER_FILL: Final = 128
"""Parts that get memory in one turn of the event loop, which takes some 5 ms."""


class SsdCopies:
    """The copies of one pool's parts. Use it on one event loop."""

    def __init__(self, parts: PartBytes, ssd: SsdStore | None) -> None:
        self._parts = parts
        self._ssd = ssd
        self._entries: dict[PartId, SsdEntry] = {}
        self._fetching: dict[PartId, asyncio.Task[None]] = {}
        self._num_spilling = 0
        self._full_until_s = 0.0
        self._spilling: dict[PartId, int] = {}
        """The latest spill of each part that is being copied to SSD."""
        self._scanning = False
        self._dropping = False

    @property
    def is_used(self) -> bool:
        """Whether there is an SSD."""
        return self._ssd is not None

    def changed(self, change: PoolChange) -> None:
        """The pool has entered or dropped a copy on SSD: remember or remove its file."""
        part_id = change.key, change.part
        if change.stored:
            self._entries[part_id] = self._entry(change)
            return
        self._entries.pop(part_id, None)
        if self._ssd is not None:
            self._ssd.remove(*part_id)

    def _entry(self, change: PoolChange) -> SsdEntry:
        return SsdEntry(
            change.key,
            change.parent,
            change.index,
            change.part,
            change.shape.parts[change.part].nbytes,
            self._parts.checksums.get((change.key, change.part), 0),
            change.shape,
        )

    async def fetch(
        self, shape: CacheShape, keys: Sequence[bytes], parts: Iterable[BlockPart]
    ) -> None:
        """Bring those of these parts that are only on SSD into the arena, as far as it has room.

        The work goes on when the caller stops waiting.
        """
        if self._ssd is None:
            return
        absent = [p for p in parts if self._parts.pool.lookup(keys[p[0]], p[1]) is None]
        # Two prompts often need the same part: the second waits for the fetch of the first.
        tasks = {t for i, p in absent if (t := self._fetching.get((keys[i], p)))}
        mine = [(i, p) for i, p in absent if (keys[i], p) not in self._fetching]
        if mine:
            task = start_task(self._fetch(shape, keys, mine), "fetching from SSD")
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
        """Fetch these parts. Returns whether all of them are in the arena now."""
        pool = self._parts.pool
        fill = pool.reserve(shape, bytes(KEY_BYTES), 0, keys, parts, now_s())
        lost: list[PartId] = []
        try:
            async with contextlib.aclosing(self._read(shape, keys, fill.slots)) as reads:
                async for slot, is_read in reads:
                    if is_read:
                        await self._parts.seal(shape, keys, [slot])
                        pool.commit(fill.fill_id, slot.index, slot.part, now_s())
                        self._parts.use.ssd_reads += 1
                        continue
                    lost.append((keys[slot.index], slot.part))
                    if shape.parts[slot.part].kind is PartKind.KV:
                        return False  # KV of later blocks is of no use without this one
        finally:
            pool.abort(fill.fill_id)
            self._parts.forget(keys, fill.slots)
            # A closed store fails every read, which says nothing about the files.
            if lost and not self._parts.is_closed:
                self._parts.use.ssd_failures += len(lost)
                pool.ssd.lost(lost)
        return all(pool.lookup(keys[index], part) is not None for index, part in parts)

    async def _read(
        self, shape: CacheShape, keys: Sequence[bytes], slots: Sequence[Slot]
    ) -> AsyncGenerator[tuple[Slot, bool]]:
        """Read the slots whose parts are on SSD, in order. Yields whether each read succeeded.

        When the generator has ended or is closed, no thread writes into the slots any more.
        """
        assert self._ssd is not None
        reading: deque[tuple[Slot, asyncio.Future[bool | None]]] = deque()
        ids = ((slot, (keys[slot.index], slot.part)) for slot in slots)
        left = ((slot, self._entries[part_id]) for slot, part_id in ids if part_id in self._entries)
        try:
            while True:
                for slot, entry in itertools.islice(left, MAX_READING - len(reading)):
                    future = self._ssd.read(entry, self._parts.views(shape, slot.part, slot.runs))
                    reading.append((slot, asyncio.wrap_future(future)))
                if not reading:
                    return
                slot, read = reading[0]
                is_read = await read
                reading.popleft()
                yield slot, bool(is_read)
        finally:
            # The memory belongs to the store's threads until every read is over.
            await asyncio.gather(*(read for _, read in reading), return_exceptions=True)

    async def drop_lost(self) -> None:
        """Drop the parts that continue unreadable parts, in steps. A second call does nothing while
        one is running.
        """
        if self._dropping:
            return
        self._dropping = True
        try:
            while not self._parts.is_closed and self._parts.pool.has_lost:
                self._parts.pool.drop_lost()
                await asyncio.sleep(0)
        finally:
            self._dropping = False

    def spill(self) -> None:
        """Begin to copy parts to SSD that are worth it. Call a few times a second."""
        ssd = self._ssd
        if self._full_until_s and now_s() >= self._full_until_s:
            self._full_until_s = 0.0
            self._parts.pool.ssd.use_whole_limit()
        # `scan` could take a file that is being written now for a torn one, and remove it.
        if ssd is None or self._scanning or self._num_spilling >= MAX_SPILLING:
            return
        loop = asyncio.get_running_loop()
        for spill in self._parts.pool.ssd.choose(MAX_SPILLING - self._num_spilling):
            change = spill.change
            views = self._parts.views(change.shape, change.part, change.runs)
            future = ssd.write(self._entry(change), views)
            if future is None:
                self._parts.pool.ssd.not_stored(spill)
                continue
            self._spilling[change.key, change.part] = spill.spill_id
            self._num_spilling += 1
            future.add_done_callback(partial(_post, loop, self._spilled, spill))

    def _spilled(self, spill: Spill, is_written: bool | None) -> None:
        """`is_written` as the result of `SsdStore.write`."""
        self._num_spilling -= 1
        if self._parts.is_closed:
            return
        key, part = spill.change.key, spill.change.part
        if is_written:
            self._parts.use.ssd_writes += 1
            is_kept = self._parts.pool.ssd.stored(spill)
        else:
            self._parts.use.ssd_failures += 1
            if is_written is None:
                self._parts.pool.ssd.not_stored(spill)
            else:
                self._full_until_s = now_s() + FULL_FOR_S
                self._parts.pool.ssd.no_room(spill)
            is_kept = False
        is_latest = self._spilling[key, part] == spill.spill_id
        if is_latest:
            del self._spilling[key, part]
        # A later spill of the part writes the same file, so only the latest one may remove it.
        if self._ssd is not None and is_latest and not is_kept and (key, part) not in self._entries:
            self._ssd.remove(key, part)
        if is_written:
            self.spill()  # at once, or the clock would limit how many are copied in a second

    async def scan(self) -> list[SsdEntry]:
        """The files that the former agent left, in the order in which they must be restored."""
        if self._ssd is None:
            return []
        self._scanning = True
        try:
            return await self._parts.run(self._ssd.scan)
        finally:
            self._scanning = False

    def restore(self, entry: SsdEntry) -> None:
        """Enter a file of the former agent into the pool. Remove it if the pool has no place for
        it.
        """
        key, parent, index, part = entry.key, entry.parent, entry.index, entry.part
        if self._ssd is None or (key, part) in self._entries:
            return  # the part was copied again meanwhile
        change = PoolChange(True, Tier.SSD, key, parent, index, part, entry.shape, ())
        if not self._parts.pool.restore(change, now_s()):
            self._ssd.remove(key, part)

    async def stop(self) -> None:
        """Close the SSD. Nothing is read or written afterwards."""
        if self._ssd is not None:
            await asyncio.to_thread(self._ssd.close)


def _post(
    loop: asyncio.AbstractEventLoop,
    function: Callable[[Spill, bool | None], None],
    spill: Spill,
    done: Future[bool | None],
) -> None:
    # RuntimeError: the loop is closed, and the cache has ended with it.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, spill, done.result())
