"""An engine of two pipeline stages on one side of a link and one of a single stage on the other.

Each prompt is also asked of the decode engine itself under a salt of its own, so that nothing
cached or moved has a part in that answer. The engine that prefills has so little KV memory that its
own cache forgets a conversation between two turns, and takes the first one from its node's cache.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from conversation import most_bytes
from engine_region import (
    RECURRENT,
    WINDOW,
    agent_status,
    ask_region,
    computed_alone,
    engine_metrics,
    everything_is_given_back,
    model_dir,
    prompt,
    region_spec,
    running,
    settled_record,
)

from deploy.lab.demo.answers import Answer
from deploy.lab.demo.reference import decided_answers, plain_engine
from deploy.lab.demo.regions import demo_region, rank_environment
from deploy.lab.demo.scenario import DemoRequest
from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS, TinyModel
from deploy.region.launch.launcher import RunningRegion
from deploy.region.spec.region import ClusterSpec, RegionInstance, RegionSpec

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.kinds]

THRESHOLD_TOKENS = 100
PREFILL, DECODE = "a1-prefill", "b1-decode"
NUM_KV_BLOCKS = 450
"""Of 32 tokens, for all groups of layers: one prompt of the longest context and little more."""
LENGTHS = (101, 256, 511, 512, 513, 1500, 2049, 3001)
"""Chunks have 512 tokens."""


@dataclass(slots=True)
class Sites:
    region: RunningRegion
    session: aiohttp.ClientSession
    stages: dict[str, int]

    async def ask(self, requests: Sequence[DemoRequest]) -> dict[str, tuple[Answer, Any]]:
        """The answers to requests that are sent together, and the gateway's records of them."""
        answers = await ask_region(self.region, WINDOW, requests)
        found = {}
        for name, answer in answers.items():
            assert not answer.error, answer.error
            record = await settled_record(self.region, answer.request_id)
            assert (record["route"], record["prefill_error"]) == ("prefill_cluster", ""), record
            found[name] = answer, record
        return found

    async def computed_alone(self, request: DemoRequest) -> list[int]:
        """The decode engine's own answer to the whole prompt."""
        return await computed_alone(
            self.region, self.session, DECODE, WINDOW, request, cache_salt="alone"
        )

    async def loaded_bytes(self, instance: str) -> float:
        """What an engine has loaded from its node's prefix cache."""
        metrics = await engine_metrics(self.region, instance)
        return metrics.get("vllm:prfaas_cache_loaded_bytes_total", 0.0)


def staged(spec: RegionSpec, stages: dict[str, int], *prefill_args: str) -> RegionSpec:
    """The region whose engines have so many pipeline stages."""

    def instance(given: RegionInstance) -> RegionInstance:
        num_stages = stages[given.name]
        changes: dict[str, Any] = {"pipeline_parallel_size": num_stages}
        changes["env"] = rank_environment(num_stages)
        if given.name == PREFILL:
            changes["args"] = prefill_args
        return given.model_copy(update=changes)

    def cluster(given: ClusterSpec) -> ClusterSpec:
        nodes = tuple(
            node.model_copy(update={"instances": tuple(map(instance, node.instances))})
            for node in given.nodes
        )
        return given.model_copy(update={"nodes": nodes})

    # The variables of one process are not those of several.
    model = spec.models[0].model_copy(update={"env": {}})
    return spec.model_copy(
        update={"clusters": tuple(map(cluster, spec.clusters)), "models": (model,)}
    )


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[(2, 1), (1, 2)], ids=["2-to-1", "1-to-2"]
)
async def sites(
    request: pytest.FixtureRequest, models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Sites]:
    stages = dict(zip((PREFILL, DECODE), request.param, strict=True))
    spec = region_spec(
        model_dir(models_dir, WINDOW),
        WINDOW,
        threshold_tokens=THRESHOLD_TOKENS,
        local_prefill=False,
    )
    spec = staged(spec, stages, "--num-gpu-blocks-override", str(NUM_KV_BLOCKS))
    folder = tmp_path_factory.mktemp("stages")
    async with (
        running(spec, folder / "region") as region,
        aiohttp.ClientSession() as session,
    ):
        yield Sites(region, session, stages)


