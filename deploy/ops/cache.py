"""`prfaas cache`: turns arguments into questions to a gateway, and errors into exit statuses.

What a command needs is imported by it, so that its help appears at once.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from deploy.command_line import GatewayOption, JsonOption, KeyOption, fail

if TYPE_CHECKING:
    from rich.console import Console

cache_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    help="What is cached where, and what that spares a prompt.",
)

T = TypeVar("T")


class Order(StrEnum):
    """What `top` begins with."""

    HITS = "hits"
    SIZE = "size"
    RECENT = "recent"


@cache_app.callback()
def _root() -> None:
    pass


@cache_app.command("ls")
def ls_command(
    gateway: GatewayOption = "", api_key: KeyOption = "", as_json: JsonOption = False
) -> None:
    """Show what every node has cached: bytes by kind and tier, hits, age of the directory's view.

    Hits are the share of the tokens that engines looked up in their node's cache. The directory,
    which routing asks, follows the nodes by their events; age is how long ago it heard of each.

    \b
    prfaas cache ls
    prfaas cache ls --gateway http://10.0.0.5:8000 --json | jq '.nodes[].hit_share'
    """
    from deploy.gateway.cache.api import CacheOverview
    from deploy.ops.cache_view import print_nodes

    overview = _ask(gateway, "/prfaas/cache", CacheOverview, api_key)
    if as_json:
        _print_json(overview)
    else:
        print_nodes(_console(), overview)


@cache_app.command("top")
def top_command(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="how many prefixes")] = 20,
    order: Annotated[Order, typer.Option(help="most used, largest or latest first")] = Order.HITS,
    gateway: GatewayOption = "",
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the hottest prefixes of the region, and which nodes hold them.

    A prefix is named by the key of its last block. Resumable is how far a prompt that begins with
    it need not be computed, branch where it parts from other prompts.

    \b
    prfaas cache top
    prfaas cache top --order size --limit 5
    """
    from deploy.gateway.cache.api import TopPrefixes
    from deploy.ops.cache_view import print_prefixes

    path = f"/prfaas/cache/top?limit={limit}&order={order.value}"
    top = _ask(gateway, path, TopPrefixes, api_key)
    if as_json:
        _print_json(top)
    else:
        print_prefixes(_console(), top)


@cache_app.command("explain")
def explain_command(
    prompt: Annotated[
        Path, typer.Argument(metavar="PROMPT-FILE", help="a text, or a JSON request body")
    ],
    model: Annotated[str, typer.Option(help="not needed if only one is served")] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="the text is a user's message, not a bare prompt")
    ] = False,
    gateway: GatewayOption = "",
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Say how a prompt would fare now: what is cached of it where, what each route would take.

    An engine turns the prompt into tokens; nothing is computed and nothing moves.

    \b
    prfaas cache explain prompt.txt
    prfaas cache explain --chat --model qwen3-next question.txt
    prfaas cache explain request.json --json | jq .routes
    """
    from deploy.gateway.cache.api import Explanation
    from deploy.ops.cache_view import print_explanation
    from deploy.ops.client import WrongPrompt, request_body

    try:
        body = request_body(prompt, model=model, is_chat=chat)
    except (WrongPrompt, OSError) as error:
        fail(str(error), 2)
    explained = _ask(gateway, "/prfaas/cache/explain", Explanation, api_key, body)
    if as_json:
        _print_json(explained)
    else:
        print_explanation(_console(), explained)


def _ask(gateway: str, path: str, kind: type[T], key: str, body: bytes | None = None) -> T:
    from deploy.ops.client import CannotAsk, ask, find_gateway
    from deploy.region.launch.rundir import RunDirectoryError

    try:
        return ask(gateway or find_gateway(os.environ), path, kind, key=key, body=body)
    except (CannotAsk, RunDirectoryError) as error:
        fail(str(error), 1)


def _console() -> Console:
    from rich.console import Console

    return Console()


def _print_json(value: object) -> None:
    import msgspec

    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
