"""Connects landings with the prefix cache: what a landing need not bring, and what of it is kept.

A landing brings only what its node lacks. The cached KV of its prompt is pinned before the landing
is reserved, and stays until the landing's memory is freed. When the landing is complete, its parts
are copied into the pool. It does not know senders, engines, or how a landing gets its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmanager.agent.cache.promotion import LandedParts, copy_ranges
from kvmanager.agent.cache.service import PARTS_PER_STEP, AgentCache
from kvmanager.agent.messages import Runs
from kvmanager.agent.transfer_io import now_s
from kvmanager.arena import Arena
from kvmanager.layout import KVLayout
from kvmanager.pool.records import BlockPart
from kvmanager.pool.shape import CacheShape
from kvmanager.transfers.holds import PROMOTION, BlockHolds, Key, Kind
from kvmanager.transfers.records import LandingRecord


@dataclass(frozen=True, slots=True)
class LandingBase:
    """The cached prefix that a landing builds on, and the keys of its prompt.

    `runs` are the pinned places of the KV parts of the first `cached_tokens`, block by block.
    """

    layout: KVLayout
    shape: CacheShape
    root: bytes
    keys: tuple[bytes, ...]
    cached_tokens: int
    runs: list[Runs]
    pin_id: int | None


class LandingBases:
    """The bases of one agent's landings. Use it on one event loop."""

    def __init__(self, cache: AgentCache, arena: Arena) -> None:
        self._cache = cache
        self._arena = arena
        self._adopted: dict[bytes, LandingBase] = {}

    async def pin(
        self,
        layout: KVLayout,
        shape: CacheShape,
        num_tokens: int,
        root: bytes,
        keys: Sequence[bytes],
    ) -> LandingBase:
        """Pin the cached KV of a prompt whose KVCache is to land. `keys`: one for each full block.

        Parts that are only on SSD count if they can be read quickly. The caller must call `adopt`
        or `drop` afterwards.
        """
        if not shape.has_kv:
            return LandingBase(layout, shape, root, tuple(keys), 0, [], None)
        pool = self._cache.pool
        # A transfer must hold at least one token, so the last token's block is always sent.
        most = (num_tokens - 1) // shape.block_tokens
        match = pool.match(shape, keys)
        if match.kv_blocks > match.arena_kv_blocks:
            parts = [(index, 0) for index in range(min(match.kv_blocks, most))]
            await self._cache.fetch_quickly(shape, keys, parts)
        # Matched again: the pool may have changed while the SSD was read.
        num_blocks = min(pool.match(shape, keys).arena_kv_blocks, most)
        runs: list[Runs] = []
        pin_id = None
        if num_blocks:
            pin = pool.pin(shape, keys, [(index, 0) for index in range(num_blocks)], now_s())
            pin_id = pin.pin_id
            runs = [[(first, length) for first, length in slot.runs] for slot in pin.slots]
        cached_tokens = num_blocks * shape.block_tokens
        return LandingBase(layout, shape, root, tuple(keys), cached_tokens, runs, pin_id)

    def adopt(self, transfer_id: bytes, base: LandingBase) -> None:
        """Give the base to the landing. It is unpinned when the landing's memory is freed."""
        self._adopted[transfer_id] = base

    def runs(self, transfer_id: bytes) -> list[Runs]:
        """The places of what the landing builds on, block by block."""
        base = self._adopted.get(transfer_id)
        return [] if base is None else base.runs

    def drop(self, base: LandingBase) -> None:
        """Unpin the base of a landing that does not exist, or not any more."""
        if base.pin_id is not None:
            self._cache.pool.unpin(base.pin_id)

    def transfer_freed(self, key: Key) -> None:
        """The transfer's memory is free, so nobody reads a landing's base any more either."""
        kind, transfer_id = key
        base = self._adopted.pop(transfer_id, None) if kind is Kind.LANDING else None
        if base is not None:
            self.drop(base)

    def landed(self, landing: LandingRecord, holds: BlockHolds) -> None:
        """Begin to copy the whole blocks of a complete landing into the pool."""
        base = self._adopted.get(landing.spec.transfer_id)
        if base is None or not base.keys or not self._cache.may_fill:
            return
        # The engine may release the landing before the copy is over, so the copy holds it as well.
        holds.hold(landing.key, PROMOTION)
        self._cache.spawn(self._promote(landing, holds, base), "promoting a landing")

    async def _promote(self, landing: LandingRecord, holds: BlockHolds, base: LandingBase) -> None:
        """Copy the landing's whole blocks into the pool, as far as that has room."""
        spec = landing.spec
        landed = LandedParts(
            base.layout, base.shape, spec.num_tokens, base.cached_tokens, spec.window_step
        )
        # In the order of blocks: when the pool has no room left, the blocks copied so far are a
        # prefix that a prompt can resume from.
        parts = sorted(landed.parts())
        num_copied = 0
        try:
            for start in range(0, len(parts), PARTS_PER_STEP):
                if not self._cache.may_fill:
                    break
                step = parts[start : start + PARTS_PER_STEP]
                num_copied += await self._promote_some(landing, base, landed, step)
        finally:
            self._cache.num_promotions += bool(num_copied)
            holds.release(landing.key, PROMOTION)

    async def _promote_some(
        self,
        landing: LandingRecord,
        base: LandingBase,
        landed: LandedParts,
        parts: Sequence[BlockPart],
    ) -> int:
        """Copy these parts. Returns how many had room and were not cached yet."""
        cache = self._cache
        fill = cache.pool.reserve(base.shape, base.root, 0, base.keys, parts, now_s())
        if not fill.slots:
            return 0  # the pool opens no fill without slots, so there is none to end
        source = self._arena.view(landing.runs, landing.spec.nbytes)
        views = source.views(0, landing.spec.nbytes)

        def copy() -> None:
            for slot in fill.slots:
                target = cache.store.parts.views(base.shape, slot.part, slot.runs)
                copy_ranges(landed.ranges(slot.index, slot.part), views, target)

        try:
            await cache.store.parts.run(copy)
            await cache.commit(base.shape, base.keys, fill, fill.slots)
            return len(fill.slots)
        finally:
            cache.end_fill(base.keys, fill)
