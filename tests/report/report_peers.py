"""Where peers win: every number of theirs in the raw results that is better than ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import report_load
import report_wan
from report_figures import Section, number, table
from report_raw import Raw
from wan_report import LIMIT_PREFIX, OURS

_INTRODUCTION: Final = """\
## Where peers win

Comparisons in the raw results in which somebody else's number is better than that of PrfaaS.
iperf3, which acknowledges nothing, is among them on emulated links."""

_GATEWAY: Final = (
    ("requests_per_s", "gateway, requests/s", True),
    ("stream_requests_per_s", "gateway, streamed requests/s", True),
    ("p50_ms", "gateway, latency of a lone client P50, ms", False),
    ("cpu_ms_per_request", "gateway, CPU of a request, ms", False),
    ("cpu_us_per_event", "gateway, CPU of a streamed event, µs", False),
)
"""Key, words with the unit, whether more is better."""
_LOAD: Final = (
    ("ttft_p50_s", "TTFT P50, s", False),
    ("ttft_p99_s", "TTFT P99, s", False),
    ("tpot_p50_s", "time per output token P50, s", False),
    ("goodput_rps", "requests/s within the SLO", True),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One number of ours and one of a peer, in the same run."""

    what: str
    peer: str
    ours: float
    theirs: float
    is_more_better: bool

    @property
    def loss(self) -> float:
        """How many times better theirs is: above 1 they win."""
        better, worse = (
            (self.theirs, self.ours) if self.is_more_better else (self.ours, self.theirs)
        )
        return better / worse if worse else float("inf")


def section(raws: Mapping[str, Sequence[Raw]]) -> Section | None:
    """The largest differences first; None where nothing is compared with a peer."""
    found = [one for bench, compare in COMPARISONS.items() for one in compare(raws.get(bench, ()))]
    if not found:
        return None
    # What rounds to 1.0 is no difference.
    lost = sorted((one for one in found if one.loss >= 1.05), key=lambda one: -one.loss)
    counts = f"{len(lost)} of {len(found)} comparisons differ by 5% or more in a peer's favour."
    rows = [
        [one.what, one.peer, number(one.ours), number(one.theirs), f"{one.loss:.2f}"]
        for one in lost
    ]
    head = ["what", "peer", "PrfaaS", "peer's", "peer better by, times"]
    return Section("peers", "\n\n".join([_INTRODUCTION, counts, table(head, rows, 2)]))


def _wan(raws: Sequence[Raw]) -> Iterator[Compared]:
    results = report_wan.results_of(raws)
    for cell in results.cells("goodput"):
        ours = report_wan.goodput(results, cell, OURS)
        for kind, name, _ in report_wan.SYSTEMS:
            theirs = report_wan.goodput(results, cell, kind)
            if kind != OURS and ours is not None and theirs is not None:
                buffer = report_wan.buffer_words(cell)
                what = f"{cell.point}, {cell.congestion}, send buffer {buffer}: Gbit/s"
                yield Compared(what, "iperf3" if kind == LIMIT_PREFIX else name, ours, theirs, True)


def _transport(raws: Sequence[Raw]) -> Iterator[Compared]:
    """Against peers that acknowledge the same blocks; the other settings of ours are no peers."""
    for raw in raws:
        by_place: dict[str, dict[str, Any]] = {}
        for one in raw.results["measured"]:
            by_place.setdefault(one["place"], {})[one["peer"]] = one
        for place, peers in by_place.items():
            for name in filter(_is_rival, peers if OURS in peers else ()):
                yield from _blocks(place, name, peers[OURS], peers[name])


def _is_rival(name: str) -> bool:
    return name.split()[0] in ("mooncake", "nixl")


def _blocks(place: str, name: str, ours: Any, theirs: Any) -> Iterator[Compared]:
    by_size = {cell["block_kib"]: cell for cell in theirs["cells"]}
    for mine in ours["cells"]:
        other = by_size.get(mine["block_kib"], {})
        for key, unit, is_more_better in (
            ("gbit_per_s", "Gbit/s", True),
            ("cpu_s_per_gib", "CPU s/GiB of both ends", False),
        ):
            if mine.get(key) and other.get(key):
                what = f"{place}, blocks of {mine['block_kib']} KiB: {unit}"
                yield Compared(what, name, mine[key], other[key], is_more_better)
    for key in ("p50", "p99"):
        mine_us, other_us = ours["acked_64kib_us"][key], theirs["acked_64kib_us"][key]
        if mine_us and other_us:
            what = f"{place}, 64 KiB acknowledged, {key.upper()}: µs"
            yield Compared(what, name, mine_us, other_us, False)


def _gateway(raws: Sequence[Raw]) -> Iterator[Compared]:
    for raw in raws:
        ours, router = raw.results["gateway"], "vllm-router"
        # Without its wheel the bench measures the rest.
        if (theirs := raw.results.get(router)) is not None:
            for key, what, is_more_better in _GATEWAY:
                yield Compared(what, router, ours[key], theirs[key], is_more_better)


def _load(raws: Sequence[Raw]) -> Iterator[Compared]:
    by_place = {(row["system"], row["request_rate"]): row for row in report_load.rows_of(raws)}
    for (system, rate), theirs in by_place.items():
        ours = by_place.get((report_load.OURS, rate))
        if system not in report_load.BESIDE or ours is None:
            continue
        peer, _ = report_load.SYSTEMS[system]
        for key, words, is_more_better in _LOAD:
            if ours.get(key) is not None and theirs.get(key) is not None:
                what = f"{rate:g} requests/s: {words}"
                yield Compared(what, peer, ours[key], theirs[key], is_more_better)


COMPARISONS: Final[Mapping[str, Callable[[Sequence[Raw]], Iterator[Compared]]]] = {
    "wan": _wan,
    "transport": _transport,
    "gateway": _gateway,
    "load": _load,
}
"""By bench, how its raw results are compared with peers."""
