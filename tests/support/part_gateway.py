"""Gateways that see only some engines of a running region: a test then chooses who serves."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from engine_region import LOOPBACK, computed_alone, settled_record_at, until
from free_ports import free_port

from deploy.lab.demo.answers import Answer, ask
from deploy.lab.demo.scenario import DemoRequest
from deploy.region.launch.launcher import RunningRegion

File = dict[str, Any]


@contextlib.asynccontextmanager
async def gateway_over(
    region: RunningRegion,
    instances: Collection[str],
    folder: Path,
    change: Callable[[File], None] = lambda file: None,
) -> AsyncIterator[str]:
    """The address of a second gateway of `region`, which knows these engines and no others. Its
    files are in `folder`, which is there. `change` may change its file.
    """
    port = free_port()
    file = await asyncio.to_thread(_write_part, region, instances, folder, port, change)
    url = f"http://{LOOPBACK}:{port}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "deploy.cli", "gateway", "--config", str(file)
    )
    try:
        await until(lambda: _is_ready(url), f"the gateway over {sorted(instances)}")
        yield url
    finally:
        process.terminate()
        await process.wait()


@dataclass(slots=True)
class PartGateways:
    """A region, and a gateway for each set of its engines that a test asks through."""

    region: RunningRegion
    model: str
    session: aiohttp.ClientSession
    folder: Path
    _gateways: contextlib.AsyncExitStack
    urls: dict[frozenset[str], str] = field(default_factory=dict)

    async def url(self, *instances: str) -> str:
        """The gateway over these engines."""
        known = frozenset(instances)
        if known not in self.urls:
            entered = gateway_over(self.region, known, self.folder)
            self.urls[known] = await self._gateways.enter_async_context(entered)
        return self.urls[known]

    async def ask(self, request: DemoRequest, *instances: str) -> tuple[Answer, File]:
        """The answer by way of these engines, and the gateway's record of it: the prompt was
        prefilled in the prefill cluster.
        """
        url = await self.url(*instances)
        answer = await ask(self.session, url, self.model, request)
        assert not answer.error, (request.name, answer.error)
        record = await settled_record_at(url, answer.request_id)
        assert (record["route"], record["prefill_error"]) == ("prefill_cluster", ""), record
        return answer, record

    async def alone(self, instance: str, request: DemoRequest, model: str = "") -> list[int]:
        """An engine's own answer to the whole prompt, in which nothing cached or moved has a part:
        the prompt has a salt of its own.
        """
        name = model or self.model
        return await computed_alone(
            self.region, self.session, instance, name, request, cache_salt="alone"
        )


@contextlib.asynccontextmanager
async def part_gateways(
    region: RunningRegion, model: str, folder: Path
) -> AsyncIterator[PartGateways]:
    """Gateways of `region` with files in `folder`. They end with the context."""
    async with aiohttp.ClientSession() as session, contextlib.AsyncExitStack() as gateways:
        yield PartGateways(region, model, session, folder, gateways)


def _write_part(
    region: RunningRegion,
    instances: Collection[str],
    folder: Path,
    port: int,
    change: Callable[[File], None],
) -> Path:
    file: File = json.loads(region.directory.gateway_file.read_text())
    file["gateway"] |= {"port": port, "state": str(folder / f"learned.{port}"), "admin": None}
    for kind in ("pd", "prefill"):
        for cluster in file[kind]:
            cluster["instances"] = [i for i in cluster["instances"] if i["name"] in instances]
        file[kind] = [cluster for cluster in file[kind] if cluster["instances"]]
    change(file)
    path = folder / f"gateway.{port}.json"
    path.write_text(json.dumps(file))
    return path


async def _is_ready(url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession() as session, session.get(f"{url}/readyz") as answer:
            return answer.status == 200
    return False
