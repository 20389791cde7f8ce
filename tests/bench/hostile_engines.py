"""Stand-ins for a prefill and a decode engine: they compute nothing, and their KVCache is real.

Run by `bench_hostile`: python hostile_engines.py PREFILL_PORT SOCKET DECODE_PORT SOCKET, where each
SOCKET is that of the engine's node agent. A prefill puts known bytes into the outbox that its agent
has opened. A decode waits for the landing and compares every byte; it answers 500 where KVCache
did not come or is wrong, so that the gateway's client sees the failure.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from agent_process import SMALL_LAYOUT
from arena_bytes import get_bytes, put_bytes
from echo_engine import (
    ANSWER,
    STREAM_END,
    STREAM_HEAD,
    STREAM_PIECE,
    EchoEngine,
    response,
    serve_engine,
)

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

FLOOD = b'"flood"'
"""A prompt with this text is answered with a stream of megabytes, which is there at once."""
_FLOOD_STREAM = STREAM_HEAD + STREAM_PIECE * 8192 + STREAM_END
_FAILED = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"


class AgentSide:
    """The connection of one engine to its node agent."""

    def __init__(self, instance: str, socket_path: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._landings: dict[bytes, asyncio.Future[Landed | None]] = {}
        self._outboxes: dict[int, OutboxOpened] = {}
        hello = EngineHello(
            instance, "worker", os.getpid(), SMALL_LAYOUT.encode(), 0, SMALL_LAYOUT.tp_size, b""
        )
        self._client = EngineClient(socket_path, hello)
        self._client.start(self)

    async def fill(self, params: dict[str, Any]) -> bool:
        """Write the KVCache of a prompt into the outbox. False: the agent is gone."""
        transfer_id, attempt = bytes.fromhex(params["transfer_id"]), params["attempt"]
        for _ in range(100):  # the agent spoke first, but on another socket
            if attempt in self._outboxes:
                break
            await asyncio.sleep(0.01)
        arena, opened = self._client.arena, self._outboxes.pop(attempt, None)
        if arena is None or opened is None:
            return False
        data = content(transfer_id, opened.num_tokens)
        self._client.attach(transfer_id, attempt)
        put_bytes(arena, opened.runs, data)
        return self._client.ready(
            transfer_id, attempt, [(0, len(data))]
        ) and self._client.prefill_end(transfer_id, attempt)

    async def load(self, params: dict[str, Any]) -> bool:
        """Whether the KVCache landed whole and right."""
        transfer_id = bytes.fromhex(params["transfer_id"])
        landed = self._landings[transfer_id] = self._loop.create_future()
        said = await landed if self._client.watch(transfer_id) else None
        is_right = said is not None and self._is_right(said)
        self._landings.pop(transfer_id, None)
        self._client.release(transfer_id)
        return is_right

    def _is_right(self, said: Landed) -> bool:
        arena, wanted = self._client.arena, content(said.transfer_id, said.num_tokens)
        if arena is None:
            return False
        return get_bytes(arena, said.runs, len(wanted)) == wanted

    # What the client calls, from its thread.

    def on_connected(self, welcome: Welcome, arena: Arena) -> None:
        pass

    def on_disconnected(self) -> None:
        self._loop.call_soon_threadsafe(self._all_lost)

    def on_outbox_opened(self, opened: OutboxOpened) -> None:
        self._loop.call_soon_threadsafe(self._opened, opened)

    def on_landed(self, landed: Landed) -> None:
        self._loop.call_soon_threadsafe(self._ended, landed.transfer_id, landed)

    def on_failed(self, transfer_id: bytes, reason: str, attempt: int) -> None:
        # A producer must say that it writes no more; that of a landing is said by `load`.
        if attempt:
            self._client.release(transfer_id, attempt)
        self._loop.call_soon_threadsafe(self._ended, transfer_id, None)

    def on_cache_found(self, found: CacheFound) -> None:
        pass

    def on_cache_slots(self, slots: CacheSlots) -> None:
        pass

    def _opened(self, opened: OutboxOpened) -> None:
        self._outboxes[opened.attempt] = opened

    def _ended(self, transfer_id: bytes, said: Landed | None) -> None:
        landed = self._landings.get(transfer_id)
        if landed is not None and not landed.done():
            landed.set_result(said)

    def _all_lost(self) -> None:
        for transfer_id in list(self._landings):
            self._ended(transfer_id, None)


def content(transfer_id: bytes, num_tokens: int) -> bytes:
    """The bytes of a transfer, told by its id."""
    nbytes = SMALL_LAYOUT.transfer_bytes(num_tokens)
    digest = hashlib.sha256(transfer_id).digest()
    return (digest * (nbytes // len(digest) + 1))[:nbytes]


class TransferringEngine(EchoEngine):
    """One connection to an engine whose node agent is behind `agent`."""

    def __init__(self, agent: AgentSide) -> None:
        super().__init__()
        self._agent = agent
        self._work: asyncio.Task[None] | None = None

    def answer(self, head: bytes, body: bytes) -> None:
        if b'"kv_transfer_params"' in body:
            # The gateway sends one request at a time on a connection.
            self._work = asyncio.get_running_loop().create_task(self._transfer(body))
        elif FLOOD in body:
            self._transport.write(_FLOOD_STREAM)
        else:
            super().answer(head, body)

    async def _transfer(self, body: bytes) -> None:
        params = json.loads(body)["kv_transfer_params"]["prfaas"]
        is_producer = params["role"] == "producer"
        is_right = await (self._agent.fill if is_producer else self._agent.load)(params)
        self._transport.write(response(ANSWER) if is_right else _FAILED)


async def serve(prefill_port: int, sender: str, decode_port: int, receiver: str) -> None:
    """Serve both engines until cancelled."""
    producer, consumer = AgentSide("p0", sender), AgentSide("d0", receiver)
    await asyncio.gather(
        serve_engine(prefill_port, lambda: TransferringEngine(producer)),
        serve_engine(decode_port, lambda: TransferringEngine(consumer)),
    )


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]))
