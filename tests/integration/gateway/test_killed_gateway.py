"""One of two gateways is killed under load: its own streams end, and nothing else."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from eventually import eventually
from gateway_region import Region
from redis_server import RedisServer
from serving_process import gateway_file, only_engine, serving

pytestmark = pytest.mark.slow

BODY = {"model": "tiny", "prompt": "x" * 120, "stream": True}
LIMIT_S = 90


class Process:
    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url


@asynccontextmanager
async def two_gateways(region: Region, folder: Path) -> AsyncIterator[tuple[Process, Process]]:
    """Two gateways of one region, joined, with the front of its PD cluster."""
    with RedisServer(folder) as server:
        front = {"name": "home", "listen": "127.0.0.1:0", **only_engine(region.engine.url)}
        (folder / "front.yaml").write_text(yaml.safe_dump(front))
        async with serving("pd", folder / "front.yaml") as (_, said), AsyncExitStack() as stack:
            found = []
            for name in ("g0", "g1"):
                shared = {"redis": server.url, "region": "r", "name": name}
                pd = {"front": said["control"]}
                file = gateway_file(folder / f"{name}.yaml", pd, gateway={"shared": shared})
                process = serving("gateway", file, "--port", "0")
                one, ready = await stack.enter_async_context(process)
                found.append(Process(one, ready["url"]))
            for gateway in found:
                await until(region, gateway, state="joined")
            yield found[0], found[1]


async def page(region: Region, gateway: Process) -> Any:
    async with region.session.get(gateway.url + "/prfaas/gateways") as response:
        return await response.json()


async def until(region: Region, gateway: Process, **wanted: Any) -> Any:
    """Wait until the gateway's page has these values."""
    return await eventually(
        lambda: page(region, gateway), lambda found: wanted.items() <= found.items()
    )


class Streams:
    """Streams through one gateway, one after the other."""

    def __init__(self, region: Region, gateway: Process) -> None:
        self.region = region
        self.gateway = gateway
        self.num_whole = 0
        self.broken: list[str] = []
        self.is_over = False

    async def run(self) -> None:
        while not self.is_over:
            try:
                url = self.gateway.url + "/v1/completions"
                async with self.region.session.post(url, json=BODY) as response:
                    answer = await response.read()
                is_whole = response.status == 200 and answer.endswith(b"data: [DONE]\n\n")
            except aiohttp.ClientError as error:
                self.broken.append(repr(error))
                return
            if is_whole:
                self.num_whole += 1
            else:
                self.broken.append(f"{response.status}: {answer[-100:]!r}")


async def test_a_killed_gateway_takes_only_its_own_streams(region: Region, tmp_path: Path) -> None:
    async with two_gateways(region, tmp_path) as (one, two):
        leader = one if (await page(region, one))["leads"] else two
        other = two if leader is one else one
        streams = [Streams(region, gateway) for gateway in (leader, leader, other, other)]
        tasks = [asyncio.create_task(item.run()) for item in streams]
        await eventually(lambda: all(item.num_whole >= 5 for item in streams))
        token = (await page(region, leader))["token"]
        leader.process.send_signal(signal.SIGKILL)
        await asyncio.wait_for(asyncio.gather(*tasks[:2]), LIMIT_S)
        # The other one goes on, hears that it is alone, and takes over.
        seen = await until(region, other, leads=True, peers=[])
        assert seen["token"] > token
        assert seen["state"] == "joined"
        done = [item.num_whole for item in streams[2:]]
        for item, num in zip(streams[2:], done, strict=True):
            await eventually(lambda item=item, num=num: item.num_whole >= num + 5)
        for item in streams:
            item.is_over = True
        await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)
        assert [len(item.broken) for item in streams] == [1, 1, 0, 0]


async def test_a_frozen_leader_learns_that_another_one_leads(
    region: Region, tmp_path: Path
) -> None:
    async with two_gateways(region, tmp_path) as (one, two):
        is_first = (await page(region, one))["leads"]
        leader, other = (one, two) if is_first else (two, one)
        leader.process.send_signal(signal.SIGSTOP)
        seen = await until(region, other, leads=True)
        leader.process.send_signal(signal.SIGCONT)
        after = await until(region, leader, leads=False, leader=seen["name"])
        assert after["token"] < seen["token"]
        await until(region, leader, state="joined")
