"""A PD cluster without a prefill cluster: ways to hand KVCache over, preemption, changes of roles.

Its three engines are on two nodes and have NixlConnector beside ours (`hand_off_ways`). Nothing is
cached, so that every hand-off brings a whole prompt and every answer is computed in the roles of
its time. Engines have too few KV blocks for several long answers at once.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from bench_smoke import run_smoke
from engine_region import (
    WINDOW,
    ask_at,
    engine_metrics,
    everything_is_given_back,
    model_dir,
    prompt,
    records_at,
    reference_answers,
    region_spec,
    running,
    settled_record_at,
    until,
)
from flight_recording import is_decided_again
from hand_off_ways import DECODE, PREFILL_FAR, PREFILL_NEAR, WAYS, gateway, two_nodes
from part_gateway import File, gateway_over

from deploy.gateway.members.pages import InstancesOverview
from deploy.lab.demo.answers import Answer, margins_of
from deploy.lab.demo.scenario import DemoRequest
from deploy.region.client import asked as asked_page
from deploy.region.launch.launcher import RunningRegion

pytestmark = pytest.mark.asyncio(loop_scope="module")

LENGTHS = (300, 512, 513, 1500)
"""More than `hand_off_tokens`; one fills its blocks, one has a token more."""
TOGETHER = 4
"""As many as a prefill engine takes at a time; more would be computed where they are decoded."""

NUM_KV_BLOCKS = 128
"""Of 32 tokens each. A request of 1,500 tokens takes 47 for full attention and 5 for each of two
groups of window layers, and 10 more for its long answer: two can begin together but not both end.
"""
MAX_MODEL_LEN = 2048
PREEMPTED_TOKENS = 1500
NUM_PREEMPTED = 4
"""Two for each decode engine, and no more than the prefill engine takes at a time."""
LONG_ANSWER = {"max_tokens": 320, "ignore_eos": True}
MIN_MARGIN_NATS = 1e-4
"""By how much each token of a long answer must beat the second best. Steps of other batches round
float32 otherwise, which moves logits by some 1e-6.
"""
MAX_DRAWS = 12

SHORT_TOKENS = (40, 200)
"""Of prompts that are computed where they are decoded."""
NUM_CLIENTS = 3
P0, D0, D1 = PREFILL_FAR.name, DECODE.name, PREFILL_NEAR.name
"""The engines by the roles that they have at first where roles change."""


@dataclass(frozen=True, slots=True)
class Served:
    """The region, and what its decode engine alone answers to `asked`."""

    region: RunningRegion
    asked: list[DemoRequest]
    expected: dict[str, Answer]

    async def are_right(self, url: str) -> dict[str, str]:
        """Ask all; the ids of the requests, by name, whose answers have the right tokens."""
        answers = await ask_at(url, WINDOW, self.asked)
        for name, answer in answers.items():
            assert not answer.error, (name, answer.error)
            assert answer.token_ids == self.expected[name].token_ids, name
        return {name: answer.request_id for name, answer in answers.items()}

    async def is_empty(self) -> None:
        await everything_is_given_back(self.region, nodes=("b1", "b2"))


def requests() -> list[DemoRequest]:
    """Each length alone, some at once, and short ones."""
    alone = [
        prompt(f"alone {length}", length, length, wave=index, stream=bool(index % 2))
        for index, length in enumerate(LENGTHS)
    ]
    together = [
        prompt(f"together {seed}", 400 + 150 * seed, seed, wave=100) for seed in range(TOGETHER)
    ]
    return [*alone, *together]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    spec = two_nodes(
        region_spec(model_dir(models_dir, WINDOW), WINDOW, prefix_caching=False), "nixl"
    )
    (model,) = spec.models
    few_blocks = ("--num-gpu-blocks-override", str(NUM_KV_BLOCKS))
    changes = {"args": (*model.args, *few_blocks), "max_model_len": MAX_MODEL_LEN}
    spec = spec.model_copy(update={"models": (model.model_copy(update=changes),)})
    async with running(spec, tmp_path_factory.mktemp("r")) as region:
        async with gateway(region.directory.gateway_file, "auto") as (url, _):
            asked, expected = await reference_answers(url, WINDOW, requests())
        yield Served(region, asked, expected)


# --- hand-offs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAYS)
async def test_tokens_are_those_of_one_engine(served: Served, name: str) -> None:
    way, file = WAYS[name], served.region.directory.gateway_file
    async with gateway(file, way.hand_off, [way.prefills]) as (url, made):
        ids = await served.are_right(url)
        records = {record.request_id: record for record in made.records}
        for request_id in ids.values():
            record = records[request_id]
            assert (record.target, record.prefill_error) == ("hand_off", ""), record
            assert (record.hand_off, record.prefill_instance) == (way.taken, way.prefills), record
    await served.is_empty()


async def test_the_regions_own_gateway_takes_the_arena_where_it_can(served: Served) -> None:
    """It knows both prefill engines; of idle ones that beside the decode engine comes first."""
    url = served.region.gateway_url
    for asked in served.asked[:3]:
        await no_request_is_known_of(served.region)
        answer = (await ask_at(url, WINDOW, [asked]))[asked.name]
        assert answer.token_ids == served.expected[asked.name].token_ids, (asked, answer.error)
        record = await settled_record_at(url, answer.request_id)
        assert (record["hand_off"], record["prefill_instance"]) == ("arena", "b2-prefill"), record


async def no_request_is_known_of(region: RunningRegion) -> None:
    """What the gateway last heard of every engine is that it has no request."""

    async def is_so() -> bool:
        found = await asked_page(region.gateway_url, "/prfaas/instances", InstancesOverview)
        return not any(item.requests for item in found.instances)

    await until(is_so, "the gateway knows of no request")


async def test_the_bench_of_hand_offs_runs_on_this_region(served: Served, tmp_path: Path) -> None:
    region = str(served.region.directory.root)
    least = ("--blocks", "1", "--prompts", "1")  # `test_smoke` runs this part, too
    await asyncio.to_thread(run_smoke, "handoff", tmp_path, *least, "--region", region)
    await served.is_empty()


# --- preemption and roles: one engine prefills, two decode ----------------------------------------


@dataclass(frozen=True, slots=True)
class Convertible:
    """A gateway whose engines change roles by orders alone, and where it records."""

    url: str
    recording: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def convertible(
    served: Served, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Convertible]:
    folder = tmp_path_factory.mktemp("convertible")
    recording = folder / "flight"

    def change(file: File) -> None:
        # Nothing but the orders of these tests changes a role, one right after the other.
        # Admission keeps engines from filling up, and so from what is tested here.
        # However busy this machine is, long prompts are handed off.
        scheduling = {
            "routing": {"policy": "threshold"},
            "long_term": {"mode": "off", "dwell_s": 0},
            "admission": {"policy": "off"},
        }
        file["gateway"] |= {"scheduling": scheduling, "recorder": {"dir": str(recording)}}
        (pd,) = file["pd"]
        pd["hand_off"] = "auto"
        for item in pd["instances"]:
            item["role"] = "prefill" if item["name"] == P0 else "decode"

    async with gateway_over(served.region, {P0, D0, D1}, folder, change) as url:
        yield Convertible(url, recording)


async def test_preempted_requests_are_computed_again(
    served: Served, convertible: Convertible
) -> None:
    """A decode engine that runs out of blocks drops a request's KVCache, landed part included."""
    drawn = [prompt(f"{seed}", PREEMPTED_TOKENS, 800 + seed) for seed in range(NUM_PREEMPTED)]
    async with aiohttp.ClientSession() as session:
        found = [await decided(session, convertible.url, request) for request in drawn]
        before = await num_preemptions(served.region)
        answers = await asyncio.gather(
            *(long_answer(session, convertible.url, request) for request, _ in found)
        )
    assert [answer["token_ids"] for answer in answers] == [expected for _, expected in found]
    assert await num_preemptions(served.region) > before, "the blocks were enough"
    for record in (await records_at(convertible.url)).values():
        assert (record["prefill_instance"], record["prefill_error"]) == (P0, ""), record
    await served.is_empty()


