"""`prfaas requests`: the last requests, where they went and why, and the parts of their TTFT.

Types and view are imported when the command runs, so that its help appears at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from deploy.command_line import GatewayOption, JsonOption, KeyOption, RunDirOption
from deploy.ops.watching import IntervalOption, WatchOption, show
from deploy.region import client
from deploy.table_style import new_table, say
from kvmanager.config_files.units import format_age

if TYPE_CHECKING:
    from deploy.gateway.serving.records import RequestRecord

BAR_COLUMNS: Final = 16
WHOLE_ID_COLUMNS: Final = 124
"""In narrower terminals ids lose their middle."""
CACHED_COLUMNS: Final = 96
"""In narrower terminals bars lose half of their length, and `cached` is left out, so that most
requests stay a line of 80 columns.
"""
_ID_ENDS: Final = (4, 3)
"""Characters of a shortened id before and behind the dots."""
_LEGEND: Final = {
    "b": ("before", "white"),
    "e": ("encode", "bright_magenta"),
    "q": ("queue", "yellow"),
    "p": ("prefill", "blue"),
    "t": ("transfer", "cyan"),
    "l": ("load", "magenta"),
    "f": ("first step", "green"),
    "r": ("relay", "bright_black"),
    "d": ("decode", "red"),
}
"""The groups of parts, named as on the gateway's page."""
_LETTERS: Final = {
    **dict.fromkeys(("read", "media", "render", "look_up", "move", "reserve"), "b"),
    "encode": "e",
    **dict.fromkeys(("queue", "open", "engine_queue"), "q"),
    "prefill": "p",
    **dict.fromkeys(("transfer_tail", "news"), "t"),
    **dict.fromkeys(("load_wait", "load"), "l"),
    **dict.fromkeys(("first_step", "load_and_first_step"), "f"),
    **dict.fromkeys(("relay", "other"), "r"),
    **dict.fromkeys(("decode", "load_and_decode"), "d"),
}
"""The letter of each part of `TtftParts`."""


def requests_command(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="how many requests")] = 20,
    gateway: GatewayOption = "",
    run_dir: RunDirOption = None,
    api_key: KeyOption = "",
    watch: WatchOption = False,
    interval_s: IntervalOption = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show the last requests: outcome, where each went and why, and what its TTFT was made of.

    Newest first. `cached` is what the prefill engine found cached. The bar divides the time to the
    first byte of the answer. `prfaas explain ID` has all that is known of one request, and
    docs/runbook has a page for each reason. Narrow terminals show ids without their middle, and
    those of less than 96 columns no `cached`; --json has both.

    \b
    prfaas requests
    prfaas requests --watch --limit 10
    prfaas requests --json | jq -r '.requests[] | select(.outcome != "ok") | .error'
    """
    url, key = client.find_pages(gateway, run_dir, api_key)

    def look() -> dict[str, list[RequestRecord]]:
        from deploy.gateway.serving.records import RequestRecord

        path = f"/prfaas/requests?limit={limit}"
        return client.ask(url, path, dict[str, list[RequestRecord]], key=key)

    def view(console: Console, found: Mapping[str, Sequence[RequestRecord]]) -> None:
        print_requests(console, found["requests"], time.time())

    show(look, view, as_json=as_json, watch=watch, interval_s=interval_s)


def print_requests(console: Console, records: Sequence[RequestRecord], now_s: float) -> None:
    """Print one line for each request. `now_s` is wall-clock time."""
    if not records:
        say(console, "no request yet")
        return
    has_whole_ids = console.width >= WHOLE_ID_COLUMNS
    is_wide = console.width >= CACHED_COLUMNS
    table = new_table("request", numbers=("age",))
    for heading in ("outcome", "went to", "reason"):
        table.add_column(heading, overflow="fold")
    for heading in ("prompt", *(("cached",) if is_wide else ()), "ttft, s"):
        table.add_column(heading, justify="right")
    table.add_column("parts", no_wrap=True)
    for record in records:
        table.add_row(
            # Clients choose ids, which are no markup.
            Text(record.request_id if has_whole_ids else _short(record.request_id)),
            # The record has the gateway's clock, which may be ahead of this host's.
            format_age(max(0.0, now_s - record.started_s)),
            _outcome(record),
            _went_to(record),
            record.reason,
            _number(record.num_prompt_tokens),
            *((_number(record.cached_tokens),) if is_wide else ()),
            "" if record.ttft_s is None else f"{record.ttft_s:.3f}",
            bar(record.parts.known(), BAR_COLUMNS if is_wide else BAR_COLUMNS // 2),
        )
    console.print(table)
    say(console, ", ".join(f"{letter} {words}" for letter, (words, _) in _LEGEND.items()))
    for record in records:
        if record.error:
            code = f"{record.error_code}: " if record.error_code else ""
            say(console, f"{record.request_id}: {code}{record.error}")


def bar(parts: Mapping[str, float], num_columns: int = BAR_COLUMNS) -> Text:
    """The parts as letters, each as many columns as its share. Parts of less than half a column
    have none.
    """
    drawn = Text()
    for letter, columns in _columns(parts, num_columns):
        drawn.append(letter * columns, style=_LEGEND[letter][1])
    return drawn


def _columns(parts: Mapping[str, float], num_columns: int) -> Iterator[tuple[str, int]]:
    whole_s = sum(parts.values())
    passed_s, drawn = 0.0, 0
    for name, seconds in parts.items():
        passed_s += seconds
        # Rounded ends leave no gap, and the whole bar has all its columns.
        end = round(num_columns * passed_s / whole_s) if whole_s > 0 else 0
        # A gateway of a later version may know more parts.
        yield _LETTERS.get(name, "r"), end - drawn
        drawn = end


def _short(request_id: str) -> str:
    first, last = _ID_ENDS
    if len(request_id) <= first + last + 1:
        return request_id
    return f"{request_id[:first]}…{request_id[-last:]}"


def _outcome(record: RequestRecord) -> str:
    is_usual = record.outcome == "open" or record.status in (0, 200)
    return record.outcome if is_usual else f"{record.outcome} ({record.status})"


def _went_to(record: RequestRecord) -> str:
    where = record.target if record.route == "prefill_cluster" else record.route or "not routed"
    spilled = f", decoded in {record.cluster}" if record.spill else ""
    return f"{where}{spilled}"


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
