"""What a stranger with write access to Redis puts there: gateways leave it out, count it, and live.

Every field of every key of the gateways is replaced by what nobody should calculate with.
"""

import asyncio
import copy
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import pytest
from eventually import eventually
from gateway_region import Region
from redis.asyncio import Redis
from redis_server import RedisServer
from shared_gateways import ask, body, gateways, limited, num_seen, page

from deploy.gateway.sharing import redis_region, region_sharing
from scheduler.live.feedback import DirectBegun, InstanceGiven, LegBegun

PREFIX = "prfaas:gw1:r:"
TEXTS = (b"", b"x", b"\xff", b"nan", b"-inf", b"-1", b"1e308", b"0x7f", b"9" * 400, b"1 1 1")
VALUES: tuple[Any, ...] = (math.nan, math.inf, -math.inf, 1e308, 2**62, -(2**62), -1, None, "x", [])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as running:
        yield running


@pytest.fixture
async def stranger(server: RedisServer) -> AsyncIterator[Redis]:
    redis = redis_region.connect(server.url, timeout_s=20)
    yield redis
    await redis.aclose()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_region, "TIMEOUT_S", 20.0)
    monkeypatch.setattr(region_sharing, "BEAT_S", 0.02)
    monkeypatch.setattr(region_sharing, "KEEP_EVERY_S", 0.1)


def changed(message: bytes) -> list[bytes]:
    """The message with each of its parts replaced by each of `VALUES`, and texts that are none."""
    whole = msgspec.msgpack.decode(message)
    found = [*TEXTS, b"\x91" * 5000, message + b"\x00", message[:-1], bytes(17 << 20)]
    for path in parts(whole):
        for value in VALUES:
            root = [copy.deepcopy(whole)]
            at: Any = root
            for step in (0, *path)[:-1]:
                at = at[step]
            at[(0, *path)[-1]] = value
            found.append(msgspec.msgpack.encode(root[0]))
    return found


