"""A prompt alone in a region: what its hand-off adds to the prefill engine's own TTFT."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from report_figures import Section, number, paced, table
from report_raw import Raw, RawError

OURS: Final = "prfaas"
SYSTEMS: Final[Mapping[str, str]] = {OURS: "PrfaaS", "nixl": "vLLM with NixlConnector"}
"""Name on the page of each that `bench_e2e` measures."""
GOAL_GBPS: Final = 1.0
"""The link that the goal names."""

_INTRODUCTION: Final = """\
## A lone prompt

One prompt at a time over an emulated link with a round trip of {rtt_ms:g} ms, and after each one
another of its length that the prefill engine answers by itself, asked at its own site. *Ratio* is
the TTFT less one round trip over that own TTFT, the median of the pairs. Goal at {gbps:g} Gbit/s:
at most {goal:g}.{cores}"""
_CORES: Final = """\
 The prefill engine's worker has a core to itself; the decode engine, gateway,
front, agents, link and client share the other. Engines are not paced: what a
hand-off adds here is CPU time of these processes."""


def section(raws: Sequence[Raw]) -> Section:
    """Of all runs together; where two measured a system at one rate and length, of the last."""
    rtts_ms = {raw.results["rtt_ms"] for raw in raws}
    if len(rtts_ms) > 1:
        raise RawError(f"{', '.join(raw.name for raw in raws)} were measured over other links")
    goal = raws[-1].results["own_ratio_goal"]
    cells = _cells(raws)
    verdicts = {name: one for raw in raws for name, one in raw.results.get("pace", {}).items()}
    # Paced engines share the cores.
    cores = "" if verdicts else _CORES
    parts = [
        _INTRODUCTION.format(rtt_ms=rtts_ms.pop(), gbps=GOAL_GBPS, goal=goal, cores=cores),
        _ratios(cells, goal),
    ]
    if measured := _parts(cells):
        parts += ["Where the time of PrfaaS goes, medians in ms:", measured]
    parts += paced(verdicts)
    return Section("e2e", "\n\n".join(parts))


_Cells = Mapping[tuple[str, float, int], tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]]


def _cells(raws: Sequence[Raw]) -> _Cells:
    """By system, rate and length: what the bench summed up, and its prompts that were answered."""
    found = {}
    for raw in raws:
        for cell in raw.results["cells"]:
            for system in SYSTEMS:
                key = system, cell["gbps"], cell["num_tokens"]
                pairs = [
                    one
                    for one in raw.results["raw"]
                    if (one["system"], one["gbps"], one["num_tokens"]) == key and not one["error"]
                ]
                if pairs:
                    found[key] = cell, pairs
    return dict(sorted(found.items(), key=lambda item: (list(SYSTEMS).index(item[0][0]), *item[0])))


def _ratios(cells: _Cells, goal: float) -> str:
    rows = []
    for (system, gbps, num_tokens), (cell, pairs) in cells.items():
        ratio = cell[f"own_{system}_ratio"]
        verdict = "-"
        if system == OURS and gbps == GOAL_GBPS and ratio is not None:
            verdict = "met" if ratio <= goal else "*missed*"
        rows.append(
            [
                SYSTEMS[system],
                verdict,
                number(gbps),
                number(num_tokens, 4),
                number(len(pairs)),
                number(cell[f"{system}_ttft_ms"], 4),
                number(cell[f"own_{system}_ms"], 4),
                number(ratio),
            ]
        )
    head = ["system", "goal", "link, Gbit/s", "tokens", "pairs", "TTFT, ms", "own TTFT, ms"]
    return table([*head, "ratio"], rows, 2)


def _parts(cells: _Cells) -> str:
    """The parts of the gateway's records over the goal's link, a column for each length."""
    ours = {
        num_tokens: [pair["parts"] for pair in pairs]
        for (system, gbps, num_tokens), (_, pairs) in cells.items()
        if (system, gbps) == (OURS, GOAL_GBPS)
    }
    names = dict.fromkeys(name for told in ours.values() for one in told for name in one)
    rows = [
        [
            name.removesuffix("_s").replace("_", " "),
            *(
                number(1e3 * statistics.median(one.get(name, 0.0) for one in told))
                for told in ours.values()
            ),
        ]
        for name in names
    ]
    head = ["part", *(f"{number(num_tokens, 4)} tokens" for num_tokens in ours)]
    return table(head, rows) if rows else ""
