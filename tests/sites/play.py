"""What is done to the region of `make sites` while clients ask, act by act."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from eventually import eventually
from hosts import Host
from load import Client, Phase
from redis_host import Redis
from region import JOINING, PD, PREFILL
from region_hosts import RegionHost

from deploy.lab.demo.scenario import DemoRequest

CUT_OFF_S = 30.0
REDIS_GONE_S = 15.0
BURST = 24
BEFORE_S, AFTER_S = 3.0, 5.0
"""How long clients ask before something happens, and after it is over."""
PATIENCE_S = 300.0
RUNS = ("healthy", "running")


@dataclass
class Sites:
    """The hosts, what runs on them, and who asks. `files` has the region's file as it is first, and
    after `JOINING` has joined.
    """

    machines: Mapping[str, Host]
    parts: Mapping[str, RegionHost]
    client: Client
    redis: Redis
    files: Mapping[str, Mapping[str, Any]]

    async def kill(self, node: str, process: str) -> None:
        """End a process of a host as a crash does, and wait until it runs again."""
        pid = await asyncio.to_thread(self.parts[node].pid, process)
        argv = self.machines[node].argv(["kill", f"-{signal.SIGKILL.value}", str(pid)])
        await asyncio.to_thread(subprocess.run, argv, check=True)

        async def runs_again() -> bool:
            return await asyncio.to_thread(
                self.parts[node].pid, process
            ) != pid and await self._serves(node, process)

        await eventually(runs_again, what=f"{process} runs again", timeout_s=PATIENCE_S)

    async def _serves(self, node: str, process: str) -> bool:
        status = await asyncio.to_thread(self.parts[node].status)
        states = {item["name"]: item["state"] for item in status["state"]["processes"]}
        return states[process] in RUNS


@dataclass(frozen=True)
class Act:
    """Something that happens while clients ask. Streams of the gateway on host `loses` may end."""

    name: str
    do: Callable[[Sites, Phase], Awaitable[None]]
    loses: str = ""


def write_file(parts: Iterable[RegionHost], region: Mapping[str, Any]) -> None:
    """Give every host the region's file, whole at once."""
    for part in parts:
        new = part.folder / "region.new"
        new.write_text(json.dumps(region, indent=1))
        new.replace(part.folder / "region.yaml")


async def _nothing(_sites: Sites, phase: Phase) -> None:
    """Until every prefill cluster has prefilled and every PD cluster has decoded."""

    await eventually(
        lambda: (phase.prefilled(), {one.cluster for one in phase.asked}),
        lambda seen: seen[0] >= set(PREFILL) and seen[1] >= set(PD),
        what="every cluster has served",
        timeout_s=PATIENCE_S,
    )


async def _kill(node: str, process: str, sites: Sites, _phase: Phase) -> None:
    await sites.kill(node, process)


async def _burst(sites: Sites, phase: Phase) -> None:
    home, prompts = next(iter(PD)), sites.client.prompts[phase.name]
    requests: list[DemoRequest] = [prompts[index % len(prompts)] for index in range(BURST)]
    await asyncio.gather(*(sites.client.ask(phase, one, home=home) for one in requests))


async def _cut_off(sites: Sites, _phase: Phase) -> None:
    machine = sites.machines[PREFILL["prefill-a"]]
    machine.cut_off()
    await asyncio.sleep(CUT_OFF_S)
    machine.reach_again()


async def _without_redis(sites: Sites, _phase: Phase) -> None:
    sites.redis.stop()
    await asyncio.sleep(REDIS_GONE_S)
    sites.redis.start()


async def _join(sites: Sites, phase: Phase) -> None:
    joining = sites.parts[JOINING]
    write_file(sites.parts.values(), sites.files["joined"])
    joining.begin()
    await asyncio.to_thread(joining.ready)

    await eventually(
        lambda: any(one.prefill_instance == f"{JOINING}-engine" for one in phase.asked),
        what="the new host has prefilled",
        timeout_s=PATIENCE_S,
    )


async def _leave(sites: Sites, _phase: Phase) -> None:
    write_file(sites.parts.values(), sites.files["first"])
    # The file names its node no more, so its part ends by itself once it has no work.
    launcher = sites.parts[JOINING].launcher
    assert launcher is not None
    await asyncio.to_thread(launcher.wait, PATIENCE_S)
    sites.machines[JOINING].power_off()


def acts() -> list[Act]:
    """All of it, in order."""
    a1, a2, b1, c1 = PREFILL["prefill-a"], PREFILL["prefill-b"], PD["pd-b"], PD["pd-c"]
    return [
        Act("nothing happens", _nothing),
        Act("a prefill engine is killed", partial(_kill, a1, f"{a1}-engine")),
        Act("a prefill agent is killed", partial(_kill, a2, f"agent.{a2}")),
        Act("a receiving agent is killed", partial(_kill, b1, f"agent.{b1}")),
        Act("a decode engine is killed", partial(_kill, c1, f"{c1}-engine")),
        Act("a burst at one home", _burst),
        Act("a prefill host is cut off", _cut_off),
        Act("a gateway is killed", partial(_kill, c1, f"gateway.{c1}"), loses=c1),
        Act("Redis stops and starts", _without_redis),
        Act("a prefill host joins", _join),
        Act("a prefill host leaves", _leave),
    ]


async def _until_used_again(phase: Phase) -> None:
    after = len(phase.asked)
    try:
        await eventually(
            lambda: phase.prefilled(after),
            lambda used: used >= set(PREFILL),
            what="every prefill cluster is used again",
            timeout_s=PATIENCE_S,
        )
    except AssertionError as error:
        raise AssertionError(f"{phase.name}: {error}; prompts stayed: {phase.stayed}") from error


async def play(sites: Sites, act: Act, per_s: float) -> Phase:
    """Carry out an act while clients ask, and go on until every prefill cluster is used again.
    Returns when all clients have their answers. AssertionError with the reasons why prompts stayed.
    """
    phase = Phase(act.name, act.loses)
    over = asyncio.Event()
    began_s = time.monotonic()
    asking = asyncio.create_task(sites.client.keep_asking(phase, per_s, over))
    try:
        await asyncio.sleep(BEFORE_S)
        await act.do(sites, phase)
        await asyncio.sleep(AFTER_S)
        await _until_used_again(phase)
    finally:
        over.set()
        await asking
    phase.seconds = time.monotonic() - began_s
    return phase
