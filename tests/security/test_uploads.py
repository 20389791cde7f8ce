"""Attacks with bodies that come slowly or never, on a real gateway over real connections."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

from eventually import eventually
from raw_client import RawClient

from deploy.gateway.api_keys import ApiKey

PATH = "/v1/completions"
JSON = {"Content-Type": "application/json"}
MIB = 1 << 20
ELSEWHERE = "127.0.0.2"
SHORT = {"model": "tiny", "prompt": "x"}


async def idle_bodies(region: Any, held: AsyncExitStack, number: int, key: str = "") -> list[Any]:
    """So many requests from one address that announce 32 MiB and send none of it."""
    headers = JSON | ({"Authorization": f"Bearer {key}"} if key else {})
    made = []
    for _ in range(number):
        client = await held.enter_async_context(RawClient(region.url, ELSEWHERE))
        await client.post(PATH, headers, announced=32 * MIB)
        made.append(client)
    return made


async def post_in_two_parts(region: Any, key: str = "") -> int:
    """A true client whose body does not come at once."""
    body = b'{"model": "tiny", "prompt": "x"}'
    headers = JSON | ({"Authorization": f"Bearer {key}"} if key else {})
    async with RawClient(region.url) as client:
        others = region.gateway.num_in_flight
        await client.post(PATH, headers, announced=len(body), body=body[:10])
        await region.until(lambda: region.gateway.num_in_flight == others + 1)
        await client.send(body[10:])
        return await client.status()


async def first_answers(clients: list[RawClient], number: int) -> list[int]:
    """The statuses of those that are answered first, once there are so many."""
    asking = [asyncio.create_task(client.status(60.0)) for client in clients]
    try:
        await eventually(lambda: sum(task.done() for task in asking) >= number)
        return [task.result() for task in asking if task.done()]
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_32_idle_bodies_keep_nobody_out(open_region: Any) -> None:
    limits = {"max_body_bytes": 32 * MIB, "max_buffered_bytes": 1024 * MIB}
    async with open_region(**limits) as region, AsyncExitStack() as held:
        await idle_bodies(region, held, 32)
        await region.until(lambda: region.gateway.num_in_flight == 32)
        assert await post_in_two_parts(region) == 200
        body = {"model": "tiny", "prompt": "x" * (MIB // 2), "n": 2}
        assert (await region.post(body))[0] == 200


async def test_idle_bodies_of_one_address_do_not_take_all_places(open_region: Any) -> None:
    async with open_region(max_in_flight=16, max_uploads_per_address=8) as region:
        async with AsyncExitStack() as held:
            clients = await idle_bodies(region, held, 32)
            assert await first_answers(clients, 24) == [429] * 24
            assert region.gateway.num_in_flight == 8
            assert await post_in_two_parts(region) == 200
            assert (await region.post(SHORT))[0] == 200
        await region.until(lambda: region.gateway.num_in_flight == 0)


async def test_idle_bodies_of_one_tenant_do_not_take_all_places(open_region: Any) -> None:
    keys = tuple(ApiKey.model_validate(line) for line in ("acme one", "mallory two"))
    async with open_region(api_keys=keys, max_in_flight=16, max_uploads_per_tenant=8) as region:
        async with AsyncExitStack() as held:
            clients = await idle_bodies(region, held, 20, "two")
            assert await first_answers(clients, 12) == [429] * 12
            (one_more,) = await idle_bodies(region, held, 1, "two")
            assert await one_more.status() == 429
            assert await post_in_two_parts(region, "one") == 200


async def test_a_stranger_uploads_nothing(open_region: Any) -> None:
    async with open_region(api_keys=("one",)) as region, AsyncExitStack() as held:
        clients = await idle_bodies(region, held, 4, "guessed")
        assert [await client.status() for client in clients] == [401] * 4
        assert region.gateway.num_in_flight == 0


async def test_a_body_that_is_idle_or_trickles_is_given_up(open_region: Any) -> None:
    limits = {"min_client_bytes_per_s": 100_000, "timeouts": {"body_grace_s": 2.0}}
    async with open_region(**limits) as region, RawClient(region.url) as trickling:
        async with RawClient(region.url) as idle:
            await idle.post(PATH, JSON, announced=MIB)
            assert await idle.status() == 408
        await trickling.post(PATH, JSON, announced=MIB)
        answer = asyncio.create_task(trickling.status())
        # Each byte buys ten microseconds.
        while not answer.done():
            with suppress(ConnectionError):
                await trickling.send(b" ")
            await asyncio.sleep(0.005)
        assert await answer == 408
        await region.until(lambda: region.gateway.num_in_flight == 0)
        assert region.engine.requests == []
        assert (await region.post(SHORT))[0] == 200


async def test_one_tenants_bodies_do_not_take_all_memory(open_region: Any) -> None:
    keys = tuple(ApiKey.model_validate(line) for line in ("acme one", "mallory two"))
    limits = {
        "max_body_bytes": MIB,
        "max_buffered_bytes": 4 * MIB,
        "max_tenant_buffered_bytes": 2 * MIB,
    }
    async with open_region(api_keys=keys, **limits) as region, AsyncExitStack() as held:
        part = b" " * (MIB - 1000)
        headers = JSON | {"Authorization": "Bearer two"}
        for _ in range(4):
            client = await held.enter_async_context(RawClient(region.url, ELSEWHERE))
            with suppress(ConnectionError):
                await client.post(PATH, headers, announced=MIB, body=part)
        # Two fit, and what the refused ones held is free again.
        await region.until(lambda: region.gateway.num_in_flight == 2)
        body = {"model": "tiny", "prompt": "x" * (MIB - 1000), "n": 2}
        answer = await region.post(body, headers={"Authorization": "Bearer one"})
        assert answer[0] == 200
