"""Engines of two pipeline stages on both sides of a link, and one of a single stage on the other.

Each prompt is also asked of the decode engine alone. The engine that prefills has so little KV
memory that its own cache forgets a conversation between two turns, and takes the first one from its
node's cache.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from conversation import cache_of, next_turn, sends_only_the_new
from engine_region import (
    WINDOW,
    agent_status,
    engine_metrics,
    everything_is_given_back,
    model_dir,
    prompt,
    region_spec,
    running,
    with_engines,
)
from part_gateway import PartGateways, part_gateways

from deploy.lab.demo.answers import Answer
from deploy.lab.demo.regions import rank_environment
from deploy.lab.demo.scenario import DemoRequest

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.kinds]

PREFILL = "a1-two"
DECODES = ("b1-one", "b1-two")
"""What the engine with stages sends suits an engine without; so it suits one with stages only if
that takes it apart in the same way.
"""
NUM_STAGES = {PREFILL: 2, "b1-one": 1, "b1-two": 2}
NUM_KV_BLOCKS = 450
"""Of 32 tokens, for all groups of layers: one prompt of the longest context and little more."""
LENGTHS = (101, 256, 511, 512, 513, 1500, 2049, 3001)
"""Chunks have 512 tokens."""
Told = dict[str, tuple[Answer, dict[str, Any]]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(
    models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[PartGateways]:
    def engine(name: str, **more: Any) -> dict[str, Any]:
        num_stages = NUM_STAGES[name]
        env = rank_environment(num_stages)
        return {"name": name, "pipeline_parallel_size": num_stages, "env": env, **more}

    spec = region_spec(
        model_dir(models_dir, WINDOW), WINDOW, threshold_tokens=100, local_prefill=False
    )
    few_blocks = ("--num-gpu-blocks-override", str(NUM_KV_BLOCKS))
    engines = {
        "a1": [engine(PREFILL, args=few_blocks)],
        "b1": [engine(name, role="decode") for name in DECODES],
    }
    folder = tmp_path_factory.mktemp("stages")
    async with (
        # The variables of one process are not those of several.
        running(with_engines(spec, engines, env={}), folder / "region") as region,
        part_gateways(region, WINDOW, folder) as found,
    ):
        yield found


async def ask(gateways: PartGateways, requests: Sequence[DemoRequest], decode: str) -> Told:
    """The answers to requests that are sent together, and the gateway's records of them."""
    await gateways.url(PREFILL, decode)
    told = await asyncio.gather(*(gateways.ask(one, PREFILL, decode) for one in requests))
    return {request.name: one for request, one in zip(requests, told, strict=True)}


@pytest.mark.shows(
    kind="full attention with sliding windows",
    dtype="float32",
    prefill="PP 2",
    decode="PP 1, PP 2",
    more="prompts in chunks, eight at a time",
)
@pytest.mark.parametrize("decode", DECODES)
async def test_prompts_in_chunks_are_exact_eight_at_a_time(
    gateways: PartGateways, decode: str
) -> None:
    first = 500 + 100 * DECODES.index(decode)
    requests = [prompt(f"{length}", length, first + n) for n, length in enumerate(LENGTHS)]
    told = await ask(gateways, requests, decode)
    for request in requests:
        assert told[request.name][0].token_ids == await gateways.alone(decode, request)


@pytest.mark.shows(
    kind="full attention with sliding windows",
    dtype="float32",
    prefill="PP 2",
    decode="PP 1, PP 2",
    more="second turns from the node's cache",
)
@pytest.mark.parametrize("decode", DECODES)
async def test_second_turns_use_what_stages_have_cached(
    gateways: PartGateways, decode: str
) -> None:
    """Of both nodes' caches: the prefill engine loads the first turns, whose KVCache is no more in
    its own memory, and only what is new to the other node travels.
    """
    seed = 1000 * (1 + DECODES.index(decode))
    firsts = [prompt(f"first {n}", 1500 + 37 * n, seed + n) for n in range(4)]
    told = await ask(gateways, firsts, decode)
    for n in range(3):
        await ask(gateways, [prompt(f"filler {n}", 5000, seed + 100 + n)], decode)
    before = await loaded_bytes(gateways)
    seconds = [
        next_turn(f"second {n}", first, told[first.name][0], 400, seed + 200 + n)
        for n, first in enumerate(firsts)
    ]
    told = await ask(gateways, seconds, decode)
    cache = await cache_of(gateways.region, decode)
    for first, second in zip(firsts, seconds, strict=True):
        answer, record = told[second.name]
        sends_only_the_new(cache, record, first, second)
        assert answer.token_ids == await gateways.alone(decode, second), second.name
    assert await loaded_bytes(gateways) > before


async def test_all_engines_have_one_layout_and_hold_nothing_at_the_end(
    gateways: PartGateways,
) -> None:
    statuses = [await agent_status(gateways.region, node) for node in ("a1", "b1")]
    engines = [engine for status in statuses for engine in status.engines]
    assert {engine.instance: engine.pp_size for engine in engines} == NUM_STAGES
    # The scheduler's process and each worker.
    assert [engine.num_connections for engine in engines] == [1 + e.pp_size for e in engines]
    assert len({engine.layout_fingerprint for engine in engines}) == 1
    await everything_is_given_back(gateways.region)


async def loaded_bytes(gateways: PartGateways) -> float:
    """What the prefill engine has loaded from its node's prefix cache."""
    metrics = await engine_metrics(gateways.region, PREFILL)
    return metrics.get("vllm:prfaas_cache_loaded_bytes_total", 0.0)
