"""The two regions of a prefill cluster and a PD cluster that most engine tests share.

`WINDOW`: the window model over mutual TLS, its nodes at an address of this host's network, so that
its engines serve HTTPS. Each node has an engine of one tensor-parallel rank and one of two, and
tests ask through gateways that know the engines they are about.

`RECURRENT`: the recurrent model with the region's key, on loopback. Beside its engines there is a
pair without prefix caching, which serves the same files as the model `UNCACHED`, and on a node of
its own an engine that computes embeddings, the model `EMBED`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from client_answers import TOOL_ARGS, client_answers
from conversation import TURNS, TURNS_OVER_SLOW_LINK, Talk, expected_turns
from engine_region import (
    RECURRENT,
    WINDOW,
    agent_status,
    are_usable,
    ask_at,
    everything_is_given_back,
    link_is_usable,
    model_dir,
    own_address,
    prompt,
    reference_answers,
    region_spec,
    running,
    settled_record_at,
    until,
    with_engines,
    with_tls,
)
from odd_requests import odd_requests
from otlp_receiver import OtlpReceiver
from part_gateway import PartGateways, part_gateways
from same_answers import HttpAnswer, HttpRequest, answers_of

from deploy.lab.demo.answers import Answer
from deploy.lab.demo.reference import plain_engine
from deploy.lab.demo.regions import rank_environment
from deploy.lab.demo.scenario import DemoRequest, text
from deploy.lab.demo.tiny_specs import MODELS
from deploy.region.launch.launcher import RunningRegion
from deploy.region.spec.region import RegionInstance, RegionSpec
from kvmanager.config_files.traces import SampledTraces
from transport.rpc import RpcError

PREFILL, DECODE = "a1-prefill", "b1-decode"
PREFILL_TWO, DECODE_TWO = "a1-two", "b1-two"
"""The engines of two ranks."""
UNCACHED = f"{RECURRENT}-uncached"
EMBED = f"{WINDOW}-embed"
POOLING = ("--runner", "pooling", "--convert", "embed")
REDIRECT = "redirect.json"
"""In the folder of the window model's region: if it is there, `DECODE` loads what it names."""

THRESHOLD_TOKENS = 100
LANDING_MIB = 72
"""Of the window model's region: room for three prompts of LONG_TOKENS, not for four, and for all
that `requests` asks for at once.
"""
LONG_TOKENS = 5000
"""22 MB of KVCache of the window model."""
ALL_AT_ONCE_TOKENS = 16384
"""A chunk of the engines without prefix caching. With no blocks to align to, a batch of several
prompts splits them anywhere, and another split rounds the bfloat16 recurrence otherwise, in a plain
engine as well.
"""

# Beside each length the draw of its text that the recurrent model is sure of: it spares the plain
# engine those before it. Where arithmetic rounds otherwise, `decided_answers` draws on from there.
ALONE = ((1, 9), (255, 2), (256, 2), (257, 1), (1000, 4), (1500, 0), (LONG_TOKENS, 0))
TOGETHER = ((1, 9), (255, 2), (256, 2), (257, 1), (1000, 4), (1500, 4), (5000, 0), (700, 1))
SHARED = (
    *((1350, 1300, 11), (1500, 256, 7), (1500, 300, 0)),
    *((2000, 1024, 7), (1500, 256, 4), (1310, 1300, 0)),
)
PREFIX = text(1300, seed=77)


def requests() -> Sequence[DemoRequest]:
    """Each length alone, then eight at once, then prompts that share parts of their prefix."""
    alone = [
        prompt(f"alone {length}", length, length, wave=index, stream=bool(index % 2)).redrawn(draw)
        for index, (length, draw) in enumerate(ALONE)
    ]
    together = [
        prompt(
            f"together {index} {length}", length, 100 + index, wave=20, stream=bool(index % 2)
        ).redrawn(draw)
        for index, (length, draw) in enumerate(TOGETHER)
    ]
    # 1,500 tokens of which 256 are in the prefill engine's cache, and other shares of a prefix.
    shared = [
        prompt(
            f"shared {index}", length, 200 + index, wave=30 + index, prefix=PREFIX[:common]
        ).redrawn(draw)
        for index, (length, common, draw) in enumerate(SHARED)
    ]
    return [*alone, *together, *shared]


