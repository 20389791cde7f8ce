"""Shows how the processes of a region come up: a live table, plain lines, or JSON lines.

Knows terminals; takes `Progress` values and does not know where they come from.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.region.launcher import Progress

_STYLES = {"healthy": "green", "starting": "yellow", "backoff": "red", "failed": "bold red"}
_REPEAT_S = 10.0


class ProgressView(Protocol):
    """Something that shows progress while it is entered."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def show(self, progress: Progress) -> None: ...


def progress_view(console: Console, *, as_json: bool) -> ProgressView:
    """JSON lines if asked for, a live table on a terminal, plain lines elsewhere."""
    if as_json:
        return LineView(lambda item: print(json.dumps(_json(item)), flush=True))
    if console.is_terminal:
        return TableView(console)
    return line_view(console)


def line_view(console: Console) -> ProgressView:
    """Plain lines."""
    return LineView(lambda item: console.print(_plain(item), highlight=False, soft_wrap=True))


class LineView:
    """One line for each change, and every ten seconds while a process takes its time."""

    def __init__(self, write: Callable[[Progress], None]) -> None:
        self._write = write
        self._last: dict[str, tuple[str, float]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def show(self, progress: Progress) -> None:
        now_s = time.monotonic()
        state, shown_s = self._last.get(progress.name, ("", now_s))
        if progress.state == state and now_s - shown_s < _REPEAT_S:
            return
        self._last[progress.name] = (progress.state, now_s)
        self._write(progress)


class TableView:
    """A row for each process that changes in place."""

    def __init__(self, console: Console) -> None:
        self._rows: dict[str, Progress] = {}
        self._seen_s: dict[str, float] = {}
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._table)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, progress: Progress) -> None:
        self._rows[progress.name] = progress
        self._seen_s[progress.name] = time.monotonic()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in ("process", "state", "time"):
            table.add_column(title, no_wrap=True)
        table.add_column("", no_wrap=True, overflow="ellipsis", style="dim")
        for name, row in self._rows.items():
            elapsed_s = row.elapsed_s
            if row.state == "starting":
                elapsed_s += time.monotonic() - self._seen_s[name]
            what = row.reason if row.state != "starting" else row.line or row.reason
            if row.state == "healthy":
                what = ""
            state = Text(row.state, style=_STYLES.get(row.state, ""))
            table.add_row(name, state, f"{elapsed_s:.1f} s", Text(what))
        return table


def _json(progress: Progress) -> dict[str, object]:
    return {"event": "progress"} | asdict(progress)


def _plain(progress: Progress) -> str:
    what = progress.line or progress.reason
    return f"{progress.name:<28} {progress.state:<9} {progress.elapsed_s:6.1f} s  {what}"
