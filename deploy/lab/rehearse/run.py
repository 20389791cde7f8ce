"""Plays rehearsals: simulates, starts a region, sends the requests, and reads how it went.

It starts regions as `prfaas up` does. What is derived and added up is in `deriving` and `columns`.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import psutil
import yaml
from rich.console import Console

from deploy.lab.pace.passes import judge, read_passes
from deploy.lab.rehearse.columns import Served, column, plan_column, simulated
from deploy.lab.rehearse.deriving import Rehearsal
from deploy.lab.rehearse.driving import Client, drive_closed, drive_open
from deploy.lab.rehearse.report import Played
from deploy.region.launch.launcher import RunningRegion
from deploy.region.launch.progress import progress_view
from deploy.region.launch.running import RegionStartFailed
from deploy.region.spec.loading import load_region
from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.units import format_age, format_rate
from scheduler.planning.region_model import Link
from scheduler.replay.driver import replay
from scheduler.replay.links import RateSchedule
from scheduler.replay.workload import Workload

READY_S: Final = 120.0
CALIBRATED_S: Final = 60.0
"""The longest wait for the gateway's timing of idle instances, in the plan's time."""
PASSES: Final = Path("run/logs/pace")
"""Where engines log their passes (`RunDirectory.pace`)."""
PROGRESS_S: Final = 15.0
"""Between two lines of progress where there is no terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Clients that ask one request after the other for `span_s` real seconds."""

    num_clients: int
    span_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Regions that are played one after the other, and what they have in common. `workload` is in
    real units.
    """

    rehearsals: Sequence[Rehearsal]
    workload: Workload
    backlog: Backlog | None
    seed: int
    keep: Path | None


async def play(rehearsal: Rehearsal, run: Run, directory: Path, console: Console) -> Played:
    """Play one region in `directory`, where the files go that its region.yaml names. Raises the
    errors of `RunningRegion.start`.
    """
    workload, outcome = run.workload, None
    if run.backlog is None:
        # Before the region starts: what cannot be simulated need not be waited for.
        outcome = replay(rehearsal.model, workload, rehearsal.policy, seed=run.seed)
    live, busy = await _live(rehearsal, run, directory, console)
    # What clients sent when is what is simulated.
    span_s = workload.arrivals_s[-1] if run.backlog is None else run.backlog.span_s
    # When clients stop asking, the region runs empty.
    until_s = math.inf if run.backlog is None else span_s
    if outcome is None:
        workload = as_sent(workload, live)
        outcome = replay(rehearsal.model, workload, rehearsal.policy, seed=run.seed)
    in_virtual_time = simulated(outcome)
    played = Played(
        rehearsal=rehearsal,
        plan=plan_column(rehearsal, len(live), span_s),
        simulated=column(
            in_virtual_time,
            span_s,
            rehearsal.scale,
            link_bytes=sum(outcome.egress_bytes.values()),
            until_s=until_s,
        ),
        live=column(live, span_s, rehearsal.scale, until_s=until_s),
        simulated_requests=in_virtual_time,
        live_requests=live,
        verdict=judge(read_passes(directory / PASSES), busy),
        span_s=span_s,
    )
    if run.keep is not None:
        _keep(run.keep / rehearsal.name, played, directory)
    return played


def as_sent(workload: Workload, live: Sequence[Served]) -> Workload:
    """The requests that clients sent, at the times at which they did."""
    order = sorted(live, key=lambda one: one.at_s)
    blocks = workload.block_ids
    return Workload(
        arrivals_s=[one.at_s for one in order],
        prompt_tokens=[one.prompt_tokens for one in order],
        output_tokens=[one.output_tokens for one in order],
        block_ids=None if blocks is None else [blocks[one.index] for one in order],
        block_tokens=workload.block_tokens,
    )


async def _live(
    rehearsal: Rehearsal, run: Run, directory: Path, console: Console
) -> tuple[list[Served], float]:
    """The requests, and the share of the machine's time that was used while they ran."""
    for name, profile in rehearsal.profiles.items():
        profile.dump(directory / f"{name}.yaml")
    region = rehearsal.loaded
    if region is None:
        file = directory / "region.yaml"
        file.write_text(yaml.safe_dump(rehearsal.region, sort_keys=False))
        region = load_region(file, os.environ)
    view = progress_view(console, as_json=False)
    running = RunningRegion(region, directory / "run", on_progress=view.show)
    timeout = aiohttp.ClientTimeout(total=3600 * rehearsal.scale.slowdown)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        with view:
            await running.start()
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await _ready(session, running.gateway_url)
            await calibrated(session, running.gateway_url, region, rehearsal.scale.slowdown)
            model = region.models[0].name
            client = Client(session, running.gateway_url, model, run.workload, run.seed)
            psutil.cpu_percent()
            async with (
                _progress(console, client, rehearsal.name, run),
                _changing_links(running, rehearsal, client),
            ):
                if run.backlog is None:
                    live = await drive_open(client, run.workload)
                else:
                    live = await drive_closed(
                        client, run.workload, run.backlog.num_clients, run.backlog.span_s
                    )
            busy = psutil.cpu_percent() / 100
    finally:
        await running.stop()
    return live, busy


