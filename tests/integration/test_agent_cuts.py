"""Engines of one layout on one node, which cut a model into blocks of other sizes."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from arena_bytes import get_bytes
from cache_node import ROOT, Node, content, node
from msgspec.structs import replace
from simple_layouts import attention, layout

from kvmanager.agent.between_agents import move_cache
from kvmanager.agent.client import CacheMoveOrder
from kvmanager.agent.engines.protocol import EngineHello
from kvmanager.agent.messages import Reserve
from kvmanager.hashing import KEY_BYTES, join_keys
from kvmanager.layout import KVGroup, KVKind, KVLayout
from kvmanager.pool.shape import CacheShape
from transport.rpc import RpcError


@dataclass(frozen=True)
class Cut:
    """One of two ways to cut a model into blocks, and the keys of a prompt's blocks."""

    layout: KVLayout
    namespace: bytes
    keys: list[bytes]

    @property
    def shape(self) -> CacheShape:
        return CacheShape.of(self.layout)

    @property
    def block_keys(self) -> bytes:
        return join_keys([ROOT, *self.keys])

    def store(self, node: Node, num_blocks: int) -> None:
        node.store([(index, 0) for index in range(num_blocks)], self.shape, self.keys)


def cut(block: int, name: bytes, num_blocks: int) -> Cut:
    keys = [name * (KEY_BYTES - 1) + bytes([index]) for index in range(num_blocks)]
    group = KVGroup(KVKind.FULL, block, (attention("layers.0", 2, 4),))
    return Cut(layout(group), name * 32, keys)


NUM_TOKENS = 300
SHORT, LONG = cut(64, b"s", 4), cut(128, b"l", 2)
"""The cached blocks of a prompt of so many tokens."""


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[Node]:
    async with node(tmp_path, "source") as one:
        join(one)
        yield one


@pytest.fixture
async def destination(tmp_path: Path) -> AsyncIterator[Node]:
    async with node(tmp_path, "destination") as one:
        join(one)
        yield one


def join(node: Node) -> None:
    """Connect an engine of each."""
    for conn_id, item in enumerate((SHORT, LONG), 1):
        hello = EngineHello(f"cut-{conn_id}", "scheduler", os.getpid(), item.layout.encode())
        node.agent.hello(conn_id, replace(hello, namespace=item.namespace))


async def test_a_landing_stands_on_the_blocks_whose_keys_it_has(source: Node) -> None:
    SHORT.store(source, 3)
    LONG.store(source, 1)
    fingerprint = SHORT.layout.fingerprint().hex()
    for item, cached_tokens in ((SHORT, 3 * 64), (LONG, 128)):
        wanted = Reserve(NUM_TOKENS, 30.0, fingerprint, block_keys=item.block_keys)
        landing = await source.control.reserve(wanted, 5.0)
        assert landing.cached_tokens == cached_tokens
        assert landing.nbytes == item.layout.transfer_bytes(NUM_TOKENS, cached_tokens)
        await source.control.cancel(landing.transfer_id, "the test is over", 5.0)


async def test_a_landing_of_blocks_that_no_engine_caches_stands_on_nothing(source: Node) -> None:
    SHORT.store(source, 3)
    fingerprint = SHORT.layout.fingerprint().hex()
    num_used = source.num_used
    keys = join_keys([ROOT, *SHORT.keys[:3]])
    wanted = Reserve(NUM_TOKENS, 30.0, fingerprint, block_keys=keys)
    landing = await source.control.reserve(wanted, 5.0)
    assert landing.cached_tokens == 0
    assert landing.nbytes == SHORT.layout.transfer_bytes(NUM_TOKENS)
    await source.control.cancel(landing.transfer_id, "the test is over", 5.0)
    assert source.num_used == num_used
    with pytest.raises(RpcError, match="block_keys: 33 bytes are no sequence of 16 byte keys"):
        await source.control.reserve(replace(wanted, block_keys=bytes(33)), 5.0)


async def test_a_move_is_of_the_blocks_of_its_namespace(source: Node, destination: Node) -> None:
    for item in (LONG, SHORT):
        item.store(source, len(item.keys))
        fingerprint, parts = item.layout.fingerprint().hex(), list(item.shape.resume_parts(2))
        wanted = CacheMoveOrder(fingerprint, item.block_keys, parts, namespace=item.namespace.hex())
        moved = await move_cache(source.control, destination.control, wanted)
        assert moved.kept_parts == 2
        assert destination.pool.match(item.shape, item.keys).num_blocks == 2
        runs = destination.pool.lookup(item.keys[1], 0)
        nbytes = item.shape.parts[0].nbytes
        assert runs is not None
        assert get_bytes(destination.agent.arena, runs, nbytes) == content((1, 0), item.shape)
        dropped = await source.control.drop_cached(
            fingerprint, item.block_keys, 1, item.namespace.hex()
        )
        assert dropped == len(item.keys) - 1
    unknown = CacheMoveOrder(fingerprint, SHORT.block_keys, parts, namespace="ab" * 32)
    with pytest.raises(RpcError, match="no connected engine has cache namespace abab") as caught:
        await destination.control.reserve_cache_move(unknown, 30.0)
    assert caught.value.code == "INVALID"
    with pytest.raises(RpcError, match="namespace is not hex"):
        await destination.control.drop_cached(fingerprint, SHORT.block_keys, 0, "xyz")


async def test_an_engines_blocks_are_followed_as_it_has_them(tmp_path: Path) -> None:
    joined: list[tuple[object, ...]] = []
    events: Any = SimpleNamespace(engine_joined=lambda *told: joined.append(told[:3]))
    async with node(tmp_path, "agent") as one:
        one.agent.engine_events = events
        join(one)
        one.agent.engine_events = None
    assert joined == [
        ("cut-1", SHORT.layout, SHORT.namespace),
        ("cut-2", LONG.layout, LONG.namespace),
    ]
