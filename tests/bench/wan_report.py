"""What bench_wan found, as tables, a picture and a comparison with the goals. Runs nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Section = Literal["goodput", "cap", "layer", "burst", "burst_warm"]

LIMIT_PREFIX = "iperf3"
"""Peers of this name are plain streams: the best of them counts as the path's limit."""

PAYLOAD_SHARE = 1448 / 1500
"""Most TCP payload of a link's IP packets: MTU 1500, less the headers of IP and TCP."""

OURS, MOONCAKE, NIXL = "ours", "mooncake", "nixl"


@dataclass(frozen=True, slots=True)
class Cell:
    """One set of conditions. `congestion`: the sites' default; our transport chooses its own.
    `wmem_mib`: the most that a send buffer grows to, None for the host's setting.
    """

    section: Section
    point: str
    congestion: str
    wmem_mib: int | None

    def __str__(self) -> str:
        wmem = "" if self.wmem_mib is None else f", wmem {self.wmem_mib} MiB"
        return f"{self.point} {self.congestion}{wmem}"


@dataclass(frozen=True, slots=True)
class Measured:
    """One transfer or stream. `seconds` is None when it failed, `error` then says why. The shares
    are of the segments that came to the link towards the receiver, late ones of its packets.
    """

    cell: Cell
    peer: str
    round_number: int
    nbytes: int
    seconds: float | None
    cpu_s_per_gib: float | None = None
    lost_share: float = 0.0
    dropped_share: float = 0.0
    late_share: float = 0.0
    error: str = ""

    @property
    def gbit_per_s(self) -> float | None:
        return None if not self.seconds else 8e-9 * self.nbytes / self.seconds


@dataclass(frozen=True, slots=True)
class Goal:
    """One number against what it should be: at least `bound`, or at most where `is_most`."""

    name: str
    found: float | None
    bound: float
    is_most: bool = False

    @property
    def is_met(self) -> bool | None:
        """None when it was not measured."""
        if self.found is None:
            return None
        return self.found <= self.bound if self.is_most else self.found >= self.bound

    def __str__(self) -> str:
        verdict = {None: "not measured", True: "met", False: "MISSED"}[self.is_met]
        found = "-" if self.found is None else f"{self.found:.3g}"
        return (
            f"{self.name}: {found} (goal {'<=' if self.is_most else '>='} {self.bound}) {verdict}"
        )


class Results:
    """All that was measured, by cell and peer."""

    def __init__(self, measured: Iterable[Measured]) -> None:
        self._measured = list(measured)

    def cells(self, *sections: Section) -> list[Cell]:
        """In the order of measurement."""
        return list(dict.fromkeys(m.cell for m in self._measured if m.cell.section in sections))

    def peers(self, *sections: Section) -> list[str]:
        return list(dict.fromkeys(m.peer for m in self._measured if m.cell.section in sections))

    def seconds(self, cell: Cell, peer: str) -> list[float]:
        """Of what succeeded, ascending."""
        return sorted(
            m.seconds for m in self._measured if (m.cell, m.peer) == (cell, peer) and m.seconds
        )

    def gbit_per_s(self, cell: Cell, peer: str) -> float | None:
        """The median of what succeeded."""
        rates = [m.gbit_per_s for m in self._measured if (m.cell, m.peer) == (cell, peer)]
        known = [rate for rate in rates if rate is not None]
        return statistics.median(known) if known else None

    def cpu_s_per_gib(self, cell: Cell, peer: str) -> float | None:
        used = [m.cpu_s_per_gib for m in self._measured if (m.cell, m.peer) == (cell, peer)]
        known = [one for one in used if one is not None]
        return statistics.median(known) if known else None

    def limit_gbit_per_s(self, cell: Cell) -> float | None:
        """The best median of the plain streams, but no more than the link carries: streams that
        lose segments read in one second what has come in the one before.
        """
        names = [peer for peer in self.peers(cell.section) if peer.startswith(LIMIT_PREFIX)]
        rates = [self.gbit_per_s(cell, name) for name in names]
        known = [rate for rate in rates if rate is not None]
        return min(max(known), PAYLOAD_SHARE * _path_gbit_per_s(cell)) if known else None

    def best_gbit_per_s(self, cell: Cell, kind: str) -> float | None:
        """The best median of the settings of one peer, such as `nixl` and `nixl sndbuf`."""
        names = [peer for peer in self.peers(cell.section) if peer.split()[0] == kind]
        rates = [self.gbit_per_s(cell, name) for name in names]
        return max((rate for rate in rates if rate is not None), default=None)


def quantile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]


def goals(results: Results) -> list[Goal]:
    """Every goal, at the host's own send-buffer limit only; `found` is None if not measured."""
    found = []
    for cell in results.cells("goodput"):
        if cell.wmem_mib is not None:
            continue
        ours = results.gbit_per_s(cell, OURS)
        ratio = _ratio(ours, results.limit_gbit_per_s(cell))
        found.append(Goal(f"{cell}: ours / best iperf3", ratio, 0.95))
        cpu_s_per_gib = results.cpu_s_per_gib(cell, OURS)
        found.append(Goal(f"{cell}: ours, CPU s/GiB of both ends", cpu_s_per_gib, 1.0, True))
        for point, congestion, kind, bound in _RATIOS:
            if (cell.point, cell.congestion) == (point, congestion):
                theirs = results.best_gbit_per_s(cell, kind)
                found.append(Goal(f"{cell}: ours / {kind}", _ratio(ours, theirs), bound))
    for cell in results.cells("cap", "layer", "burst"):
        if cell.wmem_mib is None:
            found.append(_special_goal(results, cell))
    return found


