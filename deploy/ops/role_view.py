"""The table of `prfaas role ls`. Knows answers of the gateway, not how they were had."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from deploy.gateway.scheduling.role_pages import InstanceRole, RolesOverview
from deploy.table_style import TABLE_STYLE
from kvmanager.config_files.units import format_age


def print_roles(overview: RolesOverview, console: Console | None = None) -> None:
    """One line for each instance, then the change under way and the last one."""
    console = console or Console()
    table = Table(**TABLE_STYLE)
    for title in ("instance", "role", "state"):
        table.add_column(title, no_wrap=True)
    table.add_column("epoch", justify="right")
    table.add_column("requests", justify="right")
    for item in overview.instances:
        table.add_row(item.instance, item.role, _state(item), str(item.epoch), f"{item.requests:,}")
    console.print(table)
    for line in _lines(overview):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _state(item: InstanceRole) -> str:
    return item.phase if item.healthy else "not healthy"


def _lines(overview: RolesOverview) -> list[str]:
    lines = [f"{i.instance}: {i.reason}" for i in overview.instances if i.reason]
    if (now := overview.conversion) is not None:
        way = f"from {now.from_role} to {now.to_role}, epoch {now.epoch}"
        lines.append(f"{now.instance} {way}: {now.phase} for {format_age(now.for_s)}")
    elif overview.busy_with:
        lines.append(overview.busy_with)
    if (last := overview.last) is not None:
        way = f"{last.instance} from {last.from_role} to {last.to_role}"
        lines.append(f"last: {way}: {last.outcome} {format_age(last.ago_s)} ago: {last.detail}")
    return lines
