"""Where peers win: every number of theirs in the raw results that is better than ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from report_raw import Raw
from report_sections import OURS, SYSTEMS, load_rows, number, table
from wan_report import MOONCAKE, NIXL, Cell, Measured, Results
from wan_report import OURS as OUR_END

_GATEWAY: Final = {
    "requests_per_s": "gateway, requests/s",
    "stream_requests_per_s": "gateway, streamed requests/s",
    "p50_ms": "gateway, latency of a lone client P50, ms",
    "cpu_ms_per_request": "gateway, CPU of a request, ms",
    "cpu_us_per_event": "gateway, CPU of a streamed event, µs",
}
_LOAD: Final = {
    "ttft_p50_s": "TTFT P50, s",
    "ttft_p99_s": "TTFT P99, s",
    "tpot_p50_s": "time per output token P50, s",
    "goodput_rps": "requests/s within the SLO",
}
_BLOCKS: Final = {"gbit_per_s": "Gbit/s", "cpu_s_per_gib": "CPU s/GiB of both ends"}
_LESS_IS_BETTER: Final = ("p50_ms", "cpu_", "ttft_", "tpot_", "acked")


class Compared(NamedTuple):
    """One number of ours and one of a peer, in the same run. `key`: in the raw results."""

    key: str
    what: str
    peer: str
    ours: float | None
    theirs: float | None

    @property
    def loss(self) -> float:
        """How many times better theirs is: above 1 they win. 0: one of them was not measured."""
        better, worse = self.theirs, self.ours
        if self.key.startswith(_LESS_IS_BETTER):
            better, worse = worse, better
        if better is None or worse is None:
            return 0.0
        return better / worse if worse else float("inf")


def peers(raws: Mapping[str, Sequence[Raw]]) -> str:
    """The largest differences first."""
    benches = {"wan": _wan, "transport": _transport, "gateway": _gateway, "load": _load}
    all_of = [one for bench, compare in benches.items() for one in compare(raws.get(bench, ()))]
    found = [one for one in all_of if one.ours is not None and one.theirs is not None]
    # What rounds to 1.0 is no difference.
    lost = sorted((one for one in found if one.loss >= 1.05), key=lambda one: -one.loss)
    counts = f"{len(lost)} of {len(found)} comparisons differ by 5% or more in a peer's favour."
    rows = [
        [one.what, one.peer, number(one.ours), number(one.theirs), f"{one.loss:.2f}"]
        for one in lost
    ]
    head = ["what", "peer", "PrfaaS", "peer's", "peer better by, times"]
    return f"{counts}\n\n{table(head, rows, 2)}"


def _wan(raws: Sequence[Raw]) -> Iterator[Compared]:
    """On each path, against the best streams and the best setting of each peer."""
    results = Results(
        Measured(
            **{key: one[key] for key in ("peer", "round_number", "nbytes", "seconds", "error")},
            cell=Cell(**one["cell"]),
        )
        for raw in raws
        for one in raw.results["raw"]
    )
    for cell in results.cells("goodput"):
        ours = results.best_gbit_per_s(cell, OUR_END)
        buffer = "default" if cell.wmem_mib is None else f"{cell.wmem_mib} MiB"
        what = f"{cell.point}, {cell.congestion}, send buffer {buffer}: Gbit/s"
        yield Compared("gbit", what, "iperf3", ours, results.limit_gbit_per_s(cell))
        for kind, name in ((MOONCAKE, "Mooncake"), (NIXL, "NIXL, best")):
            yield Compared("gbit", what, name, ours, results.best_gbit_per_s(cell, kind))


def _transport(raws: Sequence[Raw]) -> Iterator[Compared]:
    """Against peers that acknowledge the same blocks; the other settings of ours are no peers."""
    for raw in raws:
        measured = raw.results["measured"]
        ours_at = {one["place"]: one for one in measured if one["peer"] == OUR_END}
        for theirs in measured:
            place, peer = theirs["place"], theirs["peer"]
            if place not in ours_at or peer.split()[0] not in (MOONCAKE, NIXL):
                continue
            by_size = {cell["block_kib"]: cell for cell in theirs["cells"]}
            for mine in ours_at[place]["cells"]:
                other = by_size.get(mine["block_kib"], {})
                for key, unit in _BLOCKS.items():
                    what = f"{place}, blocks of {mine['block_kib']} KiB: {unit}"
                    yield Compared(key, what, peer, mine.get(key), other.get(key))
            for key in ("p50", "p99"):
                acked = [end["acked_64kib_us"][key] for end in (ours_at[place], theirs)]
                what = f"{place}, 64 KiB acknowledged, {key.upper()}: µs"
                yield Compared("acked", what, peer, *acked)


def _gateway(raws: Sequence[Raw]) -> Iterator[Compared]:
    for raw in raws:
        ours, router = raw.results["gateway"], "vllm-router"
        # Without its wheel the bench measures the rest.
        theirs = raw.results.get(router, {})
        for key, what in _GATEWAY.items():
            yield Compared(key, what, router, ours[key], theirs.get(key))


def _load(raws: Sequence[Raw]) -> Iterator[Compared]:
    for raw in raws:
        rows = load_rows(raw.results)
        ours = {row["request_rate"]: row for row in rows if row["system"] == OURS}
        for theirs in rows:
            rate = theirs["request_rate"]
            if theirs["system"] in ("prfaas-pd", "nixl", "plain") and rate in ours:
                peer, _ = SYSTEMS[theirs["system"]]
                for key, words in _LOAD.items():
                    what = f"{rate:g} requests/s: {words}"
                    yield Compared(key, what, peer, ours[rate].get(key), theirs.get(key))
