"""Serves a node's prefix cache on the agent's event loop.

It does not know sockets or the transfer table. The rules are in other modules: eviction in
`kvmanager.pool.pool`, requests of engines in `requests`, the journal and copies on SSD in `store`,
and what landings share with the cache in `landing_bases`.

When an agent took over the arena of the agent before it, it evicts nothing from it for `drain_s`: a
worker that has not yet noticed the change may still be reading cached blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Final

from kvmanager.agent.cache.node_feed import NodeFeed
from kvmanager.agent.cache.request_records import CacheEffect, Fetch, LacksWorkers, Seal, Tell
from kvmanager.agent.cache.requests import CacheRequests
from kvmanager.agent.cache.store import PartStore
from kvmanager.agent.config import AgentConfig
from kvmanager.agent.engines.protocol import AgentMessage, CacheMessage
from kvmanager.agent.kept_arena import KeptArena
from kvmanager.agent.messages import CacheStatus, ListCache, ListCacheReply
from kvmanager.agent.reports import cache_status, cached_prefix
from kvmanager.agent.transfer_io import now_s
from kvmanager.config_files.fields import GIB
from kvmanager.pool.eviction import eviction_policy
from kvmanager.pool.pool import HybridPool
from kvmanager.pool.records import BlockPart, Fill, PoolChange, Slot
from kvmanager.pool.shape import CacheShape
from kvmanager.pool.ssd import SsdStore
from kvmanager.transfers.blocks import Run
from kvmanager.transfers.records import EnginePeer
from transport.tasks import start_task

logger = logging.getLogger("prfaas.kvmanager.agent")

PARTS_PER_STEP: Final = 128
"""Parts that get memory, or are committed, in one turn of the event loop, which takes some 5 ms."""
MAX_LISTED: Final = 10_000


class AgentCache:
    """The prefix cache of one agent. `send` sends a message to an engine connection."""

    def __init__(
        self,
        config: AgentConfig,
        kept: KeptArena,
        send: Callable[[int, AgentMessage], None],
        feed: NodeFeed,
    ) -> None:
        """Followers of `feed` are told of changes. Raises SsdError when the SSD's directory cannot
        be used.
        """
        self.placement = config.placement
        self._feed = feed
        self._config = config
        self._kept = kept
        self._send = send
        ssd = None if config.ssd_dir is None else SsdStore(config.ssd_dir)
        self.store = PartStore(kept.arena, kept.index, ssd)
        self.pool = HybridPool(
            kept.allocator,
            config.block_bytes,
            policy=eviction_policy(config.eviction),
            listener=self._changed,
            max_blocks=config.num_cache_blocks,
            ssd_bytes=int((config.ssd_gib or 0) * GIB),
        )
        self.store.attach(self.pool)
        if kept.is_adopted:
            self.pool.keep_arena()
        self._settled_at_s = now_s() + config.drain_s
        self.requests = CacheRequests(
            self.pool,
            drain_s=config.drain_s,
            has_slow_tier=ssd is not None,
            on_end=self.store.parts.forget,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.num_promotions = 0
        """Landings of which parts were copied into the cache."""

    def start(self) -> None:
        """Begin to enter the parts that the former agent cached, in the background."""
        kept = self._kept
        # There may be many records, and nobody else needs them: they are freed with the task.
        stored, kept.stored = kept.stored, ()
        self.spawn(self.store.restore(stored, kept.allocator, self._left), "restoring")

    async def close(self) -> None:
        """End all work that is under way. Nothing touches the arena's memory afterwards."""
        self._closed = True
        await self.store.stop()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        self.store.close()

    @property
    def may_fill(self) -> bool:
        """Whether anybody may be given memory of the pool now."""
        return not self._closed

    async def make_room_in_steps(self, num_blocks: int) -> None:
        """Evict until the allocator has that many free blocks, as far as that is possible.

        Other tasks run between the steps and may take some of the room.
        """
        is_short = True
        while is_short:
            is_short = self.pool.evict_for(num_blocks)
            await asyncio.sleep(0)

    # ---- for landings and moves, which fill parts of the pool

    async def commit(
        self, shape: CacheShape, keys: Sequence[bytes], fill: Fill, slots: Sequence[Slot]
    ) -> None:
        """Check, commit and journal these completely written slots of the fill.

        The caller must call `end_fill` when nobody writes into the other slots any more.
        """
        for start in range(0, len(slots), PARTS_PER_STEP):
            step = slots[start : start + PARTS_PER_STEP]
            await self.store.parts.seal(shape, keys, step)
            for slot in step:
                self.pool.commit(fill.fill_id, slot.index, slot.part, now_s())
            await asyncio.sleep(0)

    def end_fill(self, keys: Sequence[bytes], fill: Fill) -> None:
        """Give back the slots that were not committed."""
        self.pool.abort(fill.fill_id)
        self.store.parts.forget(keys, fill.slots)

    async def fetch(
        self,
        shape: CacheShape,
        keys: Sequence[bytes],
        parts: Sequence[BlockPart],
        timeout_s: float,
    ) -> None:
        """Bring parts that are only on SSD into the arena. Returns after at most `timeout_s`."""
        if self.store.ssd.is_used:
            # The fetch goes on after the timeout, since a later prompt may need the parts as well.
            task = self.spawn(self.store.ssd.fetch(shape, keys, parts), "fetching from SSD")
            await asyncio.wait({task}, timeout=timeout_s)

    async def fetch_quickly(
        self, shape: CacheShape, keys: Sequence[bytes], parts: Sequence[BlockPart]
    ) -> None:
        await self.fetch(shape, keys, parts, self._config.ssd_wait_s)

    # ---- for engines

    def connect(self, peer: EnginePeer, shape: CacheShape) -> None:
        """An engine that uses the cache has connected."""
        self.requests.connect(peer, shape)

    def message(self, conn_id: int, message: CacheMessage) -> None:
        """Process a message of an engine. Raises ProtocolError."""
        self._perform(self.requests.message(conn_id, message, now_s()))

    def connection_lost(self, conn_id: int) -> None:
        """The connection is closed."""
        self.requests.connection_lost(conn_id, now_s())

    def process_gone(self, conn_id: int) -> None:
        """The process behind a lost connection has ended."""
        self.requests.process_gone(conn_id, now_s())

    def _perform(self, effects: Sequence[CacheEffect]) -> None:
        for effect in effects:
            match effect:
                case Tell(conn_id, message):
                    self._send(conn_id, message)
                case LacksWorkers(instance, num_ranks, world_size):
                    logger.warning(
                        "engine %s stores nothing in the prefix cache: workers of %d of its %d "
                        "ranks are connected. All processes of an engine need one name, the "
                        "`instance` of its kv_connector_extra_config",
                        instance,
                        num_ranks,
                        world_size,
                    )
                case Fetch():
                    self.spawn(self._serve_fetch(effect), "fetching for an engine")
                case Seal() if self.store.parts.checks:
                    self.spawn(self._seal(effect), "sealing what an engine wrote")
                case Seal(fill_key, _, _, slots):
                    parts = [(slot.index, slot.part) for slot in slots]
                    self.requests.sealed(fill_key, parts, now_s())

    async def _serve_fetch(self, effect: Fetch) -> None:
        try:
            await self.fetch_quickly(effect.shape, effect.keys, effect.parts)
        finally:
            # The engine waits for an answer even when the fetch failed.
            self._perform(self.requests.fetch_ended(effect.find, now_s()))

    async def _seal(self, effect: Seal) -> None:
        sealed: list[BlockPart] = []
        try:
            await self.store.parts.seal(effect.shape, effect.keys, effect.slots)
            sealed = [(slot.index, slot.part) for slot in effect.slots]
        finally:
            self.requests.sealed(effect.fill, sealed, now_s())

    # ---- for followers

    async def list_prefixes(self, request: ListCache) -> ListCacheReply:
        """The first prefixes in the order that is asked for."""
        limit = max(0, min(request.limit, MAX_LISTED))
        listing = self.pool.prefixes(request.order, limit, now_s())
        while True:
            try:
                next(listing)
            except StopIteration as done:
                prefixes, num_prefixes = done.value
                break
            await asyncio.sleep(0)
        return ListCacheReply([cached_prefix(prefix) for prefix in prefixes], num_prefixes)

    def engine_blocks_changed(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Tell followers which kinds of these blocks GPUs hold now, as (short key, kind bits)."""
        self._feed.engine_changed(blocks)

    def status(self) -> CacheStatus:
        """The cache's present numbers."""
        return cache_status(
            self.pool.status(),
            self.requests.use,
            self.store.parts.use,
            self.num_promotions,
            self._config.block_bytes,
        )

    def _left(self, runs: Sequence[Run]) -> None:
        """A part was not taken over. Until the drain time is over its blocks may still be read."""
        if self._settled_at_s:
            self._kept.set_more_apart(runs)

    # ---- time and changes

    def tick(self) -> None:
        """Call a few times a second."""
        if self._settled_at_s and now_s() >= self._settled_at_s:
            self._settled_at_s = 0.0
            self.pool.release_arena()
            self._kept.release_set_apart()
        self.requests.expire(now_s())
        self.store.ssd.spill()
        self.store.flush()
        if self.pool.has_lost:
            self.spawn(self.store.ssd.drop_lost(), "dropping lost parts")

    def _changed(self, change: PoolChange) -> None:
        self.store.part_changed(change)
        self._feed.part_changed(change)

    def spawn(self, work: Coroutine[None, None, None], doing: str) -> asyncio.Task[None]:
        """A failed task costs at most its own parts and is only logged: the cache must go on."""
        return start_task(work, doing, self._tasks)
