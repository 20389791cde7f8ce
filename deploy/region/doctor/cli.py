"""`prfaas doctor`: turns arguments into calls, and errors into exit statuses.

A command imports what it needs when it runs, so that its help appears at once.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.command_line import (
    ExitCode,
    JsonOption,
    KeyOption,
    RunDirOption,
    command_group,
    fail,
    print_json,
)
from deploy.region.file_cli import FileArgument, NodeOption, SetOption, SiteOption, load_or_exit

if TYPE_CHECKING:
    from deploy.region.doctor.agents import Pair
    from deploy.region.doctor.findings import Check
    from deploy.region.doctor.probe import ProbePlan, ProbeRun, ProbeSample

MAX_MIB = 8192

doctor_app = command_group("Find out what is wrong or slow, and what would help.")


@doctor_app.command("link")
def link_command(
    sender: Annotated[str, typer.Argument(metavar="A", help="the agent that sends")],
    receiver: Annotated[str, typer.Argument(metavar="B", help="the agent that receives")],
    seconds: Annotated[float, typer.Option(min=1, max=300, help="how long to send")] = 10.0,
    mib: Annotated[int, typer.Option(min=1, max=MAX_MIB, help="send at most this much")] = MAX_MIB,
    rate_gbps: Annotated[
        float | None, typer.Option(min=1e-6, help="what the link should carry, Gbit/s")
    ] = None,
    via: Annotated[
        str | None, typer.Option(help="host:port that A connects to, if not what B advertises")
    ] = None,
    region: Annotated[str | None, typer.Option(help="region; not needed if only one runs")] = None,
    run_dir: RunDirOption = None,
    tls_dir: Annotated[
        Path | None, typer.Option(help="tls.crt, tls.key and ca.crt; default: the region's")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the path from agent A to agent B, and say what limits it.

    A and B are nodes, clusters (their first node) or instances of the region that runs here, or
    host:port of an agent's control port anywhere.

    A sends real bytes to B the way KVCache goes: the same ports, connections, tuning, TLS and
    checksums, at a lower priority than the KVCache that requests wait for. B throws the bytes away
    and gives them no landing memory. The probe ends at both ends after --seconds, after --mib, or
    with Ctrl-C.

    How to read it: a connection sends at most one window in a round trip, so the kernels allow
    connections x window / round trip. With --rate-gbps the link is believed to allow that much.
    Expect the smaller of the two. The limit that is named is what held the rate back:

    \b
    sender CPU, receiver CPU   that host is full: give the agent more CPUs
    send, receive window       buffers are too small for the round trip: set the sysctl shown
    link                       loss, or the path carries no more
    receiver's memory          the TCP memory of B's kernel is used up

    Exit status 0: nothing needs fixing; 1: something does, or nothing could be measured; 2: wrong
    arguments. Without --rate-gbps the expected rate is unknown, so a full CPU or link is no fault.

    \b
    prfaas doctor link prefill-a pd-b
    prfaas doctor link a1 b1 --seconds 20 --rate-gbps 10
    prfaas doctor link 10.0.0.5:7101 10.1.0.7:7101 --tls-dir /etc/prfaas/tls --json
    """
    from transport import Endpoint

    try:
        endpoint = None if via is None else Endpoint.parse(via)
    except ValueError as error:
        fail(f"--via: {error}", 2)
    from deploy.region.doctor.agents import find_pair
    from deploy.region.doctor.probe import CannotMeasure, ProbePlan

    pair = find_pair(sender, receiver, run_dir, region)
    plan = ProbePlan(seconds, mib << 20, endpoint or pair.via)
    try:
        run = asyncio.run(_measure(pair, tls_dir, plan))
        _report(pair, run, rate_gbps, as_json)
    except CannotMeasure as error:
        if as_json:
            print_json({"healthy": False, "error": str(error)})
        fail(f"cannot measure: {error}", 1)
    except KeyboardInterrupt:
        fail("stopped; the probe is ended at both ends", ExitCode.INTERRUPTED)


