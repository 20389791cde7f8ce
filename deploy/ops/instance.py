"""`prfaas instance`: shows the instances of a running region, adds and removes them.

It asks the gateway and prints its answers. Their types are imported when a command runs, so that
its help appears at once.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote, urlencode

import typer
from rich.console import Console

from deploy.command_line import (
    ExitCode,
    GatewayOption,
    JsonOption,
    KeyOption,
    RunDirOption,
    command_group,
    fail,
    print_json,
)
from deploy.ops.watching import IntervalOption, WatchOption, show
from deploy.region import client
from deploy.table_style import new_table, say

if TYPE_CHECKING:
    from deploy.gateway.members.pages import InstanceNow, InstancesOverview

_PATH = "/prfaas/instances"
_LOOK_S = 1.0
# Its engine runs already: a front needs a few probes.
_JOIN_LIMIT_S = 600.0

instance_app = command_group("Which instances the region has; instances join and leave.")

WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="wait until it is done")]
ClusterOption = Annotated[str, typer.Option(metavar="CLUSTER", help="if several have the name")]


@instance_app.command("list")
def list_command(
    gateway: GatewayOption = "",
    run_dir: RunDirOption = None,
    api_key: KeyOption = "",
    watch: WatchOption = False,
    interval_s: IntervalOption = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show every instance of the region: its cluster, node, role and phase.

    \b
    prfaas instance list
    prfaas instance list --json | jq -r '.instances[] | [.cluster, .instance, .phase] | @tsv'
    """
    asked = client.find_pages(gateway, run_dir, api_key)
    show(
        lambda: _overview(*asked),
        print_instances,
        as_json=as_json,
        watch=watch,
        interval_s=interval_s,
    )


