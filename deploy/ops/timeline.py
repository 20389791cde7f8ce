"""The output of `prfaas explain --timeline`: the parts of a request's TTFT as bars on one axis.

It knows records, not where they come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.gateway.serving.records import RequestRecord
from deploy.ops.explain_view import PART_TITLES
from deploy.table_style import say
from kvmanager.config_files.units import format_bytes

WIDTH: Final = 60
"""Columns of the axis."""
_LEVELS: Final = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_BAR: Final = "\u2588"
_ASKED: Final = ("engine_queue", "prefill")
"""The first of these that a record has begins when the prefill engine is asked."""


class Bar(msgspec.Struct, frozen=True):
    """Something that took from `begin_s` to `end_s`, in seconds after the request's arrival."""

    name: str
    begin_s: float
    end_s: float


class Mark(msgspec.Struct, frozen=True):
    """`time_s` after the arrival these bytes of KVCache were computed, and these on the wire."""

    time_s: float
    computed_bytes: int
    sent_bytes: int


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """`parts` follow each other, up to the first byte of the answer at `ttft_s`. `transfer` lies
    beside them; None: nothing was sent. `progress` is how it went, of `transfer_bytes`.
    """

    request_id: str
    ttft_s: float | None
    parts: list[Bar]
    transfer: Bar | None = None
    transfer_bytes: int = 0
    progress: list[Mark] = []


def timeline_of(record: RequestRecord) -> Timeline:
    """The bars of a record. Before the first byte of the answer it has none."""
    if record.ttft_s is None:
        return Timeline(request_id=record.request_id, ttft_s=None, parts=[])
    parts, now_s = [], 0.0
    for name, seconds in record.parts.known().items():
        parts.append(Bar(name, now_s, now_s + seconds))
        now_s += seconds
    by_name = {bar.name: bar for bar in parts}
    landed, asked = by_name.get("transfer_tail"), None
    for name in _ASKED:
        asked = asked or by_name.get(name)
    transfer, progress = None, []
    if landed is not None and asked is not None and record.transfer_s:
        transfer = Bar("transfer", max(0.0, landed.end_s - record.transfer_s), landed.end_s)
        progress = [
            Mark(asked.begin_s + passed_s, computed, sent)
            for passed_s, computed, sent in record.transfer_progress
        ]
    return Timeline(
        request_id=record.request_id,
        ttft_s=record.ttft_s,
        parts=parts,
        transfer=transfer,
        transfer_bytes=record.transfer_bytes or 0,
        progress=progress,
    )


def print_timelines(console: Console, records: Sequence[RequestRecord]) -> None:
    """Print all records of one id, newest first."""
    for record in records:
        _print_timeline(console, record, timeline_of(record))


def _print_timeline(console: Console, record: RequestRecord, timeline: Timeline) -> None:
    if timeline.ttft_s is None:
        say(console, f"{timeline.request_id}: its answer did not begin")
        return
    end = "first token" if record.is_stream else "whole answer"
    title = f"{timeline.request_id}: {end} after {timeline.ttft_s:.3f} s"
    say(console, title)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(no_wrap=True)
    for name, seconds, bar in _lines(timeline):
        grid.add_row(name, seconds, Text(bar))
    console.print(grid)
    if not record.is_settled:
        say(console, "it is not over yet; numbers may change")


def _lines(timeline: Timeline) -> Iterator[tuple[str, str, str]]:
    """Name, seconds and drawing of each line."""
    assert timeline.ttft_s is not None
    # The last part may end a little later: parts are measured by several clocks.
    whole_s = max([timeline.ttft_s, *(bar.end_s for bar in timeline.parts)])
    yield "", "s", _axis(whole_s)
    names = {bar.name for bar in timeline.parts}
    for bar in timeline.parts:
        title = PART_TITLES.get(bar.name, bar.name)
        if "prefill" not in names:
            # One engine did both within this time.
            title = title.replace("load,", "engine,")
        yield title, f"{bar.end_s - bar.begin_s:.3f}", _drawn(bar, whole_s)
    if timeline.transfer is None:
        return
    bar = timeline.transfer
    yield "on the wire", f"{bar.end_s - bar.begin_s:.3f}", _drawn(bar, whole_s)
    if timeline.progress and timeline.transfer_bytes:
        end = Mark(bar.end_s, timeline.transfer_bytes, timeline.transfer_bytes)
        marks = [*timeline.progress, end]
        size = format_bytes(timeline.transfer_bytes)
        computed = [(mark.time_s, mark.computed_bytes) for mark in marks]
        sent = [(mark.time_s, mark.sent_bytes) for mark in marks]
        for name, points in ((f"computed of {size}", computed), ("sent of it", sent)):
            yield name, "", _rising(points, timeline.transfer_bytes, whole_s)


def _axis(whole_s: float) -> str:
    """Times at the quarters of the axis."""
    quarter = WIDTH // 4
    times = "".join(f"|{whole_s * n / 4:.3f}".ljust(quarter) for n in range(4))
    return f"{times}|{whole_s:.3f}"


def _drawn(bar: Bar, whole_s: float) -> str:
    """The bar on the axis; what is shorter than a column takes one all the same."""
    if whole_s <= 0:
        return ""
    begin = min(WIDTH - 1, int(WIDTH * bar.begin_s / whole_s))
    end = max(begin + 1, min(WIDTH, round(WIDTH * bar.end_s / whole_s)))
    return " " * begin + _BAR * (end - begin)


def _rising(points: Sequence[tuple[float, int]], nbytes: int, whole_s: float) -> str:
    """The share of `nbytes` at the end of each column, up to the last point."""
    drawn, last_s = [], points[-1][0]
    for column in range(WIDTH):
        until_s = whole_s * (column + 1) / WIDTH
        share = max([so_far for time_s, so_far in points if time_s <= until_s], default=0) / nbytes
        drawn.append(_LEVELS[min(8, int(8 * share))])
        if until_s >= last_s:
            break
    return "".join(drawn)
