"""Two tensor-parallel ranks on each side, and so few KV blocks that requests are preempted.

Tensor parallelism changes the rounding, so the plain engine to compare with has two ranks as well.
"""

import asyncio
from pathlib import Path

import pytest
from engine_region import (
    WINDOW,
    ask_region,
    engine_metrics,
    everything_is_given_back,
    expected_answers,
    model_dir,
    prompt,
    records,
    region_spec,
    running,
)

pytestmark = pytest.mark.asyncio

FEW_BLOCKS = ("--num-gpu-blocks-override", "300")
"""Blocks of 32 tokens; a prompt of 2,000 tokens takes up to three times 63 of them."""


async def test_two_ranks_and_preempted_requests(
    models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = model_dir(models_dir, WINDOW)
    asked = [
        prompt(f"{index}", 2000, 300 + index, wave=0 if index == 0 else 1) for index in range(5)
    ]
    expecting = asyncio.create_task(
        expected_answers(path, WINDOW, asked, tmp_path_factory.mktemp("p"), tensor_parallel_size=2)
    )
    spec = region_spec(
        path,
        WINDOW,
        tensor_parallel_size=2,
        local_prefill=False,
        engine_args=FEW_BLOCKS,
    )
    async with running(spec, tmp_path_factory.mktemp("r") / "region") as region:
        asked, expected = await expecting
        answers = await ask_region(region, WINDOW, asked)
        listed = await records(region)
        for request in asked:
            answer = answers[request.name]
            assert not answer.error, answer.error
            assert answer.token_ids == expected[request.name].token_ids, request.name
            record = listed[answer.request_id]
            assert record["route"] == "prefill_cluster", str(record)
        metrics = await engine_metrics(region, "a1-prefill")
        assert metrics["vllm:num_preemptions_total"] > 0, "the blocks were not few enough"
        await everything_is_given_back(region)
