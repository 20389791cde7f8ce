"""Shows the progress of a measurement, and a profile's numbers in tables.

It knows terminals. It starts nothing and reads no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table

from deploy.table_style import new_table

if TYPE_CHECKING:
    from deploy.plan.profile.measuring import ProfilingProgress
    from deploy.profile_file import EngineProfile, MeasuredDecode, MeasuredEncode


class ProfilingView:
    """Shows a bar with the time left on a terminal, and a line for each step elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""
        self._total = 0
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            # One sample can take minutes.
            speed_estimate_period=1800,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("asking the engine", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(self, total_work: int) -> None:
        """Set how much `ProfilingProgress.work` there will be."""
        self._total = total_work
        self._bar.update(self._task, total=total_work)

    def show(self, progress: ProfilingProgress) -> None:
        """Show what is being done."""
        text = f"{progress.doing} {progress.detail}".rstrip()
        self._bar.update(self._task, completed=progress.work, description=text)
        if not self._console.is_terminal and progress.doing != self._last:
            share = progress.work / max(self._total, 1)
            self._console.print(f"{share:4.0%} {progress.doing}", highlight=False)
        self._last = progress.doing


def tables(profile: EngineProfile) -> list[Table]:
    """Tables of prefill times, and of decode steps and encoder passes if there are any, with their
    units.
    """
    prefill = new_table(
        numbers=("tokens", "seconds", "spread s", "client s", "tokens/s", "samples"),
        title=f"prefill (median of samples, clock of the {profile.prefill.clock})",
    )
    for point in profile.prefill.points:
        prefill.add_row(
            str(point.tokens),
            _number(point.seconds),
            _number(point.spread_seconds),
            _number(point.client_seconds),
            f"{point.tokens / point.seconds:,.0f}",
            str(point.samples or "-"),
        )
    found = [prefill]
    if profile.decode is not None:
        found.append(_decode_table(profile.decode))
    if profile.encode is not None:
        found.append(_encode_table(profile.encode))
    return found


def _encode_table(encode: MeasuredEncode) -> Table:
    table = new_table(
        numbers=("images", "tokens", "ms", "spread ms", "samples"),
        title="encode (what images add to a prefill of their tokens)",
    )
    for point in encode.points:
        table.add_row(
            str(point.images or "-"),
            str(point.tokens),
            _number(point.seconds, 1e3),
            _number(point.spread_seconds, 1e3),
            str(point.samples or "-"),
        )
    return table


def _decode_table(measured: MeasuredDecode) -> Table:
    context = measured.context_tokens
    decode = new_table(
        numbers=("streams", "step ms", "spread ms", "tokens/s in all", "samples"),
        title=f"decode (after {context} tokens of context)" if context else "decode",
    )
    for step in measured.steps:
        decode.add_row(
            str(step.batch_size),
            _number(step.step_seconds, 1e3),
            _number(step.spread_seconds, 1e3),
            f"{step.batch_size / step.step_seconds:,.1f}",
            str(step.samples or "-"),
        )
    return decode


def _number(seconds: float | None, scale: float = 1.0) -> str:
    return "-" if seconds is None else f"{seconds * scale:.4g}"
