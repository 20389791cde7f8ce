"""Clients that take their answer slowly or never lose their place, on a real gateway."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web
from eventually import eventually
from openai_engine import fixed, streamed
from raw_client import RawClient

EVENT = b"data: " + b"x" * 60_000 + b"\n\n"
LIMITS = {"timeouts": {"client_stall_s": 1.0}, "min_client_bytes_per_s": 1 << 20}
JSON = {"Content-Type": "application/json"}


FLOOD = streamed(*[EVENT] * 2000)
"""An answer of 120 MB that is there at once."""
LONG_ANSWER = fixed({"choices": [], "text": "x" * (16 << 20)})


async def read_slowly(client: RawClient) -> int:
    """About 20 kB a second, far below the least rate, and never nothing; how much came in all."""
    nbytes = 0
    with suppress(ConnectionError):
        while chunk := await client.reader.read(200):
            nbytes += len(chunk)
            await asyncio.sleep(0.01)
    return nbytes


@pytest.mark.parametrize("stream", [True, False])
async def test_a_trickling_reader_is_cut_off(open_region: Any, stream: bool) -> None:
    async with open_region(**LIMITS) as region, RawClient(region.url) as client:
        region.engine.reply = FLOOD if stream else LONG_ANSWER
        body = b'{"model":"tiny","prompt":"x","stream":%s}' % str(stream).lower().encode()
        await client.post("/v1/completions", JSON, announced=len(body), body=body)
        assert await client.status() == 200
        reading = asyncio.create_task(read_slowly(client))
        await eventually(lambda: not region.gateway.num_in_flight)
        await region.until(lambda: region.engine.num_serving == 0)
        reading.cancel()
        region.engine.reply = None
        assert (await region.post({"model": "tiny", "prompt": "x"}))[0] == 200


async def test_a_slow_engine_costs_no_client_its_stream(open_region: Any) -> None:
    limits = {"timeouts": {"client_stall_s": 0.2}, "min_client_bytes_per_s": 1 << 20}
    async with open_region(**limits) as region:

        async def drip(request: web.Request, body: Any) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for _ in range(10):
                await response.write(b'data: {"choices":[{"text":"a"}]}\n\n')
                await asyncio.sleep(0.1)
            await response.write(b"data: [DONE]\n\n")
            return response

        region.engine.reply = drip
        body = {"model": "tiny", "prompt": "x", "stream": True}
        status, _, answer = await region.post(body)
        assert status == 200
        assert answer.endswith(b"data: [DONE]\n\n")
