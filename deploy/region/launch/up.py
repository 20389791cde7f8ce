"""The life of `prfaas up`: start, serve, follow the region's file, stop on signals.

Signals set flags and cancel. `launcher` has the region itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from deploy.command_line import CommandFailed
from deploy.region.launch.launcher import RunningRegion
from deploy.region.launch.parts import Part, UnknownPart
from deploy.region.launch.progress import ProgressView, line_view, progress_view
from deploy.region.launch.running import ProcessProgress
from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.followed_files import follow, hang_up
from kvmanager.config_files.problems import FileError
from kvmanager.logs import set_up_logging
from kvmanager.loop.systemd import served
from prfaas.engines.supervision.log_files import OwnLog
from transport.errors import LocalError
from transport.rpc import RpcError
from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.region")


async def keep_up(
    file: Path,
    load: Callable[[], tuple[RegionSpec, Part]],
    root: Path,
    console: Console,
    *,
    as_json: bool,
) -> bool:
    """Start the part of the region that `load` makes of `file`, and keep it until SIGINT or
    SIGTERM; a second signal kills. It follows changes of the file; SIGHUP reads it again.

    The log of this process goes to launcher.log beside the others. Returns False if it had to stop
    before it ran. Raises the errors of `RunningRegion.start`.
    """
    stop = asyncio.Event()
    view = progress_view(console, as_json=as_json)
    # Later changes come one by one, and belong below the table.
    later = view if as_json else line_view(console)
    shown = view

    def show(progress: ProcessProgress) -> None:
        # A region outlives the terminal that it was started from.
        with suppress(OSError):
            shown.show(progress)

    region, part = load()
    running = RunningRegion(region, root, part=part, on_progress=show)

    def on_signal() -> None:
        if stop.is_set():
            running.kill_all()
        stop.set()

    logs = region.logs
    set_up_logging(logs.level, logs.format, OwnLog(root / "logs" / "launcher.log"))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    again = hang_up()
    following: asyncio.Task[None] | None = None
    try:
        if not await _start(running, view, stop):
            return False
        shown = later
        _announce(running, console, as_json, await _differences(running))
        following = start_task(_follow(file, load, running, again, stop), "the region's file")
        async with served():
            await stop.wait()
        if not as_json:
            console.print("stopping", style="dim")
        return True
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await running.stop()


async def _follow(
    file: Path,
    load: Callable[[], tuple[RegionSpec, Part]],
    running: RunningRegion,
    again: asyncio.Event,
    stop: asyncio.Event,
) -> None:
    """Have the region follow its file until cancelled. What cannot be followed is logged. A part
    whose node the file names no more stops, once it has no work.
    """
    wanted: tuple[RegionSpec, Part] | tuple[()] = ()
    changed = asyncio.Event()

    def loaded() -> tuple[RegionSpec, Part] | tuple[()]:
        try:
            return load()
        except (FileError, CommandFailed, OSError) as error:
            if isinstance(error, UnknownPart) and running.part.may_leave:
                return ()
            raise LocalError("region_file", f"the region stays as it is: {error}") from error

    def use(found: tuple[RegionSpec, Part] | tuple[()]) -> None:
        nonlocal wanted
        wanted = found
        changed.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(follow((file,), loaded, use, again))
        while True:
            await changed.wait()
            changed.clear()
            if not wanted:
                logger.info("%s has left the region's file: it stops", running.part.name)
                await running.part_left()
                stop.set()
                continue
            try:
                changes = await running.reload(*wanted)
            except (FileError, CommandFailed, OSError) as error:
                logger.warning("the region stays as it is: %s", error)
                continue
            if changes.made:
                logger.info("changed without a restart: %s", ", ".join(changes.made))
            if changes.needs_restart:
                waiting = ", ".join(changes.needs_restart)
                logger.warning("changed, but needs a restart of the region: %s", waiting)


async def _start(running: RunningRegion, view: ProgressView, stop: asyncio.Event) -> bool:
    """Whether it started; False if it had to stop meanwhile."""
    with view:
        starting = asyncio.ensure_future(running.start())
        told = asyncio.ensure_future(stop.wait())
        await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return False
        starting.result()
        return True


async def _differences(running: RunningRegion) -> list[str]:
    try:
        return await running.differences()
    except RpcError as error:  # an agent that died meanwhile: the view of processes says so
        logger.warning("cannot compare the engines: %s", error)
        return []


def _announce(
    running: RunningRegion, console: Console, as_json: bool, differences: Sequence[str]
) -> None:
    url, root, part = running.gateway_url, running.directory.root, running.part
    if as_json:
        ready = {"event": "ready", "gateway": url, "run_dir": str(root), "pid": os.getpid()}
        ready |= {"gateways": list(running.gateway_urls.values())}
        print(json.dumps(ready | {"differences": list(differences)}), flush=True)
        return
    for sentence in differences:
        console.print(sentence, style="red", soft_wrap=True)
    for instance, variables in running.devices.environment.items():
        for name, value in variables.items():
            console.print(f"  {instance}: {name}={value}", highlight=False, soft_wrap=True)
    for note in running.devices.notes:
        console.print(f"  {note}", highlight=False, soft_wrap=True)
    logs = f"  logs are in {root / 'logs'}; Ctrl-C stops everything"
    if not part.is_whole:
        names = ", ".join(process.name for process in running.processes)
        console.print(f"part [bold]{part.name}[/bold] of region {running.region.name}: {names}")
    if not part.has_gateway:
        console.print(logs, highlight=False, soft_wrap=True)
        return
    model = running.region.models[0].name
    urls = " and ".join(f"[bold]{each}[/bold]" for each in running.gateway_urls.values())
    console.print(f"region [bold]{running.region.name}[/bold] serves at {urls}")
    console.print(
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 32}}\'\n'
        f"{logs}",
        highlight=False,
        soft_wrap=True,
    )
