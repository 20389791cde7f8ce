"""The client of a Redis server that the directory and the gateways use."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvmanager.directory.errors import StoreError


class BoundedRedis(Redis):
    """Each command gives up after `timeout_s`, with redis-py's TimeoutError.

    redis-py's own `socket_timeout` is not used: it waits for a write by `asyncio.wait_for`, which
    on Python 3.11 loses a cancellation that comes together with the result. A task that repeats
    commands would then never end.
    """

    timeout_s: float

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """As the base class does, but within `timeout_s`."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except TimeoutError as error:
            raise RedisTimeoutError(f"no answer within {self.timeout_s:g} s") from error


def connect(url: str, *, timeout_s: float = 0.25) -> Redis:
    """A client whose commands give up after `timeout_s`. ValueError: no such URL."""
    # No retries: a request waits for the answer, and `Outage` pauses further questions after an
    # error.
    client = BoundedRedis.from_url(
        url, socket_timeout=None, socket_connect_timeout=timeout_s, retry=None
    )
    assert isinstance(client, BoundedRedis)
    client.timeout_s = timeout_s
    return client


async def reached(redis: Redis) -> None:
    """Raises `StoreError` when the server does not answer."""
    try:
        await redis.ping()
    except (RedisError, OSError) as error:
        raise StoreError(f"Redis does not answer: {error}") from error
