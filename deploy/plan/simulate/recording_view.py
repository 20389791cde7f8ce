"""The result of playing a recording, as text for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from deploy.plan.simulate.recording import MAX_TOLD, num_changed, outcome_rows
from deploy.table_style import TABLE_STYLE
from scheduler.replay.recording import Played


def print_played(console: Console, played: Played, num_files: int, *, is_what_if: bool) -> None:
    """Print the differences, or with other settings how many answers have changed."""
    if is_what_if:
        _print_outcomes(console, played)
    else:
        _print_differences(console, played)
    told = (
        f"{num_files} files, {played.num_events} events, {played.num_decisions} decisions, "
        f"{len(played.differences)} fields differ"
    )
    console.print(told, highlight=False)
    if played.num_lost:
        console.print(f"incomplete: the recorder lost {played.num_lost} events", highlight=False)
    if is_what_if:
        console.print(
            "The events are those that the recorded decisions led to: what other decisions would "
            "have led to is not known.",
            highlight=False,
        )


def _print_outcomes(console: Console, played: Played) -> None:
    table = Table(**TABLE_STYLE)
    for title in ("decision", "outcome"):
        table.add_column(title)
    for title in ("recorded", "with these", "changed"):
        table.add_column(title, justify="right")
    previous = ""
    for row in outcome_rows(played):
        is_first = row.decision != previous
        previous = row.decision
        table.add_row(
            row.decision if is_first else "",
            row.outcome,
            str(row.recorded),
            str(row.replayed),
            str(num_changed(played, row.decision)) if is_first else "",
        )
    console.print(table)


def _print_differences(console: Console, played: Played) -> None:
    for item in played.differences[:MAX_TOLD]:
        console.print(
            f"event {item.number} ({item.event}, at {item.now_s:.6f} s): {item.field} was "
            f"{item.recorded!r} and is {item.replayed!r}",
            highlight=False,
            soft_wrap=True,
        )
    if (num_more := len(played.differences) - MAX_TOLD) > 0:
        console.print(f"and {num_more} differences more; --json has all of them")