async def test_roles_change_under_load_and_lose_no_request(
    served: Served, convertible: Convertible
) -> None:
    url = convertible.url
    short = [prompt(f"short {length}", length, 600 + length) for length in SHORT_TOKENS]
    short, expected = await reference_answers(url, WINDOW, short)
    load = Load(url, [*short, *served.asked[: len(LENGTHS)]])
    async with load.all_the_while():
        await become(url, D1, "prefill", epoch=1)
        # Now a decode instance is the only one that prefills, and the other way round.
        await become(url, P0, "decode", epoch=1)
        swapped = await load.one_round()
        refusal = await order(url, D1, "decode")
        assert refusal["error"]["code"] == "last_of_its_role", refusal
        await become(url, P0, "prefill", epoch=2)
        await become(url, D1, "decode", epoch=2)
    await load.one_round()
    expected |= served.expected
    for name, answer in load.answers.items():
        assert not answer.error, (name, answer.error)
        assert answer.token_ids == expected[name.partition(" #")[0]].token_ids, name
    listed = await records_at(url)
    for record in listed.values():
        assert (record["prefill_error"], record["num_retries"]) == ("", 0), record
    for name in swapped:
        record = listed[load.answers[name].request_id]
        if name.startswith("alone"):
            assert record["prefill_instance"] == D1, record
        assert record["decode_instance"] in (D0, P0), record
    await served.is_empty()


