"""What bench_sharing found, as goals, tables and a picture. Runs nothing.

A small request should see little of what else is on its link: at most three times the idle p99 and
the time of one chunk, which may just have left when it came. Where several transfers of its own
class and tenant have the link as well, its fair share is what it gets, and the goal is out of reach
by arithmetic; `fair_s` tells what that share alone costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

IDLE = "idle"
SLOWDOWN_BOUND = 3.0
TOLERANCE = 0.05
"""Of shares, budgets and pacing."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What is on the link beside the small transfers. `shares`: the transfers that a fair link
    serves as often as the small one, itself included.
    """

    name: str
    num_bulks: int
    is_replication: bool = False
    tenant: str = ""
    shares: float = 1.0


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of the small transfers of one phase, in order. `bulk_bytes_per_s`: of all bulks
    together while they came; `link_bytes_per_s`: of one bulk alone on this link.
    """

    place: str
    beside: Beside
    rtt_s: float
    taken_s: tuple[float, ...]
    nbytes: int
    frame_bytes: int
    num_connections: int
    bulk_bytes_per_s: float
    link_bytes_per_s: float

    def quantile_s(self, share: float) -> float:
        """The smallest value that `share` of them do not exceed."""
        ascending = sorted(self.taken_s)
        return ascending[max(0, math.ceil(share * len(ascending)) - 1)]

    @property
    def chunk_s(self) -> float:
        return self.frame_bytes / self.link_bytes_per_s

    @property
    def frames_ahead_s(self) -> float:
        """What the link needs for one chunk of each connection: so much of a bulk may have been
        taken before a small transfer came, the kernel's queues not counted.
        """
        return self.num_connections * self.chunk_s

    @property
    def fair_s(self) -> float:
        """What a transfer takes at its fair share of the link."""
        return self.rtt_s + self.beside.shares * self.nbytes / self.link_bytes_per_s


@dataclass(frozen=True, slots=True)
class Share:
    """One number of a division of the link against what it was asked to be."""

    place: str
    name: str
    found: float
    wanted: float
    unit: str
    is_least: bool = False
    """Whether more than `wanted` is as good."""

    @property
    def is_met(self) -> bool:
        if self.is_least:
            return self.found >= self.wanted
        return abs(self.found - self.wanted) <= TOLERANCE * self.wanted


@dataclass(frozen=True, slots=True)
class Goal:
    """`found` is asked to be at most `bound`, or at least where `is_least`."""

    name: str
    found: float
    bound: float
    is_met: bool
    is_least: bool = False

    def __str__(self) -> str:
        sign = ">=" if self.is_least else "<="
        verdict = "met" if self.is_met else "MISSED"
        return f"{self.name}: {self.found:.3g} (goal {sign} {self.bound:.3g}) {verdict}"


def idle_of(found: Sequence[Latency], place: str) -> Latency | None:
    return next((one for one in found if (one.place, one.beside.name) == (place, IDLE)), None)


def bound_s(idle: Latency, one: Latency) -> float:
    """The most that the p99 of `one` should be."""
    return SLOWDOWN_BOUND * idle.quantile_s(0.99) + one.chunk_s


def goals(found: Sequence[Latency], shares: Sequence[Share]) -> list[Goal]:
    """Everything that was asked, in the order of measurement."""
    asked = []
    for one in found:
        idle = idle_of(found, one.place)
        if idle is None or one is idle:
            continue
        where = f"{one.place}, beside {one.beside.name}"
        p99_s, most_s = one.quantile_s(0.99), bound_s(idle, one)
        asked.append(Goal(f"{where}: p99 ms", 1e3 * p99_s, 1e3 * most_s, p99_s <= most_s))
        rate = one.bulk_bytes_per_s
        asked.append(Goal(f"{where}: bulk went on, MB/s", rate / 1e6, 0.0, rate > 0, is_least=True))
    for share in shares:
        name = f"{share.place}, {share.name}: {share.unit}"
        if share.is_least:
            asked.append(Goal(name, share.found, share.wanted, share.is_met, is_least=True))
        else:
            off = abs(share.found / share.wanted - 1)
            words = f"{name} {share.found:.4g} of {share.wanted:.4g}, off by"
            asked.append(Goal(words, off, TOLERANCE, share.is_met))
    return asked