_RATIOS = (
    ("5g/20ms", "bbr", MOONCAKE, 2.5),
    ("5g/20ms", "bbr", NIXL, 1.9),
    ("1g/40ms/0.1%", "bbr", MOONCAKE, 2.0),
    ("1g/40ms/0.1%", "bbr", NIXL, 2.0),
    ("1g/40ms/0.1%", "cubic", MOONCAKE, 5.0),
    ("1g/40ms/0.1%", "cubic", NIXL, 10.0),
)


def _special_goal(results: Results, cell: Cell) -> Goal:
    if cell.section == "cap":
        share = _ratio(results.gbit_per_s(cell, OURS), _path_gbit_per_s(cell))
        return Goal(f"{cell}: ours / path", share, 0.9)
    taken_s = results.seconds(cell, OURS)
    if cell.section == "layer":
        p95_ms = 1e3 * quantile(taken_s, 0.95) if taken_s else None
        return Goal(f"{cell}: a 16 MiB layer, p95 ms", p95_ms, 230, is_most=True)
    return Goal(f"{cell}: burst after idle / warm", _burst_ratio(results, cell, OURS), 1.3, True)


def _burst_ratio(results: Results, cell: Cell, peer: str) -> float | None:
    warm = Cell("burst_warm", cell.point, cell.congestion, cell.wmem_mib)
    after_idle_s, warm_s = results.seconds(cell, peer), results.seconds(warm, peer)
    if not after_idle_s or not warm_s:
        return None
    return statistics.median(after_idle_s) / statistics.median(warm_s)


def _path_gbit_per_s(cell: Cell) -> float:
    return float(cell.point.partition("g")[0])


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def tables(results: Results) -> str:
    """Plain text: what was measured, then the goals."""
    parts = []
    of_rates: dict[Section, str] = {"goodput": "Goodput", "cap": "A cap on every connection"}
    for section, title in of_rates.items():
        if cells := results.cells(section):
            parts.append(f"{title}, Gbit/s (CPU s/GiB of both ends), medians\n")
            parts.append(_table(_rate_rows(results, section, cells)))
    if cells := results.cells("layer"):
        parts.append("One 16 MiB layer of 64 KiB blocks, acknowledged: ms p50 / p95\n")
        parts.append(_table(_layer_rows(results, cells)))
    if cells := results.cells("burst"):
        parts.append("A 16 MiB burst after 10 s idle: ms, the same without idling, ratio\n")
        parts.append(_table(_burst_rows(results, cells)))
    parts.append("Goals\n" + "\n".join(f"  {goal}" for goal in goals(results)) + "\n")
    return "\n".join(parts)


def _rate_rows(results: Results, section: Section, cells: Sequence[Cell]) -> list[list[str]]:
    peers = results.peers(section)
    rows = [["path, default congestion control", *peers, "ours / best iperf3"]]
    for cell in cells:
        row = [str(cell)]
        for peer in peers:
            rate, cpu = results.gbit_per_s(cell, peer), results.cpu_s_per_gib(cell, peer)
            row.append(_text(rate) + (f" ({cpu:.2g})" if cpu is not None else ""))
        ratio = _ratio(results.gbit_per_s(cell, OURS), results.limit_gbit_per_s(cell))
        rows.append([*row, _text(ratio)])
    return rows


def _layer_rows(results: Results, cells: Sequence[Cell]) -> list[list[str]]:
    peers = results.peers("layer")
    rows = [["path, default congestion control", *peers]]
    for cell in cells:
        row = [str(cell)]
        for peer in peers:
            taken_s = results.seconds(cell, peer)
            both = (f"{1e3 * quantile(taken_s, share):.0f}" for share in (0.5, 0.95))
            row.append(" / ".join(both) if taken_s else "-")
        rows.append(row)
    return rows


def _burst_rows(results: Results, cells: Sequence[Cell]) -> list[list[str]]:
    rows = [["path, default congestion control", "peer", "after idle", "warm", "ratio"]]
    for cell in cells:
        warm = Cell("burst_warm", cell.point, cell.congestion, cell.wmem_mib)
        for peer in results.peers("burst"):
            row = [str(cell), peer]
            for one in (cell, warm):
                taken_s = results.seconds(one, peer)
                row.append(f"{1e3 * statistics.median(taken_s):.0f}" if taken_s else "-")
            rows.append([*row, _text(_burst_ratio(results, cell, peer))])
    return rows


def _text(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        padded = [f"{text:>{width}}" for text, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *padded]))
    return "\n".join(lines) + "\n"


def plot(results: Results, file: Path) -> None:
    """Goodput of every peer at every point, as bars; ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = results.cells("goodput", "cap")
    peers = results.peers("goodput", "cap")
    streams = [peer for peer in peers if peer.startswith(LIMIT_PREFIX)]
    bars = [peer for peer in peers if peer not in streams] + (["best iperf3"] if streams else [])
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.6 * len(cells)), 4.5))
    width = 0.8 / len(bars)
    for number, peer in enumerate(bars):
        rates = [
            results.gbit_per_s(cell, peer) if peer in peers else results.limit_gbit_per_s(cell)
            for cell in cells
        ]
        places = [place + width * (number - (len(bars) - 1) / 2) for place in range(len(cells))]
        axes.bar(places, [rate or 0.0 for rate in rates], width, label=peer)
    labels = [str(cell).replace(" ", "\n", 1) for cell in cells]
    axes.set_xticks(range(len(cells)), labels, fontsize=8)
    axes.set_ylabel("goodput, Gbit/s")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
