"""Shows how the processes of a region start: a live table, plain lines, or JSON lines.

It knows terminals. It takes `ProcessProgress` values and does not know where they come from.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.region.launch.running import ProcessProgress
from prfaas.engines.supervision.log_lines import shortened

_STYLES = {
    "healthy": "green",
    "starting": "yellow",
    "waiting": "yellow",
    "backoff": "red",
}
_MAX_LINE_CHARS = 120
# More than the width of any terminal; the table cuts the rest to its own width.
_MAX_TABLE_CHARS = 500


class ProgressView(Protocol):
    """Shows progress while it is entered."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def show(self, progress: ProcessProgress) -> None: ...


def progress_view(console: Console, *, as_json: bool) -> ProgressView:
    """JSON lines if asked for, a live table on a terminal, plain lines elsewhere.

    No line is longer than the terminal, or than 120 characters elsewhere. An engine's log has its
    whole lines.
    """
    if as_json:
        return LineView(lambda item: print(json.dumps(_json(item)), flush=True))
    if console.is_terminal:
        return TableView(console)
    return line_view(console)


def line_view(console: Console) -> ProgressView:
    """Shows progress as plain lines."""

    def write(item: ProcessProgress) -> None:
        width = console.width if console.is_terminal else _MAX_LINE_CHARS
        line = shortened(_plain(item), width)
        console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)

    return LineView(write)


class LineView:
    """Writes one line for each change of a process's state."""

    def __init__(self, write: Callable[[ProcessProgress], None]) -> None:
        self._write = write
        self._states: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def show(self, progress: ProcessProgress) -> None:
        if self._states.get(progress.name) != progress.state:
            self._states[progress.name] = progress.state
            self._write(progress)


class TableView:
    """Shows one row for each process, which changes in place."""

    def __init__(self, console: Console) -> None:
        self._rows: dict[str, ProcessProgress] = {}
        self._seen_s: dict[str, float] = {}
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._table)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, progress: ProcessProgress) -> None:
        self._rows[progress.name] = progress
        self._seen_s[progress.name] = time.monotonic()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in ("process", "state", "time"):
            table.add_column(title, no_wrap=True, overflow="ellipsis")
        table.add_column("", no_wrap=True, overflow="ellipsis", style="dim")
        for name, row in self._rows.items():
            elapsed_s = row.elapsed_s
            # Between two reports the time of a starting process goes on.
            if row.state == "starting":
                elapsed_s += time.monotonic() - self._seen_s[name]
            what = row.line if row.state == "starting" and row.line else _why(row)
            what = shortened(what, _MAX_TABLE_CHARS)
            state = Text(row.state, style=_STYLES.get(row.state, ""))
            table.add_row(name, state, f"{elapsed_s:.1f} s", Text(what))
        return table


def _json(progress: ProcessProgress) -> dict[str, object]:
    short = {
        "reason": shortened(progress.reason, _MAX_LINE_CHARS),
        "line": shortened(progress.line, _MAX_LINE_CHARS),
    }
    return {"event": "progress"} | asdict(progress) | short


def _plain(progress: ProcessProgress) -> str:
    begun = f"{progress.name:<28} {progress.state:<9} {progress.elapsed_s:6.1f} s"
    return f"{begun}  {_why(progress)}"


def _why(progress: ProcessProgress) -> str:
    """What the state itself does not say."""
    return "" if progress.state in ("healthy", progress.reason) else progress.reason
