"""The look of our tables: no frames, titles and names at the left, numbers at the right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from transport.plain import printable

TABLE_STYLE: Final[dict[str, Any]] = {
    "box": SIMPLE,
    "padding": (0, 1, 0, 0),
    "pad_edge": False,
    "title_justify": "left",
}


class _PlainTable(Table):
    """A table that shows texts as they are: names in reports are not ours, so brackets in them are
    no markup and other characters no orders to the terminal.
    """

    def add_row(self, *cells: RenderableType | None, **look: Any) -> None:
        plain = (Text(printable(c, lines=True)) if isinstance(c, str) else c for c in cells)
        super().add_row(*plain, **look)


def new_table(*names: str, numbers: Iterable[str] = (), title: str | None = None) -> Table:
    """An empty table with these headings.

    Where the terminal is narrow, cells go on in the next line, and numbers break before their unit.
    Nothing is cut off.
    """
    made = _PlainTable(title=title, **TABLE_STYLE)
    for heading in names:
        made.add_column(heading, overflow="fold")
    for heading in numbers:
        made.add_column(heading, justify="right")
    return made


def say(console: Console, text: str) -> None:
    """Print one line unchanged, however long: brackets are no markup, numbers get no colours."""
    text = printable(text, lines=True)
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)
