"""Attacks on the identity of KVCache: a checkpoint swapped under one name, lossy bytes.

Real agents; engines that a test drives.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from agent_process import SMALL_LAYOUT, AgentProcess, DrivenEngine
from caching_engine import SHAPE, B, CachingEngine
from eventually import wait_until
from simple_layouts import with_encoding

from kvmanager.agent.between_agents import CacheMoveResult, move_cache
from kvmanager.agent.client import AgentClient, CacheMoveOrder
from kvmanager.agent.messages import Reserve, ReserveReply
from kvmanager.hashing import block_keys, join_keys, root_key
from kvmanager.layout import KVLayout
from kvmanager.vllm_connector.cache.keys import namespace_of
from transport.rpc import RpcError

SETTINGS: dict[str, Any] = {"block_bytes": 4096, "drain_s": 0.5, "arena_gib": 2 / 1024}
SWAPPED = msgspec.structs.replace(SMALL_LAYOUT, weights="files:1")
"""The same name, configuration and sizes with other weights."""
TOKENS = list(range(4 * B))


def namespace(layout: KVLayout) -> bytes:
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        model_config=SimpleNamespace(quantization=None),
    )
    return namespace_of(config, layout)


def keys(layout: KVLayout) -> list[bytes]:
    """The cache keys of one and the same prompt."""
    return block_keys(TOKENS, B, root_key(namespace(layout)))


def caching(agent: AgentProcess, layout: KVLayout) -> CachingEngine:
    return CachingEngine(agent, "engine", layout, namespace(layout))


def reserve(agent: AgentProcess, layout: KVLayout) -> ReserveReply:
    known = join_keys([root_key(namespace(layout)), *keys(layout)])
    return agent.reserve(len(TOKENS), block_keys=known)


def test_what_one_checkpoint_cached_the_next_one_of_its_name_does_not_find(tmp_path: Path) -> None:
    ssd = {"ssd_dir": str(tmp_path / "ssd"), "ssd_gib": 1 / 64}
    settings = SETTINGS | ssd | {"arena_name": "kept"}
    first = AgentProcess(tmp_path / "agent", **settings)
    with first, caching(first, SMALL_LAYOUT) as engine:
        engine.store(keys(SMALL_LAYOUT))
    second = AgentProcess(tmp_path / "agent", **settings)
    with second:
        with caching(second, SMALL_LAYOUT) as engine:
            wait_until(lambda: engine.hit(keys(SMALL_LAYOUT)) == 4, what="the cache was kept")
        wait_until(lambda: not second.status().engines, what="the engine is gone")
        with caching(second, SWAPPED) as engine:
            assert engine.hit(keys(SWAPPED)) == 0
            landing = reserve(second, SWAPPED)
            assert landing.cached_tokens == 0
        assert not {key[:8] for key in keys(SWAPPED)} & set(_told(second))


def _told(agent: AgentProcess) -> list[bytes]:
    """The short keys that a directory hears of."""
    feed = agent.watch_cache()
    return [feed.keys[start : start + 8] for start in range(0, len(feed.keys), 8)]


def test_kvcache_of_another_checkpoint_is_neither_sent_nor_taken(tmp_path: Path) -> None:
    with (
        AgentProcess(tmp_path / "sender", **SETTINGS) as sender,
        AgentProcess(tmp_path / "receiver", **SETTINGS) as receiver,
        caching(receiver, SMALL_LAYOUT),
        DrivenEngine(sender, layout=SWAPPED) as producer,
    ):
        landing = reserve(receiver, SMALL_LAYOUT)
        with pytest.raises(RpcError, match="no connected engine has KV layout"):
            sender.open_outbox(landing, len(TOKENS))
        # A sender that lies to its own agent is refused by the receiver.
        own = SWAPPED.fingerprint().hex()
        outbox = sender.open_outbox(landing, len(TOKENS), layout_fingerprint=own)
        transfer_id = bytes.fromhex(landing.transfer_id)
        producer.client.attach(transfer_id, outbox.attempt)
        producer.client.ready(transfer_id, outbox.attempt, [(0, landing.nbytes)])
        assert sender.wait(landing.transfer_id, kind="outbox").state == "failed"
        cache = receiver.status().cache
        assert cache is not None
        assert (cache.promotions, cache.num_blocks) == (0, 0)


BF16 = with_encoding(SMALL_LAYOUT, "bfloat16")


@pytest.mark.parametrize("codec", ["fp8", "none"])
def test_a_lossy_landing_is_not_what_an_exact_request_finds(tmp_path: Path, codec: str) -> None:
    settings = SETTINGS | {"transport": {"num_connections": 2, "codec": codec}}
    with (
        AgentProcess(tmp_path / "sender", **settings) as sender,
        AgentProcess(tmp_path / "receiver", **settings) as receiver,
        caching(receiver, BF16) as consumer,
        DrivenEngine(sender, layout=BF16) as producer,
    ):
        landing = reserve(receiver, BF16)
        assert landing.is_lossy == (codec == "fp8")
        _send(sender, producer, landing, keys(BF16))
        report = sender.wait(landing.transfer_id)
        assert report.state == "complete"
        assert ("fp8" in report.codecs) == (codec == "fp8")
        if codec == "none":
            wait_until(lambda: consumer.hit(keys(BF16)) == 4, what="exact bytes are kept")
            return
        assert receiver.wait(landing.transfer_id, kind="landing").state == "complete"
        assert consumer.hit(keys(BF16)) == 0
        assert reserve(receiver, BF16).cached_tokens == 0
        cache = receiver.status().cache
        assert cache is not None
        assert (cache.promotions, cache.num_blocks) == (0, 0)


def _send(
    sender: AgentProcess, producer: DrivenEngine, landing: ReserveReply, sent: Sequence[bytes]
) -> None:
    outbox = sender.open_outbox(landing, len(sent) * B)
    full, rest = divmod(landing.nbytes, 256)
    producer.send(landing, outbox, bytes(range(256)) * full + bytes(rest))


def test_a_moved_prefix_keeps_every_byte_where_transfers_may_lose_some(tmp_path: Path) -> None:
    settings = SETTINGS | {"transport": {"num_connections": 2, "codec": "fp8"}}
    told = keys(BF16)
    with (
        AgentProcess(tmp_path / "source", **settings) as source,
        AgentProcess(tmp_path / "target", **settings) as target,
        caching(source, BF16) as stored,
        caching(target, BF16) as found,
    ):
        stored.store(told)
        parts = list(SHAPE.resume_parts(len(told)))
        known = join_keys([root_key(namespace(BF16)), *told])
        order = CacheMoveOrder(BF16.fingerprint().hex(), known, parts)

        async def move() -> CacheMoveResult:
            ends = [AgentClient(agent.ready["control"]) for agent in (source, target)]
            try:
                return await move_cache(ends[0], ends[1], order)
            finally:
                for end in ends:
                    await end.close()

        assert asyncio.run(move()).kept_parts == len(parts)
        found.check(told, len(told))


def test_one_tenants_landings_leave_room_for_others(tmp_path: Path) -> None:
    settings = SETTINGS | {"tenant_landing_gib": 0.5 / 1024}
    with (
        AgentProcess(tmp_path / "agent", **settings) as agent,
        DrivenEngine(agent),
    ):

        def reserve_much(tenant: str) -> None:
            for _ in range(100):
                agent.call("Reserve", Reserve(16 * B, 30.0, tenant=tenant), ReserveReply)

        with pytest.raises(RpcError, match="tenant 'mallory' holds"):
            reserve_much("mallory")
        agent.call("Reserve", Reserve(16 * B, 30.0, tenant="alice"), ReserveReply)
