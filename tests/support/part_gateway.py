"""A gateway that sees only some engines of a running region: a test then chooses who prefills."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import aiohttp
from engine_region import LOOPBACK, until
from free_ports import free_port

from deploy.region.launch.launcher import RunningRegion


@contextlib.asynccontextmanager
async def gateway_over(
    region: RunningRegion, instances: Collection[str], folder: Path
) -> AsyncIterator[str]:
    """The address of a second gateway of `region`, which knows these engines and no others. Its
    files are in `folder`, which is there.
    """
    port = free_port()
    file = await asyncio.to_thread(_write_part, region, instances, folder, port)
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


def _write_part(region: RunningRegion, instances: Collection[str], folder: Path, port: int) -> Path:
    file: dict[str, Any] = json.loads(region.directory.gateway_file.read_text())
    file["gateway"] |= {"port": port, "state": str(folder / f"learned.{port}"), "admin": None}
    for cluster in (*file["pd"], *file["prefill"]):
        cluster["instances"] = [i for i in cluster["instances"] if i["name"] in instances]
    file["prefill"] = [cluster for cluster in file["prefill"] if cluster["instances"]]
    path = folder / f"gateway.{port}.json"
    path.write_text(json.dumps(file))
    return path


async def _is_ready(url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession() as session, session.get(f"{url}/readyz") as answer:
            return answer.status == 200
    return False