@dataclass(frozen=True, slots=True)
class Plain:
    """What one plain engine, without our connector and without a cache, answers."""

    asked: list[DemoRequest]
    expected: dict[str, Answer]
    turns: list[DemoRequest]
    answers: list[Answer]
    by_clients: dict[str, list[str]]
    odd: list[HttpRequest]
    odd_answers: dict[str, HttpAnswer]


@dataclass(frozen=True, slots=True)
class Served:
    """A region, the gateway over `PREFILL` and `DECODE`, and what a plain engine answers."""

    model: str
    path: Path
    folder: Path
    region: RunningRegion
    gateways: PartGateways
    url: str
    plain: Plain
    talk: Talk
    receiver: OtlpReceiver
    """Of the spans of all processes, engines included."""
    connections: dict[str, int]
    """Of each engine to its agent, when all run."""

    async def ask(self, asked: Sequence[DemoRequest]) -> dict[str, Answer]:
        return await ask_at(self.url, self.model, asked)

    async def record(self, answer: Answer) -> dict[str, Any]:
        """The gateway's record of a request, once that has settled."""
        return await settled_record_at(self.url, answer.request_id)

    async def prefilled(self, request: DemoRequest) -> dict[str, Any]:
        """Ask for a prompt that the prefill cluster prefills; the gateway's record of it."""
        return (await self.gateways.ask(request, PREFILL, DECODE))[1]

    async def is_whole(self) -> None:
        """Return once all that was killed or cut serves again, and nothing is held."""
        for process in self.region.processes:
            await process.wait_restarted(180)
        # Until then nothing can land, and prompts stay local.
        await until(self._engines_are_connected, "engines are connected to their agents", 180)
        await self.region.wait_settled(60)
        await are_usable(self.region, self.url, (PREFILL, DECODE))
        await everything_is_given_back(self.region)
        await until(lambda: link_is_usable(self.url), "the link is usable")

    async def _engines_are_connected(self) -> bool:
        try:
            return await num_connections(self.region) == self.connections
        except RpcError:
            return False


def serving(*models: str) -> pytest.MarkDecorator:
    """Run a test on the regions of these models. pytest runs all tests of a package that are about
    one region before it starts the next.
    """
    return pytest.mark.parametrize("served", models, indirect=True)


@contextlib.asynccontextmanager
async def two_clusters(model: str, models_dir: Path, folder: Path) -> AsyncIterator[Served]:
    """The region of `model`, with its files in `folder`."""
    path = model_dir(models_dir, model)
    spec = _window(path, folder) if model == WINDOW else _recurrent(path, models_dir)
    with OtlpReceiver() as receiver, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # instead of five seconds
        spec = spec.model_copy(update={"traces": SampledTraces(endpoint=receiver.endpoint)})
        expecting = asyncio.create_task(_plain_answers(path, model, folder / "plain"))
        try:
            async with (
                running(spec, folder / "region") as region,
                part_gateways(region, model, folder) as gateways,
            ):
                if model == RECURRENT:
                    # No other engine serves this model.
                    gateways.urls[frozenset((PREFILL, DECODE))] = region.gateway_url
                url = await gateways.url(PREFILL, DECODE)
                plain = await expecting
                talk = Talk(model, region, url, DECODE, plain.turns, plain.answers)
                connections = await num_connections(region)
                yield Served(
                    model,
                    path,
                    folder,
                    region,
                    gateways,
                    url,
                    plain,
                    talk,
                    receiver,
                    connections,
                )
        finally:
            # It has ended, unless the region did not start.
            expecting.cancel()
            await asyncio.gather(expecting, return_exceptions=True)


