"""`prfaas cache`: what a region has cached where, and what a prompt would find.

It asks the gateway and prints its answers. Their types are imported when a command runs, so that
its help appears at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.command_line import (
    CommandFailed,
    ExitCode,
    GatewayOption,
    JsonOption,
    KeyOption,
    RunDirOption,
    command_group,
)
from deploy.ops.watching import IntervalOption, WatchOption, show
from deploy.region import client
from deploy.table_style import new_table, say
from kvmanager.config_files.units import format_age, format_bytes

if TYPE_CHECKING:
    from deploy.gateway.cache.api import (
        CacheOverview,
        Explanation,
        NodeCacheStatus,
        RegionPrefix,
        TierTokens,
        TopPrefixes,
    )

_KINDS = ("kv", "window", "state")
_KEY_CHARS = 12

cache_app = command_group("What is cached where, and what that saves a prompt.")


class WrongPrompt(CommandFailed):
    """The file has no prompt; the message says what it should have."""

    exit_status = ExitCode.USAGE


class Order(StrEnum):
    """The prefixes that `top` begins with."""

    HITS = "hits"
    SIZE = "size"
    RECENT = "recent"


@cache_app.command("ls")
def ls_command(
    gateway: GatewayOption = "",
    run_dir: RunDirOption = None,
    api_key: KeyOption = "",
    watch: WatchOption = False,
    interval_s: IntervalOption = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show what every node has cached: bytes by kind and tier, hits, age of the directory's view.

    Engines look up the tokens of prompts in their node's cache; hits is the share that was found.
    Nodes with embeddings of images or other media have a second line for them.
    Routing asks the directory, which follows the nodes by their events; age says how long ago a
    node last sent it one.

    \b
    prfaas cache ls
    prfaas cache ls --gateway http://10.0.0.5:8000 --json | jq '.nodes[].hit_share'
    """
    from deploy.gateway.cache.api import CacheOverview

    url, key = client.find_pages(gateway, run_dir, api_key)
    show(
        lambda: client.ask(url, "/prfaas/cache", CacheOverview, key=key),
        print_nodes,
        as_json=as_json,
        watch=watch,
        interval_s=interval_s,
    )


@cache_app.command("top")
def top_command(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="how many prefixes")] = 20,
    order: Annotated[Order, typer.Option(help="most used, largest or latest first")] = Order.HITS,
    gateway: GatewayOption = "",
    run_dir: RunDirOption = None,
    api_key: KeyOption = "",
    watch: WatchOption = False,
    interval_s: IntervalOption = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show the hottest prefixes of the region, and which nodes hold them.

    A prefix has a name that this gateway process gives its last block, as in `explain`. Resumable:
    this many tokens of a prompt that begins with it need not be computed. Branch: other prompts
    differ after this many.

    \b
    prfaas cache top
    prfaas cache top --order size --limit 5
    """
    from deploy.gateway.cache.api import TopPrefixes

    path = f"/prfaas/cache/top?limit={limit}&order={order.value}"
    url, key = client.find_pages(gateway, run_dir, api_key)
    show(
        lambda: client.ask(url, path, TopPrefixes, key=key),
        print_prefixes,
        as_json=as_json,
        watch=watch,
        interval_s=interval_s,
    )


@cache_app.command("explain")
def explain_command(
    prompt: Annotated[
        Path, typer.Argument(metavar="PROMPT-FILE", help="a text, or a JSON request body")
    ],
    model: Annotated[str, typer.Option(help="not needed if only one is served")] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="the text is a user's message, not a plain prompt")
    ] = False,
    gateway: GatewayOption = "",
    run_dir: RunDirOption = None,
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show what is cached of a prompt now, and what each route would compute and send.

    An engine turns the prompt into tokens. It computes nothing, and no KVCache moves.

    \b
    prfaas cache explain prompt.txt
    prfaas cache explain --chat --model qwen3-next question.txt
    prfaas cache explain request.json --json | jq .routes
    """
    from deploy.gateway.cache.api import Explanation

    body = request_body(prompt, model=model, is_chat=chat)
    url = client.find_gateway(gateway, run_dir)
    explained = client.ask(url, "/prfaas/cache/explain", Explanation, key=api_key, body=body)
    client.show(explained, as_json, print_explanation)


def request_body(path: Path, *, model: str, is_chat: bool) -> bytes:
    """The request for a prompt file: JSON unchanged, text as a prompt or as one user's message.

    Raises `WrongPrompt`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise WrongPrompt(f"{path} is no text: {error}") from error
    except OSError as error:
        raise WrongPrompt(str(error)) from error
    request = _request_in(text)
    if request is None and not text:
        raise WrongPrompt(f"{path} is empty; write a prompt or a request body into it")
    if request is None:
        message = [{"role": "user", "content": text}]
        request = {"messages": message} if is_chat else {"prompt": text}
    # An object without a prompt is more likely a mistake than a prompt that is JSON.
    elif not request.keys() & {"prompt", "messages"}:
        raise WrongPrompt(f"{path} is a JSON object without prompt and messages")
    if model:
        request["model"] = model
    return json.dumps(request).encode()


def _request_in(text: str) -> dict[str, Any] | None:
    """The JSON object in `text`, None if it is something else. Prompts may be any other JSON."""
    try:
        value = json.loads(text) if text.lstrip().startswith("{") else None
    # A prompt may begin with a brace and still be plain text.
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def print_nodes(console: Console, overview: CacheOverview) -> None:
    """Print one line for each node: bytes by tier and kind, hits, age of the directory's view."""
    table = new_table(
        "cluster",
        "node",
        numbers=("blocks", "kv", "windows", "states", "ssd", "looked up\ntokens", "hits", "age"),
    )
    for node in overview.nodes:
        table.add_row(node.cluster, node.node, *_node_cells(node))
    console.print(table)
    if any(_has_embeddings(node) for node in overview.nodes):
        console.print(_embeddings_table(overview.nodes))
    for node in overview.nodes:
        if node.error:
            say(console, f"{node.cluster}/{node.node} at {node.agent}: {node.error}")
    if not overview.nodes:
        say(console, "no cluster has reported a node yet")


