"""The prefix cache in a vLLM worker: copies cached parts into the engine, and complete ones out.

One call copies all blocks of one layer, to or from the places of the parts. A store
that fails, or whose memory came over an older connection to the agent, writes nothing more and says
so. When a load fails, the engine computes the prompt.

Does not know which parts are worth keeping, nor when.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvmanager.agent.engines.client import EngineClient
from kvmanager.arena import Arena, ArenaSpace
from kvmanager.layout import KVLayout
from kvmanager.pool.shape import BlockExtent, CacheShape, part_extents
from kvmanager.vllm_connector.arena_access import ArenaAccess, StaleArenaError
from kvmanager.vllm_connector.metadata import CachedParts, StoreStep
from kvmanager.vllm_connector.pages import NO_BLOCKS, Copy, Mark, PageCopier
from kvmanager.vllm_connector.sends import Units, units_held, units_sent
from kvmanager.vllm_connector.slabs import BlockTable, PartView, Slab
from kvmanager.vllm_connector.stats import TransferStats

logger = logging.getLogger("prfaas.kvmanager.connector")


@dataclass(slots=True)
class Writing:
    """One handle. `ended`: no copy begins any more; `closed`: the scheduler does not use it again.

    The agent is told that this rank is done with the handle only after its last copy.
    """

    num_copying: int = 0
    ended: bool = False
    closed: bool = False


class CacheWorker:
    """Called by `WorkerSide`. `views` show this worker's memory of each part, by layer. `stats`
    returns the counters of the running interval.
    """

    def __init__(
        self,
        layout: KVLayout,
        client: EngineClient,
        access: ArenaAccess,
        views: Mapping[str, tuple[PartView, ...]],
        *,
        stats: Callable[[], TransferStats],
    ) -> None:
        self._layout = layout
        self._shape = CacheShape.of(layout)
        self._stats = stats
        self._client = client
        self._access = access
        self._sent, self._held = units_sent(views), units_held(views)
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
            self._access.copier.drain()

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
        layers = list(self._layers(step.cached, arena, self._sent))
        with self._writing_lock:
            writing.num_copying += 1
            writing.ended = step.is_last
        copied = Copied()
        try:
            for layer in layers:
                reads = [read for read in layer.views if read[1]]
                copier.store(reads, layer.blocks, partial(copied.copies, layer, self._layout))
            # Copies end in the order in which they begin, so after this one of nothing all have
            # ended. A rank whose parts others store says so in the same way.
            copier.store((), NO_BLOCKS, lambda: [Copy((), partial(self._copied, step, copied))])
        except BaseException:
            # Copies that have begun still read the pages and write into the arena.
            copier.drain()
            with self._writing_lock:
                writing.num_copying -= 1
                writing.ended = False
            raise

    def _copied(self, step: StoreStep, copied: Copied, error: BaseException | None) -> None:
        error = error or copied.error
        parts = [(part.index, part.part) for part in step.cached.parts]
        if error is not None:
            logger.error("storing under handle %d: %r", step.handle, error)
            self._stats().add_failed_cache_store()
            parts = []
        else:
            self._stats().add_cache_stored(copied.nbytes, len({index for index, _ in parts}))
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

    def load(self, cached: CachedParts, behind: Mark = None) -> None:
        """Copy cached parts into the engine's pages; `behind` as in `PageCopier`. Raises
        `StaleArenaError` when the agent may have given their memory to others meanwhile, and
        ValueError for a page without a block.
        """
        arena, copier = self._open(cached)
        layers = list(self._layers(cached, arena, self._held))
        nbytes = 0

        def slabs() -> Iterator[Slab]:
            nonlocal nbytes
            for layer in layers:
                for slab in layer.slabs(self._layout):
                    nbytes += slab.nbytes
                    yield slab

        copier.load(slabs(), behind)
        # Checked again: if the connection broke meanwhile, the bytes may be another part's.
        self._check_connection(cached)
        self._stats().add_cache_loaded(nbytes, len({part.index for part in cached.parts}))

    def _open(self, cached: CachedParts) -> tuple[Arena, PageCopier]:
        self._check_connection(cached)
        return self._access.open(cached.arena_epoch)

    def _check_connection(self, cached: CachedParts) -> None:
        if cached.asked_s < self._connected_at_s:
            raise StaleArenaError("the connection to the agent broke after it gave this memory")

    def _layers(self, cached: CachedParts, arena: Arena, units: Units) -> Iterator[CachedLayer]:
        """All parts layer by layer. Raises ValueError for a page without a block."""
        for part, shape in enumerate(self._shape.parts):
            items = [item for item in cached.parts if item.part == part]
            if not items:
                continue
            spaces = [arena.view(item.runs, shape.nbytes) for item in items]
            tables: dict[int, BlockTable] = {}
            for extent in part_extents(self._layout, self._shape, part):
                if extent.layer.name not in units:
                    continue  # a layer of another pipeline stage
                group = shape.groups.index(extent.group_index)
                if group not in tables:
                    ids = [block for item in items for block in item.blocks[group]]
                    # Block 0 is vLLM's null block, which stands for a page that the engine does not
                    # keep.
                    if 0 in ids:
                        raise ValueError(
                            "the engine gave no block for a page that layer "
                            f"{extent.layer.name} needs"
                        )
                    tables[group] = BlockTable(ids)
                pages = [len(item.blocks[group]) for item in items]
                yield CachedLayer(
                    extent,
                    units[extent.layer.name],
                    tables[group],
                    list(zip(spaces, pages, strict=True)),
                )


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """One layer's share of cached parts. `spaces` are the parts' bytes in the order of the blocks,
    each with the number of its blocks.
    """

    extent: BlockExtent
    views: Sequence[tuple[PartView, range]]
    blocks: BlockTable
    spaces: Sequence[tuple[ArenaSpace, int]]

    def slabs(self, layout: KVLayout) -> Iterator[Slab]:
        """The slabs of all parts. The blocks are a part's last pages."""
        extent, before = self.extent, 0
        page_tokens = layout.groups[extent.group_index].tokens_per_block
        for space, num_pages in self.spaces:
            pages = self.blocks.blocks(before, before + num_pages)
            before += num_pages
            tokens = range(max(0, extent.tokens.stop - num_pages * page_tokens), extent.tokens.stop)
            for (view, units), part in zip(self.views, extent.parts, strict=True):
                items = part.part.items(tokens)
                slab = Slab.of(view, units, pages, items.start, items, part, space)
                if num_pages and slab.nbytes:
                    yield slab


@dataclass(slots=True)
class Copied:
    """What has come of the copies of one step, layer by layer."""

    nbytes: int = 0
    error: BaseException | None = None

    def copies(self, layer: CachedLayer, layout: KVLayout) -> Iterator[Copy]:
        """The copies of one layer, of which this counts."""
        yield Copy(self._counted(layer.slabs(layout)), self._done)

    def _counted(self, slabs: Iterator[Slab]) -> Iterator[Slab]:
        for slab in slabs:
            self.nbytes += slab.nbytes
            yield slab

    def _done(self, error: BaseException | None) -> None:
        self.error = self.error or error
