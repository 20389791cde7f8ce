"""What breaks between two clusters of real engines costs time, never a wrong or half answer.

The link is slow (40 Mbit/s), so that a 5,000-token prompt's 22 MB are under way for four seconds:
faults hit in the middle. Each test asks for a prompt of its own, so that no cache helps. All
processes speak mutual TLS; tests/integration has faults of the transport without it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from engine_region import (
    WINDOW,
    agent_status,
    ask_region,
    everything_is_given_back,
    expected_answers,
    granter_of,
    link_is_usable,
    model_dir,
    prompt,
    records,
    region_spec,
    running,
    settled_record,
    until,
    with_tls,
)

from deploy.gateway.grants import reservation_grant
from deploy.lab.demo.answers import Answer
from deploy.lab.demo.scenario import DemoRequest
from deploy.region.launch.launcher import RunningRegion
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

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG_TOKENS = 5000
THRESHOLD_TOKENS = 256
"""Long prompts stay above it whatever a link that was down makes of it."""
CASES = (
    "prefill engine killed",
    "prefill agent killed",
    "receiving agent killed",
    "link cut for 3 s",
    "link cut for good",
    "byte flipped",
    "landing full, a",
    "landing full, b",
    "after a fault",
    "after the client left",
)
PROMPTS = {
    case: prompt(case, LONG_TOKENS, 1000 + index, stream=bool(index % 2))
    for index, case in enumerate(CASES)
}


class Faulty:
    """A region and the right answers."""

    def __init__(
        self,
        region: RunningRegion,
        prompts: dict[str, DemoRequest],
        expected: dict[str, Answer],
    ) -> None:
        self.region = region
        self.prompts = prompts
        self.expected = expected

    async def ask_while(
        self, case: str, fault: Callable[[], Awaitable[None]] | None = None
    ) -> dict[str, Any]:
        """Ask for the case's prompt, break something once its KVCache is under way, check the
        tokens; the gateway's record of the request."""
        asking = asyncio.create_task(ask_region(self.region, WINDOW, [self.prompts[case]]))
        if fault is not None:
            await self._under_way(case, asking)
            await fault()
        answer = (await asking)[case]
        assert not answer.error, answer.error
        assert answer.token_ids == self.expected[case].token_ids
        return (await records(self.region))[answer.request_id]

    async def _under_way(self, case: str, asking: asyncio.Task[dict[str, Answer]]) -> None:
        """Return once the link carries the KVCache; an answer before that says what went wrong."""

        async def is_under_way() -> bool:
            if asking.done():
                record = (await records(self.region))[asking.result()[case].request_id]
                raise AssertionError(f"answered with nothing transferred: {record}")
            return self.region.relay().report().forward.out_bytes > self.moved_before + 500_000

        await until(is_under_way, "a transfer is under way", 30)

    def mark(self) -> None:
        self.moved_before = self.region.relay().report().forward.out_bytes


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Faulty]:
    path = model_dir(models_dir, WINDOW)
    run_dir = tmp_path_factory.mktemp("f")
    expecting = asyncio.create_task(
        expected_answers(path, WINDOW, list(PROMPTS.values()), tmp_path_factory.mktemp("p"))
    )
    spec = region_spec(
        path,
        WINDOW,
        threshold_tokens=THRESHOLD_TOKENS,
        link={"rate": "40Mbit", "rtt": "20ms"},
        landing_gib=32 / 1024,
    )
    spec = with_tls(spec, tmp_path_factory.mktemp("tls"))
    async with running(spec, run_dir / "region") as region:
        for node in ("a1", "b1"):
            assert (await agent_status(region, node)).is_encrypted
        asked, expected = await expecting
        yield Faulty(region, {request.name: request for request in asked}, expected)


@pytest_asyncio.fixture(loop_scope="module")
async def faulty(shared: Faulty) -> AsyncIterator[Faulty]:
    """The region, whole before the test and, after it, whole and empty again."""
    shared.mark()
    yield shared
    shared.region.relay().heal()
    for process in shared.region.processes:
        await process.wait_restarted(180)
    await shared.region.wait_settled(60)
    await everything_is_given_back(shared.region)
    await until(lambda: link_is_usable(shared.region), "the link is usable")


