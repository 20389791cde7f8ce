"""Gateways whose Redis server is 40 ms away, with a real server and a real delay in between."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import pytest
from eventually import eventually
from free_ports import free_port
from gateway_region import Region
from redis.asyncio import Redis
from redis_server import RedisServer
from shared_gateways import ask, body, gateways, limited, num_seen, page

from deploy.gateway.api_keys import ApiKey
from deploy.gateway.sharing import redis_region
from deploy.gateway.sharing.redis_region import GONE_S
from deploy.gateway.sharing.region_sharing import MAX_BATCH, TOLD_BATCHES
from transport import Endpoint
from transport.testing.proxy import HurtfulProxy

ONE_WAY_S = 0.02
LOAD_S = 6.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an answer of Redis may take longer than a request should wait for it."""
    monkeypatch.setattr(redis_region, "TIMEOUT_S", 20.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, free_port()) as running:
        yield running


@pytest.fixture
def far_url(server: RedisServer) -> Iterator[str]:
    """The address of the server for who is 40 ms away."""
    proxy = HurtfulProxy(Endpoint("127.0.0.1", server.port))
    proxy.delay_s = lambda _connection, _is_forward: ONE_WAY_S
    yield f"redis://127.0.0.1:{proxy.endpoint.port}"
    proxy.close()


@pytest.fixture
async def near(server: RedisServer) -> AsyncIterator[Redis]:
    """The server itself, for the test to look at."""
    redis = redis_region.connect(server.url, timeout_s=20)
    yield redis
    await redis.aclose()


async def ask_on(region: Region, until_s: float) -> None:
    while monotonic() < until_s:
        await ask(region, 5)


async def oldest_beat_s(near: Redis) -> float:
    seconds, micros = await near.time()
    beats: dict[bytes, bytes] = await near.hgetall("prfaas:gw1:r:beats")
    return seconds + micros / 1e6 - min(int(at) for at in beats.values()) / 1000


async def test_the_lead_and_all_beats_hold_while_much_is_learnt(
    open_region: Any, far_url: str, near: Redis
) -> None:
    async with gateways(open_region, far_url, prefill=()) as regions:
        await eventually(lambda: sum(page(item).leads for item in regions) == 1)
        before = [(page(item).leads, page(item).for_s) for item in regions]
        until_s = monotonic() + LOAD_S
        loads = [asyncio.create_task(ask_on(item, until_s)) for item in regions for _ in range(4)]
        while monotonic() < until_s:
            await asyncio.sleep(0.1)
            assert await oldest_beat_s(near) < GONE_S / 2
            assert [page(item).leads for item in regions] == [leads for leads, _ in before]
            assert [len(page(item).peers) for item in regions] == [1, 1]
            # What one turn tells is what waits at most, plus what comes during its round trip.
            assert all(page(item).pending < MAX_BATCH * TOLD_BATCHES for item in regions)
        await asyncio.gather(*loads)
        assert [page(item).state for item in regions] == ["joined"] * 2
        assert all(
            page(item).for_s > for_s for item, (_, for_s) in zip(regions, before, strict=True)
        )
        await eventually(lambda: num_seen(regions[0]) == num_seen(regions[1]) > 100)


async def test_a_tenant_does_not_wait_for_the_round_trips_of_others(
    open_region: Any, far_url: str
) -> None:
    keys = tuple(ApiKey(key=f"k{number}", name=f"t{number}") for number in range(60))
    config = limited(max_requests=2) | {"api_keys": keys}
    async with gateways(open_region, far_url, num=1, prefill=(), **config) as (region,):

        async def ask_as(key: str) -> list[float]:
            took_s = []
            for _ in range(6):
                began_s = monotonic()
                headers = {"Authorization": f"Bearer {key}"}
                status, _, answer = await region.post(body(), headers=headers)
                assert status == 200, answer
                took_s.append(monotonic() - began_s)
                await asyncio.sleep(0.04)  # so that its end is being told when it asks again
            return took_s

        took_s = await asyncio.gather(*(ask_as(key.key.get_secret_value()) for key in keys))
        # One round trip for its own question, and another one while an end is told. One after the
        # other, the ends of 60 tenants take 2.4 s.
        assert median(each for own in took_s for each in own) < 0.8


async def test_limits_hold_over_both_gateways(open_region: Any, far_url: str) -> None:
    config = limited(max_requests=10)
    async with gateways(open_region, far_url, prefill=(), **config) as regions:
        regions[0].engine.first_token.clear()
        asked = [asyncio.create_task(item.post(body())) for _ in range(15) for item in regions]
        await eventually(lambda: sum(task.done() for task in asked) == 20)
        regions[0].engine.first_token.set()
        answers = await asyncio.gather(*asked)
        assert sorted(status for status, _, _ in answers) == [200] * 10 + [429] * 20
