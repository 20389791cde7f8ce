"""Engines of one and of two tensor-parallel ranks, with other block sizes, on both sides of a link.

Every pair of them exchanges KVCache. Each prompt is also asked of the decode engine itself under a
salt of its own, so that nothing cached or moved has a part in that answer: its ranks compute all of
it. The engines of a node share its prefix cache, whichever of them filled it.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from conversation import most_bytes
from engine_region import (
    WINDOW,
    agent_status,
    computed_alone,
    everything_is_given_back,
    model_dir,
    prompt,
    region_spec,
    running,
    settled_record_at,
)
from part_gateway import gateway_over

from deploy.lab.demo.answers import Answer, ask
from deploy.lab.demo.regions import rank_environment
from deploy.lab.demo.scenario import DemoRequest
from deploy.region.launch.launcher import RunningRegion
from deploy.region.spec.region import ClusterSpec, RegionInstance, RegionSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")

THRESHOLD_TOKENS = 100
BLOCK_TOKENS = {"a1": 64, "b1": 32}
"""Block sizes of the engines with two ranks on a node; those with one rank have 32."""
PAIRS = [(1, 1), (1, 2), (2, 1), (2, 2)]
"""Ranks of the engine that prefills, and of the one that decodes."""


@dataclass(slots=True)
class Sites:
    """A region, and a gateway for each pair of its engines."""

    region: RunningRegion
    session: aiohttp.ClientSession
    folder: Path
    gateways: contextlib.AsyncExitStack
    urls: dict[tuple[int, int], str] = field(default_factory=dict)

    async def url(self, pair: tuple[int, int]) -> str:
        """The gateway over this pair."""
        if pair not in self.urls:
            prefill, decode = pair
            names = {f"a1-{prefill}", f"b1-{decode}"}
            entered = gateway_over(self.region, names, self.folder)
            self.urls[pair] = await self.gateways.enter_async_context(entered)
        return self.urls[pair]

    async def ask(self, pair: tuple[int, int], request: DemoRequest) -> tuple[Answer, Any]:
        """The answer by way of this pair, and the gateway's record of it."""
        url = await self.url(pair)
        answer = await ask(self.session, url, WINDOW, request)
        assert not answer.error, answer.error
        record = await settled_record_at(url, answer.request_id)
        assert (record["route"], record["prefill_error"]) == ("prefill_cluster", ""), record
        return answer, record

    async def computed_alone(self, ranks: int, request: DemoRequest) -> list[int]:
        """A decode engine's own answer to the whole prompt."""
        return await computed_alone(
            self.region, self.session, f"b1-{ranks}", WINDOW, request, cache_salt="alone"
        )


def unequal(spec: RegionSpec) -> RegionSpec:
    """The region with an engine of one rank and one of two on each node."""

    def engines(node: str) -> tuple[RegionInstance, ...]:
        role = "prefill" if node == "a1" else "decode"
        one = RegionInstance.model_validate({"name": f"{node}-1", "role": role})
        two = {"tensor_parallel_size": 2, "env": rank_environment(2)}
        two |= {"block_size": BLOCK_TOKENS[node]}
        return one, RegionInstance.model_validate({"name": f"{node}-2", "role": role, **two})

    def with_both(cluster: ClusterSpec) -> ClusterSpec:
        nodes = tuple(
            node.model_copy(update={"instances": engines(node.name)}) for node in cluster.nodes
        )
        return cluster.model_copy(update={"nodes": nodes})

    # The variables of one rank are not those of two, and the block size is the instances'.
    model = spec.models[0].model_copy(update={"env": {}, "args": (), "block_size": 32})
    return spec.model_copy(
        update={"clusters": tuple(map(with_both, spec.clusters)), "models": (model,)}
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sites(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sites]:
    spec = region_spec(
        model_dir(models_dir, WINDOW),
        WINDOW,
        threshold_tokens=THRESHOLD_TOKENS,
        local_prefill=False,
    )
    folder = tmp_path_factory.mktemp("unequal")
    async with (
        running(unequal(spec), folder / "region") as region,
        aiohttp.ClientSession() as session,
        contextlib.AsyncExitStack() as gateways,
    ):
        yield Sites(region, session, folder, gateways)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("length", [256, 3001])
@pytest.mark.shows(
    kind="full attention with sliding windows",
    dtype="float32",
    prefill="TP 1 and 2",
    decode="TP 1 and 2",
    more="all four pairs, blocks of 32 and 64 tokens",
)
async def test_any_pair_exchanges_kvcache(sites: Sites, pair: tuple[int, int], length: int) -> None:
    request = prompt(f"{pair} {length}", length, 300 + length + 10 * pair[0] + pair[1])
    answer, _ = await sites.ask(pair, request)
    assert answer.token_ids == await sites.computed_alone(pair[1], request)


@pytest.mark.parametrize(("before", "after"), [((1, 1), (2, 2)), ((2, 2), (2, 1))])
@pytest.mark.shows(
    kind="full attention with sliding windows",
    dtype="float32",
    prefill="TP 1 and 2",
    decode="TP 1 and 2",
    more="one node's cache filled and used by engines of other TP",
)
async def test_a_second_turn_sends_only_what_is_new_to_the_node(
    sites: Sites, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """The first turn fills the node's cache by one decode engine, the second uses it by another."""
    first = prompt("first", 1500, 41 + before[0])
    answer, _ = await sites.ask(before, first)
    said = first.prompt + bytes(answer.token_ids).decode()
    second = prompt("second", len(said) + 400, 42, prefix=said)
    answer, record = await sites.ask(after, second)
    model = (await agent_status(sites.region, "b1")).engines[0].cache
    assert model is not None
    known = (first.num_bytes - 1) // model.block_tokens * model.block_tokens
    assert record["landing_cached_tokens"] >= known, record
    assert 0 < record["transfer_bytes"] <= most_bytes(model, second.num_bytes - 1 - known), record
    assert answer.token_ids == await sites.computed_alone(after[1], second)


async def test_all_engines_have_one_layout_and_hold_nothing_at_the_end(sites: Sites) -> None:
    engines = [
        engine
        for node in ("a1", "b1")
        for engine in (await agent_status(sites.region, node)).engines
    ]
    assert sorted(engine.tp_size for engine in engines) == [1, 1, 2, 2]
    assert len({engine.layout_fingerprint for engine in engines}) == 1
    await everything_is_given_back(sites.region)