async def test_a_link_cut_for_3_s_only_delays(faulty: Faulty) -> None:
    async def cut() -> None:
        faulty.region.relay().cut(for_s=3.0)

    record = await faulty.ask_while("link cut for 3 s", cut)
    assert record["route"] == "prefill_cluster", record


async def test_a_flipped_byte_is_sent_again(faulty: Faulty) -> None:
    async def flip() -> None:
        faulty.region.relay().flip(after_bytes=100_000)

    record = await faulty.ask_while("byte flipped", flip)
    assert record["route"] == "prefill_cluster", record


async def test_a_full_landing_means_local_prefill(faulty: Faulty) -> None:
    cases = ("landing full, a", "landing full, b")
    answers = await asyncio.gather(
        *(ask_region(faulty.region, WINDOW, [faulty.prompts[case]]) for case in cases)
    )
    for case, answer in zip(cases, answers, strict=True):
        assert not answer[case].error
        assert answer[case].token_ids == faulty.expected[case].token_ids
    listed = await records(faulty.region)
    found = [listed[answer[case].request_id] for case, answer in zip(cases, answers, strict=True)]
    assert sorted(record["route"] != "prefill_cluster" for record in found) == [False, True]
    assert any(record["reason"] == "no_landing_room" for record in found), found


async def test_a_link_cut_for_good_ends_in_local_prefill(faulty: Faulty) -> None:
    async def cut() -> None:
        faulty.region.relay().cut()

    record = await faulty.ask_while("link cut for good", cut)
    assert record["reason"] == "prefill_failed", record


async def test_a_killed_prefill_agent_ends_in_local_prefill(faulty: Faulty) -> None:
    record = await faulty.ask_while("prefill agent killed", faulty.region.agent("a1").kill)
    assert record["prefill_error"], record


async def test_a_killed_receiving_agent_ends_in_local_prefill(faulty: Faulty) -> None:
    record = await faulty.ask_while("receiving agent killed", faulty.region.agent("b1").kill)
    record = await settled_record(faulty.region, record["request_id"])
    assert record["first_route"] == "prefill_cluster", record
    # Whether the sender gave up before the decode engine had answered by itself, and so whether
    # there is an error, is a race.
    assert not record["transfer_bytes"], record


@pytest.mark.parametrize("answered", [False, True])
async def test_a_client_that_leaves_frees_everything(faulty: Faulty, answered: bool) -> None:
    url = f"{faulty.region.gateway_url}/v1/completions"
    request = prompt("left", LONG_TOKENS, seed=5000 + answered, stream=True)
    body = request.body(WINDOW) | {"max_tokens": 500, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        if answered:
            async with session.post(url, json=body) as response:
                await response.content.readline()
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.post(url, json=body), 0.3)
    await everything_is_given_back(faulty.region, 45)
    await faulty.ask_while("after the client left")


async def test_a_wrong_token_lands_nothing(faulty: Faulty) -> None:
    gateway, granter = faulty.region.credentials("gateway"), granter_of(faulty.region)
    sender = RpcClient(faulty.region.agent_control("a1"), SERVICE, gateway)
    receiver = RpcClient(faulty.region.agent_control("b1"), SERVICE, gateway)
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
    assert (await agent_status(faulty.region, "b1")).landing_bytes > 0


async def test_a_killed_prefill_engine_ends_in_local_prefill_and_comes_back(
    faulty: Faulty,
) -> None:
    record = await faulty.ask_while(
        "prefill engine killed", faulty.region.engine("a1-prefill").kill
    )
    assert record["prefill_error"], record
    await faulty.region.engine("a1-prefill").wait_restarted(180)
    await faulty.region.wait_settled(60)
    await until(lambda: link_is_usable(faulty.region), "the link is usable")
    record = await faulty.ask_while("after a fault")
    assert record["route"] == "prefill_cluster", record["reason"]
    assert not record.get("prefill_error"), record["prefill_error"]
