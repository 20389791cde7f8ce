"""The planner's tables. They know the documents of `solving` and `case_study`, not their origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.table_style import new_table
from scheduler.planning.curves import FittedCurve

MAX_RANGES = 4
TOKENS_NOTE = "tokens are written in full; in files and options 1k = 1000 and 1Ki = 1024 tokens"

_CASE_ROWS = (
    ("threshold_tokens", "threshold t, tokens", 0),
    ("num_prfaas", "prefill-cluster instances N_prfaas", 0),
    ("num_prefill", "local prefill instances N_p", 0),
    ("num_decode", "local decode instances N_d", 0),
    ("offload_fraction", "share of requests offloaded", 3),
    ("mean_offloaded_tokens", "mean offloaded length, tokens", 0),
    ("theta_prfaas_rps", "Theta_prfaas, requests/s", 3),
    ("theta_prefill_rps", "Theta_pd-p, requests/s", 3),
    ("theta_decode_rps", "Theta_pd-d, requests/s", 3),
    ("throughput_rps", "Lambda_max, requests/s", 3),
    ("ttft_mean_s", "TTFT mean, empty system, s", 2),
    ("ttft_p90_s", "TTFT P90, empty system, s", 2),
    ("egress_gbps", "egress, Gbit/s", 2),
    ("ratio_vs_homogeneous", "Lambda_max / homogeneous", 3),
)


def print_case_study(
    console: Console,
    paper: Mapping[str, Mapping[str, Any]],
    exact: Mapping[str, Mapping[str, Any]],
    printed: Mapping[str, Mapping[str, float]],
    titles: Mapping[str, str],
) -> None:
    """Print a table for each deployment: the paper's values, the same model here, and exact
    mode.
    """
    for key, found in paper.items():
        headings = ("paper\nprints", "here,\npaper mode", "difference", "here,\nexact mode")
        table = new_table("", numbers=headings, title=titles[key])
        for name, label, digits in _CASE_ROWS:
            # A deployment without such instances has no row for them.
            if found[name] is None or (name.startswith("num_") and not found[name]):
                continue
            theirs = printed[key].get(name)
            off = "-" if theirs is None else f"{found[name] / theirs - 1:+.1%}"
            # "0" means equal to the last digit, while +0.0% would only mean close.
            if theirs is not None and found[name] == theirs:
                off = "0"
            table.add_row(
                label,
                _number(theirs, digits),
                _number(found[name], digits),
                off,
                _number(exact[key][name], digits),
            )
        console.print(table)
    console.print(
        "paper mode: T(E\\[L]), as the paper calculates; exact mode: E\\[T(L)], what hardware "
        "sustains. The prefill cluster has H200s, the PD cluster H20s; the curve of the H20, the "
        "decode slots and the KVCache per token are derived from the paper's Tables 5 and 6."
    )
    console.print(TOKENS_NOTE)


def print_solution(
    console: Console, document: Mapping[str, Any], fits: Mapping[str, FittedCurve]
) -> None:
    """Print everything that `solve` found."""
    paper = document["paper_mode"]
    console.print(
        f"[bold]{document['throughput_rps']:.3g} requests/s[/] sustained (exact); "
        f"{paper['throughput_rps']:.3g} by the paper's formula (T of the mean length)"
    )
    console.print(escape(document["binding"]))
    alone = document["without_prefill_clusters"]
    if alone is not None:
        ratio = "-" if alone["ratio"] is None else f"{alone['ratio']:.2f} times that"
        console.print(
            f"the PD clusters alone: {alone['throughput_rps']:.3g} requests/s; "
            f"with prefill clusters {ratio}"
        )
    if document["threshold_tokens"] is not None:
        console.print(
            f"threshold {document['threshold_tokens']:,.0f} tokens: "
            f"{document['offload_fraction']:.1%} of requests are offloaded, "
            f"mean {document['mean_offloaded_tokens']:,.0f} tokens "
            f"(paper mode: threshold {paper['threshold_tokens']:,.0f})"
        )
    for split in document["splits"]:
        console.print(
            f"{split['pd_cluster']}: {split['num_prefill']:g} instances prefill, "
            f"{split['num_decode']:g} decode"
        )
    console.print(_routes(document["routes"]))
    console.print(_parts(document["parts"]))
    console.print(_loads(document["ttft_under_load"]))
    _print_cost(console, document["cost"])
    _print_goals(console, document["goals"])
    print_fits(console, fits)
    console.print(TOKENS_NOTE)


def print_fits(console: Console, fits: Mapping[str, FittedCurve]) -> None:
    """Print how far each fitted profile is from its points."""
    for name, fit in fits.items():
        worst = max(abs(float(residual)) for residual in fit.residuals)
        console.print(f"profile {escape(name)}: {fit.method}, residuals up to {worst:.1%}")


def print_search(console: Console, rows: Sequence[Mapping[str, float]]) -> None:
    """Print the best threshold of each division."""
    table = new_table(
        numbers=("prefill\ninstances", "decode\ninstances", "threshold\ntokens", "requests/s"),
        title="every division of the PD cluster, each with its best threshold",
    )
    # Several divisions may be equally good, and each gets the mark.
    top = max(row["throughput_rps"] for row in rows)
    for row in rows:
        mark = " *" if row["throughput_rps"] == top else "  "
        table.add_row(
            f"{row['num_prefill']:g}",
            f"{row['num_decode']:g}",
            _number(row["threshold_tokens"], 0),
            f"{row['throughput_rps']:.3f}{mark}",
        )
    console.print(table)


def print_sweep(console: Console, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each point of the sweep."""
    changed = [name.replace("_", "\n") for name in names]
    found = ("exact", "paper\nmode", "today's\nplan", "loss", "PD\nalone", "threshold\ntokens")
    table = new_table(
        numbers=(*changed, *found, "N_p/N_d", "off-\nloaded"),
        title="re-solved at each point, requests/s",
    )
    for row in rows:
        splits = ", ".join(f"{s['num_prefill']:g}/{s['num_decode']:g}" for s in row["splits"])
        table.add_row(
            *(f"{row[name]:g}" for name in names),
            f"{row['throughput_rps']:.3f}",
            f"{row['paper_mode_rps']:.3f}",
            _number(row["frozen_rps"], 3),
            "-" if row["frozen_loss"] is None else f"{max(0.0, row['frozen_loss']):.0%}",
            f"{row['without_prefill_clusters_rps']:.3f}",
            _number(row["threshold_tokens"], 0),
            splits,
            f"{row['offload_fraction']:.0%}",
        )
    console.print(table)
    console.print(
        "today's plan: the routes and the division that are best for the file as it is, kept\n"
        f"{TOKENS_NOTE}"
    )


