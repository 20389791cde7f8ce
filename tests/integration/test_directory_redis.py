"""The directory in a real Redis server, which each test file starts for itself."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from eventually import eventually
from free_ports import free_port
from redis.asyncio import Redis
from redis_server import RedisServer

from kvmanager.agent.messages import SERVICE, CacheFeed, WatchCache
from kvmanager.directory.cli import serve
from kvmanager.directory.config import load
from kvmanager.directory.coverage import EMBEDDING_FLAG
from kvmanager.directory.directory import FROM_THE_BEGINNING, Directory
from kvmanager.directory.errors import FeedError, StoreError
from kvmanager.directory.messages import Hit, NodeName, ResumeRule
from kvmanager.directory.redis_client import connect, reached
from kvmanager.directory.redis_sink import RedisSink
from kvmanager.directory.redis_store import RedisDirectory, RedisSettings
from kvmanager.hashing import block_keys, root_key
from transport.rpc import Method, RpcServer

NODE, OTHER = NodeName("near", "n0"), NodeName("far", "n0")
KEYS = block_keys(range(2500), 1, root_key(b"model"))
RULE = ResumeRule(has_kv=True, window_reach=2, has_state=True)
FULL = ResumeRule(has_kv=True, window_reach=0, has_state=False)
SETTINGS = RedisSettings()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that keeps nothing on disk."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
async def redis(url: str) -> AsyncIterator[Redis]:
    client = connect(url, timeout_s=5)
    await client.flushall()
    yield client
    await client.aclose()


def feed(
    holds: dict[bytes, int],
    seq: int = 1,
    *,
    epoch: str = "e",
    snapshot: bool = False,
    more: bool = False,
) -> CacheFeed:
    blocks = {key[:8]: flags for key, flags in holds.items() if flags != EMBEDDING_FLAG}
    return CacheFeed(
        epoch,
        seq,
        b"".join(blocks),
        b"".join(flags.to_bytes(2, "little") for flags in blocks.values()),
        is_snapshot=snapshot,
        more=more,
        age_s=0.25,
        embeddings=b"".join(key[:8] for key in holds if key[:8] not in blocks),
    )


def names(keys: list[bytes]) -> list[bytes]:
    return [SETTINGS.blocks + key[:8] for key in keys]


async def tell(sink: RedisSink, node: NodeName, message: CacheFeed) -> bool:
    assert await sink.position(node) is not None
    return await sink.apply(node, message)


async def num_kv_blocks(reader: RedisDirectory) -> dict[str, int]:
    return {node.cluster: node.kv_blocks for node in await reader.match(FULL, KEYS)}


async def test_answers_as_a_directory_of_this_process_does(redis: Redis) -> None:
    sink, reader, model = RedisSink(redis), RedisDirectory(redis), Directory()
    tiers = {index: 7 if index % 5 else 7 | 7 << 3 for index in range(40)}
    messages = [
        (NODE, feed({KEYS[i]: flags for i, flags in tiers.items()}, snapshot=True)),
        (OTHER, feed(dict.fromkeys(KEYS[:30], 1), snapshot=True)),
        (OTHER, feed({KEYS[i]: 64 | 7 for i in range(20, 27)}, 2)),
        (NODE, feed({KEYS[33]: 0, KEYS[34]: 0, KEYS[10]: 1}, 3)),
        (OTHER, feed(dict.fromkeys(KEYS[100:104], EMBEDDING_FLAG), 3)),
        (NODE, feed({KEYS[102]: EMBEDDING_FLAG, KEYS[103]: EMBEDDING_FLAG}, 4)),
        (OTHER, feed({KEYS[103]: 0, KEYS[101]: 0}, 4)),
    ]
    for node, message in messages:
        assert await tell(sink, node, message)
        assert model.apply(node, message, 0.0)
        for rule in (RULE, FULL, ResumeRule(has_kv=False, window_reach=0, has_state=True)):
            found = await reader.match(rule, KEYS[:64])
            assert [replace_age(one) for one in found] == [
                replace_age(one) for one in model.match(rule, KEYS[:64], 0.0)
            ]
            assert all(0 <= one.age_s < 5 for one in found)
        holders = await reader.embedding_holders(KEYS[99:105])
        assert [sorted(one) for one in holders] == [
            sorted(one) for one in model.embedding_holders(KEYS[99:105])
        ]
    assert list(map(sorted, holders)) == [[], [OTHER], [], [OTHER, NODE], [NODE], []]
    known = {state.cluster: state for state in await reader.nodes()}
    assert (known["far"].seq, known["near"].seq, known["near"].lag_s) == (4, 4, 0.25)
    assert await sink.position(NODE) == ("e", 4)


def replace_age(found: object) -> str:
    return repr(found).partition("age_s")[0]


async def test_a_snapshot_replaces_all_at_once_when_its_last_page_is_there(redis: Redis) -> None:
    sink, reader = RedisSink(redis), RedisDirectory(redis)
    assert await tell(sink, NODE, feed(dict.fromkeys(KEYS[:50], 1), snapshot=True))
    assert await sink.apply(
        NODE, feed(dict.fromkeys(KEYS[:10], 1), 2, epoch="f", snapshot=True, more=True)
    )
    assert await num_kv_blocks(reader) == {"near": 50}
    assert await sink.position(NODE) == ("f", 2)
    assert await sink.apply(NODE, feed(dict.fromkeys(KEYS[10:20], 1), 3, epoch="f"))
    assert await num_kv_blocks(reader) == {"near": 20}
    assert await sink.apply(NODE, feed({KEYS[15]: 0, KEYS[40]: 0}, 4, epoch="f"))
    assert await num_kv_blocks(reader) == {"near": 15}


async def test_blocks_of_many_snapshots_do_not_pile_up(redis: Redis) -> None:
    sink = RedisSink(redis)
    for seq in range(1, 8):
        assert await tell(sink, NODE, feed(dict.fromkeys(KEYS, 1), seq, snapshot=True))
    (name,) = names(KEYS[:1])
    assert await redis.strlen(name) == 12
    assert await tell(sink, NODE, feed(dict.fromkeys(KEYS, 0), 9))
    assert await redis.exists(*names(KEYS)) == 0


async def test_blocks_of_a_node_that_is_forgotten_again_and_again_do_not_pile_up(
    redis: Redis,
) -> None:
    sink = RedisSink(redis)
    for _ in range(10):
        assert await tell(sink, NODE, feed(dict.fromkeys(KEYS[:20], 1), snapshot=True))
        await sink.forget(NODE)
        assert await tell(sink, OTHER, feed(dict.fromkeys(KEYS[:20], 1), snapshot=True))
    assert max([await redis.strlen(name) for name in names(KEYS[:20])]) <= 12


async def test_blocks_of_snapshots_that_break_off_do_not_pile_up(redis: Redis) -> None:
    sink, reader = RedisSink(redis), RedisDirectory(redis)
    assert await tell(sink, NODE, feed(dict.fromkeys(KEYS[:20], 1), snapshot=True))
    for _ in range(10):
        page = feed(dict.fromkeys(KEYS[:10], 1), 2, epoch="f", snapshot=True, more=True)
        assert await tell(sink, NODE, page)
        with pytest.raises(FeedError):
            await sink.apply(NODE, CacheFeed("f", 3, b"12345678", b""))
    assert await num_kv_blocks(reader) == {"near": 20}
    assert max([await redis.strlen(name) for name in names(KEYS[:20])]) <= 12


async def test_blocks_that_several_nodes_write_drop_only_what_nobody_goes_by(redis: Redis) -> None:
    sinks = {NODE: RedisSink(redis), OTHER: RedisSink(redis)}
    reader = RedisDirectory(redis)
    for seq in range(1, 6):
        for node, sink in sinks.items():
            assert await tell(sink, node, feed(dict.fromkeys(KEYS[:20], 1), seq, snapshot=True))
    page = feed(dict.fromkeys(KEYS[:5], 1), 9, snapshot=True, more=True)
    assert await tell(sinks[NODE], NODE, page)
    assert await tell(sinks[OTHER], OTHER, feed(dict.fromkeys(KEYS[:10], 0), 9))
    assert await num_kv_blocks(reader) == {"near": 20}
    assert await tell(sinks[NODE], NODE, feed(dict.fromkeys(KEYS[5:15], 1), 10))
    assert await num_kv_blocks(reader) == {"near": 15}


async def test_nodes_that_are_gone_for_good_leave_no_record(redis: Redis) -> None:
    settings = replace(SETTINGS, key_ttl_s=1)
    for number in range(3):
        gone = NodeName("near", f"gone-{number}")
        assert await tell(RedisSink(redis, settings), gone, feed({KEYS[0]: 1}, snapshot=True))
    sink = RedisSink(redis, settings)
    async with asyncio.timeout(10):
        while await redis.hlen(SETTINGS.nodes) > 1 or await redis.hlen(SETTINGS.live) > 1:
            assert await tell(sink, NODE, feed({KEYS[0]: 1}, snapshot=True))
            await asyncio.sleep(0.1)
    assert await redis.hkeys(SETTINGS.live) == [b"near/n0"]


async def test_a_server_that_lost_its_data_is_told_everything_again(redis: Redis) -> None:
    sink, reader = RedisSink(redis), RedisDirectory(redis)
    assert await tell(sink, NODE, feed(dict.fromkeys(KEYS[:5], 1), snapshot=True))
    await redis.flushall()
    assert await sink.position(NODE) == FROM_THE_BEGINNING
    assert await sink.apply(NODE, feed(dict.fromkeys(KEYS[:6], 1), snapshot=True))
    assert await sink.position(NODE) == ("e", 1)
    await redis.delete(SETTINGS.live, SETTINGS.nodes)
    for message in (feed({KEYS[7]: 1}, 2), feed({}, 2)):
        with pytest.raises(StoreError, match="lost"):
            await sink.apply(NODE, message)
        assert await tell(sink, NODE, feed(dict.fromkeys(KEYS[:6], 1), snapshot=True))
        await redis.delete(SETTINGS.live)
    assert await num_kv_blocks(reader) == {"near": 6}


async def test_a_writer_that_slept_through_another_ones_turn_begins_anew(redis: Redis) -> None:
    sleeper, other = RedisSink(redis), RedisSink(redis)
    reader = RedisDirectory(redis)
    assert await tell(sleeper, NODE, feed(dict.fromkeys(KEYS[:5], 1), snapshot=True))
    await redis.delete(SETTINGS.lease(NODE))
    assert await tell(other, NODE, feed(dict.fromkeys(KEYS[:9], 1), 7, snapshot=True))
    await redis.delete(SETTINGS.lease(NODE))
    assert await sleeper.position(NODE) == FROM_THE_BEGINNING
    assert not await sleeper.apply(NODE, feed({KEYS[0]: 0}, 2))
    assert await num_kv_blocks(reader) == {"near": 9}


async def test_a_record_that_cannot_be_read_is_replaced_by_the_next_snapshot(redis: Redis) -> None:
    sink, reader = RedisSink(redis), RedisDirectory(redis)
    await redis.hset(SETTINGS.nodes, "near/n0", "rubbish")
    assert await sink.position(NODE) == FROM_THE_BEGINNING
    assert await sink.apply(NODE, feed(dict.fromkeys(KEYS[:5], 1), snapshot=True))
    assert await num_kv_blocks(reader) == {"near": 5}


async def test_gaps_and_bad_messages_lead_to_a_snapshot(redis: Redis) -> None:
    sink = RedisSink(redis)
    assert not await tell(sink, NODE, feed({KEYS[0]: 1}))
    assert await tell(sink, NODE, feed({KEYS[0]: 1}, snapshot=True))
    assert not await tell(sink, NODE, feed({KEYS[1]: 1}, epoch="another"))
    assert await sink.position(NODE) == FROM_THE_BEGINNING
    assert await tell(sink, NODE, feed({KEYS[0]: 1}, snapshot=True))
    with pytest.raises(FeedError):
        await sink.apply(NODE, CacheFeed("e", 5, b"12345678", b""))
    assert await sink.position(NODE) == FROM_THE_BEGINNING


async def test_one_writer_at_a_time_and_the_next_takes_over(redis: Redis) -> None:
    settings = replace(SETTINGS, lease_s=60.0)
    first, second = RedisSink(redis, settings), RedisSink(redis, settings)
    reader = RedisDirectory(redis)
    assert await tell(first, NODE, feed(dict.fromkeys(KEYS[:5], 1), snapshot=True))
    assert await second.position(NODE) is None
    await second.forget(NODE)
    assert await num_kv_blocks(reader) == {"near": 5}
    assert 0 < await redis.pttl(settings.lease(NODE)) <= 60_000
    await redis.pexpire(settings.lease(NODE), 1)
    taken = await eventually(lambda: second.position(NODE), lambda position: position is not None)
    assert taken == FROM_THE_BEGINNING
    with pytest.raises(StoreError, match="another writer"):
        await first.apply(NODE, feed({KEYS[5]: 1}, 2))
    assert await second.apply(NODE, feed(dict.fromkeys(KEYS[:3], 1), 7, snapshot=True))
    assert await num_kv_blocks(reader) == {"near": 3}
    await second.forget(NODE)
    assert await reader.nodes() == []
    assert await num_kv_blocks(reader) == {}


async def test_what_a_dead_writer_left_does_not_count_and_vanishes(redis: Redis) -> None:
    settings = replace(SETTINGS, key_ttl_s=2)
    sink, reader = RedisSink(redis, settings), RedisDirectory(redis, settings)
    forgetful = RedisDirectory(redis, replace(settings, forget_s=0.05))
    assert await tell(sink, NODE, feed(dict.fromkeys(KEYS[:5], 1), snapshot=True))
    assert await num_kv_blocks(reader) == {"near": 5}
    await eventually(lambda: num_kv_blocks(forgetful), lambda found: not found)
    await eventually(lambda: sink.position(NODE), lambda position: position == FROM_THE_BEGINNING)
    await eventually(lambda: redis.exists(SETTINGS.nodes, *names(KEYS[:5])), lambda num: not num)


async def test_a_server_that_goes_away_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path)
    reader = RedisDirectory.at(server.url)
    sink = RedisSink(connect(server.url))
    assert await reader.match(FULL, KEYS) == []
    assert await reader.nodes() == []
    assert caplog.text.count("directory in Redis: no answer, going on without") == 1
    with pytest.raises(StoreError):
        await sink.position(NODE)
    with server:
        assert await tell(sink, NODE, feed(dict.fromkeys(KEYS[:5], 1), snapshot=True))
        await eventually(lambda: num_kv_blocks(reader), lambda found: found == {"near": 5})
    with pytest.raises(StoreError):
        await sink.apply(NODE, feed({KEYS[6]: 1}, 2))
    assert await num_kv_blocks(reader) == {}
    with pytest.raises(StoreError, match="does not answer"):
        await reached(reader._redis)
    await sink._redis.aclose()
    await reader.close()


async def test_a_record_that_is_none_is_no_answer(redis: Redis) -> None:
    await redis.hset(SETTINGS.nodes, "near/n0", "rubbish")
    reader = RedisDirectory(redis)
    assert await reader.match(FULL, KEYS) == []
    assert await RedisDirectory(redis).nodes() == []


async def test_a_stranger_in_a_block_is_nobody(redis: Redis) -> None:
    sink, reader = RedisSink(redis), RedisDirectory(redis)
    assert await tell(sink, NODE, feed(dict.fromkeys(KEYS[:3], 1), snapshot=True))
    (name,) = names(KEYS[3:4])
    await redis.set(name, (77).to_bytes(4, "little") + b"\x01\x00")
    (found,) = await reader.match(FULL, KEYS)
    assert found.every == Hit(3, 3)
    await redis.set(name, b"rubbish")
    assert await reader.match(FULL, KEYS) == []


async def test_the_command_fills_redis_while_it_runs(redis: Redis, url: str) -> None:
    async def watch(request: WatchCache) -> CacheFeed:
        if request.epoch:
            await asyncio.sleep(request.timeout_s)
            return feed({})
        return feed(dict.fromkeys(KEYS[:9], 1), snapshot=True)

    methods = {"WatchCache": Method(WatchCache, CacheFeed, watch)}
    agent = RpcServer("127.0.0.1:0", {SERVICE: methods})
    address = f"127.0.0.1:{await agent.start()}"
    config = load(None, {"agents": {str(NODE): address}, "redis": url})
    serving = asyncio.create_task(serve(config))
    reader = RedisDirectory(redis)
    await eventually(lambda: num_kv_blocks(reader), lambda found: found == {"near": 9})
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await agent.stop(grace_s=0)


async def test_a_directory_without_its_redis_lives_and_is_not_ready(
    tmp_path: Path,
) -> None:
    port = free_port()

    async def status(path: str) -> int:
        url = f"http://127.0.0.1:{port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status

    async def becomes_ready(serving: asyncio.Task[None]) -> None:
        while not serving.done():
            try:
                assert await status("/readyz") == 200
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.02)
            else:
                return
        await serving

    store = RedisServer(tmp_path)
    with store:
        settings = {
            "agents": {"c/n": "127.0.0.1:1"},
            "redis": store.url,
            "metrics_port": port,
        }
        serving = asyncio.create_task(serve(load(None, settings)))
        async with asyncio.timeout(30):
            await becomes_ready(serving)
    assert (await status("/livez"), await status("/readyz")) == (200, 503)
    with store:
        assert await status("/readyz") == 200
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
