"""Recurrent states of an engine with one rank continue on two: all of them are divided anew.

The model computes in bfloat16, in which two ranks round otherwise than one. So tokens are compared
where the decode engine's own answer is decided (`deploy.lab.demo.reference`).
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from engine_region import (
    RECURRENT,
    agent_status,
    ask_region,
    everything_is_given_back,
    model_dir,
    prompt,
    reference_answers,
    region_spec,
    running,
    settled_record,
)
from part_gateway import gateway_over

from deploy.lab.demo.regions import rank_environment
from deploy.region.launch.launcher import RunningRegion
from deploy.region.spec.region import ClusterSpec, RegionInstance

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.kinds]

LENGTHS = (300, 1100)


@dataclass(frozen=True, slots=True)
class Sites:
    """A region of one rank that prefills and two that decode, and a gateway over the latter."""

    region: RunningRegion
    decode_url: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sites(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sites]:
    path = model_dir(models_dir, RECURRENT)
    spec = region_spec(
        path, RECURRENT, threshold_tokens=100, local_prefill=False, prefix_caching=False
    )
    two = {"tensor_parallel_size": 2, "env": rank_environment(2)}

    def with_ranks(cluster: ClusterSpec) -> ClusterSpec:
        node = cluster.nodes[0]
        if cluster.kind == "prefill":
            return cluster
        engine = RegionInstance.model_validate({"name": "b1-decode", "role": "decode", **two})
        return cluster.model_copy(
            update={"nodes": (node.model_copy(update={"instances": (engine,)}),)}
        )

    model = spec.models[0].model_copy(update={"env": {}})
    clusters = tuple(map(with_ranks, spec.clusters))
    spec = spec.model_copy(update={"clusters": clusters, "models": (model,)})
    folder = tmp_path_factory.mktemp("states")
    async with (
        running(spec, folder / "region") as region,
        gateway_over(region, {"b1-decode"}, folder) as decode_url,
    ):
        yield Sites(region, decode_url)


@pytest.mark.shows(
    kind="full attention with gated delta net",
    dtype="bfloat16",
    prefill="TP 1",
    decode="TP 2",
    more="tokens where they are decided",
)
async def test_states_of_one_rank_continue_on_two(sites: Sites) -> None:
    prompts = [prompt(f"{length}", length, 700 + length) for length in LENGTHS]
    asked, expected = await reference_answers(sites.decode_url, RECURRENT, prompts)
    answers = await ask_region(sites.region, RECURRENT, asked)
    for request in asked:
        answer = answers[request.name]
        assert not answer.error, answer.error
        record = await settled_record(sites.region, answer.request_id)
        assert (record["route"], record["prefill_error"]) == ("prefill_cluster", ""), record
        assert answer.token_ids == expected[request.name].token_ids
    ranks = [(await agent_status(sites.region, node)).engines[0] for node in ("a1", "b1")]
    assert [engine.tp_size for engine in ranks] == [1, 2]
    assert len({engine.layout_fingerprint for engine in ranks}) == 1
    await everything_is_given_back(sites.region)
