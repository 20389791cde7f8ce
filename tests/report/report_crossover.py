"""Moving a prompt's KVCache against computing it again, over link rate and prompt length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from report_figures import Axis, Figure, Look, Panel, Section, Series, number, table
from report_raw import Raw

SHOWN_GBPS: Final = (1.0, 10.0, 100.0)
PICTURED_TOKENS: Final = 32 * 1024
PICTURED_ENGINE: Final = "H200"
LOOKS: Final[tuple[Look, ...]] = ("ours", "first", "second", "third", "fourth")
MIB: Final = 2**20

_INTRODUCTION: Final = """\
## Transfer against recompute

`bench_crossover` computes. KVCache sizes and prefill times are the planner's. The goodput of a link
is the share of its rate that PrfaaS reached on emulated links, and at most what both ends moved on
loopback: {ceiling:.1f} Gbit/s. The full-attention model has the prefill times of the case study's
hybrid, so they differ in KVCache alone. *Needed* is the goodput at which moving takes as long as
computing again. *Left* is what remains of the transfer after the end of a prefill that sends its
layers while it runs. RTT {rtt_ms:g} ms."""


def section(raws: Sequence[Raw]) -> Section:
    """From the last run: it computes from others, so that parts of it would not fit together."""
    kept = raws[-1].results
    rates = [link["gbps"] for link in kept["links"]]
    introduction = _INTRODUCTION.format(ceiling=kept["ceiling_gbps"], rtt_ms=1e3 * kept["rtt_s"])
    figure = Figure(
        "crossover",
        "Left: goodput from which moving beats computing, over prompt length. "
        "Right: seconds to move a prompt over the link's rate",
        (_needed(kept), _times(kept, rates)),
        2,
    )
    picture = f"![{figure.alt}](results/curves/{figure.name}.svg)"
    text = "\n\n".join([introduction, picture, _table(kept, rates)])
    return Section("crossover", text, (figure,))


def _cases(kept: Any) -> list[tuple[Mapping[str, Any], Look]]:
    return list(zip(kept["cases"], LOOKS, strict=False))


def _needed(kept: Any) -> Panel:
    series = []
    tokens: list[int] = []
    for case, look in _cases(kept):
        tokens = [row["num_tokens"] for row in case["rows"]]
        known = [row for row in case["rows"] if row["needed_gbps"] is not None]
        points = tuple((float(row["num_tokens"]), row["needed_gbps"]) for row in known)
        series.append(Series(f"{case['model']}, {case['engine']}", look, points))
    limit = ((0.0, kept["ceiling_gbps"]),)
    series.append(Series("what both ends moved on loopback", "limit", limit, "level"))
    return Panel(
        "above its line, moving beats computing",
        Axis("prompt, tokens", True, tuple((float(n), _tokens(n)) for n in tokens)),
        Axis("goodput needed, Gbit/s", True),
        tuple(series),
    )


def _times(kept: Any, rates: Sequence[float]) -> Panel:
    series = []
    for case, look in _cases(kept):
        if case["engine"] != PICTURED_ENGINE:
            continue
        row = next(row for row in case["rows"] if row["num_tokens"] == PICTURED_TOKENS)
        moved = tuple(zip(rates, row["transfer_s"], strict=True))
        left = tuple(zip(rates, row["remaining_s"], strict=True))
        series.append(Series(f"{case['model']}: whole transfer", look, moved, "bare"))
        # Points, so that one look can have two lines.
        series.append(Series(f"{case['model']}: left after the prefill", look, left[::3], "points"))
        prefill = ((0.0, row["prefill_s"]),)
    series.append(Series(f"prefill on {PICTURED_ENGINE}", "limit", prefill, "level"))
    return Panel(
        f"a prompt of {_tokens(PICTURED_TOKENS)} tokens",
        Axis("link, Gbit/s", True),
        Axis("seconds", True),
        tuple(series),
    )


def _table(kept: Any, rates: Sequence[float]) -> str:
    shown = [min(range(len(rates)), key=lambda at: abs(rates[at] - gbps)) for gbps in SHOWN_GBPS]
    head = ["model, engine", "prompt", "KVCache, MiB", "prefill, s", "needed, Gbit/s"]
    head += [f"moved at {rates[at]:g} Gbit/s, s" for at in shown]
    head += [f"left at {rates[at]:g} Gbit/s, s" for at in shown]
    rows = []
    for case in kept["cases"]:
        for row in case["rows"][1::2]:
            cells = [f"{case['model']}, {case['engine']}", _tokens(row["num_tokens"])]
            values = [row["kv_bytes"] / MIB, row["prefill_s"], row["needed_gbps"]]
            values += [row["transfer_s"][at] for at in shown]
            values += [row["remaining_s"][at] for at in shown]
            rows.append([*cells, *map(number, values)])
    return table(head, rows, 2)


def _tokens(num: int) -> str:
    return f"{num // 1024}Ki"