async def num_connections(region: RunningRegion) -> dict[str, int]:
    """Of each engine instance, those of its workers and of its scheduler."""
    states = [await agent_status(region, node) for node in ("a1", "b1")]
    return {engine.instance: engine.num_connections for state in states for engine in state.engines}


async def _plain_answers(path: Path, name: str, log_dir: Path) -> Plain:
    model = replace(MODELS[name], engine_args=(*MODELS[name].engine_args, *TOOL_ARGS))
    async with plain_engine(model, path, log_dir) as url:
        asked, expected = await reference_answers(url, name, requests())
        # Texts of the official clients are not drawn until the recurrent model is sure of them.
        is_exact = name == WINDOW
        new = TURNS_OVER_SLOW_LINK if is_exact else TURNS
        turns, answers = await expected_turns(url, name, new, seed=9000)
        by_clients = await client_answers(url, name) if is_exact else {}
        odd = await odd_requests(url, name, model.max_model_len) if is_exact else []
        odd_answers = await answers_of(url, odd)
        return Plain(asked, expected, turns, answers, by_clients, odd, odd_answers)


def _window(path: Path, folder: Path) -> RegionSpec:
    spec = region_spec(
        path,
        WINDOW,
        threshold_tokens=THRESHOLD_TOKENS,
        landing_gib=LANDING_MIB / 1024,
        local_prefill=False,
    )
    # The variables of one rank are not those of two, and the block size is the instances'.
    one, two = rank_environment(), rank_environment(2)
    ranks = {"tensor_parallel_size": 2, "env": two}
    redirected = one | {"VLLM_MODEL_REDIRECT_PATH": str(folder / REDIRECT)}
    engines: dict[str, list[dict[str, Any]]] = {
        "a1": [{"name": PREFILL, "env": one}, {"name": PREFILL_TWO, **ranks, "block_size": 64}],
        "b1": [
            {"name": DECODE, "role": "decode", "env": redirected},
            {"name": DECODE_TWO, "role": "decode", **ranks},
        ],
    }
    # An agent that was killed evicts nothing at first, so transfers need memory beside the cache.
    agents = {"arena_gib": 1, "cache_gib": 0.5}
    spec = with_engines(spec, engines, agents, env={}, args=TOOL_ARGS, block_size=32)
    return with_tls(spec, folder, own_address())


def _recurrent(path: Path, models_dir: Path) -> RegionSpec:
    spec = region_spec(path, RECURRENT, threshold_tokens=THRESHOLD_TOKENS, local_prefill=False)
    # In turn the engines get this machine's cores: two that work together should not share one.
    engines = {
        "a1": [{"name": PREFILL, "model": RECURRENT}, {"name": "a1-uncached", "model": UNCACHED}],
        "b1": [
            {"name": "b1-uncached", "role": "decode", "model": UNCACHED},
            {"name": DECODE, "role": "decode", "model": RECURRENT},
        ],
    }
    spec = with_engines(spec, engines, args=(*spec.models[0].args, *TOOL_ARGS))
    (cached,) = spec.models
    changes = {"prefix_caching": False, "max_num_batched_tokens": ALL_AT_ONCE_TOKENS}
    uncached = cached.model_copy(update={"name": UNCACHED, **changes})
    (window,) = region_spec(model_dir(models_dir, WINDOW), WINDOW).models
    embed = window.model_copy(update={"name": EMBED, "args": (*window.args, *POOLING)})
    prefill, pd = spec.clusters
    # The landings of another model would make it ambiguous what is reserved at b1.
    engine = RegionInstance(name="b2-embed", role="decode", model=EMBED)
    node = pd.nodes[0].model_copy(update={"name": "b2", "instances": (engine,)})
    pd = pd.model_copy(update={"nodes": (*pd.nodes, node)})
    models = (cached, uncached, embed)
    return spec.model_copy(update={"models": models, "clusters": (prefill, pd)})
