"""What breaks between two clusters of real engines costs time, never a wrong or half answer.

The link is slow (40 Mbit/s), so that the prompt's 22 MB are under way for four seconds: faults hit
in the middle. Each test asks for the same prompt with a salt of its own, so that no cache helps.
All processes speak mutual TLS; tests/integration has faults of the transport without it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from engine_region import (
    WINDOW,
    agent_status,
    engine_metrics,
    everything_is_given_back,
    granter_of,
    link_is_usable,
    records_at,
    until,
)
from served_region import DECODE, LONG_TOKENS, PREFILL, Served, serving

from deploy.gateway.grants import reservation_grant
from deploy.lab.demo.answers import Answer
from deploy.lab.demo.scenario import DemoRequest
from kvmanager.agent.grants import outbox_send
from kvmanager.agent.messages import (
    SERVICE,
    Await,
    OpenOutbox,
    OpenOutboxReply,
    Reserve,
    ReserveReply,
    TransferReport,
)
from transport.rpc import RpcClient, RpcError

pytestmark = [pytest.mark.asyncio(loop_scope="session"), serving(WINDOW)]

LONG = f"alone {LONG_TOKENS}"
UNDER_WAY_BYTES = 500_000


@pytest_asyncio.fixture(loop_scope="session")
async def slow(served: Served) -> AsyncIterator[Served]:
    """The region with a slow link; after the test it is whole and empty again, with its own."""
    relay = served.region.relay()
    await asyncio.to_thread(relay.configure, rate="40Mbit")
    await until(lambda: link_is_usable(served.url), "the link is usable")
    yield served
    await asyncio.to_thread(relay.heal)
    await asyncio.to_thread(relay.configure, rate="1Gbit")
    await served.is_whole()


def long_prompt(served: Served, case: str) -> DemoRequest:
    """The prompt that nobody has cached by this name."""
    (known,) = (request for request in served.plain.asked if request.name == LONG)
    return replace(known, name=case, salt=case)


async def ask_while(
    served: Served, case: str, fault: Callable[[], Awaitable[Any]] | None = None
) -> dict[str, Any]:
    """Ask for the prompt, break something once its KVCache is under way, check the tokens; the
    gateway's record of the request.
    """
    link = served.region.relay()
    before = (await asyncio.to_thread(link.report)).forward.out_bytes
    asking = asyncio.create_task(served.ask([long_prompt(served, case)]))

    async def is_under_way() -> bool:
        if asking.done():
            record = (await records_at(served.url))[asking.result()[case].request_id]
            raise AssertionError(f"answered with nothing transferred: {record}")
        moved = (await asyncio.to_thread(link.report)).forward.out_bytes - before
        return moved > UNDER_WAY_BYTES

    if fault is not None:
        await until(is_under_way, "a transfer is under way", 30)
        await fault()
    answer = (await asking)[case]
    is_right(served, answer)
    return await served.record(answer)


def is_right(served: Served, answer: Answer) -> None:
    assert not answer.error, answer.error
    assert answer.token_ids == served.plain.expected[LONG].token_ids


async def test_a_full_landing_means_local_prefill(served: Served) -> None:
    """There is room for three of four prompts."""
    cases = [long_prompt(served, f"landing {number}") for number in range(4)]
    answers = (await served.ask(cases)).values()
    for answer in answers:
        is_right(served, answer)
    found = [await served.record(answer) for answer in answers]
    (local,) = (record for record in found if record["route"] != "prefill_cluster")
    assert local["reason"] == "no_landing_room", local
    await everything_is_given_back(served.region)


async def test_a_flipped_byte_and_a_cut_of_3_s_only_delay(slow: Served) -> None:
    link = slow.region.relay()
    before = await asyncio.to_thread(link.report)

    async def is_noticed() -> bool:
        now = await asyncio.to_thread(link.report)
        is_flipped = now.forward.flipped_bytes == before.forward.flipped_bytes + 1
        return is_flipped and now.accepted_connections > before.accepted_connections

    async def damage() -> None:
        await asyncio.to_thread(link.flip, after_bytes=100_000)
        await until(is_noticed, "a connection in place of the one with the wrong byte", 10)
        await asyncio.to_thread(link.cut, for_s=3.0)

    record = await ask_while(slow, "damaged", damage)
    assert (record["route"], record["prefill_error"]) == ("prefill_cluster", ""), record


async def test_a_link_cut_for_good_ends_in_local_prefill(slow: Served) -> None:
    async def cut() -> None:
        await asyncio.to_thread(slow.region.relay().cut)

    record = await ask_while(slow, "cut", cut)
    assert record["reason"] == "prefill_failed", record


async def test_clients_that_leave_free_everything(slow: Served) -> None:
    """Before the first token and after it."""
    url = f"{slow.url}/v1/completions"
    async with aiohttp.ClientSession() as session:
        for answered in (False, True):
            body = replace(long_prompt(slow, f"left {answered}"), stream=True).body(WINDOW)
            body |= {"max_tokens": 500, "ignore_eos": True}
            if answered:
                async with session.post(url, json=body) as response:
                    await response.content.readline()
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(session.post(url, json=body), 0.3)
            await everything_is_given_back(slow.region, 45)
    await ask_while(slow, "after the clients left")


async def test_a_wrong_token_lands_nothing(slow: Served) -> None:
    region = slow.region
    gateway, granter = region.credentials("gateway"), granter_of(region)
    sender = RpcClient(region.agent_control("a1"), SERVICE, gateway)
    receiver = RpcClient(region.agent_control("b1"), SERVICE, gateway)
    try:
        grant = reservation_grant(granter, 300, "", b"")
        wanted = Reserve(300, 8.0, grant=grant)
        landing = await receiver.call("Reserve", wanted, ReserveReply, 5.0)
        outbox = OpenOutbox(
            transfer_id=landing.transfer_id,
            token="00" * 32,
            nbytes=landing.nbytes,
            num_tokens=300,
            layout_fingerprint=landing.layout_fingerprint,
            host=landing.host,
            port=landing.port,
            lease_s=8.0,
            window_step=landing.window_step,
        )

        async def open_outbox(request: OpenOutbox) -> None:
            request = msgspec.structs.replace(request, grant=granter.grant(outbox_send(request)))
            await sender.call("OpenOutbox", request, OpenOutboxReply, 5.0)

        await open_outbox(outbox)
        report = await sender.call("Await", Await(landing.transfer_id, 15.0), TransferReport, 20.0)
        assert report.state == "failed", report
        assert "token" in report.error, report
        assert report.acked_bytes == 0
        other_layout = msgspec.structs.replace(outbox, layout_fingerprint="11" * 32)
        with pytest.raises(RpcError, match="layout"):
            await open_outbox(other_layout)
    finally:
        await sender.close()
        await receiver.close()
    # The landing itself is untouched and goes with its lease.
    assert (await agent_status(region, "b1")).landing_bytes > 0


async def test_what_dies_costs_a_local_prefill_and_no_cache(slow: Served) -> None:
    """Prefill agent, receiving agent and prefill engine, each in the middle of a transfer. Then a
    conversation goes on as if they had not died.
    """
    region, talk = slow.region, slow.talk
    await talk.next_turn()
    for process in (region.agent("a1"), region.agent("b1"), region.engine(PREFILL)):
        before = await num_loads(slow)
        record = await ask_while(slow, f"{process.name} killed", process.kill)
        assert record["first_route"] == "prefill_cluster", record
        # Without the agent at its side the decode engine may answer before the sender gives up.
        assert record["prefill_error"] or process.name == "agent.b1", record
        assert await num_loads(slow) == before, "half a landing was loaded"
        await slow.is_whole()
    await talk.assert_only_the_new(await talk.next_turn())
    record = await ask_while(slow, "after the faults")
    assert (record["route"], record["prefill_error"]) == ("prefill_cluster", ""), record


async def num_loads(served: Served) -> float:
    """The landings that the decode engine has loaded."""
    metrics = await engine_metrics(served.region, DECODE)
    return metrics.get("vllm:prfaas_loads_total", 0.0)
