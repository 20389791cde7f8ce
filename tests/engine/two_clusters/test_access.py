"""Real engines answer nobody without the key of their run, which nobody else can see."""

import ipaddress

import aiohttp
import psutil
import pytest
from engine_region import RECURRENT, listening_hosts
from served_region import DECODE, Served, serving

pytestmark = [pytest.mark.asyncio(loop_scope="session"), serving(RECURRENT)]

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


async def test_strangers_get_no_answer_and_the_region_does(served: Served) -> None:
    url = served.region.engine(DECODE).address
    body = {"model": served.model, "prompt": "x", "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer guessed"}):
        async with aiohttp.ClientSession(headers=headers) as session:
            for path in PATHS:
                for method in ("GET", "POST", "OPTIONS"):
                    async with session.request(method, url + path, json=body) as response:
                        assert response.status == 401, (method, path)
    async with aiohttp.ClientSession(headers=served.region.engine_access().headers) as session:
        for path in ("/health", "/metrics", "/v1/models"):
            async with session.get(url + path) as response:
                assert response.status == 200, path
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200


async def test_no_command_line_and_no_environment_has_the_key(served: Served) -> None:
    root = served.region.directory.root
    keys = [path.read_text().strip() for path in root.glob("*.key")]
    assert len(keys) >= 3
    for process in served.region.processes:
        for pid in process.pids:
            one = psutil.Process(pid)
            held = " ".join([*one.cmdline(), *one.environ().values()])
            assert not [key for key in keys if key in held], one.cmdline()[:4]


async def test_engines_listen_on_loopback_only(served: Served) -> None:
    listening = listening_hosts(*served.region.processes)
    assert listening
    assert all(ipaddress.ip_address(ip).is_loopback for ip in listening), listening
