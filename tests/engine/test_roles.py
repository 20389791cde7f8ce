"""Engines preempt requests, and change between prefill and decode under load; no client notices.

One PD cluster of three engines without a prefill cluster; prompts above 256 tokens are handed from
a prefill to a decode instance. Nothing is cached, so that every answer is computed in the roles of
its time. The right answers are those that the region gave while it had nothing else to do. Engines
have too few KV blocks for several long answers at once.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from bench_smoke import run_smoke
from engine_region import (
    WINDOW,
    ask_region,
    engine_metrics,
    everything_is_given_back,
    model_dir,
    prompt,
    records,
    reference_answers,
    region_spec,
    running,
)
from flight_recording import is_decided_again, recorded

from deploy.lab.demo.answers import Answer, margins_of
from deploy.lab.demo.regions import pd_cluster_alone
from deploy.lab.demo.scenario import DemoRequest
from deploy.region.launch.launcher import RunningRegion
from deploy.region.spec.region import RegionInstance, RegionSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")

HANDED_OFF_TOKENS = (300, 700, 1200)
LENGTHS = (40, 200, *HANDED_OFF_TOKENS)
NUM_CLIENTS = 3

NUM_KV_BLOCKS = 110
"""Of 32 tokens each. A request of 1,200 tokens takes 38 for full attention and 5 for each of two
groups of window layers, and 10 more for its long answer: two can begin together but not both end.
"""
MAX_MODEL_LEN = 2048
PREEMPTED_TOKENS = 1200
NUM_PREEMPTED = 4
"""Two for each decode engine, and no more than the prefill engine takes at a time."""
LONG_ANSWER = {"max_tokens": 320, "ignore_eos": True}
MIN_MARGIN_NATS = 1e-4
"""By how much each token of a long answer must beat the second best. Steps of other batches round
float32 otherwise, which moves logits by some 1e-6.
"""
MAX_DRAWS = 12


class Load:
    """Clients that ask the same prompts again and again; `answers` by request name."""

    def __init__(self, region: RunningRegion, asked: list[DemoRequest]) -> None:
        self.answers: dict[str, Answer] = {}
        self._region = region
        self._asked = asked
        self._rounds = count()

    async def one_round(self) -> list[str]:
        """Every prompt once, one after the other; the names they were asked by."""
        number = next(self._rounds)
        requests = [
            replace(request, name=f"{request.name} #{number}", wave=wave)
            for wave, request in enumerate(self._asked)
        ]
        self.answers |= await ask_region(self._region, WINDOW, requests)
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


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the region's gateway records."""
    return tmp_path_factory.mktemp("flight")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def region(
    models_dir: Path, recording: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningRegion]:
    spec = recorded(_spec(model_dir(models_dir, WINDOW)), recording)
    async with running(spec, tmp_path_factory.mktemp("r")) as started:
        yield started


async def test_preempted_requests_are_computed_again(region: RunningRegion) -> None:
    """A decode engine that runs out of blocks drops a request's KVCache, landed part included."""
    drawn = [prompt(f"{seed}", PREEMPTED_TOKENS, 800 + seed) for seed in range(NUM_PREEMPTED)]
    async with aiohttp.ClientSession() as session:
        prompts = [await decided(session, region, request) for request in drawn]
        expected = [await long_answer(session, region, request) for request in prompts]
        assert await num_preemptions(region) == 0
        answers = await asyncio.gather(
            *(long_answer(session, region, request) for request in prompts)
        )
    assert answers == expected
    assert await num_preemptions(region) > 0, "the blocks were enough"
    for record in (await records(region)).values():
        assert (record["prefill_instance"], record["prefill_error"]) == ("b1-p0", ""), record
    await everything_is_given_back(region, nodes=("b1",))


async def test_roles_change_under_load_and_lose_no_request(region: RunningRegion) -> None:
    prompts = [
        prompt(f"{length}", length, 600 + length, stream=bool(index % 2))
        for index, length in enumerate(LENGTHS)
    ]
    asked, expected = await reference_answers(region.gateway_url, WINDOW, prompts)
    load = Load(region, asked)
    async with load.all_the_while():
        await become(region, "b1-d1", "prefill", epoch=1)
        # Now a decode instance is the only one that prefills, and the other way round.
        await become(region, "b1-p0", "decode", epoch=1)
        swapped = await load.one_round()
        refusal = await order(region, "b1-d1", "decode")
        assert refusal["error"]["code"] == "last_of_its_role", refusal
        await become(region, "b1-p0", "prefill", epoch=2)
        await become(region, "b1-d1", "decode", epoch=2)
    await load.one_round()
    for name, answer in load.answers.items():
        assert not answer.error, (name, answer.error)
        assert answer.token_ids == expected[name.partition(" #")[0]].token_ids, name
    await assert_roles_were_those_of_the_time(region, load, swapped)
    await everything_is_given_back(region, nodes=("b1",))


