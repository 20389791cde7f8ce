"""The KVCache of a stand-in engine: which bytes it has, and what its node agent is told of them.

The KVCache of a token depends on all tokens before it and on the request's cache salt, so that
whatever is loaded can be compared with what should be there. `AgentSide` does for a request what
our connector does in vLLM. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from blake3 import blake3

from kvmanager.agent.engines.client import EngineClient
from kvmanager.agent.engines.protocol import (
    CacheFound,
    CacheSlots,
    EngineHello,
    Landed,
    OutboxOpened,
    Welcome,
)
from kvmanager.arena import Arena
from kvmanager.hashing import block_keys, root_key
from kvmanager.layout import KVGroup, KVKind, KVLayer, KVLayout, KVPart
from kvmanager.pool.shape import CacheShape, part_extents


def _layer(name: str, nbytes: int, tokens_per_item: int) -> KVLayer:
    return KVLayer(name, (KVPart("pages", 1, nbytes, "opaque", tokens_per_item),))


LAYOUT = KVLayout(
    model_id="stand-in",
    weights="files:0",
    config_digest="0",
    tp_size=1,
    groups=(
        KVGroup(KVKind.FULL, 16, (_layer("full.0", 4096, 16), _layer("full.1", 4096, 16))),
        KVGroup(KVKind.RECURRENT, 16, (_layer("state.0", 10_000, 0),)),
    ),
)
SHAPE = CacheShape.of(LAYOUT)
NAMESPACE = b"the stand-in's weights, layout".ljust(32, b".")
KV = 0
ANSWER_S = 30.0
MAX_OUTBOXES = 1024
"""Longest wait for an answer of the agent, seconds; a request then goes on without it."""
CHUNK_S = 0.02
"""Between two layers of a prefill, so that faults meet transfers on their way."""

logger = logging.getLogger("prfaas.soak.engine")


class Prompt:
    """One request's tokens, and the KVCache that they must have."""

    def __init__(self, token_ids: Sequence[int], salt: str) -> None:
        self.token_ids = token_ids
        self.root = root_key(NAMESPACE, tenant=salt)
        self.keys = block_keys(token_ids, SHAPE.block_tokens, self.root)

    def part(self, block: int, part: int) -> bytes:
        """A part of a full block, as the prefix cache has it."""
        return b"".join(
            content(self.keys[block], extent.layer) for extent in part_extents(LAYOUT, SHAPE, part)
        )

    def layers(self, num_tokens: int, cached_tokens: int) -> Iterator[tuple[int, bytes]]:
        """A transfer of the first `num_tokens`: (offset, bytes) of each layer."""
        for extent in LAYOUT.extents(num_tokens, cached_tokens):
            pages = (self._key_at(page, num_tokens) for page in extent.pages)
            yield extent.parts[0].offset, b"".join(content(key, extent.layer) for key in pages)

    def _key_at(self, page: int, num_tokens: int) -> bytes:
        """Names the tokens up to the end of `page`, or to `num_tokens` if that is within it."""
        first, end = page * SHAPE.block_tokens, (page + 1) * SHAPE.block_tokens
        if end <= num_tokens:
            return self.keys[page]
        before = self.keys[page - 1] if page else self.root
        return blake3(before + bytes(self.token_ids[first:num_tokens])).digest(16)


def content(key: bytes, layer: KVLayer) -> bytes:
    return blake3(key + layer.name.encode()).digest(layer.parts[0].item_bytes)


def read(arena: Arena, runs: Sequence[Sequence[int]], nbytes: int) -> bytes:
    space = arena.view([(first, count) for first, count in runs], nbytes)
    return b"".join(space.views(0, nbytes))


def write(
    arena: Arena, runs: Sequence[Sequence[int]], nbytes: int, offset: int, data: bytes
) -> None:
    space = arena.view([(first, count) for first, count in runs], nbytes)
    for view in space.views(offset, len(data)):
        view[:] = data[: len(view)]
        data = data[len(view) :]


