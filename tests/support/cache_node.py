"""A node agent in the process of a test, with its prefix cache and a client of its control port."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_process import QUICK_TRANSPORT, SMALL_LAYOUT
from arena_bytes import get_bytes, put_bytes

from kvmanager.agent.client import AgentClient
from kvmanager.agent.config import AgentConfig
from kvmanager.agent.control import ControlService
from kvmanager.agent.engines.protocol import EngineHello
from kvmanager.agent.messages import SERVICE
from kvmanager.agent.service import NodeAgent
from kvmanager.agent.transfer_io import now_s
from kvmanager.hashing import KEY_BYTES
from kvmanager.pool.pool import HybridPool
from kvmanager.pool.records import BlockPart
from kvmanager.pool.shape import CacheShape
from kvmanager.transfers.blocks import Run
from transport.rpc import RpcServer

SHAPE = CacheShape.of(SMALL_LAYOUT)
FINGERPRINT = SMALL_LAYOUT.fingerprint().hex()
ROOT = bytes([255]) * KEY_BYTES
KEYS = [bytes([index]) * KEY_BYTES for index in range(8)]
RESUME: list[BlockPart] = list(SHAPE.resume_parts(8))
NBYTES = sum(SHAPE.parts[part].nbytes for _, part in RESUME)
BLOCK_KEYS = ROOT + b"".join(KEYS)


def content(part: BlockPart, shape: CacheShape = SHAPE) -> bytes:
    return random.Random(repr(part)).randbytes(shape.parts[part[1]].nbytes)


@dataclass
class Node:
    agent: NodeAgent
    control: AgentClient

    @property
    def pool(self) -> HybridPool:
        assert self.agent.cache is not None
        return self.agent.cache.pool

    @property
    def num_used(self) -> int:
        return self.agent.allocator.num_used

    def store(
        self,
        parts: Sequence[BlockPart],
        shape: CacheShape = SHAPE,
        keys: Sequence[bytes] = tuple(KEYS),
    ) -> None:
        """Put these parts into the cache, as an engine would."""
        fill = self.pool.reserve(shape, ROOT, 0, list(keys), parts, now_s())
        for slot in fill.slots:
            data = content((slot.index, slot.part), shape)
            put_bytes(self.agent.arena, _pairs(slot.runs), data)
            self.pool.commit(fill.fill_id, slot.index, slot.part, now_s())
        self.pool.abort(fill.fill_id)

    def read(self, part: BlockPart) -> bytes:
        runs = self.pool.lookup(KEYS[part[0]], part[1])
        assert runs is not None
        nbytes = SHAPE.parts[part[1]].nbytes
        return get_bytes(self.agent.arena, _pairs(runs), nbytes)

    def holds_nothing_for_moves(self) -> bool:
        mover = self.agent.transfers.mover
        self.pool.check_invariants()
        return not mover.num_open("landing") and not mover.num_open("send")


def _pairs(runs: Sequence[Run]) -> list[tuple[int, int]]:
    return [(run.first, run.length) for run in runs]


@contextlib.asynccontextmanager
async def node(directory: Path, name: str, *, num_blocks: int = 256) -> AsyncIterator[Node]:
    directory = directory / name
    directory.mkdir()
    settings: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "control": "127.0.0.1:0",
        "socket": directory / "agent.sock",
        "arena_dir": directory,
        "arena_gib": num_blocks * 4096 / (1 << 30),
        "block_bytes": 4096,
        "transport": QUICK_TRANSPORT,
    }
    config = AgentConfig.model_validate(settings)
    agent = NodeAgent(config)
    await agent.start()
    hello = EngineHello("engine", "worker", os.getpid(), SMALL_LAYOUT.encode())
    agent.book.join(0, hello)
    rpc = RpcServer(config.control, {SERVICE: ControlService(agent).methods()})
    control = AgentClient(f"127.0.0.1:{await rpc.start()}")
    try:
        yield Node(agent, control)
    finally:
        await control.close()
        await rpc.stop()
        await agent.stop()