async def test_benches_of_a_region_run_on_this_one(
    region: RunningRegion, recording: Path, tmp_path: Path
) -> None:
    """Their smallest sizes keep all of their rows."""
    asking = ("--gateway", region.gateway_url)
    await asyncio.to_thread(run_smoke, "region", tmp_path, *asking)
    engine = ("--engine", region.engine("b1-p0").address)
    key = ("--engine-key", str(region.directory.engine_key))
    recorded_in = ("--recording", str(recording))
    await asyncio.to_thread(run_smoke, "capacity", tmp_path, *asking, *engine, *key, *recorded_in)
    await everything_is_given_back(region, nodes=("b1",))


async def test_every_decision_is_taken_the_same_again(
    region: RunningRegion, recording: Path
) -> None:
    """From the recording of all of this module while it is written."""
    await is_decided_again(recording)


async def long_answer(
    session: aiohttp.ClientSession, region: RunningRegion, request: DemoRequest
) -> list[int]:
    body = request.body(WINDOW) | LONG_ANSWER
    url = f"{region.gateway_url}/v1/completions"
    async with session.post(url, json=body) as response:
        answer = await response.json()
    assert response.status == 200, answer
    return list(answer["choices"][0]["token_ids"])


async def decided(
    session: aiohttp.ClientSession, region: RunningRegion, request: DemoRequest
) -> DemoRequest:
    """The request with a text whose long answer has no near ties."""
    least = []
    for attempt in range(MAX_DRAWS):
        drawn = request.redrawn(attempt)
        body = drawn.body(WINDOW, with_logprobs=True) | LONG_ANSWER
        url = f"{region.gateway_url}/v1/completions"
        async with session.post(url, json=body) as response:
            answer = await response.json()
        assert response.status == 200, answer
        least.append(min(margins_of(answer["choices"][0]["logprobs"])))
        if least[-1] >= MIN_MARGIN_NATS:
            return drawn
    raise AssertionError(f"no text of {MAX_DRAWS} has an answer without near ties: {least}")


async def num_preemptions(region: RunningRegion) -> float:
    """Of both decode engines since they started."""
    found = [await engine_metrics(region, instance) for instance in ("b1-d0", "b1-d1")]
    return sum(metrics["vllm:num_preemptions_total"] for metrics in found)


async def become(region: RunningRegion, instance: str, role: str, *, epoch: int) -> None:
    """Order it and wait for it."""
    answer = await order(region, instance, role)
    assert (answer.get("role"), answer.get("epoch")) == (role, epoch), answer


async def order(region: RunningRegion, instance: str, role: str) -> dict[str, Any]:
    url = f"{region.gateway_url}/v1/pd_role?wait=1"
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json={"instance": instance, "role": role}) as response:
            answer: dict[str, Any] = await response.json()
    return answer


async def assert_roles_were_those_of_the_time(
    region: RunningRegion, load: Load, swapped: list[str]
) -> None:
    listed = await records(region)
    for record in listed.values():
        assert (record["prefill_error"], record["num_retries"]) == ("", 0), record
    for name in swapped:
        record = listed[load.answers[name].request_id]
        if int(name.partition(" #")[0]) in HANDED_OFF_TOKENS:
            assert record["prefill_instance"] == "b1-d1", record
        assert record["decode_instance"] in ("b1-d0", "b1-p0"), record


def _spec(path: Path) -> RegionSpec:
    # Nothing but the orders of this test changes a role, one right after the other.
    # Admission keeps engines from filling up, and so from what is tested here.
    # However busy this machine is, long prompts are handed off.
    scheduling = {
        "routing": {"policy": "threshold"},
        "long_term": {"mode": "off", "dwell_s": 0},
        "admission": {"policy": "off"},
    }
    few_blocks = ("--num-gpu-blocks-override", str(NUM_KV_BLOCKS))
    spec = region_spec(path, WINDOW, prefix_caching=False, scheduling=scheduling)
    model = spec.models[0]
    model = model.model_copy(
        update={"args": (*model.args, *few_blocks), "max_model_len": MAX_MODEL_LEN}
    )
    spec = spec.model_copy(update={"models": (model,)})
    instances = (
        RegionInstance(name="b1-p0", role="prefill"),
        RegionInstance(name="b1-d0", role="decode"),
        RegionInstance(name="b1-d1", role="decode"),
    )
    return pd_cluster_alone(spec, instances)