def print_prefixes(console: Console, top: TopPrefixes) -> None:
    """Print one line for each prefix."""
    table = new_table(
        "prefix", numbers=("tokens", "resumable", "branch", "hits", "idle", "arena", "ssd")
    )
    table.add_column("held by", overflow="fold")
    for prefix in top.prefixes:
        table.add_row(*_prefix_cells(prefix))
    console.print(table)
    for name, error in top.errors.items():
        say(console, f"{name}: {error}")
    if not top.prefixes:
        say(console, "nothing is cached")


def print_explanation(console: Console, explained: Explanation) -> None:
    """Print what nodes hold of the prompt, what each route would take, and the present decision."""
    blocks = f", {explained.num_blocks} full blocks of {explained.block_tokens}"
    say(
        console,
        f"{explained.num_prompt_tokens:,} tokens{blocks if explained.block_tokens else ''}",
    )
    if explained.note:
        say(console, explained.note)
    if explained.nodes:
        console.print(_coverage_table(explained))
    console.print(_routes_table(explained))
    numbers = "".join(f"; {name}={value}" for name, value in explained.numbers.items())
    where = f" in {explained.cluster}" if explained.cluster != explained.home else ""
    say(console, f"now: {explained.route} {explained.target}{where}: {explained.reason}{numbers}")


def _node_cells(node: NodeCacheStatus) -> list[str]:
    known = node.directory
    age = "" if known is None else format_age(known.age_s) + ("" if known.complete else ", partly")
    cache = node.cache
    # Without a prefix cache or an answer, only the age of the directory's view is known.
    if cache is None:
        return ["", "", "", "", "", "", "", age]
    return [
        f"{cache.num_blocks:,}",
        *(format_bytes(cache.nbytes.get(f"arena/{kind}", 0)) for kind in _KINDS),
        format_bytes(_in_tier(cache.nbytes, "ssd")),
        f"{cache.query_tokens:,}",
        "" if node.hit_share is None else f"{node.hit_share:.0%}",
        age,
    ]


def _has_embeddings(node: NodeCacheStatus) -> bool:
    """Whether there have been any since its agent's start."""
    told = node.embeddings
    return told is not None and bool(told.num_embeddings or told.num_queries)


def _embeddings_table(nodes: Sequence[NodeCacheStatus]) -> Table:
    """A line for each node that has had embeddings of media."""
    table = new_table(
        "cluster", "node", numbers=("embeddings", "held", "limit", "looked up\nmedia", "hits")
    )
    for node in nodes:
        if node.embeddings is None or not _has_embeddings(node):
            continue
        table.add_row(
            node.cluster,
            node.node,
            f"{node.embeddings.num_embeddings:,}",
            format_bytes(node.embeddings.held_bytes),
            format_bytes(node.embeddings.cap_bytes),
            f"{node.embeddings.num_queries:,}",
            "" if node.embedding_hit_share is None else f"{node.embedding_hit_share:.0%}",
        )
    return table


def _prefix_cells(prefix: RegionPrefix) -> list[str]:
    return [
        prefix.key[:_KEY_CHARS],
        f"{prefix.num_tokens:,}",
        f"{prefix.resumable_tokens:,}",
        f"{prefix.branch_tokens:,}" if prefix.branch_tokens else "",
        f"{prefix.hits:,}",
        format_age(prefix.idle_s),
        format_bytes(_in_tier(prefix.nbytes, "arena")),
        format_bytes(_in_tier(prefix.nbytes, "ssd")),
        ", ".join(prefix.nodes) + (" (in use)" if prefix.pinned else ""),
    ]


def _coverage_table(explained: Explanation) -> Table:
    table = new_table(
        "cluster",
        "node",
        numbers=("resumable\ntokens", "kv\ntokens", "arena", "ssd", "engine", "age"),
    )
    for node in explained.nodes:
        tiers: Sequence[TierTokens] = (node.arena, node.ssd, node.engine)
        table.add_row(
            node.cluster,
            node.node,
            f"{node.together.usable_tokens:,}",
            f"{node.together.kv_tokens:,}",
            *(f"{tier.usable_tokens:,}" if tier.usable_tokens else "-" for tier in tiers),
            format_age(node.age_s),
        )
    return table


def _routes_table(explained: Explanation) -> Table:
    table = new_table(
        "route", "target", numbers=("to compute\ntokens", "to send\ntokens", "to send\nabout")
    )
    for work in explained.routes:
        table.add_row(
            work.route,
            work.target,
            f"{work.computed_tokens:,}",
            f"{work.sent_tokens:,}" if work.sent_tokens else "-",
            format_bytes(work.sent_bytes) if work.sent_bytes else "-",
        )
    return table


def _in_tier(nbytes: Mapping[str, int], tier: str) -> int:
    return sum(size for part, size in nbytes.items() if part.startswith(f"{tier}/"))
