"""The demo's table and its JSON file. Knows rows, not how they came about."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.demo.verdict import Row

_PART_NAMES = {
    "render": "render",
    "reserve": "reserve",
    "queue": "queue",
    "prefill": "prefill",
    "transfer_tail": "tail",
    "load_and_first_step": "load+step",
    "load_and_decode": "load+decode",
}


def print_table(console: Console, rows: Sequence[Row]) -> None:
    """One line a request, then the checks that failed."""
    table = Table(title="Requests through the region", title_justify="left")
    table.add_column("model", overflow="fold")
    table.add_column("request", overflow="fold")
    table.add_column("prompt\ntokens", justify="right")
    table.add_column("route (reason)", overflow="fold")
    table.add_column("KV moved\nMB", justify="right")
    table.add_column("sent before\nprefill end", justify="right")
    table.add_column("tail /\ntransfer", justify="right")
    table.add_column("TTFT ms", justify="right")
    table.add_column("its parts, ms", overflow="fold")
    table.add_column("tokens\nequal")
    for row in rows:
        table.add_row(
            row.model,
            row.request,
            str(row.num_prompt_tokens),
            f"{row.route} ({row.reason})",
            f"{row.transfer_bytes / 1e6:.2f}" if row.transfer_bytes else "-",
            _percent(row.early_share),
            _percent(row.tail_share),
            f"{1e3 * row.ttft_s:.0f}",
            ", ".join(
                f"{_PART_NAMES.get(name, name)} {1e3 * seconds:.0f}"
                for name, seconds in row.parts_s.items()
                if name in _PART_NAMES
            ),
            "[green]yes[/]" if row.tokens_equal else "[red]NO[/]",
        )
    console.print(table)
    for row in rows:
        for check in row.failed_checks:
            console.print(f"[red]failed[/] {row.model}, {row.request}: {check}")


def write_json(path: Path, rows: Sequence[Row], leftovers: Sequence[str]) -> None:
    """The rows, what was left behind, and whether every check held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    passed = not leftovers and all(not row.failed_checks for row in rows)
    report = {
        "passed": passed,
        "leftovers": list(leftovers),
        "requests": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"
