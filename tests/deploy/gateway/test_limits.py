"""What requests hold together: charged as it arrives, given back however a request ends."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from aiohttp import web

from deploy.gateway.config import GatewayConfig, TimeoutConfig
from deploy.gateway.errors import ApiError
from deploy.gateway.intake.limits import SMALL_BODY_BYTES, Limits


class Body:
    """A body as aiohttp gives it: what has been fed, then the end or an error."""

    def __init__(self) -> None:
        self._fed: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self.num_read = 0

    def feed(self, *chunks: bytes) -> None:
        for chunk in chunks:
            self._fed.put_nowait(chunk)

    def end(self, error: Exception | None = None) -> None:
        self._fed.put_nowait(error or b"")

    def is_eof(self) -> bool:
        return False

    async def readany(self) -> bytes:
        item = await self._fed.get()
        if isinstance(item, Exception):
            raise item
        self.num_read += len(item)
        return item


class Request:
    """`announced` is its Content-Length, None for a chunked body."""

    content_type = "application/json"

    def __init__(self, announced: int | None = None, remote: str = "127.0.0.1") -> None:
        self.content_length = announced
        self.remote = remote
        self.content = Body()


def limits(**config: Any) -> Limits:
    settings = {"models": [{"name": "tiny"}], "max_body_bytes": 100, "max_buffered_bytes": 250}
    return Limits(GatewayConfig.model_validate(settings | config))


async def hold(held: Limits, request: Request, leave: asyncio.Event | None = None) -> int:
    """Be received, and stay until `leave`; how long the body was."""
    async with held.received(cast(web.Request, request)) as received:
        if leave is not None:
            await leave.wait()
        return len(received.body)


async def settle() -> None:
    """Let every task go on until it waits for something that has not happened."""
    for _ in range(20):
        await asyncio.sleep(0)


def codes(ended: Sequence[object]) -> list[object]:
    return [(end.status, end.code) if isinstance(end, ApiError) else end for end in ended]


@pytest.mark.parametrize("announced", [None, 90])
async def test_a_body_is_charged_as_it_arrives(announced: int | None) -> None:
    held, request, leave = limits(), Request(announced), asyncio.Event()
    task = asyncio.create_task(hold(held, request, leave))
    await settle()
    assert (held.num_in_flight, held.num_body_bytes) == (1, 0)
    for nbytes in (30, 60, 90):
        request.content.feed(b"x" * 30)
        await settle()
        assert held.num_body_bytes == nbytes
    request.content.end()
    await settle()
    leave.set()
    assert await task == 90
    assert (held.num_in_flight, held.num_body_bytes) == (0, 0)


@pytest.mark.parametrize("announced", [None, 90])
async def test_bodies_that_arrive_together_stay_within_the_memory(announced: int | None) -> None:
    held = limits()
    requests = [Request(announced) for _ in range(8)]
    tasks = [asyncio.create_task(hold(held, request)) for request in requests]
    most = 0
    for _ in range(9):
        for request in requests:
            request.content.feed(b"x" * 10)
            await settle()
            most = max(most, held.num_body_bytes)
    for request in requests:
        request.content.end()
    ended = codes(await asyncio.gather(*tasks, return_exceptions=True))
    # 250 bytes hold two whole bodies of 90; what a refused one held the others may use.
    assert most <= 250
    assert ended.count(90) >= 2
    assert ended.count(90) + ended.count((429, "too_many_requests")) == 8
    assert (held.num_in_flight, held.num_body_bytes) == (0, 0)


async def test_what_is_announced_and_never_sent_keeps_nobody_out() -> None:
    held = limits()
    silent = [asyncio.create_task(hold(held, Request(100))) for _ in range(10)]
    await settle()
    request = Request(100)
    request.content.feed(b"x" * 100)
    request.content.end()
    assert await hold(held, request) == 100
    for task in silent:
        task.cancel()
    await asyncio.gather(*silent, return_exceptions=True)
    assert (held.num_in_flight, held.num_body_bytes) == (0, 0)


async def test_a_body_that_grows_too_long_is_not_read_to_its_end() -> None:
    held, request = limits(), Request()
    request.content.feed(*[b"x" * 30] * 50)
    with pytest.raises(ApiError, match=r"longer than 100 bytes.*\(max_body_bytes\)") as refused:
        await hold(held, request)
    assert (refused.value.status, refused.value.code) == (413, "body_too_large")
    assert request.content.num_read == 120
    assert (held.num_in_flight, held.num_body_bytes) == (0, 0)


async def test_a_body_of_exactly_the_limit_is_let_in() -> None:
    request = Request()
    request.content.feed(b"x" * 60, b"x" * 40)
    request.content.end()
    assert await hold(limits(), request) == 100


async def test_a_body_that_trickles_is_given_up_in_time() -> None:
    held, request = limits(timeouts=TimeoutConfig(body_s=0.02)), Request()
    request.content.feed(b"x")
    with pytest.raises(ApiError, match=r"within 0\.02 s") as refused:
        await hold(held, request)
    assert (refused.value.status, refused.value.code) == (408, "body_timeout")
    assert (held.num_in_flight, held.num_body_bytes) == (0, 0)


@pytest.mark.parametrize("error", [web.RequestPayloadError("cut off"), ValueError("no gzip")])
async def test_a_body_that_breaks_off_gives_its_memory_back(error: Exception) -> None:
    held, request = limits(), Request()
    request.content.feed(b"x" * 50)
    request.content.end(error)
    with pytest.raises(ApiError) as refused:
        await hold(held, request)
    assert (refused.value.status, refused.value.code) == (400, "unreadable_body")
    assert (held.num_in_flight, held.num_body_bytes) == (0, 0)


async def test_a_client_that_leaves_gives_its_memory_back() -> None:
    held, request = limits(), Request()
    task = asyncio.create_task(hold(held, request))
    request.content.feed(b"x" * 50)
    await settle()
    assert held.num_body_bytes == 50
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (held.num_in_flight, held.num_body_bytes) == (0, 0)


async def test_a_refusal_says_which_limit_and_when_to_come_back() -> None:
    held, leave = limits(max_in_flight=3), asyncio.Event()
    tasks = []
    for _ in range(2):
        request = Request()
        request.content.feed(b"x" * 100)
        request.content.end()
        tasks.append(asyncio.create_task(hold(held, request, leave)))
    await settle()
    with pytest.raises(ApiError, match=r"250 bytes \(max_buffered_bytes\)\. .* 1 s\.") as refused:
        await hold(held, Request(60))
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    tasks.append(asyncio.create_task(hold(held, Request(), leave)))
    await settle()
    with pytest.raises(ApiError, match=r"3 requests .* \(max_in_flight\)\. .* 1 s\.") as refused:
        await hold(held, Request(1))
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    tasks[-1].cancel()
    leave.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (held.num_in_flight, held.num_body_bytes) == (0, 0)


async def test_an_order_to_the_gateway_is_short() -> None:
    held, request = limits(max_body_bytes=1 << 20, max_buffered_bytes=1 << 20), Request()
    request.content.feed(*[b"x" * 1024] * 1000)
    with pytest.raises(ApiError) as refused:
        await held.read_small(cast(web.Request, request))
    assert refused.value.status == 413
    assert request.content.num_read == SMALL_BODY_BYTES + 1024


async def test_requests_that_no_engine_was_given_do_not_shorten_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("deploy.gateway.intake.limits.time.monotonic", lambda: now_s[0])
    held = limits(max_in_flight=1)

    def whole() -> Request:
        request = Request()
        request.content.feed(b"{}")
        request.content.end()
        return request

    async with held.received(cast(web.Request, whole())) as received:
        received.is_served = True
        now_s[0] += 20.0
    for _ in range(100):
        assert await hold(held, whole()) == 2
    async with held.received(cast(web.Request, whole())):
        with pytest.raises(ApiError) as refused:
            await hold(held, whole())
    assert refused.value.retry_after_s == 20
