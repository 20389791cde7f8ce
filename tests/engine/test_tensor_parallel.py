"""Two tensor-parallel ranks: each sends its share, and each finds its share again.

One engine of two ranks is both ends (two such engines are more than a small machine can run): it
answers a prompt by itself, prefills it for a landing, and answers it again from what landed.
"""

from pathlib import Path

import aiohttp
import pytest
from engine_region import (
    WINDOW,
    agent_status,
    engine_metrics,
    model_dir,
    prompt,
    region_spec,
    running,
)
from handoff import Handoff

from deploy.region.spec import RegionInstance, RegionSpec

pytestmark = pytest.mark.asyncio


async def test_two_ranks(models_dir: Path, tmp_path: Path) -> None:
    spec = _one_engine(model_dir(models_dir, WINDOW))
    async with running(spec, tmp_path / "r") as region, aiohttp.ClientSession() as session:
        handoff = Handoff(region, WINDOW, session)
        url = f"{region.engine('both').address}/v1/completions"

        async def tokens(body: dict[str, object]) -> list[int]:
            async with session.post(url, json=body) as response:
                answer = await response.json()
            assert response.status == 200, answer
            return list(answer["choices"][0]["token_ids"])

        loaded = 0
        for length in (256, 1100, 3001):
            request = prompt(f"{length}", length, 300 + length)
            body = request.body(WINDOW)
            expected = await tokens(body)
            token_ids = list(request.prompt.encode())  # a token is a byte
            landed = await handoff.land("both", "b1", token_ids[:-1])
            loading = body | {"kv_transfer_params": landed.consumer_params}
            assert await tokens(loading) == expected, length
            loaded += length - 1
        await handoff.close()
        metrics = await engine_metrics(region, "both")
        assert metrics["vllm:external_prefix_cache_hits_total"] == loaded
        status = await agent_status(region, "b1")
        assert [engine.tp_size for engine in status.engines] == [2]
        assert status.landing_bytes == status.outbox_bytes == 0


def _one_engine(path: Path) -> RegionSpec:
    spec = region_spec(path, WINDOW, tensor_parallel_size=2, prefix_caching=False)
    cluster = spec.pd_cluster
    node = cluster.nodes[0].model_copy(
        update={"instances": (RegionInstance(name="both", role="both"),)}
    )
    alone = cluster.model_copy(update={"nodes": (node,)})
    return spec.model_copy(update={"clusters": (alone,), "links": ()})
