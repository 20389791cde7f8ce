"""Real engines answer nobody without the key of their run, and use no other checkpoint's KVCache.

The prefill cluster's checkpoint is not the one that decodes, though both have one name. An engine
of the other checkpoint runs beside the decode engine, too, and shares its node's arena.
"""

import ipaddress
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
from engine_region import (
    WINDOW,
    agent_status,
    ask_region,
    everything_is_given_back,
    listening_hosts,
    model_dir,
    prompt,
    region_spec,
    running,
    settled_record,
    until,
)

from deploy.lab.demo.scenario import DemoRequest
from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS
from deploy.region.launch.launcher import RunningRegion

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = prompt("long", 1100, 77)
PATHS = (
    "/health",
    "/metrics",
    "/version",
    "/load",
    "/docs",
    "/openapi.json",
    "/v1/models",
    "/invocations",
    "/tokenize",
    "/v1/completions",
    "/v1/completions/render",
    "/inference/v1/generate",
    "/scale_elastic_ep",
    "/no/such/path",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def region(
    models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningRegion]:
    model = MODELS[WINDOW]
    other = build_model(replace(model, seed=model.seed + 1), models_dir / "swapped")
    path = model_dir(models_dir, WINDOW)
    spec = region_spec(path, WINDOW, threshold_tokens=100)
    # As if the folder had something else in it on another host.
    redirect = models_dir / "redirect.json"
    redirect.write_text(json.dumps({str(path): str(other)}))
    document = spec.model_dump(mode="json")
    for cluster in document["clusters"]:
        for instance in cluster["nodes"][0]["instances"]:
            if instance["name"] != "b1-decode":
                instance["env"] = {"VLLM_MODEL_REDIRECT_PATH": str(redirect)}
    swapped = type(spec).model_validate(document)
    async with running(swapped, tmp_path_factory.mktemp("swap")) as running_region:
        yield running_region


async def computed_at(
    region: RunningRegion, instance: str, request: DemoRequest, **fields: Any
) -> list[int]:
    """One engine's own answer."""
    url = f"{region.engine(instance).address}/v1/completions"
    body = request.body(WINDOW) | {"stream": False} | fields
    async with aiohttp.ClientSession(headers=region.engine_access().headers) as session:
        async with session.post(url, json=body) as response:
            answer = await response.json()
    assert response.status == 200, answer
    return list(answer["choices"][0]["token_ids"])


async def test_kvcache_of_the_other_checkpoint_is_never_used(region: RunningRegion) -> None:
    others = [await computed_at(region, name, PROMPT) for name in ("a1-prefill", "b1-prefill")]

    async def is_cached() -> bool:
        cache = (await agent_status(region, "b1")).cache
        return cache is not None and cache.num_blocks > 0

    await until(is_cached, "the other checkpoint's KVCache is in the arena of the decode engine")
    answer = (await ask_region(region, WINDOW, [PROMPT]))[PROMPT.name]
    assert not answer.error, answer.error
    record = await settled_record(region, answer.request_id)
    assert record["cached_tokens"] in (0, None), record
    assert record["local_cached_tokens"] in (0, None), record
    assert record["landing_cached_tokens"] in (0, None), record
    assert set(record["prefill_cached_tokens"].values()) <= {0}, record
    assert record["route"] == "local", record
    assert answer.token_ids == await computed_at(region, "b1-decode", PROMPT, cache_salt="alone")
    assert others[0] == others[1] != answer.token_ids, "the checkpoints answer differently"


async def test_the_region_says_which_weights_differ(region: RunningRegion) -> None:
    agents = [await agent_status(region, node) for node in ("a1", "b1")]
    (sentence,) = await region.differences()
    assert " are files:" in sentence
    assert " at a1-prefill, b1-prefill" in sentence
    engines = {engine.instance: engine for agent in agents for engine in agent.engines}
    assert engines["a1-prefill"].layout_fingerprint == engines["b1-prefill"].layout_fingerprint
    caches = [engines[name].cache for name in ("a1-prefill", "b1-decode")]
    assert caches[0] is not None
    assert caches[1] is not None
    assert caches[0].namespace != caches[1].namespace
    await everything_is_given_back(region)


async def test_strangers_get_no_answer_and_the_region_does(region: RunningRegion) -> None:
    url = region.engine("b1-decode").address
    body = {"model": WINDOW, "prompt": "x", "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer guessed"}):
        async with aiohttp.ClientSession(headers=headers) as session:
            for path in PATHS:
                for method in ("GET", "POST", "OPTIONS"):
                    async with session.request(method, url + path, json=body) as response:
                        assert response.status == 401, (method, path)
    async with aiohttp.ClientSession(headers=region.engine_access().headers) as session:
        for path in ("/health", "/metrics", "/v1/models"):
            async with session.get(url + path) as response:
                assert response.status == 200, path
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200
    request = prompt("long", 1100, 5)
    answer = (await ask_region(region, WINDOW, [request]))[request.name]
    assert not answer.error, answer.error


async def test_no_command_line_and_no_environment_has_the_key(region: RunningRegion) -> None:
    keys = [path.read_text().strip() for path in region.directory.root.glob("*.key")]
    assert len(keys) >= 3
    for process in region.processes:
        for pid in process.pids:
            one = psutil.Process(pid)
            held = " ".join([*one.cmdline(), *one.environ().values()])
            assert not [key for key in keys if key in held], one.cmdline()[:4]


async def test_engines_listen_on_loopback_only(region: RunningRegion) -> None:
    listening = listening_hosts(*region.processes)
    assert listening
    assert all(ipaddress.ip_address(ip).is_loopback for ip in listening), listening