@instance_app.command("add")
def add_command(
    name: Annotated[str, typer.Argument(help="as its engine's connector calls it")],
    cluster: Annotated[str, typer.Option(help="the cluster that it joins")],
    url: Annotated[str, typer.Option(help="its engine's OpenAI server, http://HOST:PORT")],
    agent: Annotated[str, typer.Option(help="control address of its node agent, HOST:PORT")],
    node: Annotated[str, typer.Option(help="what people call its host")] = "",
    model: Annotated[str, typer.Option(help="served name; default: the region has one")] = "",
    role: Annotated[str, typer.Option(help="encode, prefill, decode or both")] = "both",
    max_concurrent: Annotated[int | None, typer.Option(help="prefills at a time")] = None,
    decode_slots: Annotated[int | None, typer.Option(help="requests decoded at a time")] = None,
    wait: WaitOption = True,
    gateway: GatewayOption = "",
    run_dir: RunDirOption = None,
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Add an instance whose engine and node agent run already.

    It is refused, with both values, if its weights or its KVCache layout are not those of the
    region. It gets requests once the front has found it well. Instances that shall be there after
    a restart belong in the region's file.

    \b
    prfaas instance add p9 --cluster east --url http://10.0.1.9:7400 --agent 10.0.1.9:7101
    """
    from deploy.gateway.members.pages import InstanceNow

    order: dict[str, object] = {
        "cluster": cluster,
        "name": name,
        "url": url,
        "agent": agent,
        "node": node,
        "model": model,
        "role": role,
    }
    limits = {"max_concurrent": max_concurrent, "decode_slots": decode_slots}
    order |= {key: value for key, value in limits.items() if value is not None}
    asked = client.find_pages(gateway, run_dir, api_key)
    now = client.ask(asked[0], _PATH, InstanceNow, key=asked[1], body=json.dumps(order).encode())
    if wait:
        try:
            now = _waited_joined(asked, now, as_json)
        except KeyboardInterrupt:
            fail(f"stopped waiting; {name} goes on joining", ExitCode.INTERRUPTED)
    _show(now, as_json)


@instance_app.command("remove")
def remove_command(
    name: Annotated[str, typer.Argument(help="as `prfaas instance list` calls it")],
    cluster: ClusterOption = "",
    limit: Annotated[
        str, typer.Option(metavar="TIME", help="how long its work may take, such as 5min")
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="also the last one that decodes its model")
    ] = False,
    wait: WaitOption = True,
    gateway: GatewayOption = "",
    run_dir: RunDirOption = None,
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Remove an instance: no new work, then the hot prefixes of its node go to others.

    What runs there ends there, within the limit; afterwards it fails over. Its engine goes on
    running unless the front started it.

    \b
    prfaas instance remove p9
    prfaas instance remove p9 --limit 30s --no-wait --json
    """
    from deploy.gateway.members.pages import InstanceNow

    query = {"cluster": cluster, "limit": limit, "force": "1" if force else ""}
    words = urlencode({key: value for key, value in query.items() if value})
    path = f"{_PATH}/{quote(name, safe='')}" + (f"?{words}" if words else "")
    asked = client.find_pages(gateway, run_dir, api_key)
    now = client.ask(asked[0], path, InstanceNow, key=asked[1], method="DELETE")
    if wait:
        try:
            now = _waited_left(asked, now)
        except KeyboardInterrupt:
            fail(f"stopped waiting; {name} goes on leaving", ExitCode.INTERRUPTED)
    _show(now, as_json)


def _waited_joined(asked: tuple[str, str], now: InstanceNow, quiet: bool) -> InstanceNow:
    """The instance once it has joined. Exits if it is gone meanwhile, or takes too long."""
    said, was_seen, deadline_s = "", False, time.monotonic() + _JOIN_LIMIT_S
    while now.phase == "joining":
        if time.monotonic() > deadline_s:
            reason = f"{now.reason}; it goes on joining, `prfaas instance remove` ends that"
            fail(f"{now.instance} has not joined after {_JOIN_LIMIT_S:g} s: {reason}", 1)
        time.sleep(_LOOK_S)
        found = _found(asked, now)
        # The first answers may be older than the order.
        if found is None and was_seen:
            fail(f"{now.instance} is gone before it had joined: {now.reason}", 1)
        was_seen, now = was_seen or found is not None, found or now
        if now.reason != said and not quiet:
            said = now.reason
            typer.echo(f"{now.instance}: {said}", err=True)
    return now


def _waited_left(asked: tuple[str, str], now: InstanceNow) -> InstanceNow:
    """The instance as it was shown last before it was gone."""
    from msgspec import structs

    # Another of the name may join as soon as this one is gone. The first answers may be older than
    # the order, so one that does not leave is another one only if one was seen that did.
    was_leaving = False
    while True:
        time.sleep(_LOOK_S)
        found = _found(asked, now)
        if found is None or (was_leaving and found.phase != "leaving"):
            return structs.replace(now, phase="left")
        was_leaving, now = found.phase == "leaving", found


def _found(asked: tuple[str, str], now: InstanceNow) -> InstanceNow | None:
    own = (now.cluster, now.instance)
    instances = _overview(*asked).instances
    return next((item for item in instances if (item.cluster, item.instance) == own), None)


def _show(now: InstanceNow, as_json: bool) -> None:
    if as_json:
        print_json(now)
        return
    said = "has left" if now.phase == "left" else f"is {now.phase}"
    typer.echo(f"{now.instance} of {now.cluster} {said}")
    if now.copied:
        typer.echo(f"copied away: {now.copied}")


def _overview(url: str, api_key: str) -> InstancesOverview:
    from deploy.gateway.members.pages import InstancesOverview

    return client.ask(url, _PATH, InstancesOverview, key=api_key)


def print_instances(console: Console, overview: InstancesOverview) -> None:
    """Print one line for each instance, then why some are not usable."""
    table = new_table("cluster", "instance", "node", "role", "phase", numbers=("requests",))
    for item in overview.instances:
        phase = item.phase + (", paced" if item.paced else "")
        words = (item.cluster, item.instance, item.node, item.role, phase)
        table.add_row(*words, f"{item.requests:,}")
    console.print(table)
    for item in overview.instances:
        for line in (item.reason, item.copied and f"copied away: {item.copied}"):
            if line:
                say(console, f"{item.instance}: {line}")
