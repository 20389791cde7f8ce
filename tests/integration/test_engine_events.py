import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from eventually import eventually
from simple_layouts import paged

from kvmanager.agent.engines import events
from kvmanager.agent.engines.events import EngineCaches
from kvmanager.hashing import block_keys, root_key
from kvmanager.layout import KVGroup, KVKind, KVLayout

LAYOUT = KVLayout(
    "model",
    "files:0",
    "0",
    1,
    (KVGroup(KVKind.FULL, 16, (paged("layer", 64),)),),
)
NAMESPACE = b"namespace"
KV = 1


def key(turn: int) -> bytes:
    """Ours, of a prompt of one block."""
    return block_keys([turn] * 64, 64, root_key(NAMESPACE))[0][:8]


def stored(turn: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [bytes([turn]) * 31 + bytes([index]) for index in range(4)],
        "parent_block_hash": None,
        "token_ids": [turn] * 64,
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(turn: int) -> dict[str, Any]:
    return {
        "type": "BlockRemoved",
        "block_hashes": [bytes([turn]) * 32],
        "medium": "GPU",
        "group_idx": 0,
    }


class Publisher:
    """What vLLM's `ZmqEventPublisher` puts on its two sockets."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"ipc://{directory}/events"
        self.replay_endpoint = f"ipc://{directory}/replay"
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.XPUB)  # tells who subscribes
        self._events.bind(self.endpoint)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.bind(self.replay_endpoint)
        self._sent: list[tuple[int, bytes]] = []
        self.number = 0
        self._serving = asyncio.create_task(self._serve())

    async def subscribed(self) -> None:
        async with asyncio.timeout(5):
            while await self._events.recv() != b"\x01":
                pass

    async def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        await self.publish_raw(payload, lost=lost)

    async def publish_raw(self, payload: bytes, *, lost: bool = False) -> None:
        number, self.number = self.number, self.number + 1
        self._sent.append((number, payload))
        if not lost:
            await self._events.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def forget(self) -> None:
        """The buffer for replays is shorter than that."""
        self._sent.clear()

    async def _serve(self) -> None:
        while True:
            client, _, start = await self._replay.recv_multipart()
            for number, payload in self._sent:
                if number >= int.from_bytes(start, "big"):
                    frames = [client, b"", b"", number.to_bytes(8, "big"), payload]
                    await self._replay.send_multipart(frames)
            end = (-1).to_bytes(8, "big", signed=True)
            await self._replay.send_multipart([client, b"", b"", end, b""])

    async def close(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._context.destroy(linger=0)


@pytest.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[Publisher]:
    publisher = Publisher(tmp_path)
    yield publisher
    await publisher.close()


class Follower:
    def __init__(self, **endpoints: str) -> None:
        self.held: dict[bytes, int] = {}
        self.events = EngineCaches(endpoints, self._changed)

    def _changed(self, changes: list[tuple[bytes, int]]) -> None:
        self.held |= dict(changes)
        self.held = {key: bits for key, bits in self.held.items() if bits}

    async def until(self, condition: Callable[[dict[bytes, int]], bool]) -> None:
        await eventually(lambda: self.held, condition)


@contextlib.asynccontextmanager
async def following(**endpoints: str) -> AsyncIterator[Follower]:
    follower = Follower(**endpoints)
    for instance in endpoints:
        follower.events.engine_joined(instance, LAYOUT, NAMESPACE)
    yield follower
    await follower.events.close()


async def test_what_the_engine_publishes_is_told_as_our_keys(publisher: Publisher) -> None:
    async with following(engine=publisher.endpoint) as follower:
        await publisher.subscribed()
        await publisher.publish(stored(1), stored(2))
        await follower.until(lambda held: held == {key(1): KV, key(2): KV})
        await publisher.publish(removed(1))
        await follower.until(lambda held: held == {key(1): KV, key(2): KV})  # another hash
        gone = removed(1) | {"block_hashes": stored(1)["block_hashes"][:1]}
        await publisher.publish(gone)
        await follower.until(lambda held: held == {key(2): KV})
        follower.events.engine_left("engine")
        await follower.until(lambda held: held == {})


async def test_lost_messages_cost_every_claim(publisher: Publisher) -> None:
    async with following(engine=publisher.endpoint) as follower:
        await publisher.subscribed()
        await publisher.publish(stored(1))
        await follower.until(lambda held: held == {key(1): KV})
        await publisher.publish(stored(2), lost=True)
        await publisher.publish(stored(3))
        await follower.until(lambda held: held == {key(3): KV})


async def test_lost_messages_are_replayed_where_the_engine_does_that(publisher: Publisher) -> None:
    await publisher.publish(stored(1), lost=True)  # before anybody listened
    async with following(engine=f"{publisher.endpoint},{publisher.replay_endpoint}") as follower:
        await publisher.subscribed()
        await follower.until(lambda held: held == {key(1): KV})
        await publisher.publish(stored(2), lost=True)
        await publisher.publish(stored(3))
        await follower.until(lambda held: held == {key(1): KV, key(2): KV, key(3): KV})
        publisher.forget()
        publisher.number += 1
        await publisher.publish(stored(4))
        await follower.until(lambda held: held == {key(4): KV})


async def test_what_makes_no_sense_costs_the_claims_and_nothing_else(publisher: Publisher) -> None:
    async with following(engine=publisher.endpoint) as follower:
        await publisher.subscribed()
        await publisher.publish(stored(1))
        await follower.until(lambda held: held == {key(1): KV})
        await publisher.publish_raw(b"\xc1")
        await follower.until(lambda held: held == {})
        await publisher.publish(stored(2))
        await follower.until(lambda held: held == {key(2): KV})


async def test_an_engine_that_ends_holds_nothing_and_may_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "RETRY_S", 0.05)
    first = Publisher(tmp_path)
    async with following(engine=first.endpoint) as follower:
        await first.subscribed()
        await first.publish(stored(1))
        await follower.until(lambda held: held == {key(1): KV})
        await first.close()
        await follower.until(lambda held: held == {})
        second = Publisher(tmp_path)
        await second.subscribed()
        await second.publish(stored(2))
        await follower.until(lambda held: held == {key(2): KV})
        await second.close()


async def test_an_endpoint_that_is_none_and_an_engine_without_one_cost_nothing() -> None:
    async with following(engine="nonsense") as follower:
        follower.events.engine_joined("other", LAYOUT, NAMESPACE)
        await asyncio.sleep(0.1)
        follower.events.engine_left("other")
    assert follower.held == {}
