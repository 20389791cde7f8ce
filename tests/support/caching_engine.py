"""An engine of `SMALL_LAYOUT` that a test makes store and find cached prefixes at a real agent.

Everything here blocks, as in `agent_process`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Self

from agent_process import SMALL_LAYOUT, AgentProcess, DrivenEngine
from eventually import wait_until

from kvmanager.agent.engines.protocol import CacheFound, CacheSlots
from kvmanager.hashing import block_keys, root_key
from kvmanager.layout import KVLayout
from kvmanager.pool.shape import CacheShape

SHAPE = CacheShape.of(SMALL_LAYOUT)
B = SHAPE.block_tokens
KV, STATE = 0, 1
NAMESPACE = b"model and layout"
ROOT = root_key(NAMESPACE)


def prompt(num_blocks: int, seed: int = 0) -> list[bytes]:
    tokens = [random.Random(seed).randrange(1000) for _ in range(num_blocks * B)]
    return block_keys(tokens, B, ROOT)


def content(key: bytes, part: int) -> bytes:
    """The bytes of a part, told by its key."""
    return random.Random(key + bytes([part])).randbytes(SHAPE.parts[part].nbytes)


class CachingEngine:
    """A scheduler and a worker of one engine. `layout` has the parts of `SMALL_LAYOUT`."""

    def __init__(
        self,
        agent: AgentProcess,
        instance: str = "engine",
        layout: KVLayout = SMALL_LAYOUT,
        namespace: bytes = NAMESPACE,
    ) -> None:
        self.root = root_key(namespace)
        self.scheduler = DrivenEngine(
            agent, instance, layout, role="scheduler", namespace=namespace
        )
        self.worker = DrivenEngine(agent, instance, layout)
        self._handles = iter(range(1 << 30))

    def __enter__(self) -> Self:
        self.scheduler.__enter__()
        self.worker.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.client.close()
        self.scheduler.client.close()

    def find(self, keys: Sequence[bytes]) -> CacheFound:
        assert self.scheduler.client.cache_find(next(self._handles), keys)
        name, found = self.scheduler.next()
        assert name == "found"
        assert isinstance(found, CacheFound)
        return found

    def free(self, found: CacheFound) -> None:
        assert self.scheduler.client.cache_free(found.handle)

    def reserve(self, keys: Sequence[bytes], parts: Sequence[tuple[int, int]]) -> CacheSlots:
        assert self.scheduler.client.cache_reserve(
            next(self._handles), keys, parts, parent=self.root
        )
        name, slots = self.scheduler.next()
        assert name == "slots"
        assert isinstance(slots, CacheSlots)
        return slots

    def write(self, keys: Sequence[bytes], slots: CacheSlots, *, is_last: bool = True) -> None:
        for index, part, runs in slots.slots:
            self.worker.write(runs, content(keys[index], part))
        parts = [(index, part) for index, part, _ in slots.slots]
        assert self.worker.client.cache_written(slots.handle, parts, is_last=is_last)

    def store(self, keys: Sequence[bytes]) -> None:
        """Store all KV and, at the end, the state; returns when it can be found."""
        parts = [*((index, KV) for index in range(len(keys))), (len(keys) - 1, STATE)]

        def is_stored() -> bool:
            if self.hit(keys) == len(keys):
                return True
            slots = self.reserve(keys, parts)
            if slots.slots:
                self.write(keys, slots)
            return False

        wait_until(is_stored, what="what was stored is there")

    def hit(self, keys: Sequence[bytes]) -> int:
        found = self.find(keys)
        self.free(found)
        return found.num_blocks

    def check(self, keys: Sequence[bytes], num_blocks: int) -> None:
        """So much is found, byte for byte."""
        found = self.find(keys)
        assert found.num_blocks == num_blocks
        assert len(found.slots) == (num_blocks + 1 if num_blocks else 0)
        for index, part, runs in found.slots:
            nbytes = SHAPE.parts[part].nbytes
            assert self.scheduler.read(runs, nbytes) == content(keys[index], part)
        self.free(found)