async def _ready(session: aiohttp.ClientSession, url: str) -> None:
    for _ in range(int(READY_S / 0.5)):
        async with session.get(f"{url}/readyz") as response:
            if response.status == 200:
                return
        await asyncio.sleep(0.5)
    raise RegionStartFailed(f"{url}/readyz does not answer 200 after {READY_S:g} s")


async def calibrated(
    session: aiohttp.ClientSession, url: str, region: RegionSpec, slowdown: float = 1.0
) -> None:
    """Wait until the gateway has timed prefills wherever it does (`scheduling.calibration`). They
    take `tokens_per_token` times as long as on the GPUs, and requests would wait for them.
    """
    if region.gateway.scheduling.calibration.mode != "on":
        return
    places = {(c.name, i.role) for c in region.clusters for n in c.nodes for i in n.instances}
    for _ in range(int(CALIBRATED_S * slowdown / 0.5)):
        async with session.get(f"{url}/prfaas/scheduling") as response:
            models = (await response.json())["models"]
        if sum(place["calibrated"] for model in models for place in model["places"]) >= len(places):
            return
        await asyncio.sleep(0.5)


@asynccontextmanager
async def _changing_links(
    running: RunningRegion, rehearsal: Rehearsal, client: Client
) -> AsyncIterator[None]:
    """Give emulated links the rates of their schedules while requests run."""

    async def follow(link: Link, schedule: RateSchedule) -> None:
        relay = running.relay(f"{link.source}-to-{link.target}")
        for at_s, rate in zip(schedule.times_s[1:], schedule.rates[1:], strict=True):
            await asyncio.sleep(max(0.0, at_s - client.now_s))
            await asyncio.to_thread(relay.configure, rate=format_rate(rate))

    model = rehearsal.model
    async with asyncio.TaskGroup() as tasks:
        following = [
            tasks.create_task(follow(link, model.schedules[link.name]))
            for link in model.region.links
            if link.name in model.schedules
        ]
        yield
        for task in following:
            task.cancel()


@asynccontextmanager
async def _progress(console: Console, client: Client, name: str, run: Run) -> AsyncIterator[None]:
    """Tell how far the requests are, on one line of a terminal or line by line."""
    span_s = run.workload.arrivals_s[-1] if run.backlog is None else run.backlog.span_s
    total = "" if run.backlog is not None else f" of {len(run.workload):,}"

    def text() -> str:
        counts, left_s = client.counts, span_s - client.now_s
        until = f"{format_age(left_s)} left" if left_s > 0 else "waiting for the last answers"
        return (
            f"{name}: sent {counts.sent:,}{total}, answered {counts.done:,}, refused "
            f"{counts.refused:,}, failed {counts.failed:,}; {until}"
        )

    async def tell(every_s: float, say: Any) -> None:
        while True:
            say(text())
            await asyncio.sleep(every_s)

    if console.is_terminal:
        with console.status(name) as status:
            telling = asyncio.create_task(tell(1.0, status.update))
            try:
                yield
            finally:
                telling.cancel()
    else:
        telling = asyncio.create_task(tell(PROGRESS_S, partial(console.print, soft_wrap=True)))
        try:
            yield
        finally:
            telling.cancel()
    console.print(text(), soft_wrap=True)


def _keep(folder: Path, played: Played, directory: Path) -> None:
    """The raw results of a region: requests live and simulated, passes, the region file, logs."""
    folder.mkdir(parents=True, exist_ok=True)
    encode = msgspec.json.Encoder().encode_lines
    (folder / "live.jsonl").write_bytes(encode(played.live_requests))
    (folder / "simulated.jsonl").write_bytes(encode(played.simulated_requests))
    (folder / "region.yaml").write_text(yaml.safe_dump(played.rehearsal.region, sort_keys=False))
    _copy(directory / PASSES, folder / "pace", "*.jsonl")
    _copy(directory / "run" / "logs", folder / "logs", "*.log")


def _copy(source: Path, target: Path, pattern: str) -> None:
    for file in sorted(source.glob(pattern)):
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target / file.name)
