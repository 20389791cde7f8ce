"""What a figure shows, as data: panels, axes and series. Draws nothing and reads nothing.

`digest` tells whether a drawn file still shows its figure without drawing it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

Look = Literal["ours", "first", "second", "third", "fourth", "limit"]
"""Colour, marker and line of a series, so that a system looks the same in every figure."""

Kind = Literal["line", "bare", "points", "level"]
"""`bare`: a line without markers. `level`: one y over the whole width."""


_PACED: Final = """\
The engines took the time of the paper's H200 (those of a prefill cluster) and H20, a token stood
for 16. *Off* is how far a pass was from the time that it should take."""


@dataclass(frozen=True, slots=True)
class Series:
    """`points` are (x, y); what was not measured has none."""

    name: str
    look: Look
    points: tuple[tuple[float, float], ...]
    kind: Kind = "line"


@dataclass(frozen=True, slots=True)
class Axis:
    """`label` has the unit. `ticks`: (value, words); without any they are chosen when drawn."""

    label: str
    is_log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels in rows of `columns`; those of a figure that `shares_y` have one range. `alt`: what it
    shows, for those who cannot see it.
    """

    name: str
    alt: str
    panels: tuple[Panel, ...]
    columns: int
    shares_y: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: Markdown with its heading, and the figures that it shows."""

    name: str
    text: str
    figures: tuple[Figure, ...] = ()


def digest(figure: Figure, drawn_by: str) -> str:
    """Of all that a figure shows and of the source of what draws it."""
    content = json.dumps(asdict(figure), sort_keys=True) + drawn_by
    return hashlib.sha256(content.encode()).hexdigest()


def table(head: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int = 1) -> str:
    """A Markdown table; the first columns are texts, the others are numbers."""
    rule = ["---"] * num_texts + ["---:"] * (len(head) - num_texts)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def paced(verdicts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A paragraph and a table on how engines of a bench with `--pace` kept their pace; nothing
    without any.
    """
    if not verdicts:
        return []
    keys = ("off_p50", "off_p99", "late", "busy")
    rows = [
        [name, number(one["num_passes"]), *(f"{one[key]:.2%}" for key in keys)]
        for name, one in verdicts.items()
    ]
    head = ["paced engines of", "passes", "off, P50", "off, P99", "late", "machine busy"]
    return [_PACED, table(head, rows)]


def number(value: float | None, digits: int = 3) -> str:
    """With so many significant digits, without an exponent; "-" for what was not measured."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"