class AgentSide:
    """The engine's two connections to its agent; its own methods belong to the event loop. Unless
    it `caches`, nothing goes into the node's prefix cache or comes out of it.
    """

    def __init__(self, socket: str, instance: str, model: str, *, caches: bool = True) -> None:
        self._loop = asyncio.get_running_loop()
        # A restarted engine has the name of the one before it, whose handles the agent may hold.
        self._handles = itertools.count(time.time_ns() // 1000)
        self._asked: dict[int | bytes, asyncio.Future[Any]] = {}
        self._filling: set[int] = set()
        self._outboxes: dict[int, OutboxOpened] = {}
        # Openings rise, and only the latest can still be begun here.
        self._failed: deque[int] = deque(maxlen=1024)
        layout = msgspec.structs.replace(LAYOUT, model_id=model).encode()
        self._caches = caches
        namespace = NAMESPACE if caches else b""
        hello = EngineHello(instance, "scheduler", os.getpid(), layout, namespace=namespace)
        self._scheduler = EngineClient(socket, hello)
        self._worker = EngineClient(socket, EngineHello(instance, "worker", os.getpid(), layout))

    def start(self) -> None:
        self._scheduler.start(self)
        self._worker.start(self)

    def close(self) -> None:
        self._worker.close()
        self._scheduler.close()

    # Events of the agent, on threads of the connections.

    def on_connected(self, welcome: Welcome, arena: Arena) -> None:
        logger.info("connected to the agent, epoch %s", welcome.arena_epoch)

    def on_disconnected(self) -> None:
        self._loop.call_soon_threadsafe(self._forget)

    def on_outbox_opened(self, opened: OutboxOpened) -> None:
        self._loop.call_soon_threadsafe(self._opened, opened)

    def on_landed(self, landed: Landed) -> None:
        self._loop.call_soon_threadsafe(self._landed, landed)

    def on_failed(self, transfer_id: bytes, reason: str, attempt: int) -> None:
        self._loop.call_soon_threadsafe(self._end, transfer_id, attempt)

    def on_cache_found(self, found: CacheFound) -> None:
        self._loop.call_soon_threadsafe(self._found, found)

    def on_cache_slots(self, slots: CacheSlots) -> None:
        self._loop.call_soon_threadsafe(self._given, slots)

    # The same on the loop. What nobody waits for any more is given back.

    def _forget(self) -> None:
        self._outboxes.clear()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(None)

    def _tell(self, name: int | bytes, answer: object) -> bool:
        asked = self._asked.get(name)
        if asked is None or asked.done():
            return False
        asked.set_result(answer)
        return True

    def _opened(self, opened: OutboxOpened) -> None:
        self._outboxes[opened.attempt] = opened
        if len(self._outboxes) > MAX_OUTBOXES:
            del self._outboxes[next(iter(self._outboxes))]

    def _landed(self, landed: Landed) -> None:
        if not self._tell(landed.transfer_id, landed):
            self._scheduler.release(landed.transfer_id)

    def _end(self, transfer_id: bytes, attempt: int) -> None:
        if not attempt:
            self._tell(transfer_id, None)
            return
        self._failed.append(attempt)
        if attempt not in self._filling:
            self._worker.release(transfer_id, attempt)

    def _found(self, found: CacheFound) -> None:
        if not self._tell(found.handle, found):
            self._scheduler.cache_free(found.handle)

    def _given(self, slots: CacheSlots) -> None:
        if not self._tell(slots.handle, slots) and slots.slots:
            self._scheduler.cache_cancel(slots.handle)

    async def _answer(self, name: int | bytes, is_sent: bool) -> Any:
        """The report of the agent about `name`; None when it says nothing or is gone."""
        if not is_sent:
            return None
        asked = self._asked[name] = self._loop.create_future()
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asked
        except TimeoutError:
            return None
        finally:
            del self._asked[name]

    # What an engine does for a request.

    async def prefix(self, prompt: Prompt) -> tuple[int, bool]:
        """Load what is cached of the prompt and store the rest. How many tokens were cached, and
        whether they were right.
        """
        cached_tokens, is_right, kv_blocks = 0, True, 0
        # vLLM always computes the last token itself.
        keys = prompt.keys[: (len(prompt.token_ids) - 1) // SHAPE.block_tokens]
        handle, arena = next(self._handles), self._scheduler.arena
        if not keys or not self._caches:
            return 0, True
        found = await self._answer(handle, self._scheduler.cache_find(handle, keys))
        if found is not None:
            is_right = arena is not None and all(
                read(arena, runs, SHAPE.parts[part].nbytes) == prompt.part(block, part)
                for block, part, runs in found.slots
            )
            kv_blocks = found.kv_blocks
            cached_tokens = found.num_blocks * SHAPE.block_tokens
            # Bytes that were read while the agent died say nothing.
            if arena is None or self._scheduler.arena is not arena:
                cached_tokens, is_right = 0, True
            self._scheduler.cache_free(handle)
        await self._store(prompt, keys, kv_blocks)
        return cached_tokens, is_right

    async def _store(self, prompt: Prompt, keys: list[bytes], kv_blocks: int) -> None:
        handle, arena = next(self._handles), self._worker.arena
        parts = [(block, KV) for block in range(kv_blocks, len(keys))]
        assert SHAPE.state_part is not None
        parts.append((len(keys) - 1, SHAPE.state_part))
        is_sent = self._scheduler.cache_reserve(handle, keys, parts, parent=prompt.root)
        given = await self._answer(handle, is_sent)
        if given is None or not given.slots:
            return
        if arena is None or self._worker.arena is not arena:
            self._scheduler.cache_cancel(handle)
            return
        for block, part, runs in given.slots:
            write(arena, runs, SHAPE.parts[part].nbytes, 0, prompt.part(block, part))
        written = [(block, part) for block, part, _ in given.slots]
        self._worker.cache_written(handle, written, is_last=True)

    async def fill(self, prompt: Prompt, params: dict[str, Any]) -> None:
        """Hand a prefill's KVCache over layer by layer, for as long as anybody wants it."""
        transfer_id, attempt = bytes.fromhex(params["transfer_id"]), params["attempt"]
        for _ in range(100):  # the agent spoke first, but on another socket
            if attempt in self._outboxes:
                break
            await asyncio.sleep(0.01)
        opened, arena = self._outboxes.pop(attempt, None), self._worker.arena
        if opened is None or arena is None or attempt in self._failed:
            return
        num_tokens, cached_tokens = opened.num_tokens, opened.cached_tokens
        nbytes = LAYOUT.transfer_bytes(num_tokens, cached_tokens)
        self._filling.add(attempt)
        self._worker.attach(transfer_id, attempt)
        is_over = False
        try:
            for offset, data in prompt.layers(num_tokens, cached_tokens):
                if attempt in self._failed or self._worker.arena is not arena:
                    return
                write(arena, opened.runs, nbytes, offset, data)
                self._worker.ready(transfer_id, attempt, [(offset, len(data))])
                await asyncio.sleep(CHUNK_S)
            self._worker.prefill_end(transfer_id, attempt)
            is_over = True
        finally:
            self._filling.discard(attempt)
            if attempt in self._failed:
                self._worker.release(transfer_id, attempt)
            elif not is_over:
                self._worker.abort(transfer_id, attempt, "the request was aborted")

    async def load(self, prompt: Prompt, params: dict[str, Any]) -> bool | None:
        """Whether what landed is right; None when nothing landed and the prompt is computed."""
        transfer_id = bytes.fromhex(params["transfer_id"])
        landed = await self._answer(transfer_id, self._scheduler.watch(transfer_id))
        if landed is None:
            return None
        arena = self._scheduler.arena
        try:
            if arena is None:
                return None
            num_tokens, cached_tokens = landed.num_tokens, landed.cached_tokens
            nbytes = LAYOUT.transfer_bytes(num_tokens, cached_tokens)
            layers = b"".join(data for _, data in prompt.layers(num_tokens, cached_tokens))
            is_right = read(arena, landed.runs, nbytes) == layers and all(
                read(arena, runs, SHAPE.parts[KV].nbytes) == prompt.part(block, KV)
                for block, runs in enumerate(landed.cached_runs)
            )
            return is_right if self._scheduler.arena is arena else None
        finally:
            self._scheduler.release(transfer_id)
