"""`prfaas up`, `status` and `down`: what runs of regions on this machine, from the command line.

It turns arguments into calls and errors into exit statuses (2: the file or the arguments, 1: other
errors). A command imports what it needs when it runs, so that its help appears at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deploy.command_line import ExitCode, JsonOption, RunDirOption, fail, print_json
from deploy.region.file_cli import (
    FileArgument,
    NodeOption,
    SetOption,
    SiteOption,
    load_or_exit,
    load_variables,
)
from deploy.region.launch.rundir import (
    ProcessRecord,
    RegionState,
    RunDirectoryError,
    RunLock,
    default_base,
    find_run,
    remove_leftovers,
)
from kvmanager.config_files.problems import FileError

if TYPE_CHECKING:
    from deploy.region.launch.parts import Part
    from deploy.region.spec.region import RegionSpec

NameArgument = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="region, or REGION.PART; not needed if only one runs"),
]


def up_command(
    file: FileArgument,
    run_dir: RunDirOption = None,
    variables: SetOption = None,
    site: SiteOption = None,
    node: NodeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a region, or the part of it on this host, and keep it running until Ctrl-C.

    Starts emulated links, node agents, engines, fronts and the gateway, in this order. Restarts
    processes that die. Stops all of them on Ctrl-C, SIGTERM or `prfaas down`. A second Ctrl-C kills
    instead of waiting.

    It follows the file: nodes and instances that it names anew are started and join; those that it
    names no more leave, are drained, and stop. Limits of tenants change too. SIGHUP reads the file
    at once. What else changes is named in launcher.log and needs a restart.

    With --node, or --site for all nodes of a cluster, every host starts its own part of the same
    file, in any order. Such a file names the keys or certificates of all hosts: see
    `prfaas certs init --help`. Without, everything runs on this machine.

    \b
    MODEL=/models/qwen3-next prfaas up region.yaml
    prfaas up region.yaml --set MODEL=/models/qwen3-next --json
    prfaas up region.yaml --node a1
    """
    region = load_or_exit(file, variables or [])
    from deploy.region.launch.parts import part_of, run_name
    from deploy.region.launch.up import keep_up

    def load() -> tuple[RegionSpec, Part]:
        wanted = load_variables(file, variables or [])
        return wanted, part_of(wanted, site=site, node=node)

    part = part_of(region, site=site, node=node)
    root = run_dir or default_base(os.environ) / run_name(region, part)
    # With --json, stdout has JSON lines only.
    console = Console(stderr=as_json)
    try:
        started = asyncio.run(keep_up(file, load, root, console, as_json=as_json))
    except FileError as error:
        fail(str(error), 2)
    except OSError as error:
        fail(str(error), 1)
    # Interrupted while starting: this is neither a success nor an error of the region.
    if not started:
        raise typer.Exit(ExitCode.INTERRUPTED)


def status_command(
    name: NameArgument = None, run_dir: RunDirOption = None, as_json: JsonOption = False
) -> None:
    """Show what runs and what it holds: processes, node agents' memory, emulated links.

    Exit status 0 if the region runs with every process healthy, 1 otherwise.

    \b
    prfaas status
    prfaas status --json | jq .agents.b1.landing_bytes
    """
    from deploy.region.launch.status import region_status, render_status

    _, state = find_run(run_dir, name, or_left_behind=True)
    status = asyncio.run(region_status(state))
    if as_json:
        print_json(status)
    else:
        Console().print(render_status(status))
    healthy = all(item.state == "healthy" for item in state.processes)
    raise typer.Exit(0 if status.launcher_lives and healthy else 1)


def down_command(
    name: NameArgument = None,
    run_dir: RunDirOption = None,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", help="seconds to wait [as long as its processes may take]"),
    ] = None,
) -> None:
    """Stop a region that `prfaas up` keeps running, and wait until nothing of it is left.

    \b
    prfaas down
    prfaas down --run-dir /run/prfaas/demo
    """
    root, state = find_run(run_dir, name, or_left_behind=True)
    timeout_s = timeout_s or _stop_limit_s(state)  # the launcher removes the region's file
    if state.launcher_lives():
        os.kill(state.launcher_pid, signal.SIGTERM)
    deadline_s = time.monotonic() + timeout_s
    while state.launcher_lives() or any(map(_lives, state.processes)):
        if time.monotonic() > deadline_s:
            fail(f"region {state.title} still runs after {timeout_s:g} s", 1)
        time.sleep(0.05)
    clean_up(state, root)
    typer.echo(f"region {state.title} is down")


def clean_up(state: RegionState, root: Path) -> None:
    """Remove what a launcher that was killed left behind, unless a new one owns `root` by now."""
    try:
        lock = RunLock(root)
    except RunDirectoryError:
        return
    try:
        _discard_arenas(state, root)
        remove_leftovers(root)
    finally:
        lock.release()


def _stop_limit_s(state: RegionState) -> float:
    from deploy.gateway.config import TimeoutConfig
    from deploy.region.launch.plan import stop_limit_s

    region = _region_of(state)
    return stop_limit_s(TimeoutConfig() if region is None else region.gateway.timeouts)


def _region_of(state: RegionState) -> RegionSpec | None:
    """The region as its launcher wrote it; None where that is gone, or of an older version."""
    from deploy.region.spec.region import RegionSpec

    try:
        return RegionSpec.model_validate_json(Path(state.region_file).read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _discard_arenas(state: RegionState, root: Path) -> None:
    """Remove the arenas that the agents of a killed launcher kept."""
    from deploy.region.launch.arenas import discard_arenas

    # A file of an older version must not keep a region from being taken down.
    if (region := _region_of(state)) is not None:
        discard_arenas(region, root)


def _lives(process: ProcessRecord) -> bool:
    """Whether it still runs. Its log is its output; no other program that got its id writes there,
    and a zombie has no files.
    """
    try:
        return os.path.samefile(f"/proc/{process.pid}/fd/1", process.log)
    except OSError:
        return False