def parts(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part. Of long lists the first two items stand for all."""
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for step, item in list(items)[:2] if isinstance(node, dict) else items:
        if isinstance(item, (list, dict)):
            yield from parts(item, (*path, step))
        elif step in (0, 1) or not isinstance(node, list) or len(node) < 16:
            yield (*path, step)


async def all_is_well(*regions: Region) -> None:
    """All gateways answer requests, one of them leads, and they know of each other."""
    async with asyncio.timeout(30):
        for region in regions:
            status, _, answer = await region.post(body())
            assert status == 200, answer
    await eventually(lambda: all(page(item).state == "joined" for item in regions))
    names = {page(item).name for item in regions}
    for region in regions:
        others = names - {page(region).name}
        await eventually(
            lambda region=region, others=others: (
                others <= {peer.name for peer in page(region).peers}
            )
        )
    await eventually(lambda: sum(page(item).leads for item in regions) == 1)


async def num_left_out(region: Region) -> float:
    async with region.session.get(region.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("prfaas_gateway_shared_entry_failures_total")
    )


async def now_ms(redis: Redis) -> int:
    seconds, _ = await redis.time()
    return 1000 * int(seconds)


async def test_a_number_is_no_amount_of_work(
    open_region: Any, server: RedisServer, stranger: Redis
) -> None:
    async with gateways(open_region, server.url) as (one, two):
        for beat in (0, 10**15):
            number = msgspec.msgpack.encode(["evil", [[], [], {"d0": 10**9}, []]])
            await stranger.hset(PREFIX + "works", "evil", number)
            await stranger.hset(PREFIX + "beats", "evil", str(beat + await now_ms(stranger)))
            began_s = monotonic()
            await asyncio.sleep(0.2)
            await all_is_well(one, two)
            assert monotonic() - began_s < 20
        # One from the future is nobody: it would never be gone.
        await eventually(lambda: len(page(one).peers) == 1)
        assert not await stranger.hexists(PREFIX + "beats", "evil")


async def test_beats_that_cannot_be_are_left_out(
    open_region: Any, server: RedisServer, stranger: Redis
) -> None:
    async with gateways(open_region, server.url) as (one, two):
        live = one.gateway.scheduler
        live.tell(LegBegun("a", "tiny", "far", 1000, 900, 100, 512_000, 2.0, 0, "d0", "home"))
        live.tell(DirectBegun("d0", 700, 700))
        live.tell(InstanceGiven("d0"))
        await eventually(lambda: two.gateway.scheduler.live.ledger.requests == {"d0": 1})
        works = await stranger.hgetall(PREFIX + "works")
        bad = changed(max(works.values(), key=len))
        for start in range(0, len(bad), 100):
            names = {f"evil{start + number}": said for number, said in enumerate(bad[start:][:100])}
            await stranger.hset(PREFIX + "works", mapping=names)
            now = await now_ms(stranger)
            before = await num_left_out(one)
            await stranger.hset(PREFIX + "beats", mapping=dict.fromkeys(names, now))
            await eventually(lambda: num_left_out(one), lambda now, before=before: now > before)
            await all_is_well(one, two)
            await stranger.hdel(PREFIX + "beats", *names)
            await stranger.hdel(PREFIX + "works", *names)
        await stranger.hset(PREFIX + "beats", mapping={text: text for text in TEXTS})
        await asyncio.sleep(0.1)
        await all_is_well(one, two)
        await eventually(lambda: [peer.requests for peer in page(two).peers] == [1])


async def test_batches_that_cannot_be_are_passed_over(
    open_region: Any, server: RedisServer, stranger: Redis
) -> None:
    async with gateways(open_region, server.url, prefill=()) as (one, two):
        await ask(one, 10)
        await eventually(lambda: page(one).pending == 0)
        entries = await stranger.xrange(PREFIX + "seen")
        for said in changed(max((fields[b"b"] for _, fields in entries), key=len)):
            await stranger.xadd(PREFIX + "seen", {"b": said})
        await stranger.xadd(PREFIX + "seen", {"c": b"x"})
        await all_is_well(one, two)
        before = num_seen(two)
        await ask(one, 10)
        await eventually(lambda: num_seen(two) > before)
        assert await num_left_out(two) > 100


async def test_whatever_leads_or_plans_the_region_goes_on(
    open_region: Any, server: RedisServer, stranger: Redis
) -> None:
    async with gateways(open_region, server.url) as (one, two):
        await all_is_well(one, two)
        future = str(2**62).encode()
        for name in ("leader", "token"):
            for text in (*TEXTS, b"stranger 1", b"stranger " + future, future):
                await stranger.set(PREFIX + name, text)
                await asyncio.sleep(0.05)
                await all_is_well(one, two)
                # What fronts refuse orders below must stay what later leaders get beyond.
                assert max(page(one).token, page(two).token) < await now_ms(stranger) + 86_400_000
        await eventually(lambda: page(one).leads != page(two).leads)
        plan = await stranger.get(PREFIX + "plan")
        for text in changed(plan):
            await stranger.set(PREFIX + "plan", text)
            await asyncio.sleep(0)
        await all_is_well(one, two)
        assert one.gateway.scheduler.base_tokens() == two.gateway.scheduler.base_tokens()


async def test_keys_of_another_type_are_dropped(
    open_region: Any, server: RedisServer, stranger: Redis
) -> None:
    async with gateways(open_region, server.url, **limited(max_requests=9)) as (one, two):
        await all_is_well(one, two)
        for key in await stranger.keys(PREFIX + "*"):
            # In one step: gateways write their keys again as soon as these are gone.
            await stranger.pipeline().delete(key).rpush(key, b"x").execute()
        await all_is_well(one, two)
        await eventually(lambda: page(one).pending == page(two).pending == 0)


async def test_an_account_that_cannot_be_shuts_nobody_out(
    open_region: Any, server: RedisServer, stranger: Redis
) -> None:
    limit = limited(max_requests=9, tokens_per_s=1e6, burst_tokens=1e6)
    async with gateways(open_region, server.url, **limit) as (one, two):
        await all_is_well(one, two)
        (account,) = await stranger.keys(PREFIX + "b:*")
        gateway = (await stranger.hkeys(PREFIX + "beats"))[0]
        for field in (b"level", b"at", b"stranger", gateway):
            for text in (*TEXTS, b"9" * 400 + b" 1", b"1 " + b"9" * 400):
                await stranger.hset(account, field, text)
                await all_is_well(one, two)


async def test_a_gateway_starts_whatever_was_learnt(
    open_region: Any, server: RedisServer, stranger: Redis
) -> None:
    async with gateways(open_region, server.url, num=1) as (one,):
        await ask(one, 10)
    learned = await stranger.get(PREFIX + "learned")
    bad = changed(learned)
    for text in [*bad[:14], *bad[14 :: len(bad) // 60]]:
        await stranger.set(PREFIX + "learned", text)
        async with gateways(open_region, server.url, num=1) as (two,):
            await ask(two, 3)
            await all_is_well(two)
