"""`prfaas link`: shows what links carry, once or until Ctrl-C.

What a command needs is imported by it, so that its help appears at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.command_line import GatewayOption, JsonOption, KeyOption, fail

if TYPE_CHECKING:
    from deploy.gateway.links.region_links import LinksOverview

link_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    help="What the links between clusters carry.",
)


@link_app.callback()
def _root() -> None:
    pass


@link_app.command("top")
def top_command(
    once: Annotated[bool, typer.Option("--once", help="show it once and end")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, help="seconds between two looks")
    ] = 1.0,
    paths: Annotated[
        bool, typer.Option("--paths", help="every agent's own connections as well")
    ] = False,
    gateway: GatewayOption = "",
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the links of the region, again and again until Ctrl-C.

    Now is what transfers get, available what they would get together as it was seen last: ">="
    where the link carried that much without being full. A round trip of 20ms+10ms has 10 ms of
    queues in the network. The bars are what was carried lately.

    With --json a line for every look. Without a terminal it is shown once.

    \b
    prfaas link top
    prfaas link top --once --paths
    prfaas link top --json --interval 5 | jq -c '.links[] | [.name, .condition]'
    """
    from deploy.gateway.links.region_links import LinksOverview
    from deploy.ops.client import CannotAsk, ask, find_gateway
    from deploy.region.launch.rundir import RunDirectoryError

    try:
        url = gateway or find_gateway(os.environ)

        def look() -> LinksOverview:
            return ask(url, "/prfaas/links", LinksOverview, key=api_key)

        if as_json:
            _print_json(look, interval_s, once=once)
        else:
            _show(look, interval_s, once=once, with_paths=paths)
    except (CannotAsk, RunDirectoryError) as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        return
    except BrokenPipeError:
        # Whoever read has enough; what is left unwritten must not be complained about at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show(
    look: Callable[[], LinksOverview], interval_s: float, *, once: bool, with_paths: bool
) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from deploy.ops.client import CannotAsk
    from deploy.ops.link_view import overview

    console = Console()
    shown = overview(look(), with_paths=with_paths)
    if once or not console.is_terminal:
        console.print(shown)
        return
    with Live(shown, console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                shown = overview(look(), with_paths=with_paths)
                live.update(shown, refresh=True)
            except CannotAsk as error:
                live.update(Group(shown, Text(f"no news: {error}", style="red")), refresh=True)


def _print_json(look: Callable[[], LinksOverview], interval_s: float, *, once: bool) -> None:
    import msgspec

    while True:
        sys.stdout.buffer.write(msgspec.json.encode(look()) + b"\n")
        sys.stdout.buffer.flush()
        if once:
            return
        time.sleep(interval_s)