def _routes(routes: Sequence[Mapping[str, Any]]) -> Table:
    names = ("prefill at", "decode at", "prompt lengths, tokens")
    table = new_table(*names, numbers=("share", "mean\ntokens"), title="who prefills what")
    for route in routes:
        parts = route["lengths"]
        shown = parts[:MAX_RANGES]
        lengths = "; ".join(
            f"{part['above_tokens']:,.0f} to {part['up_to_tokens']:,.0f}" for part in shown
        )
        if len(parts) > MAX_RANGES:
            lengths += f"; and {len(parts) - MAX_RANGES} more ranges (--json has them)"
        table.add_row(
            route["prefill_at"],
            route["decode_at"],
            lengths or "none",
            f"{route['share']:.1%}",
            _number(route["mean_tokens"], 0),
        )
    return table


def _parts(parts: Sequence[Mapping[str, Any]]) -> Table:
    numbers = ("size", "its own\nrequests/s", "in use", "headroom")
    table = new_table("part", numbers=numbers, title="how full each part is at that rate")
    for part in parts:
        size = (
            f"{part['rate_gbps']:g} Gbit/s"
            if part["kind"] == "link"
            else f"{part['instances']:g} instances"
        )
        table.add_row(
            f"{part['kind']} {part['name']}",
            size,
            _number(part["theta_rps"], 3),
            f"{part['utilisation']:.0%}",
            "-" if part["headroom"] is None else f"{max(0.0, part['headroom']):+.0%}",
        )
    return table


def _loads(rows: Sequence[Mapping[str, float]]) -> Table:
    ttft, parts = ("P50", "P90", "P99"), ("queue\nP90", "tail\nP90", "slot wait\nP90")
    table = new_table(
        numbers=("load", "requests/s", *ttft, *parts),
        title="time to first token under Poisson load, s (simulated)",
    )
    for row in rows:
        table.add_row(
            f"{row['load']:.0%}",
            f"{row['rate_rps']:.3g}",
            f"{row['ttft_p50_s']:.2f}",
            f"{row['ttft_p90_s']:.2f}",
            f"{row['ttft_p99_s']:.2f}",
            f"{row['queue_p90_s']:.2f}",
            f"{row['transfer_tail_p90_s']:.3f}",
            f"{row['slot_wait_p90_s']:.2f}",
        )
    return table


def _print_cost(console: Console, cost: Mapping[str, Any]) -> None:
    if not cost["per_hour"]:
        return
    console.print(
        f"cost at {cost['rate_rps']:.3g} requests/s: {cost['per_hour']:,.2f} {cost['currency']}/h, "
        f"{cost['per_million_tokens']:,.3g} a million tokens, "
        f"{cost['per_million_output_tokens']:,.3g} a million output tokens"
    )


def _print_goals(console: Console, goals: Mapping[str, Mapping[str, Any]]) -> None:
    rate, ttft = goals.get("rate"), goals.get("ttft_p90")
    if rate is not None:
        word = "[green]met[/]" if rate["met"] else "[red]NOT met[/]"
        console.print(f"{rate['wanted_rps']:g} requests/s: {word}, a load of {rate['load']:.0%}")
    if ttft is not None:
        word = "[green]met[/]" if ttft["met"] else "[red]NOT met[/]"
        console.print(
            f"P90 TTFT of {ttft['wanted_s']:g} s: {word}; kept up to "
            f"{ttft['highest_rate_rps']:.3g} requests/s ({ttft['highest_load']:.0%} load)"
        )
    for goal in (rate, ttft):
        if goal is not None and goal["advice"]:
            console.print(escape(goal["advice"]))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
