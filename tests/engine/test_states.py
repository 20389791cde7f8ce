"""Recurrent states that two pipeline stages computed go on in one engine, and divided over two
ranks.

The model computes in bfloat16, in which two ranks round otherwise than one. So tokens are compared
where the decode engine's own answer is decided (`deploy.lab.demo.reference`). Prompts come alone,
since other chunks round otherwise, too.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_region import (
    RECURRENT,
    agent_status,
    everything_is_given_back,
    prompt,
    running,
    with_engines,
)
from part_gateway import part_gateways

from deploy.lab.demo.answers import Answer
from deploy.lab.demo.reference import decided_answers
from deploy.lab.demo.regions import demo_region, rank_environment
from deploy.lab.demo.scenario import DemoRequest
from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS

pytestmark = pytest.mark.kinds

MODEL = replace(
    MODELS[RECURRENT],
    name=f"{RECURRENT}-stages",
    # vLLM's Qwen3-Next asks every stage for a layer with experts; the demo's model has one.
    config={**MODELS[RECURRENT].config, "mlp_only_layers": [0, 1, 4, 5]},
)
PREFILL, DECODES = "a1-stages", ("b1-one", "b1-ranks")
LENGTHS = (256, 1500, 3001)


def answered(request: DemoRequest, answer: Answer) -> None:
    assert not answer.error, f"no reference for {request.name}: {answer.error}"


@pytest.mark.shows(
    kind="full attention with gated delta net",
    dtype="bfloat16",
    prefill="PP 2",
    decode="TP 1 and 2",
    more="tokens where they are decided",
)
async def test_states_of_two_stages_continue_on_one_rank_and_on_two(
    models_dir: Path, tmp_path: Path
) -> None:
    path = await asyncio.to_thread(build_model, MODEL, models_dir)
    spec = demo_region(MODEL, path, threshold_tokens=100, local_prefill=False, prefix_caching=False)
    one, two = rank_environment(), rank_environment(2)
    engines: dict[str, list[dict[str, Any]]] = {
        "a1": [{"name": PREFILL, "pipeline_parallel_size": 2, "env": two}],
        "b1": [
            {"name": "b1-one", "role": "decode", "env": one},
            {"name": "b1-ranks", "role": "decode", "tensor_parallel_size": 2, "env": two},
        ],
    }
    async with (
        running(with_engines(spec, engines, env={}), tmp_path / "region") as region,
        part_gateways(region, MODEL.name, tmp_path) as gateways,
    ):
        for decode in DECODES:
            wanted = [prompt(f"{length}", length, 900 + length) for length in LENGTHS]
            alone = await gateways.url(decode)
            asked, expected = await decided_answers(alone, MODEL, wanted, answered)
            for request in asked:
                answer, _ = await gateways.ask(request, PREFILL, decode)
                assert answer.token_ids == expected[request.name].token_ids, (decode, request.name)
        statuses = [await agent_status(region, node) for node in ("a1", "b1")]
        known = [engine for status in statuses for engine in status.engines]
        cuts = {engine.instance: (engine.pp_size, engine.tp_size) for engine in known}
        assert cuts == {PREFILL: (2, 1), "b1-one": (1, 1), "b1-ranks": (1, 2)}
        assert len({engine.layout_fingerprint for engine in known}) == 1
        await everything_is_given_back(region)
