"""`prfaas role`: shows and changes the roles of a running region's instances.

What a command needs is imported by it, so that its help appears at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from deploy.command_line import GatewayOption, JsonOption, KeyOption, fail

if TYPE_CHECKING:
    from deploy.gateway.scheduling.role_pages import InstanceRole, RolesOverview

_PATH = "/v1/pd_role"
_LOOK_S = 1.0

role_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    help="Which instances of the PD cluster prefill and which decode.",
)


class NewRole(StrEnum):
    """What an instance can be made."""

    PREFILL = "prefill"
    DECODE = "decode"


@role_app.callback()
def _root() -> None:
    pass


@role_app.command("ls")
def ls_command(
    gateway: GatewayOption = "", api_key: KeyOption = "", as_json: JsonOption = False
) -> None:
    """Show every instance of the PD cluster with its role, and the change under way.

    Epoch counts the changes of an instance's role; 0 is the role of its configuration.

    \b
    prfaas role ls
    prfaas role ls --json | jq -r '.instances[] | [.instance, .role, .phase] | @tsv'
    """
    from deploy.ops.role_view import print_roles

    overview = _overview(_url(gateway), api_key)
    if as_json:
        _print_json(overview)
    else:
        print_roles(overview)


@role_app.command("set")
def set_command(
    instance: Annotated[str, typer.Argument(help="as `prfaas role ls` calls it")],
    role: Annotated[NewRole, typer.Argument(help="what it shall do")],
    epoch: Annotated[
        int | None, typer.Option(min=0, help="do it only if this is the instance's epoch still")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="until it has the role, or keeps the old one")
    ] = True,
    gateway: GatewayOption = "",
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make an instance prefill or decode: it is drained and given work of the other kind.

    Requests that it serves end there. The last usable instance of a role keeps it. One instance
    changes at a time, and for some minutes after a change there is no other.

    \b
    prfaas role set d1 prefill
    prfaas role set d1 prefill --no-wait --json
    """
    order: dict[str, object] = {"instance": instance, "role": role.value}
    if epoch is not None:
        order["expected_epoch"] = epoch
    url = _url(gateway)
    now = _order(url, api_key, json.dumps(order).encode())
    if wait:
        try:
            now = _waited(url, api_key, now, role)
        except KeyboardInterrupt:
            fail(f"not waited any longer; {instance} goes on to become {role.value}", 130)
    if as_json:
        _print_json(now)
    else:
        typer.echo(f"{instance} is {now.role}, epoch {now.epoch}, {now.phase}")


def _waited(url: str, api_key: str, now: InstanceRole, wanted: NewRole) -> InstanceRole:
    """The instance once its change is over; exits with status 1 when it kept its role."""
    while now.role != wanted or now.phase != "ready":
        overview = _overview(url, api_key)
        now = next((item for item in overview.instances if item.instance == now.instance), now)
        if _is_over(overview, now):
            if now.role != wanted:
                _not_converted(now, overview)
            return now
        time.sleep(_LOOK_S)
    return now


def _is_over(overview: RolesOverview, now: InstanceRole) -> bool:
    """Whether nothing more comes of the instance's change."""
    change = overview.conversion
    if change is None:
        return not overview.busy_with  # else it is being given back
    if change.instance != now.instance:
        return True
    return change.phase == "dwelling" and now.phase == "ready"


def _not_converted(now: InstanceRole, overview: RolesOverview) -> NoReturn:
    last = overview.last
    why = "the gateway says not why"
    if last is not None and last.instance == now.instance:
        why = f"{last.outcome}: {last.detail}"
    fail(f"{now.instance} is {now.role} still; {why}", 1)


def _url(gateway: str) -> str:
    from deploy.ops.client import CannotAsk, find_gateway
    from deploy.region.launch.rundir import RunDirectoryError

    try:
        return gateway or find_gateway(os.environ)
    except (CannotAsk, RunDirectoryError) as error:
        fail(str(error), 1)


def _overview(url: str, api_key: str) -> RolesOverview:
    from deploy.gateway.scheduling.role_pages import RolesOverview
    from deploy.ops.client import CannotAsk, ask

    try:
        return ask(url, _PATH, RolesOverview, key=api_key)
    except CannotAsk as error:
        fail(str(error), 1)


def _order(url: str, api_key: str, body: bytes) -> InstanceRole:
    from deploy.gateway.scheduling.role_pages import InstanceRole
    from deploy.ops.client import CannotAsk, ask

    try:
        return ask(url, _PATH, InstanceRole, key=api_key, body=body)
    except CannotAsk as error:
        fail(str(error), 1)


def _print_json(value: object) -> None:
    import msgspec

    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
