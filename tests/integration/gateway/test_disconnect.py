"""The client goes away at each await: both legs end, and the landing is back."""

import asyncio
import contextlib
from typing import Any

import pytest
from openai_engine import fixed, streamed


async def leave(region: Any, body: dict[str, Any], when: Any) -> None:
    """Send `body`, wait for `when`, and hang up."""
    asking = asyncio.create_task(region.session.post(region.url + "/v1/completions", json=body))
    await asyncio.wait_for(when, 5)
    assert not asking.done()
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


async def assert_gone(region: Any) -> None:
    await region.assert_nothing_held()
    record = await region.record()
    assert record.outcome == "client_gone"
    # The region serves the next request.
    region.engine.reply = region.engine.render_reply = None
    region.engine.first_token.set()
    region.pd.reserve_gate.set()
    region.far.gate.set()
    status, _, _ = await region.post(region.long_body())
    assert status == 200
    await region.assert_nothing_held()


async def test_while_rendering(region: Any) -> None:
    region.engine.render_reply = fixed({}, after=asyncio.Event())
    await leave(region, region.long_body(), region.until(lambda: region.engine.requests))
    await assert_gone(region)


async def test_while_reserving(region: Any) -> None:
    region.pd.reserve_gate.clear()
    await leave(region, region.long_body(), region.pd.reserving.wait())
    await region.until(lambda: region.gateway.num_in_flight == 0)
    region.pd.reserve_gate.set()
    await assert_gone(region)
    assert len(region.far.jobs) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_while_waiting_for_the_landing(region: Any, stream: bool) -> None:
    region.far.gate.clear()
    awaited = region.until(lambda: len(region.pd.awaiting) == 1)
    await leave(region, region.long_body(stream=stream), awaited)
    await region.until(lambda: region.far.num_cancelled == 1)
    assert region.engine.bodies() == []
    await assert_gone(region)


async def test_while_the_engine_waits_for_the_landing(region: Any) -> None:
    region.far.gate.clear()
    region.pd.agent_is_gone = True
    posted = region.until(lambda: region.engine.num_serving == 1)
    await leave(region, region.long_body(), posted)
    await region.until(lambda: region.far.num_cancelled == 1)
    await region.until(lambda: region.engine.num_aborted == 1)
    await assert_gone(region)


async def test_while_a_failed_landing_waits_for_the_reason(open_region: Any) -> None:
    async with open_region(timeouts={"result_grace_s": 30.0}) as region:
        region.far.gate.clear()

        async def landing_failed() -> None:
            await region.until(lambda: len(region.pd.awaiting) == 1)
            region.pd.end_landing(*region.pd.awaiting, "failed", "checksum")
            await region.until(lambda: not region.pd.awaiting)

        await leave(region, region.long_body(), landing_failed())
        await region.until(lambda: region.far.num_cancelled == 1)
        assert region.engine.bodies() == []
        await assert_gone(region)


@pytest.mark.parametrize("stream", [False, True])
async def test_while_waiting_for_the_first_token(region: Any, stream: bool) -> None:
    region.engine.first_token.clear()
    landed = region.until(lambda: region.engine.sources == ["landing"])
    await leave(region, region.long_body(stream=stream), landed)
    await region.until(lambda: region.engine.num_aborted == 1)
    await assert_gone(region)


async def test_in_the_middle_of_a_stream(region: Any) -> None:
    region.engine.next_token.clear()
    body = region.long_body(stream=True)
    response = await region.session.post(region.url + "/v1/completions", json=body)
    assert (await response.content.readany()).startswith(b"data: ")
    response.close()
    await region.until(lambda: region.engine.num_aborted == 1)
    region.engine.next_token.set()
    await assert_gone(region)


async def test_while_one_engine_serves_it_whole(region: Any) -> None:
    region.engine.first_token.clear()
    served = region.until(lambda: region.engine.sources == ["prompt"])
    await leave(region, {"model": "tiny", "prompt": "x"}, served)
    await region.until(lambda: region.engine.num_aborted == 1)
    await assert_gone(region)


async def test_before_the_body_is_there(region: Any) -> None:
    host, port = region.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b'Content-Length: 100\r\n\r\n{"model"'
    )
    await writer.drain()
    await region.until(lambda: region.gateway.num_in_flight == 1)
    writer.close()
    await region.until(lambda: region.gateway.num_in_flight == 0)
    assert region.engine.requests == []


async def test_a_client_that_stops_reading_is_let_go(open_region: Any) -> None:
    async with open_region(timeouts={"client_stall_s": 0.2}) as region:
        region.engine.reply = streamed(*[b"data: " + b"x" * 60_000 + b"\n\n"] * 2000)
        host, port = region.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = b'{"model":"tiny","prompt":"x","stream":true}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        await reader.readline()
        await region.until(lambda: region.gateway.num_in_flight == 0)
        assert (await region.record()).outcome == "client_gone"
        await region.until(lambda: region.engine.num_serving == 0)
        writer.close()


async def test_many_leave_while_others_stay(region: Any) -> None:
    region.far.gate.clear()
    tasks = [
        asyncio.create_task(region.post(region.long_body(seed=seed, stream=bool(seed % 3))))
        for seed in range(60)
    ]
    await region.until(lambda: len(region.far.jobs) == 60)
    for task in tasks[::2]:
        task.cancel()
    await region.until(lambda: region.far.num_cancelled == 30)
    region.far.gate.set()
    for task in tasks[1::2]:
        assert (await task)[0] == 200
    await asyncio.gather(*tasks, return_exceptions=True)
    await region.assert_nothing_held()
    assert len(region.pd.released) == 60
