"""The tables of `prfaas cache`. Knows answers of the gateway, not how they were had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from deploy.gateway.cache.api import (
    CacheOverview,
    Explanation,
    HotPrefix,
    NodeCache,
    TierTokens,
    TopPrefixes,
)
from deploy.table_style import TABLE_STYLE
from kvmanager.config_files.units import format_age, format_bytes

KINDS = ("kv", "window", "state")
_KEY_CHARS = 12


def print_nodes(console: Console, overview: CacheOverview) -> None:
    """One line for each node: bytes by tier and kind, hits, and how old the directory's view is."""
    table = _table("cluster", "node")
    for heading in ("blocks", "kv", "windows", "states", "ssd", "looked up\ntokens", "hits", "age"):
        table.add_column(heading, justify="right")
    for node in overview.nodes:
        table.add_row(node.cluster, node.node, *_node_cells(node))
    console.print(table)
    for node in overview.nodes:
        if node.error:
            _say(console, f"{node.cluster}/{node.node} at {node.agent}: {node.error}")
    if not overview.nodes:
        _say(console, "no cluster has reported a node yet")


def print_prefixes(console: Console, top: TopPrefixes) -> None:
    """One line for each prefix."""
    table = _table("prefix")
    for heading in ("tokens", "resumable", "branch", "hits", "idle", "arena", "ssd"):
        table.add_column(heading, justify="right")
    table.add_column("held by", overflow="fold")
    for prefix in top.prefixes:
        table.add_row(*_prefix_cells(prefix))
    console.print(table)
    for name, error in top.errors.items():
        _say(console, f"{name}: {error}")
    if not top.prefixes:
        _say(console, "nothing is cached")


def print_explanation(console: Console, explained: Explanation) -> None:
    """What nodes hold of the prompt, what each route would take, and what would be decided."""
    blocks = f", {explained.num_blocks} full blocks of {explained.block_tokens}"
    _say(
        console,
        f"{explained.num_prompt_tokens:,} tokens{blocks if explained.block_tokens else ''}",
    )
    if explained.note:
        _say(console, explained.note)
    if explained.nodes:
        console.print(_coverage_table(explained))
    console.print(_routes_table(explained))
    numbers = "".join(f"; {name}={value}" for name, value in explained.numbers.items())
    _say(console, f"now: {explained.route} {explained.target}: {explained.reason}{numbers}")


def _node_cells(node: NodeCache) -> list[str]:
    known = node.directory
    age = "" if known is None else format_age(known.age_s) + ("" if known.complete else ", partly")
    cache = node.cache
    if cache is None:
        return ["", "", "", "", "", "", "", age]
    return [
        f"{cache.num_blocks:,}",
        *(format_bytes(cache.nbytes.get(f"arena/{kind}", 0)) for kind in KINDS),
        format_bytes(_in_tier(cache.nbytes, "ssd")),
        f"{cache.query_tokens:,}",
        "" if node.hit_share is None else f"{node.hit_share:.0%}",
        age,
    ]


def _prefix_cells(prefix: HotPrefix) -> list[str]:
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
    table = _table("cluster", "node")
    for heading in ("resumable\ntokens", "kv\ntokens", "arena", "ssd", "engine", "age"):
        table.add_column(heading, justify="right")
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
    table = _table("route", "target")
    for heading in ("to compute\ntokens", "to send\ntokens", "to send\nabout"):
        table.add_column(heading, justify="right")
    for work in explained.routes:
        table.add_row(
            work.route,
            work.target,
            f"{work.computed_tokens:,}",
            f"{work.sent_tokens:,}" if work.sent_tokens else "-",
            format_bytes(work.sent_bytes) if work.sent_bytes else "-",
        )
    return table


def _table(*titles: str) -> Table:
    table = Table(**TABLE_STYLE)
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table


def _in_tier(nbytes: Mapping[str, int], tier: str) -> int:
    return sum(size for part, size in nbytes.items() if part.startswith(f"{tier}/"))


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)
