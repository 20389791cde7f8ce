"""The client of a rehearsal against a small gateway: times, refusals, broken answers, records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from deploy.lab.rehearse.columns import REMOTE
from deploy.lab.rehearse.driving import Client, drive_closed, drive_open
from scheduler.replay.workload import Workload

FIRST_S = 0.05


class Gateway:
    """Streams three tokens; refuses the first try of a prompt of 13 tokens, breaks one of 17."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        num = len(body["prompt"])
        if num == 13 and sum(len(one["prompt"]) == 13 for one in self.bodies) == 1:
            return web.Response(status=429, headers={"Retry-After": "0"})
        response = web.StreamResponse()
        await response.prepare(request)
        # A comment that keeps the connection alive is no token.
        await response.write(b": keep-alive\n\n")
        await asyncio.sleep(FIRST_S)
        for _ in range(3):
            await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
            await asyncio.sleep(0.01)
        await response.write(b'data: {"error": {}}\n\n' if num == 17 else b"data: [DONE]\n\n")
        return response

    async def record(self, request: web.Request) -> web.Response:
        record = {"is_settled": True, "route": REMOTE, "reason": "above_threshold"}
        record |= {"predicted_ttft_s": 0.06, "transfer_bytes": 7, "cached_tokens": 2}
        return web.json_response({"requests": [record]})


Started = tuple[Gateway, Callable[[Workload], Client]]


@pytest.fixture
async def started() -> AsyncIterator[Started]:
    gateway, server = Gateway(), web.Application()
    server.router.add_post("/v1/completions", gateway.complete)
    server.router.add_get("/prfaas/requests/{id}", gateway.record)
    runner = web.AppRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    async with aiohttp.ClientSession() as session:
        yield gateway, lambda work: Client(session, f"http://{host}:{port}", "tiny", work, 1)
    await runner.cleanup()


async def test_requests_are_sent_at_their_times_and_read_to_the_end(started: Started) -> None:
    gateway, client_of = started
    blocks = [[1, 2], [1, 3], [], []]
    work = Workload(
        arrivals_s=[0.0, 0.1, 0.2, 0.2],
        prompt_tokens=[10, 9, 13, 17],
        output_tokens=[3] * 4,
        block_ids=blocks,
        block_tokens=4,
    )
    client = client_of(work)
    found = await drive_open(client, work)
    assert [one.fate for one in found] == ["ok", "ok", "refused", "failed"]
    assert [round(one.at_s, 1) for one in found] == [0.0, 0.1, 0.2, 0.2]
    assert all(FIRST_S <= (one.ttft_s or 0) < FIRST_S + 0.08 for one in found[:2])
    assert found[0].tpot_s == pytest.approx(0.01, abs=0.01)
    assert (found[0].route, found[0].transfer_bytes, found[0].cached_tokens) == (REMOTE, 7, 2)
    assert "error event" in found[3].reason
    assert client.counts.done == 2
    first, second = (body["prompt"] for body in gateway.bodies[:2])
    # They share their first block and nothing after it.
    assert first[:4] == second[:4]
    assert first[4:8] != second[4:8]
    assert (len(first), len(second)) == (10, 9)
    wanted = {"min_tokens": 3, "max_tokens": 3, "ignore_eos": True, "temperature": 0}
    assert {key: gateway.bodies[0][key] for key in wanted} == wanted


async def test_clients_of_a_backlog_ask_again_when_they_are_told(started: Started) -> None:
    _, client_of = started
    work = Workload(
        arrivals_s=[0.0] * 90, prompt_tokens=[13] * 90, output_tokens=[3] * 90, block_ids=None
    )
    found = await drive_closed(client_of(work), work, 2, 0.5)
    assert {one.fate for one in found} == {"ok"}
    assert sum(one.num_refusals for one in found) == 1
    assert 6 <= len(found) <= 20
    assert len({one.index for one in found}) == len(found)