async def test_benches_of_a_region_run_on_this_one(
    served: Served, convertible: Convertible, tmp_path: Path
) -> None:
    """Their smallest sizes keep all of their rows."""
    region, asking = served.region, ("--gateway", convertible.url)
    await asyncio.to_thread(run_smoke, "region", tmp_path, *asking)
    engine = ("--engine", region.engine(P0).address)
    key = ("--engine-key", str(region.directory.engine_key))
    recording = ("--recording", str(convertible.recording))
    await asyncio.to_thread(run_smoke, "capacity", tmp_path, *asking, *engine, *key, *recording)
    await served.is_empty()


async def test_every_decision_is_taken_the_same_again(convertible: Convertible) -> None:
    """From the recording of all that was asked of the gateway, while it is written."""
    await is_decided_again(convertible.recording)


class Load:
    """Clients that ask the same prompts again and again; `answers` by request name."""

    def __init__(self, url: str, asked: list[DemoRequest]) -> None:
        self.answers: dict[str, Answer] = {}
        self._url = url
        self._asked = asked
        self._rounds = count()

    async def one_round(self) -> list[str]:
        """Every prompt once, one after the other; the names they were asked by."""
        number = next(self._rounds)
        requests = [
            replace(request, name=f"{request.name} #{number}", wave=wave)
            for wave, request in enumerate(self._asked)
        ]
        self.answers |= await ask_at(self._url, WINDOW, requests)
        return [request.name for request in requests]

    @asynccontextmanager
    async def all_the_while(self) -> AsyncIterator[None]:
        is_over = asyncio.Event()

        async def keep_asking() -> None:
            while not is_over.is_set():
                await self.one_round()

        clients = [asyncio.create_task(keep_asking()) for _ in range(NUM_CLIENTS)]
        try:
            yield
            is_over.set()
            await asyncio.gather(*clients)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def long_answer(
    session: aiohttp.ClientSession, url: str, request: DemoRequest, *, with_logprobs: bool = False
) -> dict[str, Any]:
    """The only choice of the answer."""
    body = request.body(WINDOW, with_logprobs=with_logprobs) | LONG_ANSWER
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
    assert response.status == 200, answer
    (choice,) = answer["choices"]
    return dict(choice)


async def decided(
    session: aiohttp.ClientSession, url: str, request: DemoRequest
) -> tuple[DemoRequest, list[int]]:
    """The request with a text whose long answer has no near ties, and the tokens of that."""
    least = []
    for attempt in range(MAX_DRAWS):
        drawn = request.redrawn(attempt)
        answer = await long_answer(session, url, drawn, with_logprobs=True)
        least.append(min(margins_of(answer["logprobs"])))
        if least[-1] >= MIN_MARGIN_NATS:
            return drawn, answer["token_ids"]
    raise AssertionError(f"no text of {MAX_DRAWS} has an answer without near ties: {least}")


async def num_preemptions(region: RunningRegion) -> float:
    """Of both decode engines since they started."""
    found = [await engine_metrics(region, instance) for instance in (D0, D1)]
    return sum(metrics["vllm:num_preemptions_total"] for metrics in found)


async def become(url: str, instance: str, role: str, *, epoch: int) -> None:
    """Order it and wait for it."""
    answer = await order(url, instance, role)
    assert (answer.get("role"), answer.get("epoch")) == (role, epoch), answer


async def order(url: str, instance: str, role: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session:
        body = {"instance": instance, "role": role}
        async with session.post(f"{url}/v1/pd_role?wait=1", json=body) as response:
            answer: dict[str, Any] = await response.json()
    return answer
