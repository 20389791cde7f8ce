"""`prfaas link`: what links carry, once or until Ctrl-C.

It asks the gateway and prints its answers. Their types are imported when the command runs, so that
its help appears at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.command_line import (
    GatewayOption,
    JsonOption,
    KeyOption,
    RunDirOption,
    command_group,
)
from deploy.ops.watching import IntervalOption, show
from deploy.region import client
from deploy.table_style import new_table
from kvmanager.config_files.units import format_age, format_bytes, format_duration, format_rate
from netmon.estimate import LinkCondition

if TYPE_CHECKING:
    from deploy.gateway.links.region_links import LinksOverview
    from netmon.region_link import LinkNow, LinkPath

_BARS: Final = "▁▂▃▄▅▆▇█"
_NUM_BARS: Final = 16
_STYLES: Final = {
    LinkCondition.CLEAR: "green",
    LinkCondition.RISING: "yellow",
    LinkCondition.CONGESTED: "red",
    LinkCondition.DOWN: "bold red",
}

link_app = command_group("What the links between clusters carry.")


@link_app.command("top")
def top_command(
    once: Annotated[bool, typer.Option("--once", help="show the links once and end")] = False,
    interval_s: IntervalOption = 1.0,
    paths: Annotated[
        bool, typer.Option("--paths", help="also the connections of every agent")
    ] = False,
    gateway: GatewayOption = "",
    run_dir: RunDirOption = None,
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the links of the region, refreshed until Ctrl-C.

    The column now is the rate that transfers get; available is the rate that all transfers together
    would get, as last measured. ">=" means that the link carried that much and was not full. In a
    round trip of 20ms+10ms, 10 ms are queues in the network. The bars show the recent rate.

    With --json it prints a line at each refresh. Without a terminal it shows the links once.

    \b
    prfaas link top
    prfaas link top --once --paths
    prfaas link top --json --interval 5 | jq -c '.links[] | [.name, .condition]'
    """
    from deploy.gateway.links.region_links import LinksOverview

    url, key = client.find_pages(gateway, run_dir, api_key)

    def look() -> LinksOverview:
        return client.ask(url, "/prfaas/links", LinksOverview, key=key)

    def view(console: Console, found: LinksOverview) -> None:
        console.print(overview(found, with_paths=paths))

    show(look, view, as_json=as_json, watch=not once, interval_s=interval_s)


def overview(found: LinksOverview, *, with_paths: bool = False) -> RenderableType:
    """One line for each link, and below the table what waits and why a link is not clear."""
    parts: list[RenderableType] = [_links_table(found.links)]
    parts += [Text(f"{title(link)}: {note}") for link in found.links for note in _notes(link)]
    if with_paths:
        parts.append(_paths_table(found.paths))
    parts += [Text(f"{name}: {error}") for name, error in found.errors.items()]
    if not found.links:
        parts.append(Text("no links yet: nothing was sent, and no prefill cluster is configured"))
    return Group(*parts)


def title(link: LinkNow) -> str:
    """The name of a link for people."""
    return link.name or f"{link.source} to {link.target}"


def sparkline(link: LinkNow) -> str:
    """Bars of what was carried lately, oldest first, relative to the most that was or could be.

    A dot stands for nothing.
    """
    shown = link.lately_bytes_per_s[-_NUM_BARS:]
    most = max([*shown, link.available_bytes_per_s or 0.0])

    def bar(rate: float) -> str:
        share = rate / most if most > 0 else 0.0
        # A dot, so that an idle link does not look like a slow one.
        if share < 0.005:
            return "·"
        return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]

    return "".join(map(bar, shown))


def _links_table(links: Sequence[LinkNow]) -> Table:
    table = new_table("link", "state", numbers=("now", "available", "seen", "used", "rtt", "loss"))
    table.add_column("lately", no_wrap=True)
    for link in links:
        # Nobody reports about the link, so its last condition may be wrong by now.
        is_known = link.age_s is not None
        table.add_row(
            title(link),
            _condition(link.condition) if is_known else Text("no news", style="dim"),
            _rate(link.achieved_bytes_per_s),
            _available(link),
            "" if link.rate_age_s is None else format_age(link.rate_age_s),
            f"{link.utilisation:.0%}" if link.available_bytes_per_s else "",
            _rtt(link),
            f"{link.loss:.1%}" if link.loss else "",
            sparkline(link),
        )
    return table


def _paths_table(paths: Sequence[LinkPath]) -> Table:
    table = new_table(
        "from", "to", "by way of", "state", numbers=("now", "available", "rtt", "sockets", "heard")
    )
    for path in paths:
        report, estimate = path.report, path.report.estimate
        table.add_row(
            path.agent,
            path.to or "?",
            report.endpoint,
            _condition(report.condition),
            _rate(estimate.achieved_bytes_per_s),
            _rate(estimate.available_bytes_per_s),
            _ms(estimate.rtt_s) if estimate.rtt_s else "",
            str(report.num_connections),
            format_age(path.heard_age_s),
        )
    return table


def _condition(condition: LinkCondition) -> Text:
    return Text(condition, style=_STYLES[condition])


def _rate(bytes_per_s: float) -> str:
    return format_rate(round(bytes_per_s)) if bytes_per_s >= 1 else "-"


def _available(link: LinkNow) -> str:
    if link.available_bytes_per_s is None:
        return "unknown"
    return (">= " if link.is_floor else "") + _rate(link.available_bytes_per_s)


def _rtt(link: LinkNow) -> str:
    if not link.rtt_s:
        return ""
    # Less than a millisecond of queue is noise.
    if link.queueing_delay_s < 1e-3:
        return _ms(link.rtt_s)
    return f"{_ms(max(0.0, link.rtt_s - link.queueing_delay_s))}+{_ms(link.queueing_delay_s)}"


def _ms(seconds: float) -> str:
    return format_duration(float(f"{seconds:.2g}"))


def _notes(link: LinkNow) -> Iterator[str]:
    """The notes below the table: why a link is not clear, and what waits to be sent."""
    if link.condition is not LinkCondition.CLEAR:
        yield f"{link.condition} for {format_age(link.condition_s)}: {link.reason}"
    if link.backlog_bytes:
        size, wait = format_bytes(link.backlog_bytes), format_age(link.backlog_s)
        transfers = "transfer" if link.num_transfers == 1 else "transfers"
        yield f"{size} of {link.num_transfers} {transfers} wait, for {wait} at this rate"
