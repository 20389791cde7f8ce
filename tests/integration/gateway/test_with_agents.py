"""The gateway over the real fronts and real node agents; only the engines' computing is fake."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from whole_region import Whole, ask, whole_region

from kvmanager.agent.messages import Reserve, ReserveReply

pytestmark = pytest.mark.slow


@pytest.fixture
async def whole(tmp_path: Path, lone_engine: Any) -> AsyncIterator[Whole]:
    async with whole_region(tmp_path, lone_engine) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
async def test_kvcache_moves_and_the_numbers_are_known(whole: Whole, stream: bool) -> None:
    status, headers, answer = await ask(whole, stream=stream)
    assert status == 200
    assert answer
    assert headers["x-prfaas-route"] == "prefill_cluster"
    assert whole.loaded == whole.sent
    record = await whole.record()
    assert record.outcome == "ok"
    assert record.transfer_bytes == whole.nbytes
    assert record.prefill_instance == "p0"
    assert (record.decode_instance, record.decode_reason) == ("d0", "1 usable, least loaded first")
    assert record.landing_wait_s is not None
    assert record.landing_wait_s <= record.ttft_s
    assert {"queue_s", "prefill_s", "transfer_tail_s"} <= {
        name for name in record.parts.__struct_fields__ if getattr(record.parts, name) is not None
    }
    await whole.memory_is_back()


async def test_a_killed_sending_agent_means_recomputing(whole: Whole) -> None:
    whole.share = 0.5
    whole.prefiller.first_token.clear()
    asking = asyncio.create_task(ask(whole))
    await whole.prefiller.wait_requests(1)
    whole.sending.end(signal.SIGKILL)
    status, headers, _ = await asyncio.wait_for(asking, 30)
    assert status == 200
    assert headers["x-prfaas-reason"].startswith("prefill_failed")
    assert whole.decoder.sources == ["prompt"]
    await whole.memory_is_back()


async def test_a_receiving_agent_killed_before_the_landing_means_recomputing(whole: Whole) -> None:
    whole.share = 0.5
    whole.prefiller.first_token.clear()
    asking = asyncio.create_task(ask(whole))
    await whole.prefiller.wait_requests(1)
    whole.receiving.end(signal.SIGKILL)
    status, _, answer = await asyncio.wait_for(asking, 30)
    assert status == 200
    assert answer
    assert "landing" not in whole.decoder.sources
    await whole.prefiller.wait_aborts(1)


async def test_a_client_that_leaves_frees_the_landing(whole: Whole) -> None:
    whole.share = 0.5
    whole.prefiller.first_token.clear()
    asking = asyncio.create_task(ask(whole, stream=True))
    await whole.prefiller.wait_requests(1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await whole.prefiller.wait_aborts(1)
    await whole.memory_is_back()
    assert (await whole.record()).outcome == "client_gone"


async def test_a_killed_receiving_agent_means_local(whole: Whole) -> None:
    whole.receiving.end(signal.SIGKILL)
    status, headers, _ = await asyncio.wait_for(ask(whole), 30)
    assert status == 200
    assert headers["x-prfaas-route"] == "local"
    assert headers["x-prfaas-reason"].startswith("reserve_failed")
    assert (await whole.record()).decode_reason == "0 requests, fewest of 1"


async def test_a_full_arena_means_local_before_any_reservation_fails(whole: Whole) -> None:
    status, headers, _ = await ask(whole)
    assert (status, headers["x-prfaas-route"]) == (200, "prefill_cluster")
    await whole.memory_is_back()
    others: list[ReserveReply] = []
    agent = whole.pd._instances.by_name["d0"].agent
    while (await whole.agent_status()).landing_room_bytes >= whole.nbytes:
        others.append(await agent.reserve(Reserve(299, 60.0), 5.0))
    await whole.routing_sees(lambda room_bytes: room_bytes < whole.nbytes)
    for _ in range(3):
        status, headers, _ = await ask(whole)
        assert (status, headers["x-prfaas-route"]) == (200, "local")
        assert headers["x-prfaas-reason"].startswith("no_landing_room; ")
        assert "; landing_bytes=" in headers["x-prfaas-reason"]
    assert await whole.num_refused() == 0
    for other in others:
        await agent.cancel(other.transfer_id, "the test goes on", 5.0)
    await whole.routing_sees(lambda room_bytes: room_bytes > 2 * whole.nbytes)
    status, headers, _ = await ask(whole)
    assert (status, headers["x-prfaas-route"]) == (200, "prefill_cluster")
    await whole.memory_is_back()
