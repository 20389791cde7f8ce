"""Figures: what they show, as data, and their drawing as SVG with matplotlib.

The same figure gives the same text on every day. Texts stay texts. Colours are those of Okabe and
Ito, darkened or lightened to stand out on their background, and series differ in markers as well. A
style sheet in the file turns light into dark where the reader's system asks for it.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

Look = Literal["ours", "first", "second", "third", "fourth", "limit"]
LOOKS: Final[dict[Look, tuple[str, str, str]]] = {
    "ours": ("#0060a8", "#63b5f5", "o"),
    "first": ("#b84a00", "#f59556", "s"),
    "second": ("#00795a", "#3cc9a0", "^"),
    "third": ("#9a3f7a", "#e8a3cf", "D"),
    "fourth": ("#7a6400", "#e5cb52", "v"),
    "limit": ("#5a5a5a", "#b8b8b8", "x"),
}
"""Colour by light and in the dark, and marker, so that a system looks the same in every figure."""
INK, BACKGROUND, GRID = "#1b1b1b", "#fffffe", "#d5d5d5"
DARK: Final = {INK: "#e6e6e6", BACKGROUND: "#1d1f25", GRID: "#464a54"} | {
    light: dark for light, dark, _ in LOOKS.values()
}
FONT: Final = "DejaVu Sans"
"""Comes with matplotlib, so that lengths are the same everywhere."""
OTHER_FONTS: Final = "Verdana, sans-serif"
"""For readers without it: none is wider."""
WIDTH_INCHES, LONE_WIDTH_INCHES = 9.4, 6.0
PANEL_HEIGHT_INCHES, LEGEND_LINE_INCHES = 2.7, 0.25

_SETTINGS: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "prfaas",
    "font.family": FONT,
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    **dict.fromkeys(
        ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK
    ),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), BACKGROUND),
    "legend.frameon": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
}


@dataclass(frozen=True, slots=True)
class Series:
    """`points` are (x, y). `bare`: a line without markers."""

    name: str
    look: Look
    points: tuple[tuple[float, float], ...]
    kind: Literal["line", "bare", "points"] = "line"


@dataclass(frozen=True, slots=True)
class Panel:
    """Labels have units. `logs`: the axes that are logarithmic, such as "xy"."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    logs: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels in rows of two; those of a figure that `shares_y` have one range. `alt`: what it
    shows, for those who cannot see it.
    """

    name: str
    alt: str
    panels: tuple[Panel, ...]
    shares_y: bool = False

    def mark(self) -> str:
        """What the drawn file says of itself: the same figure, drawn by the same code, has the
        same.
        """
        content = repr(self).encode() + Path(__file__).read_bytes()
        return f"figure {hashlib.sha256(content).hexdigest()}"


def svg(figure: Figure) -> str:
    """The file's text, with the figure's mark on its first line. ImportError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    columns = min(2, len(figure.panels))
    num_rows = -(-len(figure.panels) // columns)
    names = dict.fromkeys(series.name for panel in figure.panels for series in panel.series)
    # Four long names fit into a line, and more of them into columns.
    num_columns = 4 if len(names) <= 4 else 3
    num_lines = -(-len(names) // num_columns)
    height = PANEL_HEIGHT_INCHES * num_rows + LEGEND_LINE_INCHES * num_lines
    width = WIDTH_INCHES if columns > 1 else LONE_WIDTH_INCHES
    with matplotlib.rc_context(_SETTINGS):
        canvas = Canvas(figsize=(width, height), layout="constrained")
        grid = canvas.subplots(num_rows, columns, squeeze=False, sharey=figure.shares_y)
        shown: dict[str, Any] = {}
        for at, axes in enumerate(grid.flat):
            if at < len(figure.panels):
                has_label = not figure.shares_y or at % columns == 0
                _draw(axes, figure.panels[at], shown, has_label=has_label)
            else:
                axes.set_visible(False)
        canvas.legend(
            list(shown.values()), list(shown), loc="outside lower center", ncols=num_columns
        )
        kept = io.StringIO()
        canvas.savefig(kept, format="svg", metadata={"Date": None, "Creator": None})
    head, _, rest = kept.getvalue().partition("<metadata>")
    rules = "".join(
        f'[style*="{part}: {light}"]{{{part}:{dark} !important}}'
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{{rules}}}</style>\n "
    # A comment may not stand before an XML declaration; without one a file is UTF-8 as well.
    text = f"<!-- {figure.mark()} -->\n{head[head.index('<svg') :]}{style}<metadata>{rest}"
    return text.replace(f"'{FONT}'", f"'{FONT}', {OTHER_FONTS}")


def _draw(axes: Any, panel: Panel, shown: dict[str, Any], *, has_label: bool) -> None:
    """One panel; adds to `shown` what the legend names."""
    for series in panel.series:
        color, _, marker = LOOKS[series.look]
        # A limit stays visible where a system reaches it.
        line, order = ("--", 3) if series.look == "limit" else ("-", 2)
        how: dict[str, Any] = {
            "line": {"marker": marker, "markersize": 5, "linewidth": 1.6, "linestyle": line},
            "bare": {"linewidth": 1.4, "linestyle": line},
            "points": {"marker": marker, "markersize": 4, "linestyle": "none"},
        }[series.kind]
        xs, ys = [x for x, _ in series.points], [y for _, y in series.points]
        (drawn,) = axes.plot(xs, ys, color=color, zorder=order, **how)
        shown.setdefault(series.name, drawn)
    axes.set_title(panel.title)
    if "x" in panel.logs:
        _set_log(axes.xaxis, axes.set_xscale)
    if "y" in panel.logs:
        _set_log(axes.yaxis, axes.set_yscale)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y if has_label else "")
    if "y" not in panel.logs:
        axes.set_ylim(bottom=0)
    axes.grid(visible=True)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _set_log(axis: Any, set_scale: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    set_scale("log")
    least, most = axis.get_data_interval()
    # Where an axis spans so little, powers of ten alone would be too few.
    is_short = least > 0 and most / least < 300
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if is_short else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
