"""The demo's tables and its JSON file. It knows rows, not where they come from."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.lab.demo.verdict import Row
from deploy.table_style import new_table

_PARTS = {
    "render": ("render",),
    "reserve": ("reserve",),
    "queue": ("queue", "open", "engine_queue"),
    "prefill": ("prefill",),
    "tail": ("transfer_tail", "news"),
    "load": ("load_wait", "load"),
    "rest": ("load_and_first_step", "load_and_decode", "first_step", "relay", "decode"),
}
"""The columns, and the parts of the TTFT that each one adds up."""


def print_tables(console: Console, model: str, rows: Sequence[Row]) -> None:
    """Print where each request went and what moved, its times, and the checks that failed."""
    console.print(_moves(model, rows))
    console.print(_times(rows))
    console.print(
        "sent early: share of the KVCache that was on the wire before the prefill ended;\n"
        "at least 80%, and a tail of at most 20%, in the median of long prompts sent alone\n"
        "tail: from the end of the prefill until the KVCache had landed\n"
        "rest: the first token, with loading where that was not measured; every token of an\n"
        "answer that is not streamed\n"
    )
    for row in rows:
        for check in row.failed_checks:
            console.print(f"[red]failed[/] {row.model}, {row.request}: {check}")


def _moves(model: str, rows: Sequence[Row]) -> Table:
    table = new_table("request", title=f"{model}: requests through the region")
    table.add_column("prompt\ntokens", justify="right")
    table.add_column("route", overflow="fold")
    table.add_column("reason", overflow="fold")
    table.add_column("KV\nMB", justify="right")
    table.add_column("sent\nearly", justify="right")
    table.add_column("tokens\nequal")
    for row in rows:
        table.add_row(
            row.request,
            str(row.num_prompt_tokens),
            row.route,
            row.reason,
            f"{row.transfer_bytes / 1e6:.1f}" if row.transfer_bytes else "-",
            _percent(row.early_share),
            "[green]yes[/]" if row.tokens_equal else "[red]NO[/]",
        )
    return table


def _times(rows: Sequence[Row]) -> Table:
    numbers = ("TTFT", *_PARTS, "tail /\ntransfer")
    table = new_table("request", numbers=numbers, title="time to first token and its parts, ms")
    for row in rows:
        parts = (
            [row.parts_s[name] for name in names if name in row.parts_s]
            for names in _PARTS.values()
        )
        table.add_row(
            row.request,
            f"{1e3 * row.ttft_s:.0f}",
            *(f"{1e3 * sum(found_s):.0f}" if found_s else "-" for found_s in parts),
            _percent(row.tail_share),
        )
    return table


def write_json(path: Path, rows: Sequence[Row], leftovers: Sequence[str]) -> dict[str, Any]:
    """Write and return the rows, what was left behind, and whether every check held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    passed = not leftovers and all(not row.failed_checks for row in rows)
    report = {
        "passed": passed,
        "leftovers": list(leftovers),
        "requests": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    return report


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"
