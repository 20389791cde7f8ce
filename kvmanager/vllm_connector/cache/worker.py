"""The prefix cache in a vLLM worker: copies cached parts into the engine, and complete ones out.

One call copies all blocks of one layer, and gathers the bytes from the places of the parts. A store
that fails, or whose memory came over an older connection to the agent, writes nothing more and says
so. When a load fails, the engine computes the prompt.

Does not know which parts are worth keeping, nor when.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvmanager.agent.engines.client import EngineClient
from kvmanager.arena import Arena, ArenaSpace
from kvmanager.layout import KVLayout
from kvmanager.pool.shape import CacheShape, part_extents
from kvmanager.vllm_connector.arena_access import ArenaAccess, StaleArenaError
from kvmanager.vllm_connector.metadata import CachedParts, StoreStep
from kvmanager.vllm_connector.pages import LayerPages, PageCopier
from kvmanager.vllm_connector.stats import TransferStats

logger = logging.getLogger("prfaas.kvmanager.connector")


class JoinedSpace:
    """Ranges of several spaces as one run of bytes (implements `transport.ByteSpace`)."""

    def __init__(self, ranges: Sequence[tuple[ArenaSpace, int, int]]) -> None:
        self._ranges = ranges
        self._starts = [0, *accumulate(length for _, _, length in ranges)]
        self.nbytes = self._starts[-1]

    def views(self, offset: int, length: int) -> list[memoryview]:
        """The writable memory of a logical range; ValueError outside [0, nbytes)."""
        return [
            v for space, at, size in self._pieces(offset, length) for v in space.views(at, size)
        ]

    def _pieces(self, offset: int, length: int) -> Iterator[tuple[ArenaSpace, int, int]]:
        if offset < 0 or offset + length > self.nbytes:
            raise ValueError(f"range {offset}+{length} leaves the {self.nbytes} bytes")
        index = bisect_right(self._starts, offset) - 1
        while length > 0:
            space, start, size = self._ranges[index]
            skipped = offset - self._starts[index]
            taken = min(size - skipped, length)
            if taken:
                yield space, start + skipped, taken
            offset, length, index = offset + taken, length - taken, index + 1


@dataclass(slots=True)
class Writing:
    """One handle. `ended`: no copy begins any more; `closed`: the scheduler does not use it again.

    The agent is told that this rank is done with the handle only after its last copy.
    """

    num_copying: int = 0
    ended: bool = False
    closed: bool = False


@dataclass(frozen=True, slots=True)
class LayerCopy:
    """Pages of one layer that are copied together, and their bytes in the arena."""

    layer: str
    block_ids: list[int]
    space: JoinedSpace


class CacheWorker:
    """Called by `WorkerSide`. `pages` are the engine's by layer name. `stats` returns the counters
    of the running interval.
    """

    def __init__(
        self,
        layout: KVLayout,
        tp_rank: int,
        client: EngineClient,
        access: ArenaAccess,
        pages: Mapping[str, LayerPages],
        *,
        stats: Callable[[], TransferStats],
    ) -> None:
        self._layout = layout
        self._shape = CacheShape.of(layout)
        self._tp_rank = tp_rank
        self._stats = stats
        self._client = client
        self._access = access
        self._pages = pages
        self._lock = threading.Lock()
        self._connected_at_s = math.inf
        self._writing: dict[int, Writing] = {}
        # The thread that ends copies takes this lock, so it must not be held while a copier is
        # called, whose `drain` waits for that thread.
        self._writing_lock = threading.Lock()

    def on_connected(self) -> None:
        with self._lock:
            self._connected_at_s = time.monotonic()

    def on_disconnected(self) -> None:
        """Wait until nothing writes into the arena, whose memory the agent may soon use again."""
        with self._lock:
            self._connected_at_s = math.inf
            self._access.drain()

    def store(self, steps: Sequence[StoreStep]) -> None:
        """Copy the parts of these steps. The agent is told when the copies have ended."""
        for step in steps:
            try:
                with self._lock:
                    self._store(step)
            except Exception as error:
                # The engine must go on whatever happens to one handle.
                level = logging.INFO if isinstance(error, StaleArenaError) else logging.ERROR
                logger.log(level, "storing under handle %d: %r", step.handle, error)
                self._stats().add_failed_cache_store()
                self._end(step)
            if step.is_last:
                self._close(step.handle)

    def _store(self, step: StoreStep) -> None:
        writing = self._writing.setdefault(step.handle, Writing())
        if writing.ended:
            return
        if not step.cached.parts:
            self._end(step)
            return
        arena, copier = self._open(step.cached)
        copies = list(self._copies(step.cached, arena))
        with self._writing_lock:
            writing.num_copying += 1
            writing.ended = step.is_last
        try:
            for copy in copies[:-1]:
                copier.store(self._pages[copy.layer], copy.block_ids, copy.space, 0, _nothing)
            # Copies end in the order in which they begin, so after the last one all have ended.
            last = copies[-1]
            pages = self._pages[last.layer]
            copier.store(
                pages, last.block_ids, last.space, 0, lambda error: self._copied(step, error)
            )
        except BaseException:
            # Copies that have begun still read the pages and write into the arena.
            copier.drain()
            with self._writing_lock:
                writing.num_copying -= 1
                writing.ended = False
            raise
        num_blocks = len({part.index for part in step.cached.parts})
        self._stats().add_cache_stored(sum(copy.space.nbytes for copy in copies), num_blocks)

    def _copied(self, step: StoreStep, error: BaseException | None) -> None:
        parts = [(part.index, part.part) for part in step.cached.parts]
        if error is not None:
            logger.error("storing under handle %d: %r", step.handle, error)
            self._stats().add_failed_cache_store()
            parts = []
        with self._writing_lock:
            writing = self._writing[step.handle]
            writing.num_copying -= 1
            writing.ended = writing.ended or error is not None
            is_last = writing.ended and not writing.num_copying
            self._forget(step.handle, writing)
        if parts or is_last:
            self._say(step, parts, is_last=is_last)

    def _end(self, step: StoreStep) -> None:
        """Begin no more copies under this handle, and tell the agent once none is under way."""
        with self._writing_lock:
            writing = self._writing[step.handle]
            is_new, writing.ended = not writing.ended, True
            is_over = not writing.num_copying
        if is_new and is_over:
            self._say(step, (), is_last=True)

    def _say(self, step: StoreStep, parts: Sequence[tuple[int, int]], *, is_last: bool) -> None:
        """Send `CacheWritten` to the agent that gave the memory, and to no agent after it."""
        arena = self._client.arena
        if arena is not None and arena.epoch == step.cached.arena_epoch:
            self._client.cache_written(step.handle, parts, is_last=is_last)

    def _close(self, handle: int) -> None:
        with self._writing_lock:
            writing = self._writing.get(handle)
            if writing is not None:
                writing.closed = True
                self._forget(handle, writing)

    def _forget(self, handle: int, writing: Writing) -> None:
        if writing.closed and writing.ended and not writing.num_copying:
            del self._writing[handle]

    def load(self, cached: CachedParts) -> None:
        """Copy cached parts into the engine's pages. Raises `StaleArenaError` when the agent may
        have given their memory to others meanwhile, and ValueError for a page without a block.
        """
        arena, copier = self._open(cached)
        nbytes = 0
        for copy in self._copies(cached, arena):
            copier.load(self._pages[copy.layer], copy.block_ids, copy.space, 0)
            nbytes += copy.space.nbytes
        # Checked again: if the connection broke meanwhile, the bytes may be another part's.
        self._check_connection(cached)
        self._stats().add_cache_loaded(nbytes, len({part.index for part in cached.parts}))

    def _open(self, cached: CachedParts) -> tuple[Arena, PageCopier]:
        self._check_connection(cached)
        return self._access.open(cached.arena_epoch)

    def _check_connection(self, cached: CachedParts) -> None:
        if cached.asked_s < self._connected_at_s:
            raise StaleArenaError("the connection to the agent broke after it gave this memory")

    def _copies(self, cached: CachedParts, arena: Arena) -> Iterator[LayerCopy]:
        """The copies layer by layer, with all pages of all parts in order."""
        for part, shape in enumerate(self._shape.parts):
            pages = [item for item in cached.parts if item.part == part]
            if not pages:
                continue
            spaces = [arena.view(item.runs, shape.nbytes) for item in pages]
            for extent in part_extents(self._layout, self._shape, part, self._tp_rank):
                group = shape.groups.index(extent.group_index)
                page_bytes = extent.layer.page_bytes
                ranges = []
                for item, space in zip(pages, spaces, strict=True):
                    count = len(item.blocks[group])
                    skipped = extent.num_pages - count
                    ranges.append((space, extent.offset + skipped * page_bytes, count * page_bytes))
                block_ids = [block for item in pages for block in item.blocks[group]]
                # Block 0 is vLLM's null block, which stands for a page that the engine does not
                # keep.
                if 0 in block_ids:
                    raise ValueError(
                        f"the engine gave no block for a page that layer {extent.layer.name} needs"
                    )
                if block_ids:
                    yield LayerCopy(extent.layer.name, block_ids, JoinedSpace(ranges))


def _nothing(error: BaseException | None) -> None:
    """Do nothing: the agent is told of a handle's copies with the last one."""
