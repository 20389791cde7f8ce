"""`prfaas up`, `status`, `down` and `region`: regions on this machine from the command line.

Turns arguments into calls, errors into exit statuses (2: the file or the arguments, 1: the rest)
and signals into an orderly stop.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import psutil
import typer
from rich.console import Console

from deploy.region.launcher import RegionStartFailed, RunningRegion
from deploy.region.loading import RegionError, load_region
from deploy.region.progress import ProgressView, progress_view
from deploy.region.rundir import (
    RegionState,
    RunDirectoryError,
    default_base,
    known_runs,
    read_state,
    remove_leftovers,
)
from deploy.region.spec import RegionSpec, region_schema
from deploy.region.status import region_status, render_status

region_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    help="Look at region files: their schema, and whether one is right.",
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="region file, YAML")]
NameArgument = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="region; not needed if only one runs")
]
RunDirOption = Annotated[
    Path | None, typer.Option(help="directory of the run; default: ~/.local/state/prfaas/NAME")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="fill ${NAME} in the file; repeatable"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of tables")]


def up_command(
    file: FileArgument,
    run_dir: RunDirOption = None,
    variables: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a region on this machine and keep it running until Ctrl-C.

    Starts emulated links, node agents, engines and the gateway, in this order; restarts what dies;
    stops all of it on Ctrl-C, SIGTERM or `prfaas down`. A second Ctrl-C kills instead of waiting.

    \b
    MODEL=/models/qwen3-next prfaas up region.yaml
    prfaas up region.yaml --set MODEL=/models/qwen3-next --json
    """
    region = _load(file, variables or [])
    root = run_dir or default_base(dict(os.environ)) / region.name
    console = Console(stderr=as_json)
    try:
        started = asyncio.run(_up(region, root, console, as_json))
    except RegionError as error:
        _fail(str(error), 2)
    except (RegionStartFailed, RunDirectoryError, OSError) as error:
        _fail(str(error), 1)
    if not started:
        raise typer.Exit(128 + signal.SIGINT)


def status_command(
    name: NameArgument = None, run_dir: RunDirOption = None, as_json: JsonOption = False
) -> None:
    """Show what runs and what it holds: processes, node agents' memory, emulated links.

    Exit status 0 if the region runs with every process healthy, 1 otherwise.

    \b
    prfaas status
    prfaas status --json | jq .agents.b1.landing_bytes
    """
    root = _find(name, run_dir)
    state = _read(root)
    if state is None:
        _fail(f"no region runs in {root}", 1)
    status = asyncio.run(region_status(state))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(status) + b"\n")
    else:
        Console().print(render_status(status))
    healthy = all(item.state == "healthy" for item in state.processes)
    raise typer.Exit(0 if status.launcher_lives and healthy else 1)


def down_command(
    name: NameArgument = None,
    run_dir: RunDirOption = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="seconds to wait")] = 60.0,
) -> None:
    """Stop a region that `prfaas up` keeps running, and wait until nothing of it is left.

    \b
    prfaas down
    prfaas down --run-dir /run/prfaas/demo
    """
    root = _find(name, run_dir)
    state = _read(root)
    if state is None:
        _fail(f"no region runs in {root}", 1)
    if state.launcher_lives():
        os.kill(state.launcher_pid, signal.SIGTERM)
    deadline_s = time.monotonic() + timeout_s
    while state.launcher_lives() or any(_lives(item.pid) for item in state.processes):
        if time.monotonic() > deadline_s:
            _fail(f"region {state.region} still runs after {timeout_s:g} s", 1)
        time.sleep(0.05)
    remove_leftovers(root)
    typer.echo(f"region {state.region} is down")


@region_app.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of region files, for editors.

    \b
    prfaas region schema > region.schema.json
    and as the first line of a region file:
    # yaml-language-server: $schema=region.schema.json
    """
    typer.echo(json.dumps(region_schema(), indent=2))


@region_app.command("check")
def check_command(
    file: FileArgument, variables: SetOption = None, as_json: JsonOption = False
) -> None:
    """Check a region file; every problem with its line, its path and what to write instead.

    \b
    prfaas region check region.yaml --set MODEL=/models/qwen3-next
    """
    try:
        region = load_region(file, dict(os.environ) | _variables(variables or []))
    except RegionError as error:
        if not as_json:
            _fail(str(error), 2)
        problems = [
            {"path": item.where, "line": item.line, "message": item.message}
            for item in error.problems
        ]
        typer.echo(json.dumps({"ok": False, "file": str(file), "problems": problems}))
        raise typer.Exit(2) from error
    if as_json:
        document = json.loads(region.model_dump_json(by_alias=True, exclude_none=True))
        typer.echo(json.dumps({"ok": True, "file": str(file), "region": document}))
        return
    engines = sum(len(cluster.instances) for cluster in region.clusters)
    names = ", ".join(f"{cluster.name} ({cluster.kind})" for cluster in region.clusters)
    typer.echo(f"{file} is right: region {region.name}, clusters {names}, {engines} engines")


async def _up(region: RegionSpec, root: Path, console: Console, as_json: bool) -> bool:
    """Whether it was running before it was told to stop."""
    stop = asyncio.Event()
    view = progress_view(console, as_json=as_json)
    running = RunningRegion(region, root, on_progress=view.show)

    def on_signal() -> None:
        if stop.is_set():
            running.kill_all()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        if not await _start(running, view, stop):
            return False
        _announce(running, console, as_json)
        await stop.wait()
        return True
    finally:
        if not as_json:
            console.print("stopping", style="dim")
        await running.stop()


async def _start(running: RunningRegion, view: ProgressView, stop: asyncio.Event) -> bool:
    """Whether it started; False if it was told to stop meanwhile."""
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


def _announce(running: RunningRegion, console: Console, as_json: bool) -> None:
    url, root = running.gateway_url, running.directory.root
    if as_json:
        ready = {"event": "ready", "gateway": url, "run_dir": str(root), "pid": os.getpid()}
        print(json.dumps(ready), flush=True)
        return
    model = running.region.models[0].name
    console.print(f"region [bold]{running.region.name}[/bold] serves at [bold]{url}[/bold]")
    console.print(
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 32}}\'\n'
        f"  logs are in {root / 'logs'}; Ctrl-C stops everything",
        highlight=False,
        soft_wrap=True,
    )


def _load(file: Path, variables: list[str]) -> RegionSpec:
    try:
        return load_region(file, dict(os.environ) | _variables(variables))
    except RegionError as error:
        _fail(str(error), 2)


def _variables(words: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for name, equals, _ in pairs:
        if not equals:
            raise typer.BadParameter(f"{name!r} is not NAME=VALUE", param_hint="--set")
    return {name: value for name, _, value in pairs}


def _find(name: str | None, run_dir: Path | None) -> Path:
    """The run directory that is meant; with neither argument the only one there is."""
    if run_dir is not None:
        return run_dir
    base = default_base(dict(os.environ))
    if name is not None:
        return base / name
    runs = known_runs(base)
    if not runs:
        _fail(f"no region runs under {base}", 1)
    if len(runs) > 1:
        _fail(f"several regions run; name one: {', '.join(run.name for run in runs)}", 2)
    return runs[0]


def _read(root: Path) -> RegionState | None:
    try:
        return read_state(root)
    except RunDirectoryError as error:
        _fail(str(error), 1)


def _lives(pid: int | None) -> bool:
    try:
        return pid is not None and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(status)
