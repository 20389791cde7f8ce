"""Draws a figure as SVG with matplotlib: the same text for the same figure, on every day.

Texts stay texts. Colours are those of Okabe and Ito, darkened or lightened to stand out on their
background, and series differ in markers as well. A style sheet in the file turns light into dark
where the reader's system asks for it, background included.
"""

from __future__ import annotations

import io
from typing import Any, Final

from report_figures import Axis, Figure, Look, Panel, Series

INK, BACKGROUND, GRID = "#1b1b1b", "#fffffe", "#d5d5d5"
COLORS: Final[dict[Look, str]] = {
    "ours": "#0060a8",
    "first": "#b84a00",
    "second": "#00795a",
    "third": "#9a3f7a",
    "fourth": "#7a6400",
    "limit": "#5a5a5a",
}
MARKERS: Final[dict[Look, str]] = {
    "ours": "o",
    "first": "s",
    "second": "^",
    "third": "D",
    "fourth": "v",
    "limit": "x",
}
DARK: Final = {
    INK: "#e6e6e6",
    BACKGROUND: "#1d1f25",
    GRID: "#464a54",
    "#0060a8": "#63b5f5",
    "#b84a00": "#f59556",
    "#00795a": "#3cc9a0",
    "#9a3f7a": "#e8a3cf",
    "#7a6400": "#e5cb52",
    "#5a5a5a": "#b8b8b8",
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
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": BACKGROUND,
    "figure.facecolor": BACKGROUND,
    "savefig.facecolor": BACKGROUND,
    "legend.frameon": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
}


def svg(figure: Figure, mark: str) -> str:
    """The file's text; `mark` is kept in it as a comment. ImportError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    num_rows = -(-len(figure.panels) // figure.columns)
    names = dict.fromkeys(series.name for panel in figure.panels for series in panel.series)
    # Four long names fit into a line, and more of them into columns.
    num_columns = 4 if len(names) <= 4 else 3
    num_lines = -(-len(names) // num_columns)
    height = PANEL_HEIGHT_INCHES * num_rows + LEGEND_LINE_INCHES * num_lines
    width = WIDTH_INCHES if figure.columns > 1 else LONE_WIDTH_INCHES
    with matplotlib.rc_context(_SETTINGS):
        canvas = Canvas(figsize=(width, height), layout="constrained")
        grid = canvas.subplots(num_rows, figure.columns, squeeze=False, sharey=figure.shares_y)
        cells = list(grid.flat)
        shown: dict[str, Any] = {}
        for at, (axes, panel) in enumerate(zip(cells, figure.panels, strict=False)):
            has_label = not figure.shares_y or at % figure.columns == 0
            _draw(axes, panel, shown, has_y_label=has_label)
        for axes in cells[len(figure.panels) :]:
            axes.set_visible(False)
        canvas.legend(
            list(shown.values()), list(shown), loc="outside lower center", ncols=num_columns
        )
        kept = io.StringIO()
        canvas.savefig(kept, format="svg", metadata={"Date": None, "Creator": None})
    head, _, rest = kept.getvalue().partition("<metadata>")
    text = f"<!-- {mark} -->\n{_without_declaration(head)}{_style()}<metadata>{rest}"
    return text.replace(f"'{FONT}'", f"'{FONT}', {OTHER_FONTS}")


def _without_declaration(head: str) -> str:
    """A comment may not stand before an XML declaration; without one a file is UTF-8 as well."""
    return head[head.index("<svg") :]


def _style() -> str:
    rules = "".join(
        f'[style*="{part}: {light}"]{{{part}:{dark} !important}}'
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
    )
    return f"<style>@media (prefers-color-scheme: dark) {{{rules}}}</style>\n "


def _draw(axes: Any, panel: Panel, shown: dict[str, Any], *, has_y_label: bool) -> None:
    """One panel; adds to `shown` what the legend names."""
    for series in panel.series:
        handle = _draw_series(axes, series)
        shown.setdefault(series.name, handle)
    axes.set_title(panel.title)
    _set_axis(axes.xaxis, axes.set_xscale, panel.x)
    _set_axis(axes.yaxis, axes.set_yscale, panel.y)
    axes.set_xlabel(panel.x.label)
    axes.set_ylabel(panel.y.label if has_y_label else "")
    if not panel.y.is_log:
        axes.set_ylim(bottom=0)
    axes.grid(visible=True)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_series(axes: Any, series: Series) -> Any:
    color, marker = COLORS[series.look], MARKERS[series.look]
    if series.kind == "level":
        ((_, level),) = series.points
        return axes.axhline(level, color=color, linestyle="--", linewidth=1.2)
    xs, ys = [x for x, _ in series.points], [y for _, y in series.points]
    # A limit stays visible where a system reaches it.
    dashes = "--" if series.look == "limit" else "-"
    how: dict[str, Any] = {
        "line": {"marker": marker, "markersize": 5, "linewidth": 1.6, "linestyle": dashes},
        "bare": {"linewidth": 1.4, "linestyle": dashes},
        "points": {"marker": marker, "markersize": 4, "linestyle": "none"},
    }[series.kind]
    (line,) = axes.plot(xs, ys, color=color, zorder=3 if series.look == "limit" else 2, **how)
    return line


def _set_axis(axis: Any, set_scale: Any, wanted: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if wanted.is_log:
        set_scale("log")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if _is_short(axis) else (1.0,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    if wanted.ticks:
        axis.set_ticks([value for value, _ in wanted.ticks], [words for _, words in wanted.ticks])
        axis.set_ticks([], minor=True)


def _is_short(axis: Any) -> bool:
    """Whether an axis spans so little that powers of ten alone would be too few."""
    least, most = axis.get_data_interval()
    return bool(least > 0 and most / least < 300)
