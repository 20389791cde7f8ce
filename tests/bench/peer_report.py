"""What was measured of the transport and its peers: medians, goals, a table and a picture.

Knows no process and no clock. Ratios to a peer are medians of the ratios within each round, since
the machine's own speed changes from minute to minute.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer_end import KIB, MIB
from peers import Sample

RIVALS = ("mooncake", "mooncake default", "nixl write")
RAW = "raw x4"
OURS = "ours"
OURS_PLAIN = f"{OURS} no checksum"
"""Neither checksum nor TLS."""


@dataclass(slots=True)
class Measured:
    """Of one peer at one place. `samples` has one entry a round for each block size, None where the
    peer failed; `acked_us` those of all rounds; `idle` and `rss_mib` are (sender, receiver).
    """

    peer: str
    place: str
    samples: dict[int, list[Sample | None]] = field(default_factory=dict)
    acked_us: list[float] = field(default_factory=list)
    idle: tuple[float, float] | None = None
    rss_mib: tuple[float, float] | None = None
    is_verified: bool | None = None
    failures: list[str] = field(default_factory=list)

    def good(self, block_bytes: int) -> list[Sample]:
        return [sample for sample in self.samples.get(block_bytes, []) if sample is not None]

    def gbit_per_s(self, block_bytes: int) -> float | None:
        return median(sample.gbit_per_s for sample in self.good(block_bytes))

    def cpu_s_per_gib(self, block_bytes: int) -> float | None:
        return median(sample.cpu_s_per_gib for sample in self.good(block_bytes))

    def acked_percentile_us(self, percent: int) -> float | None:
        ordered = sorted(self.acked_us)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else None

    def as_json(self) -> dict[str, Any]:
        return {
            "peer": self.peer,
            "place": self.place,
            "cells": [self._cell_json(block_bytes) for block_bytes in self.samples],
            "acked_64kib_us": {
                f"p{percent}": _rounded(self.acked_percentile_us(percent), 1)
                for percent in (50, 90, 99)
            },
            "idle_cores": self.idle,
            "rss_mib": self.rss_mib,
            "verified": self.is_verified,
            "failures": self.failures,
        }

    def _cell_json(self, block_bytes: int) -> dict[str, Any]:
        good = self.good(block_bytes)
        return {
            "block_kib": block_bytes // KIB,
            "gbit_per_s": _rounded(self.gbit_per_s(block_bytes), 2),
            "cpu_s_per_gib": _rounded(self.cpu_s_per_gib(block_bytes), 3),
            "failed": len(self.samples[block_bytes]) - len(good),
            "runs": [
                {
                    "gbit_per_s": round(sample.gbit_per_s, 3),
                    "cpu_sender_s": round(sample.cpu_sender_s, 4),
                    "cpu_receiver_s": round(sample.cpu_receiver_s, 4),
                    "nbytes": sample.nbytes,
                }
                for sample in good
            ],
        }


@dataclass(frozen=True, slots=True)
class Goal:
    """`value` is asked to be at least (`at_least`) or at most `bound`; None: not measured."""

    what: str
    value: float | None
    bound: float
    at_least: bool = True

    @property
    def is_met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self) -> str:
        verdict = {True: "met", False: "NOT MET", None: "not measured"}[self.is_met]
        sign = ">=" if self.at_least else "<="
        value = "-" if self.value is None else f"{self.value:.3g}"
        return f"{self.what:<70} {value:>7}  {sign} {self.bound:g}  {verdict}"


def median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def goals(found: Sequence[Measured], place: str) -> list[Goal]:
    """What is asked of `OURS`, with what was found at this place."""
    by_peer = {measured.peer: measured for measured in found if measured.place == place}
    ours = by_peer.get(OURS)
    if ours is None:
        return []
    asked = []
    for block_kib, least in ((16, 2.0), (64, 2.0), (1024, 1.5)):
        for rival in (name for name in RIVALS if name in by_peer):
            what = f"{block_kib} KiB blocks, rate over {rival}'s"
            asked.append(Goal(what, rate_ratio(ours, by_peer[rival], block_kib * KIB), least))
    if "nixl read" in by_peer:
        ratio = rate_ratio(ours, by_peer["nixl read"], 64 * KIB)
        asked.append(Goal("64 KiB blocks, rate over nixl read's", ratio, 5.0))
    asked += _own_goals(ours)
    if (encrypted := by_peer.get(f"{OURS} tls")) is not None:
        for block in encrypted.samples:
            what = f"{block // KIB} KiB blocks under TLS, Gbit/s"
            asked.append(Goal(what, encrypted.gbit_per_s(block), 10.0))
    for name, least in ((OURS, 0.85), (f"{OURS} tls", 0.5)):
        for plain in (plain for plain in (OURS_PLAIN, RAW) if plain in by_peer):
            if name in by_peer:
                what = f"1 MiB blocks, bytes per CPU second: {name} over {plain}"
                asked.append(Goal(what, cpu_ratio(by_peer[plain], by_peer[name], MIB), least))
    return asked


def _own_goals(ours: Measured) -> list[Goal]:
    asked = [
        Goal(
            f"{block // KIB} KiB blocks, CPU s/GiB of both ends",
            ours.cpu_s_per_gib(block),
            0.6,
            at_least=False,
        )
        for block in ours.samples
    ]
    if ours.idle is not None:
        asked.append(Goal("cores used while idle, worse end", max(ours.idle), 0.01, at_least=False))
    if ours.rss_mib is not None:
        asked.append(Goal("RSS beyond the buffer, MiB", max(ours.rss_mib), 60.0, at_least=False))
    for percent, most_us in ((50, 150.0), (99, 500.0)):
        found_us = ours.acked_percentile_us(percent)
        asked.append(Goal(f"64 KiB acknowledged, p{percent} us", found_us, most_us, at_least=False))
    return asked


def rate_ratio(ours: Measured, theirs: Measured, block_bytes: int) -> float | None:
    return median(a.gbit_per_s / b.gbit_per_s for a, b in _pairs(ours, theirs, block_bytes))


def cpu_ratio(ours: Measured, theirs: Measured, block_bytes: int) -> float | None:
    """CPU seconds per byte of ours over theirs."""
    return median(a.cpu_s_per_gib / b.cpu_s_per_gib for a, b in _pairs(ours, theirs, block_bytes))


def _pairs(a: Measured, b: Measured, block_bytes: int) -> Iterable[tuple[Sample, Sample]]:
    """Samples of the same round."""
    rounds = zip(a.samples.get(block_bytes, []), b.samples.get(block_bytes, []), strict=False)
    return [(x, y) for x, y in rounds if x is not None and y is not None]


def table(found: Sequence[Measured], place: str) -> str:
    """Medians (ranges) in Gbit/s for each block size and the rest, a line a peer."""
    here = [measured for measured in found if measured.place == place]
    blocks = sorted({block for measured in here for block in measured.samples})
    heads = [f"{block // KIB} KiB" for block in blocks]
    rows = [
        ["Gbit/s, median (range)", *heads, "CPU s/GiB", "acked us", "idle", "RSS MiB", "failed"]
    ]
    for measured in here:
        cpus = [measured.cpu_s_per_gib(block) for block in blocks]
        rows.append(
            [
                measured.peer + ("" if measured.is_verified is not False else " UNVERIFIED"),
                *(_rate_words(measured.good(block)) for block in blocks),
                "/".join("-" if cpu is None else f"{cpu:.2f}" for cpu in cpus),
                _pair_words([measured.acked_percentile_us(p) for p in (50, 99)], "{:.0f}"),
                _pair_words(measured.idle or (), "{:.2f}"),
                _pair_words(measured.rss_mib or (), "{:.0f}"),
                str(len(measured.failures)),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )


def _rate_words(good: Sequence[Sample]) -> str:
    rates = sorted(sample.gbit_per_s for sample in good)
    if not rates:
        return "-"
    return f"{statistics.median(rates):.1f} ({rates[0]:.1f}-{rates[-1]:.1f})"


def _pair_words(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return "/".join(form.format(value) for value in known) or "-"


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def plot(found: Sequence[Measured], path: Path) -> None:
    """Rates with their ranges, and CPU, by block size: a row of panels for each place."""
    from matplotlib.figure import Figure

    places = list(dict.fromkeys(measured.place for measured in found))
    figure = Figure(figsize=(13, 4.5 * len(places)), layout="constrained")
    panels = figure.subplots(len(places), 2, squeeze=False)
    for row, place in zip(panels, places, strict=True):
        here = [measured for measured in found if measured.place == place]
        for index, measured in enumerate(here):
            _draw_peer(row, measured, index, len(here))
        row[0].set(title=f"{place}: rate, median and range", ylabel="Gbit/s")
        row[1].set(title=f"{place}: CPU of both ends", ylabel="s/GiB", ylim=(0, 5))
        row[1].legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=120)


def _draw_peer(row: Sequence[Any], measured: Measured, index: int, num: int) -> None:
    blocks = sorted(block for block in measured.samples if measured.good(block))
    places = [place + 0.85 * (index / num - 0.5) for place in range(len(blocks))]
    rates = [sorted(sample.gbit_per_s for sample in measured.good(block)) for block in blocks]
    middles = [statistics.median(found) for found in rates]
    ranges = [
        [middle - found[0] for middle, found in zip(middles, rates, strict=True)],
        [found[-1] - middle for middle, found in zip(middles, rates, strict=True)],
    ]
    look = {"color": f"C{index % 10}", "hatch": "" if index < 10 else "//", "width": 0.85 / num}
    row[0].bar(places, middles, yerr=ranges, ecolor="0.3", error_kw={"lw": 0.7}, **look)
    cpus = [measured.cpu_s_per_gib(block) or 0.0 for block in blocks]
    row[1].bar(places, cpus, label=measured.peer, **look)
    for panel in row:
        panel.set_xticks(range(len(blocks)), [f"{block // KIB} KiB" for block in blocks])
