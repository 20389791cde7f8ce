"""Shows an answer once, or again and again until Ctrl-C, as a table or as JSON lines.

It does not know what it shows: a command gives it a function that asks and one that prints.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, TypeVar

import typer
from rich.console import Console, RenderableType

from deploy.command_line import print_json
from deploy.region import client
from deploy.table_style import say

WatchOption = Annotated[
    bool, typer.Option("--watch", help="again and again until Ctrl-C; with --json a line each time")
]
IntervalOption = Annotated[
    float, typer.Option("--interval", min=0.1, help="seconds between two refreshes")
]

T = TypeVar("T")


def show(
    look: Callable[[], T],
    view: Callable[[Console, T], None],
    *,
    as_json: bool,
    watch: bool = False,
    interval_s: float = 1.0,
) -> None:
    """Print what `look` finds, with `view` or as JSON, and with `watch` again every `interval_s`.

    Ctrl-C ends a watch like any other end. A file or a pipe gets a table once, and a JSON line at
    each refresh. Raises `client.CannotAsk`: at the first look, and with JSON at any.
    """
    try:
        if as_json:
            _print_lines(look, interval_s if watch else None)
        else:
            _draw(look, view, interval_s if watch else None)
    except KeyboardInterrupt:
        # To stop watching is no failure; an answer that was not waited for is one.
        if not watch:
            raise
    except BrokenPipeError:
        # The reader of the pipe has closed it. What Python still has to flush must not become an
        # error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_lines(look: Callable[[], T], interval_s: float | None) -> None:
    print_json(look())
    while interval_s is not None:
        time.sleep(interval_s)
        print_json(look())


def _draw(
    look: Callable[[], T], view: Callable[[Console, T], None], interval_s: float | None
) -> None:
    console = Console()
    found = look()
    if interval_s is None or not console.is_terminal:
        view(console, found)
        return
    if console.is_dumb_terminal:
        # It cannot move its cursor, so each table goes below the one before.
        view(console, found)
        for seen in _refreshed(look, interval_s):
            if isinstance(seen, client.CannotAsk):
                say(console, f"no answer: {seen}")
            else:
                view(console, seen)
        return
    # Commands that print once need neither.
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    shown = _drawn(console, view, found)
    with Live(shown, console=console, auto_refresh=False) as live:
        for seen in _refreshed(look, interval_s):
            if isinstance(seen, client.CannotAsk):
                # The last table stays with the error below.
                live.update(Group(shown, Text(f"no answer: {seen}", style="red")), refresh=True)
            else:
                shown = _drawn(console, view, seen)
                live.update(shown, refresh=True)


def _refreshed(look: Callable[[], T], interval_s: float) -> Iterator[T | client.CannotAsk]:
    """What `look` finds every `interval_s`, without an end: a gateway that restarts is none."""
    while True:
        time.sleep(interval_s)
        try:
            found: T | client.CannotAsk = look()
        except client.CannotAsk as error:
            found = error
        yield found


def _drawn(console: Console, view: Callable[[Console, T], None], found: T) -> RenderableType:
    """What `view` prints, for a live display, which must print it itself."""
    from rich.text import Text

    apart = Console(
        file=io.StringIO(),
        width=console.width,
        force_terminal=True,
        no_color=console.no_color,
        legacy_windows=False,
    )
    view(apart, found)
    assert isinstance(apart.file, io.StringIO)
    return Text.from_ansi(apart.file.getvalue().rstrip("\n"))