def tables(found: Sequence[Latency], shares: Sequence[Share]) -> str:
    """Plain text: latencies, divisions of the link, goals."""
    parts = []
    if found:
        parts.append("Small request transfers, opened to complete, ms\n")
        parts.append(_table(_latency_rows(found)))
    if shares:
        rows = [["division of the link", "found", "wanted", "unit"]]
        for share in shares:
            sign = ">= " if share.is_least else ""
            name = f"{share.place}, {share.name}"
            rows.append([name, f"{share.found:.4g}", f"{sign}{share.wanted:.4g}", share.unit])
        parts.append(_table(rows))
    lines = "\n".join(f"  {goal}" for goal in goals(found, shares))
    return "\n".join([*parts, f"Goals\n{lines}\n"])


def _latency_rows(found: Sequence[Latency]) -> list[list[str]]:
    head = ["place, beside", "count", "p50", "p99", "x idle p50", "x idle p99"]
    rows = [[*head, "at a fair share", "frames ahead", "bulk MB/s", "of its rate alone"]]
    for one in found:
        idle = idle_of(found, one.place)
        p50_s, p99_s = one.quantile_s(0.5), one.quantile_s(0.99)
        p50_ratio = "-" if idle is None else f"{p50_s / idle.quantile_s(0.5):.2f}"
        p99_ratio = "-" if idle is None else f"{p99_s / idle.quantile_s(0.99):.2f}"
        has_bulk = one.beside.num_bulks > 0
        rows.append(
            [
                f"{one.place}, {one.beside.name}",
                str(len(one.taken_s)),
                f"{1e3 * p50_s:.1f}",
                f"{1e3 * p99_s:.1f}",
                p50_ratio,
                p99_ratio,
                f"{1e3 * one.fair_s:.0f}",
                f"{1e3 * one.frames_ahead_s:.0f}" if has_bulk else "-",
                f"{one.bulk_bytes_per_s / 1e6:.1f}" if has_bulk else "-",
                f"{one.bulk_bytes_per_s / one.link_bytes_per_s:.0%}" if has_bulk else "-",
            ]
        )
    return rows


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        padded = [f"{text:>{width}}" for text, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *padded]))
    return "\n".join(lines) + "\n"


_STYLES = (
    ("#1b1b1b", "-"),
    ("#1f6fb2", "--"),
    ("#c25b12", "-."),
    ("#4d8f3c", ":"),
    ("#7b4fa3", (0, (5, 1, 1, 1, 1, 1))),
)


def plot(found: Sequence[Latency], file: Path) -> None:
    """How many of the small transfers took at most so long: a panel for each place, a line for each
    condition, the goal upright. ImportError without matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    places = list(dict.fromkeys(one.place for one in found))
    figure = Figure(figsize=(4.6 * len(places), 4.2), layout="constrained")
    panels = figure.subplots(1, len(places), squeeze=False)[0]
    for panel, place in zip(panels, places, strict=True):
        here = [one for one in found if one.place == place]
        for one, (color, dashes) in zip(here, _STYLES, strict=False):
            taken_ms = [1e3 * seconds for seconds in sorted(one.taken_s)]
            shares = [100 * (rank + 1) / len(taken_ms) for rank in range(len(taken_ms))]
            label = one.beside.name if one.beside.name == IDLE else f"beside {one.beside.name}"
            panel.step(taken_ms, shares, where="post", color=color, linestyle=dashes, label=label)
        idle = idle_of(found, place)
        if idle is not None:
            most_ms = 1e3 * max(bound_s(idle, one) for one in here)
            panel.axvline(most_ms, color="#b3123a", linewidth=1.0, label="goal for p99")
        panel.set(xscale="log", ylim=(0, 102), xlabel="opened to complete, ms", title=place)
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("% of the transfers took at most so long")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(file, dpi=120)
