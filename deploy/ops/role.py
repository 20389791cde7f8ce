"""`prfaas role`: shows and changes the roles of a running region's instances.

It asks the gateway and prints its answers. Their types are imported when a command runs, so that
its help appears at once.
"""

from __future__ import annotations

import json
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NoReturn
from urllib.parse import urlencode

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
from deploy.region import client
from deploy.table_style import new_table, say
from kvmanager.config_files.units import format_age

if TYPE_CHECKING:
    from deploy.gateway.scheduling.role_pages import InstanceRole, RolesOverview

_PATH = "/v1/pd_role"
_LOOK_S = 1.0

role_app = command_group("Which instances of the PD clusters encode, prefill and decode.")


class NewRole(StrEnum):
    """The roles that an operator can give."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


@role_app.command("ls")
def ls_command(
    gateway: GatewayOption = "",
    run_dir: RunDirOption = None,
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show every instance of the PD clusters with its role, and the change under way.

    Epoch counts the changes of an instance's role; 0 is the role of its configuration.

    \b
    prfaas role ls
    prfaas role ls --json | jq -r '.instances[] | [.instance, .role, .phase] | @tsv'
    """
    url, key = client.find_pages(gateway, run_dir, api_key)
    first = _overview(url, key)
    others = [name for name in first.clusters if name != first.cluster]
    # As JSON, there is one object for each cluster.
    for overview in (first, *(_overview(url, key, name) for name in others)):
        client.show(overview, as_json, print_roles)


@role_app.command("set")
def set_command(
    instance: Annotated[str, typer.Argument(help="as `prfaas role ls` calls it")],
    role: Annotated[NewRole, typer.Argument(help="its new role")],
    epoch: Annotated[
        int | None, typer.Option(min=0, help="only if this is still the instance's epoch")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="wait until the change is over")
    ] = True,
    cluster: Annotated[str, typer.Option(metavar="CLUSTER", help="if several have the name")] = "",
    gateway: GatewayOption = "",
    run_dir: RunDirOption = None,
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Change an instance's role: drain it, then give it work of the other kind.

    The instance finishes the requests that it serves. The last usable instance that prefills, or
    that decodes, keeps its role. One that only encodes keeps it too, unless the region's file gives
    it the whole model. One instance of a cluster changes at a time, and for some minutes after a
    change no other may.

    \b
    prfaas role set d1 prefill
    prfaas role set d1 prefill --no-wait --json
    """
    from deploy.gateway.scheduling.role_pages import InstanceRole

    order: dict[str, object] = {"instance": instance, "role": role.value}
    if epoch is not None:
        order["expected_epoch"] = epoch
    url, key = client.find_pages(gateway, run_dir, api_key)
    now = client.ask(url, _path(cluster), InstanceRole, key=key, body=json.dumps(order).encode())
    # The gateway converts the instance by itself; waiting only watches.
    if wait:
        try:
            now = _waited(url, key, now, role)
        except KeyboardInterrupt:
            fail(f"stopped waiting; {instance} goes on becoming {role.value}", ExitCode.INTERRUPTED)
    if as_json:
        print_json(now)
    else:
        typer.echo(f"{instance} is {now.role}, epoch {now.epoch}, {now.phase}")


def _waited(url: str, api_key: str, now: InstanceRole, wanted: NewRole) -> InstanceRole:
    """The instance once its change is over. Exits with status 1 if it kept its role."""
    # The role changes first; work follows once the instance is ready for it.
    while now.role != wanted or now.phase != "ready":
        overview = _overview(url, api_key, now.cluster)
        now = next((item for item in overview.instances if item.instance == now.instance), now)
        if _is_over(overview, now):
            if now.role != wanted:
                _not_converted(now, overview)
            return now
        time.sleep(_LOOK_S)
    return now


def _is_over(overview: RolesOverview, now: InstanceRole) -> bool:
    """Whether the instance's change has ended, with success or without."""
    change = overview.conversion
    if change is None:
        return not overview.busy_with  # an undo is still under way
    if change.instance != now.instance:
        # Another conversion runs, so this one is over: there is one at a time.
        return True
    return change.phase == "dwelling" and now.phase == "ready"


def _not_converted(now: InstanceRole, overview: RolesOverview) -> NoReturn:
    last = overview.last
    why = "the gateway does not say why"
    if last is not None and last.instance == now.instance:
        why = f"{last.outcome}: {last.detail}"
    fail(f"{now.instance} is still {now.role}; {why}", 1)


def _overview(url: str, api_key: str, cluster: str = "") -> RolesOverview:
    from deploy.gateway.scheduling.role_pages import RolesOverview

    return client.ask(url, _path(cluster), RolesOverview, key=api_key)


def _path(cluster: str) -> str:
    return f"{_PATH}?{urlencode({'cluster': cluster})}" if cluster else _PATH


def print_roles(console: Console, overview: RolesOverview) -> None:
    """Print one line for each instance, then the change under way and the last one."""
    table = new_table("instance", "role", "state", numbers=("epoch", "requests"))
    if len(overview.clusters) > 1:
        table.title = overview.cluster
    for item in overview.instances:
        state = item.phase if item.healthy else "not healthy"
        table.add_row(item.instance, item.role, state, str(item.epoch), f"{item.requests:,}")
    console.print(table)
    for line in _lines(overview):
        say(console, line)


def _lines(overview: RolesOverview) -> list[str]:
    lines = [f"{i.instance}: {i.reason}" for i in overview.instances if i.reason]
    if (now := overview.conversion) is not None:
        way = f"from {now.from_role} to {now.to_role}, epoch {now.epoch}"
        lines.append(f"{now.instance} {way}: {now.phase} for {format_age(now.for_s)}")
    elif overview.busy_with:
        lines.append(overview.busy_with)
    if (last := overview.last) is not None:
        way = f"{last.instance} from {last.from_role} to {last.to_role}"
        lines.append(f"last: {way}: {last.outcome} {format_age(last.ago_s)} ago: {last.detail}")
    return lines