@pytest.mark.shows(
    kind="full attention with sliding windows",
    dtype="float32",
    prefill="PP 2, PP 1",
    decode="PP 1, PP 2",
    more="prompts in chunks, eight at a time",
)
async def test_prompts_in_chunks_are_exact_eight_at_a_time(sites: Sites) -> None:
    requests = [prompt(f"{length}", length, 500 + number) for number, length in enumerate(LENGTHS)]
    answers = await sites.ask(requests)
    for request in requests:
        answer, _ = answers[request.name]
        assert answer.token_ids == await sites.computed_alone(request), request.name


@pytest.mark.shows(
    kind="full attention with sliding windows",
    dtype="float32",
    prefill="PP 2, PP 1",
    decode="PP 1, PP 2",
    more="second turns from the node's cache",
)
async def test_second_turns_use_what_stages_have_cached(sites: Sites) -> None:
    """Of both nodes' caches: the prefill engine loads the first turns, whose KVCache is no more in
    its own memory, and only what is new to the other node travels.
    """
    firsts = [prompt(f"first {n}", 1500 + 37 * n, 600 + n) for n in range(4)]
    answers = await sites.ask(firsts)
    fillers = [prompt(f"filler {n}", 5000, 700 + n) for n in range(3)]
    for filler in fillers:
        await sites.ask([filler])
    before = await sites.loaded_bytes(PREFILL)
    seconds = []
    for number, first in enumerate(firsts):
        said = first.prompt + bytes(answers[first.name][0].token_ids).decode()
        name = f"second {number}"
        seconds.append(prompt(name, len(said) + 400, 800 + number, prefix=said))
    later = await sites.ask(seconds)
    model = (await agent_status(sites.region, "b1")).engines[0].cache
    assert model is not None
    for first, second in zip(firsts, seconds, strict=True):
        answer, record = later[second.name]
        known = (first.num_bytes - 1) // model.block_tokens * model.block_tokens
        assert record["landing_cached_tokens"] >= known, record
        assert 0 < record["transfer_bytes"] <= most_bytes(model, second.num_bytes - 1 - known)
        assert answer.token_ids == await sites.computed_alone(second), second.name
    assert await sites.loaded_bytes(PREFILL) > before


async def test_both_engines_have_one_layout_and_hold_nothing_at_the_end(sites: Sites) -> None:
    statuses = await asyncio.gather(*(agent_status(sites.region, node) for node in ("a1", "b1")))
    engines = [engine for status in statuses for engine in status.engines]
    assert {engine.instance: engine.pp_size for engine in engines} == sites.stages
    # The scheduler's process and each worker.
    assert [engine.num_connections for engine in engines] == [1 + e.pp_size for e in engines]
    assert len({engine.layout_fingerprint for engine in engines}) == 1
    await everything_is_given_back(sites.region)


def with_experts_in_each_stage(model: TinyModel) -> TinyModel:
    """vLLM's Qwen3-Next asks every stage for a layer with experts; the demo's model has one."""
    config = {**model.config, "mlp_only_layers": [0, 1, 4, 5]}
    return replace(model, name=f"{model.name}-stages", config=config)


@pytest.mark.shows(
    kind="full attention with gated delta net", dtype="bfloat16", prefill="PP 2", decode="PP 1"
)
async def test_states_of_a_recurrent_model_come_from_two_stages(
    models_dir: Path, tmp_path: Path
) -> None:
    """Alone, since other chunks round otherwise in bfloat16; a plain engine says what is right."""
    model = with_experts_in_each_stage(MODELS[RECURRENT])
    path = build_model(model, models_dir)
    wanted = [prompt(f"{length}", length, 900 + length) for length in (256, 1500, 3001)]
    async with plain_engine(model, path, tmp_path / "plain") as url:
        requests, expected = await decided_answers(url, model, wanted, answered)
    spec = demo_region(
        model,
        path,
        threshold_tokens=THRESHOLD_TOKENS,
        local_prefill=False,
        prefix_caching=False,
    )
    spec = staged(spec, {PREFILL: 2, DECODE: 1})
    async with running(spec, tmp_path / "region") as region:
        for request in requests:
            answer = (await ask_region(region, model.name, [request]))[request.name]
            assert answer.token_ids == expected[request.name].token_ids, request.name
            record = await settled_record(region, answer.request_id)
            assert (record["route"], record["prefill_error"]) == ("prefill_cluster", ""), record
        (engine,) = (await agent_status(region, "a1")).engines
        assert (engine.pp_size, engine.num_connections) == (2, 3)
        await everything_is_given_back(region)


def answered(request: DemoRequest, answer: Answer) -> None:
    assert not answer.error, f"no reference for {request.name}: {answer.error}"
