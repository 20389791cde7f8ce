"""The client of Redis with a real server."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis_server import RedisServer

from kvmanager.directory.redis_client import connect


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as running:
        yield running


@pytest.mark.parametrize("is_connected", [False, True])
async def test_a_task_that_repeats_commands_ends_when_it_is_cancelled(
    server: RedisServer, is_connected: bool
) -> None:
    for num_steps in range(40):
        redis = connect(server.url, timeout_s=20)
        if is_connected:
            await redis.ping()

        async def repeat(redis=redis) -> None:
            while True:
                await redis.set("key", b"value")
                await asyncio.sleep(0)

        task = asyncio.create_task(repeat())
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait((task,), timeout=10)
        assert done, f"cancelled after {num_steps} steps, it went on"
        assert task.cancelled()
        await redis.aclose()


async def test_a_server_that_does_not_answer_is_given_up(server: RedisServer) -> None:
    redis = connect(server.url, timeout_s=20)
    try:
        await redis.client_pause(1500)
        redis.timeout_s = 0.05
        with pytest.raises(RedisTimeoutError, match=r"no answer within 0\.05 s"):
            await redis.get("key")
        # What came too late is not taken for the answer of the next command.
        redis.timeout_s = 20
        await redis.set("key", b"value")
        assert await redis.get("key") == b"value"
    finally:
        await redis.aclose()
