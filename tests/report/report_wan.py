"""The wide-area grid: goodput over round trip time and loss, ours beside streams and peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from report_figures import Axis, Figure, Look, Panel, Section, Series, number, table
from report_raw import Raw
from wan_report import LIMIT_PREFIX, MOONCAKE, NIXL, OURS, Cell, Measured, Results

SYSTEMS: Final[tuple[tuple[str, str, Look], ...]] = (
    (LIMIT_PREFIX, "iperf3, best", "limit"),
    (OURS, "PrfaaS", "ours"),
    (MOONCAKE, "Mooncake", "first"),
    (NIXL, "NIXL, best", "second"),
)
"""Kind in the raw results, name on the page, look."""

_INTRODUCTION: Final = """\
## Long links

Goodput of whole acknowledged transfers of KVCache in blocks of 256 KiB over an emulated link,
medians. PrfaaS asks for bbr by itself; all others use the sites' default congestion control.
*Send buffer* is how far the kernel grows one (the last number of `net.ipv4.tcp_wmem`). iperf3 is
what plain TCP streams carry: the best median of its numbers of streams, without their first second
and with nothing acknowledged. NIXL is the best of the settings of UCX that were measured, its
default and `UCX_TCP_SNDBUF=4m`."""


@dataclass(frozen=True, slots=True)
class Path:
    """What the text of a cell's point says."""

    gbps: float
    rtt_ms: float
    loss_percent: float

    @classmethod
    def of(cls, point: str) -> Path:
        """`1g/40ms/0.1%`; ValueError for a path with more to it."""
        rate, rtt, *loss = point.split("/")
        percent = float(loss[0].removesuffix("%")) if loss else 0.0
        return cls(float(rate.removesuffix("g")), float(rtt.removesuffix("ms")), percent)


def results_of(raws: Sequence[Raw]) -> Results:
    """All parts together."""
    return Results(measured for raw in raws for measured in _measured(raw.results))


def _measured(kept: Any) -> list[Measured]:
    return [
        Measured(
            cell=Cell(**one["cell"]),
            peer=one["peer"],
            round_number=one["round_number"],
            nbytes=one["nbytes"],
            seconds=one["seconds"],
            cpu_s_per_gib=one["cpu_s_per_gib"],
            error=one["error"],
        )
        for one in kept["raw"]
    ]


def goodput(results: Results, cell: Cell, kind: str) -> float | None:
    """Gbit/s of one kind of system: the best median of its settings."""
    if kind == LIMIT_PREFIX:
        return results.limit_gbit_per_s(cell)
    return results.best_gbit_per_s(cell, kind)


def section(raws: Sequence[Raw]) -> Section:
    """Figures of what forms a grid, and a table of everything."""
    results = results_of(raws)
    cells = sorted(results.cells("goodput"), key=_order)
    figures = _figures(results, cells)
    pictures = [f"![{figure.alt}](results/curves/{figure.name}.svg)" for figure in figures]
    parts = [_INTRODUCTION, *pictures, _table(results, cells)]
    if lacking := _lacking(results, cells):
        parts.append(f"Not measured: {', '.join(lacking)}.")
    missing = {name: why for raw in raws for name, why in raw.results.get("missing", {}).items()}
    parts += [f"Not measured: {name} ({why})." for name, why in missing.items()]
    return Section("wan", "\n\n".join(parts), tuple(figures))


def _order(cell: Cell) -> tuple[float, float, float, str, int]:
    path = Path.of(cell.point)
    return path.gbps, path.loss_percent, path.rtt_ms, cell.congestion, cell.wmem_mib or 0


def _table(results: Results, cells: Sequence[Cell]) -> str:
    head = ["link", "default congestion control", "send buffer"]
    head += [f"{name}, Gbit/s" for _, name, _ in SYSTEMS]
    rows = []
    for cell in cells:
        found = {kind: goodput(results, cell, kind) for kind, _, _ in SYSTEMS}
        ours, limit = found[OURS], found[LIMIT_PREFIX]
        ratio = number(ours / limit, 2) if ours is not None and limit else "-"
        first = [_link_words(cell), cell.congestion, buffer_words(cell)]
        rows.append([*first, *(number(rate) for rate in found.values()), ratio])
    return table([*head, "PrfaaS / iperf3"], rows, 3)


def _link_words(cell: Cell) -> str:
    path = Path.of(cell.point)
    loss = f", {path.loss_percent:g}% loss" if path.loss_percent else ""
    return f"{path.gbps:g} Gbit/s, {path.rtt_ms:g} ms{loss}"


def buffer_words(cell: Cell) -> str:
    return "default" if cell.wmem_mib is None else f"{cell.wmem_mib} MiB"


def _lacking(results: Results, cells: Sequence[Cell]) -> list[str]:
    """Systems that no path of a kind has numbers of."""
    return [
        name
        for kind, name, _ in SYSTEMS
        if all(goodput(results, cell, kind) is None for cell in cells)
    ]


def _figures(results: Results, cells: Sequence[Cell]) -> list[Figure]:
    """For each rate and congestion control with a grid of at least two by two: a row of panels for
    each send buffer, a column for each loss.
    """
    grids: dict[tuple[float, str], list[Cell]] = {}
    for cell in cells:
        grids.setdefault((Path.of(cell.point).gbps, cell.congestion), []).append(cell)
    figures = []
    for (gbps, congestion), grid in grids.items():
        losses = sorted({Path.of(cell.point).loss_percent for cell in grid})
        rtts_ms = sorted({Path.of(cell.point).rtt_ms for cell in grid})
        buffers = sorted({cell.wmem_mib for cell in grid}, key=lambda mib: mib or 0)
        if min(len(losses), len(rtts_ms)) < 2:
            continue
        panels = [
            _panel(results, [cell for cell in grid if cell.wmem_mib == mib], loss, rtts_ms)
            for mib in buffers
            for loss in losses
        ]
        name = f"wan-{gbps:g}g-{congestion}"
        alt = (
            f"Goodput over round trip time at {gbps:g} Gbit/s with {congestion}, "
            "a column for each loss, a row for each limit of the send buffer"
        )
        shown = tuple(panel for panel in panels if panel.series)
        figures.append(Figure(name, alt, shown, len(losses), shares_y=True))
    return figures


def _panel(
    results: Results, cells: Sequence[Cell], loss_percent: float, rtts_ms: Sequence[float]
) -> Panel:
    here = [cell for cell in cells if Path.of(cell.point).loss_percent == loss_percent]
    series = []
    for kind, name, look in SYSTEMS:
        pairs = [(Path.of(cell.point).rtt_ms, goodput(results, cell, kind)) for cell in here]
        points = tuple((rtt_ms, rate) for rtt_ms, rate in pairs if rate is not None)
        if points:
            series.append(Series(name, look, points))
    buffer = buffer_words(cells[0]) if cells else "default"
    return Panel(
        f"{loss_percent:g}% loss, send buffer {buffer}",
        Axis("round trip time, ms", True, tuple((rtt_ms, f"{rtt_ms:g}") for rtt_ms in rtts_ms)),
        Axis("goodput, Gbit/s"),
        tuple(series),
    )