@doctor_app.command("region")
def region_command(
    file: FileArgument,
    run_dir: RunDirOption = None,
    variables: SetOption = None,
    site: SiteOption = None,
    node: NodeOption = None,
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Look at all of a region from this host, and say what to do about each thing that is wrong.

    It connects to every port of the region that this host needs, shakes hands over TLS, and asks
    agents, fronts, engines and the gateway. It looks at certificates and their dates, at keys of
    grants, weights and layouts, versions, clocks, kernels, arenas, GPUs and NUMA nodes. Nothing is
    changed. With --node or --site it says which part of the region this host is; else it is what
    runs here, or a host outside. What a firewall keeps from one host another may reach: run it on
    each.

    Each line is ok, a warning (it costs speed or safety, or will be a problem) or a problem. Exit
    status 0: no problem; 1: a problem; 2: wrong arguments.

    \b
    prfaas doctor region region.yaml
    prfaas doctor region region.yaml --node a1 --json
    """
    region = load_or_exit(file, variables or [])
    from deploy.region.doctor.region import examine
    from deploy.region.doctor.viewpoint import find_viewpoint

    view = find_viewpoint(region, site=site, node=node, run_dir=run_dir)
    checks = asyncio.run(examine(view, api_key))
    healthy = not any(check.level == "problem" for check in checks)
    if as_json:
        print_json(
            {"region": region.name, "from": view.title, "healthy": healthy, "checks": checks}
        )
    else:
        _print_checks(checks, f"region {region.name}, seen from {view.title}")
    raise typer.Exit(0 if healthy else 1)


def _print_checks(checks: list[Check], title: str) -> None:
    from collections import Counter

    from rich.console import Console
    from rich.text import Text

    console = Console()
    styles = {"ok": "green", "warning": "yellow", "problem": "bold red"}
    console.print(title, style="bold", highlight=False)
    for check in checks:
        line = Text.assemble((f"{check.level:8}", styles[check.level]), f"{check.about}: ")
        console.print(line.append(check.what), soft_wrap=True)
        if check.fix:
            console.print(Text(f"          → {check.fix}"), soft_wrap=True)
    count = Counter(check.level for check in checks)
    say = f"{count['problem']} problems, {count['warning']} warnings, {count['ok']} fine"
    console.print(say, style="bold", highlight=False)


async def _measure(pair: Pair, tls_dir: Path | None, plan: ProbePlan) -> ProbeRun:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from deploy.region.doctor.probe import NamedAgent, run_probe
    from kvmanager.agent.client import AgentClient
    from kvmanager.config_files.units import format_rate
    from transport import TlsFiles

    credentials = pair.credentials if tls_dir is None else TlsFiles.in_directory(tls_dir)
    agents = [
        NamedAgent(place.name, AgentClient(place.control, credentials))
        for place in (pair.sender, pair.receiver)
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[seen]}"))
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            title = f"{pair.sender.name} → {pair.receiver.name}"
            task = progress.add_task(title, total=1.0, seen="connecting")

            def show(sample: ProbeSample, since_first_s: float) -> None:
                done = sample.sender.done_bytes
                seen = f"{done >> 20} MiB, {since_first_s:.0f} of {plan.seconds_s:g} s"
                if since_first_s > 0:
                    seen += f", {format_rate(done / since_first_s)}"
                if sample.sender.link is not None:
                    seen += f", {sample.sender.link.width} connections"
                # The probe ends with whichever limit comes first.
                share = max(since_first_s / plan.seconds_s, done / plan.nbytes)
                progress.update(task, completed=min(1.0, share), seen=seen)

            return await run_probe(agents[0], agents[1], plan, show)
    finally:
        for agent in agents:
            await agent.control.close()


def _report(pair: Pair, run: ProbeRun, rate_gbps: float | None, as_json: bool) -> None:
    """Print the report, and exit with its status. Raises CannotMeasure."""
    from rich.console import Console

    from deploy.region.cache_identity import unlike_engines
    from deploy.region.doctor import report
    from deploy.region.doctor.diagnosis import diagnose
    from deploy.region.doctor.measurement import summarise
    from kvmanager.config_files.units import GBIT_PER_S

    measured = summarise(run)
    diagnosis = diagnose(
        measured,
        None if rate_gbps is None else rate_gbps * GBIT_PER_S,
        unlike=unlike_engines((run.sender_status, run.receiver_status)),
    )
    names = (pair.sender.name, pair.receiver.name)
    if as_json:
        print_json(report.as_json(names, run.endpoint, measured, diagnosis))
    else:
        Console().print(report.render(names, run.endpoint, measured, diagnosis))
    raise typer.Exit(0 if diagnosis.is_healthy else 1)
