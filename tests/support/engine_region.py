"""Regions of real vLLM engines for tests: their spec, their models, a plain engine to compare with.

Engines are small and slow to start (half a minute): tests share them by module.
"""

import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from deploy.demo.answers import Answer, ask_all
from deploy.demo.reference import plain_engine
from deploy.demo.regions import demo_region
from deploy.demo.scenario import DemoRequest, text
from deploy.demo.tiny_models import build_model
from deploy.demo.tiny_specs import MODELS
from deploy.region.launcher import RunningRegion
from deploy.region.spec import RegionSpec

RECURRENT = "qwen3-next-tiny"
WINDOW = "mimo-v2-tiny"
START_TIMEOUT_S = 240.0


def model_dir(cache_dir: Path, name: str) -> Path:
    """The built model; building takes a second the first time."""
    return build_model(MODELS[name], cache_dir).path


def region_spec(path: Path, name: str, **changes: Any) -> RegionSpec:
    """The demo's region for one model; see `deploy.demo.regions.demo_region`."""
    return demo_region(MODELS[name], path, **changes)


@contextlib.asynccontextmanager
async def running(spec: RegionSpec, run_dir: Path) -> AsyncIterator[RunningRegion]:
    """The region, every engine healthy; stopped at the end."""
    async with RunningRegion(spec, run_dir) as region:
        yield region


def prompt(
    name: str, num_tokens: int, seed: int, *, wave: int = 0, stream: bool = False, prefix: str = ""
) -> DemoRequest:
    """A completion of exactly `num_tokens` prompt tokens (the tokenizer makes one of each byte)."""
    content = prefix + text(num_tokens - len(prefix), seed)
    return DemoRequest(name, "/v1/completions", content, stream, "prefill_cluster", wave)


async def ask_region(
    region: RunningRegion, model: str, requests: Sequence[DemoRequest]
) -> dict[str, Answer]:
    return await ask_all(region.gateway_url, model, requests, lambda request, answer: None)


async def records(region: RunningRegion) -> dict[str, dict[str, Any]]:
    """The gateway's latest record of each request id."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{region.gateway_url}/prfaas/requests?limit=500") as response:
            listed = (await response.json())["requests"]
    return {record["request_id"]: record for record in reversed(listed)}


async def expected_answers(
    path: Path, name: str, requests: Sequence[DemoRequest], log_dir: Path
) -> dict[str, Answer]:
    """What one plain engine, without our connector, answers."""
    async with plain_engine(MODELS[name], path, log_dir) as url:
        return await ask_all(url, name, requests, lambda request, answer: None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
