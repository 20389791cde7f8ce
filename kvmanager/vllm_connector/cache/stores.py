"""Stores requests' KVCache in the prefix cache, from asking for memory to the last part.

A handle begins with `CacheReserve`, and its answer names memory. As steps complete blocks, the
workers are told what to copy, and end the handle with the last part. A handle that they never heard
of is cancelled with `CacheCancel`. A complete part that is not in the engine's pages any more is
left out, and then misses only in the cache.

Does not know finding, loading or waiting. Its owner's lock guards it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from kvmanager.agent.engines.client import EngineClient
from kvmanager.agent.engines.protocol import MAX_CACHE_BLOCKS, CacheSlots, Slot
from kvmanager.pool.placement import StatePlacement
from kvmanager.pool.shape import CacheShape, PartKind
from kvmanager.vllm_connector.cache.plan import (
    BlockPart,
    CachePages,
    StepTables,
    Tables,
    prompt_boundaries,
    wanted_parts,
    window_reach,
)
from kvmanager.vllm_connector.cache.requests import Store, Tracked
from kvmanager.vllm_connector.metadata import CachedParts, PartPages, StoreStep

MAX_PARTS_PER_HANDLE: Final = 128
"""The agent gives this much memory, and evicts for it, in one turn of its event loop of some 5 ms.
"""


class CacheStores:
    """All handles of one engine under which memory was asked for.

    `placement` and `epoch` are the connected agent's. Without a placement nothing is asked for.
    """

    def __init__(
        self, shape: CacheShape, pages: CachePages, handles: Iterator[int], client: EngineClient
    ) -> None:
        self.placement: StatePlacement | None = None
        self.epoch = ""
        self._shape = shape
        self._pages = pages
        self._handles = handles
        self._has_only_kv = shape.parts[-1].kind is PartKind.KV
        self._reach = max(1, window_reach(shape))
        self._client = client
        self._stores: dict[int, Store] = {}
        self._ended: list[StoreStep] = []

    def reserve_prompt(self, tracked: Tracked) -> None:
        """Ask for memory for the parts that the prompt will compute and the agent lacks."""
        tracked.is_planned = True
        num_blocks = min(len(tracked.keys.keys), MAX_CACHE_BLOCKS)
        if self.placement is None or not num_blocks:
            return
        boundaries = prompt_boundaries(
            self.placement,
            self._shape.block_tokens,
            tracked.num_tokens,
            after_tokens=tracked.hit_tokens,
            branch_tokens=tracked.branch_tokens,
        )
        boundaries = [boundary for boundary in boundaries if boundary <= num_blocks]
        parts = wanted_parts(self._shape, range(tracked.kv_blocks, num_blocks), boundaries)
        for start in range(0, len(parts), MAX_PARTS_PER_HANDLE):
            self._reserve(tracked, parts[start : start + MAX_PARTS_PER_HANDLE])

    def reserve_answer(self, tracked: Tracked, end_tokens: int) -> None:
        """Ask for memory for the answer's blocks that are full at `end_tokens`.

        With asynchronous scheduling a step's tokens may not be known yet. A later step asks then.
        """
        token_ids = tracked.request.all_token_ids
        known_blocks = min(end_tokens, len(token_ids)) // self._shape.block_tokens
        if known_blocks <= tracked.asked_blocks:
            return
        tracked.keys.extend(token_ids)
        first, tracked.asked_blocks = tracked.asked_blocks, known_blocks
        if self.placement is None or known_blocks > MAX_CACHE_BLOCKS:
            return
        for block in range(first, known_blocks):
            is_wanted = self.placement.wants(self._end_tokens(block), is_end=True)
            parts = wanted_parts(self._shape, [block], [block + 1] if is_wanted else [])
            if parts:
                self._reserve(tracked, parts, self._replaced(tracked, block, self.placement))

    def _end_tokens(self, block: int) -> int:
        return (block + 1) * self._shape.block_tokens

    def _replaced(self, tracked: Tracked, block: int, placement: StatePlacement) -> bytes:
        """The key of the answer's last block whose windows and state no end needs any more. The
        windows of the present end reach back over the blocks in between.
        """
        if self._has_only_kv:
            return b""
        old = block - self._reach
        is_of_answer = old >= tracked.num_tokens // self._shape.block_tokens
        is_kept = placement.wants(self._end_tokens(old))
        return tracked.keys.keys[old] if is_of_answer and not is_kept else b""

    def _reserve(self, tracked: Tracked, parts: Sequence[BlockPart], replaces: bytes = b"") -> None:
        first, last = parts[0][0], parts[-1][0]
        store = Store(next(self._handles), first, time.monotonic())
        self._stores[store.handle] = store
        is_sent = self._client.cache_reserve(
            store.handle,
            tracked.keys.keys[first : last + 1],
            [(block - first, part) for block, part in parts],
            parent=tracked.keys.before(first),
            first_block=first,
            replaces=replaces,
        )
        if is_sent:
            tracked.stores.append(store)
        else:
            del self._stores[store.handle]

    def answered(self, slots: CacheSlots) -> None:
        """Take the agent's answer. Without any slot the handle is over."""
        store = self._stores.get(slots.handle)
        # None: the request ended before the answer came, and its handle was cancelled.
        if store is None:
            return
        store.slots = deque(sorted(slots.slots, key=lambda slot: slot[:2]))
        if not slots.slots:
            del self._stores[slots.handle]

    def complete(
        self,
        tracked: Tracked,
        end_tokens: int,
        tables: Callable[[], Tables | None],
        offered: Mapping[tuple[int, int], int],
    ) -> list[StoreStep]:
        """The stores that a step completes that ends at `end_tokens`. `tables` is called only if
        there are any.
        """
        full_blocks = end_tokens // self._shape.block_tokens
        ready = [
            store
            for store in tracked.stores
            if store.slots is not None
            and (not store.slots or store.first_block + store.slots[0][0] < full_blocks)
        ]
        current = tables() if ready else None
        if current is None:
            return []
        step = StepTables(current, end_tokens, tracked.state_ends, offered)
        steps = [self._complete(tracked, store, step) for store in ready]
        return [step for step in steps if step is not None]

    def _complete(self, tracked: Tracked, store: Store, step: StepTables) -> StoreStep | None:
        assert store.slots is not None
        parts = self._take_complete(store, store.slots, step)
        is_last = not store.slots
        if is_last:
            tracked.stores.remove(store)
            is_open = self._stores.pop(store.handle, None) is not None
            if is_open and not parts and not store.handed_over:
                self._client.cache_cancel(store.handle)
        if parts or (is_last and store.handed_over):
            return self._step(store, parts, is_last=is_last)
        return None

    def _take_complete(
        self, store: Store, slots: deque[Slot], step: StepTables
    ) -> tuple[PartPages, ...]:
        full_blocks = step.end_tokens // self._shape.block_tokens
        parts = []
        while slots and store.first_block + slots[0][0] < full_blocks:
            index, part, runs = slots.popleft()
            pages = self._pages.to_store(store.first_block + index, part, step)
            if pages is not None:
                parts.append(PartPages(index, part, tuple(runs), pages))
        return tuple(parts)

    def _step(self, store: Store, parts: tuple[PartPages, ...], *, is_last: bool) -> StoreStep:
        store.handed_over = True
        return StoreStep(store.handle, CachedParts(self.epoch, store.asked_s, parts), is_last)

    def end(self, tracked: Tracked) -> None:
        """Store nothing more of this request, and end its handles."""
        for store in tracked.stores:
            if self._stores.pop(store.handle, None) is None:
                continue
            if store.handed_over:
                self._ended.append(self._step(store, (), is_last=True))
            else:
                self._client.cache_cancel(store.handle)
        tracked.stores.clear()

    def take_ended(self) -> list[StoreStep]:
        """Take the last steps of handles that the workers know and that need no more copies."""
        ended, self._ended = self._ended, []
        return ended
