"""Real engines of a region answer nobody without the key of its run, on no path."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio
from engine_region import (
    WINDOW,
    ask_region,
    listening_hosts,
    model_dir,
    prompt,
    region_spec,
    running,
)

from deploy.region.launch.launcher import RunningRegion

pytestmark = pytest.mark.asyncio(loop_scope="module")

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
    spec = region_spec(model_dir(models_dir, WINDOW), WINDOW, threshold_tokens=100)
    async with running(spec, tmp_path_factory.mktemp("keys")) as opened:
        yield opened


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
