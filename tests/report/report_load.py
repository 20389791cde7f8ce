"""Load curves: time to first token and goodput over the rate of requests, system by system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from report_figures import Axis, Figure, Look, Panel, Section, Series, number, paced, table
from report_raw import Raw, RawError

SYSTEMS: Final[Mapping[str, tuple[str, Look]]] = {
    "prfaas": ("PrfaaS, default routing", "ours"),
    "prfaas-remote": ("PrfaaS, all prompts remote", "third"),
    "prfaas-pd": ("PrfaaS as one PD cluster", "fourth"),
    "nixl": ("vLLM with NixlConnector", "second"),
    "plain": ("one plain engine, all cores", "limit"),
}
"""Name on the page and look of each that `bench_load` measures."""
OURS: Final = "prfaas"
BESIDE: Final = ("prfaas-pd", "nixl", "plain")
"""What somebody would run instead."""

CURVES: Final[tuple[tuple[str, str, bool], ...]] = (
    ("ttft_p50_s", "TTFT P50, s", True),
    ("ttft_p99_s", "TTFT P99, s", True),
    ("tpot_p50_s", "time per output token P50, s", False),
    ("goodput_rps", "requests/s within the SLO", False),
)
"""Key in the raw results, label with its unit, whether its axis is logarithmic."""

_INTRODUCTION: Final = """\
## Under load

Real engines on the same cores, driven by `vllm bench serve` at fixed mean rates of requests
(`{settings}`). *Capacity* is what a system completes with {many} requests at a time."""

_UNPACED: Final = """ These
engines are not paced: all of a system shares the threads of one core, so this compares what systems
cost in CPU. *The case study, rehearsed* shows what a prefill cluster gains when engines take the
time of GPUs."""


def section(raws: Sequence[Raw]) -> Section:
    """Of all runs together; where two measured a system at one rate, of the last."""
    rows = rows_of(raws)
    figure = Figure(
        "load",
        "Time to first token, time per output token and goodput over requests per second",
        tuple(_panel(rows, *curve) for curve in CURVES),
        2,
    )
    picture = f"![{figure.alt}](results/curves/{figure.name}.svg)"
    verdicts = {name: one for raw in raws for name, one in raw.results.get("pace", {}).items()}
    introduction = _introduction(raws) + ("" if verdicts else _UNPACED)
    parts = [introduction, _capacity(raws), picture, _table(rows)]
    # Without the peer or the rate of a goal there is none to judge.
    if any(raw.results["goals"] for raw in raws):
        parts.append(_goals(raws))
    missing = {name: why for raw in raws for name, why in raw.results.get("missing", {}).items()}
    lines = [f"Not measured: {name} ({why})." for name, why in missing.items()]
    parts += paced({SYSTEMS[name][0]: one for name, one in verdicts.items()})
    return Section("load", "\n\n".join([*parts, *lines]), (figure,))


def _introduction(raws: Sequence[Raw]) -> str:
    """Settings are those of all runs: rows of others would not fit beside each other. RawError."""
    kept = [raw.results["settings"] for raw in raws]
    if any(settings != kept[0] for settings in kept):
        raise RawError(f"{', '.join(raw.name for raw in raws)} were measured with other settings")
    words = ", ".join(f"{key} {_words(value)}" for key, value in kept[0].items())
    many = sorted({row["concurrency"] for raw in raws for row in raw.results["capacity"]})
    return _INTRODUCTION.format(settings=words, many=_words(many))


def _words(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _capacity(raws: Sequence[Raw]) -> str:
    found = {row["system"]: row for raw in raws for row in raw.results["capacity"]}
    lines = [
        [name, number(found[system].get("throughput_rps"))]
        for system, (name, _) in SYSTEMS.items()
        if system in found
    ]
    return table(["system", "capacity, requests/s"], lines)


def _goals(raws: Sequence[Raw]) -> str:
    """Each as the bench judged it."""
    lines = [
        [
            goal["what"],
            goal["wanted"],
            "met" if goal["met"] else "*missed*",
            number(goal["request_rate"]),
            number(goal["found"]),
        ]
        for raw in raws
        for goal in raw.results["goals"]
    ]
    return table(["goal", "wanted", "verdict", "requests/s", "found"], lines, 3)


def rows_of(raws: Sequence[Raw]) -> list[Mapping[str, Any]]:
    """By system in the order of `SYSTEMS`, then by rate; RawError for a system not in it."""
    kept = [row for raw in raws for row in raw.results["rows"]]
    if strange := {row["system"] for row in kept} - SYSTEMS.keys():
        raise RawError(f"{raws[-1].name}: the report knows no system {', '.join(sorted(strange))}")
    found = {(row["system"], row["request_rate"]): row for row in kept}
    order = list(SYSTEMS)
    return sorted(found.values(), key=lambda row: (order.index(row["system"]), row["request_rate"]))


def _panel(rows: Sequence[Mapping[str, Any]], key: str, label: str, is_log: bool) -> Panel:
    series = []
    for system, (name, look) in SYSTEMS.items():
        pairs = [(row["request_rate"], row.get(key)) for row in rows if row["system"] == system]
        points = tuple((rate, value) for rate, value in pairs if value is not None)
        if points:
            series.append(Series(name, look, points))
    return Panel("", Axis("requests/s"), Axis(label, is_log), tuple(series))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = (
        ("ttft_p50_s", "TTFT P50, s"),
        ("ttft_p90_s", "P90, s"),
        ("ttft_p99_s", "P99, s"),
        ("tpot_p50_s", "time per output token P50, s"),
        ("goodput_rps", "within the SLO, requests/s"),
        ("failed", "failed"),
        ("remote_share", "share prefilled remotely"),
    )
    lines = [
        [
            SYSTEMS[row["system"]][0],
            number(row["request_rate"]),
            *(number(row.get(key)) for key, _ in columns),
        ]
        for row in rows
    ]
    return table(["system", "requests/s", *(label for _, label in columns)], lines)
