"""The parts of docs/performance.md that come from raw results, a function for each bench.

Each takes the runs of its bench and gives Markdown, and a figure where it has one. What does not
depend on results is written by hand on the page.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from report_drawing import Figure, Look, Panel, Series
from report_raw import Raw, RawError

OURS: Final = "prfaas"
SYSTEMS: Final[Mapping[str, tuple[str, Look]]] = {
    OURS: ("PrfaaS, default routing", "ours"),
    "prfaas-remote": ("PrfaaS, all prompts remote", "third"),
    "prfaas-pd": ("PrfaaS as one PD cluster", "fourth"),
    "nixl": ("vLLM with NixlConnector", "second"),
    "plain": ("one plain engine, all cores", "limit"),
}
"""Name on the page and look of each that `bench_load` measures."""
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    text: str
    figure: Figure | None = None


def section(figure: Figure | None, before: Sequence[str], after: Sequence[str]) -> Section:
    """Paragraphs and tables, with the figure between them."""
    pictures = [f"![{figure.alt}](results/curves/{figure.name}.svg)"] if figure else []
    return Section("\n\n".join([*before, *pictures, *after]), figure)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int = 1) -> str:
    """A Markdown table; the first columns are texts, the others are numbers."""
    rule = ["---"] * num_texts + ["---:"] * (len(head) - num_texts)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def number(value: float | None, digits: int = 3) -> str:
    """With so many significant digits, without an exponent; "-" for what was not measured."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


def verdict(met: bool | None) -> str:
    return {True: "met", False: "*missed*", None: "-"}[met]


def only(raws: Sequence[Raw]) -> Any:
    """The results of the one run that the page shows of a bench; RawError."""
    if len(raws) != 1:
        raise RawError(f"the page shows one of these runs: {', '.join(raw.name for raw in raws)}")
    return raws[0].results


def not_measured(kept: Row) -> list[str]:
    return [f"Not measured: {name} ({why})." for name, why in kept.get("missing", {}).items()]


def paced(verdicts: Mapping[str, Row]) -> list[str]:
    """How engines of a bench with `--pace` kept their pace; nothing without any."""
    if not verdicts:
        return []
    keys = ("off_p50", "off_p99", "late", "busy")
    rows = [
        [name, number(one["num_passes"]), *(f"{one[key]:.2%}" for key in keys)]
        for name, one in verdicts.items()
    ]
    head = ["paced engines of", "passes", "off, P50", "off, P99", "late", "machine busy"]
    words = (
        "The engines took the time of the paper's H200 (those of a prefill cluster) and H20, a "
        "token stood\nfor 16. *Off* is how far a pass was from the time that it should take."
    )
    return [words, table(head, rows)]


def e2e(raws: Sequence[Raw]) -> Section:
    """A prompt alone: its TTFT over the prefill engine's own, and where the time goes."""
    kept, goal_gbps = only(raws), 1.0
    rows: list[list[str]] = []
    parts: dict[str, list[Row]] = {}
    for system, name in ((OURS, "PrfaaS"), ("nixl", "vLLM with NixlConnector")):
        for cell in sorted(kept["cells"], key=lambda cell: (cell["gbps"], cell["num_tokens"])):
            place = system, cell["gbps"], cell["num_tokens"]
            pairs = [
                one
                for one in kept["raw"]
                if (one["system"], one["gbps"], one["num_tokens"]) == place and not one["error"]
            ]
            if not pairs:
                continue
            has_goal = (system, cell["gbps"]) == (OURS, goal_gbps)
            if has_goal:
                parts[number(cell["num_tokens"], 4)] = [pair["parts"] for pair in pairs]
            ratio = cell[f"own_{system}_ratio"]
            was_met = ratio <= kept["own_ratio_goal"] if has_goal and ratio is not None else None
            cells = [name, verdict(was_met), number(cell["gbps"]), number(cell["num_tokens"], 4)]
            cells += [str(len(pairs)), number(cell[f"{system}_ttft_ms"], 4)]
            rows.append([*cells, number(cell[f"own_{system}_ms"], 4), number(ratio)])
    head = ["system", "goal", "link, Gbit/s", "tokens", "pairs", "TTFT, ms", "own TTFT, ms"]
    after = [table([*head, "ratio"], rows, 2), *_time_spent(parts)]
    return section(None, [], after + paced(kept.get("pace", {})))


def _time_spent(parts: Mapping[str, Sequence[Row]]) -> list[str]:
    """Medians of the parts of the gateway's records, a column for each length."""
    names = dict.fromkeys(name for all_of in parts.values() for one in all_of for name in one)
    rows = []
    for name in names:
        medians = (
            statistics.median(one.get(name, 0.0) for one in all_of) for all_of in parts.values()
        )
        title = name.removesuffix("_s").replace("_", " ")
        rows.append([title, *(number(1e3 * median) for median in medians)])
    head = ["part", *(f"{tokens} tokens" for tokens in parts)]
    return ["Where the time of PrfaaS goes, medians in ms:", table(head, rows)] if rows else []


def load(raws: Sequence[Raw]) -> Section:
    """TTFT and goodput over the rate of requests, system by system."""
    kept = only(raws)
    rows = load_rows(kept)
    curves = (
        ("ttft_p50_s", "TTFT P50, s", "y"),
        ("ttft_p99_s", "TTFT P99, s", "y"),
        ("tpot_p50_s", "time per output token P50, s", ""),
        ("goodput_rps", "requests/s within the SLO", ""),
    )
    panels = tuple(
        Panel("", "requests/s", label, _by_system(rows, key), logs) for key, label, logs in curves
    )
    alt = "Time to first token, time per output token and goodput over requests per second"
    columns = {
        "ttft_p50_s": "TTFT P50, s",
        "ttft_p90_s": "P90, s",
        "ttft_p99_s": "P99, s",
        "tpot_p50_s": "time per output token P50, s",
        "goodput_rps": "within the SLO, requests/s",
        "failed": "failed",
        "remote_share": "share prefilled remotely",
    }
    lines = [
        [SYSTEMS[row["system"]][0], *(number(row.get(key)) for key in ("request_rate", *columns))]
        for row in rows
    ]
    after = [table(["system", "requests/s", *columns.values()], lines)]
    if kept["goals"]:
        # As the bench judged them. Without the peer or the rate of a goal there is none.
        goals = [
            [
                *(one["what"], one["wanted"], verdict(one["met"])),
                *(number(one["request_rate"]), number(one["found"])),
            ]
            for one in kept["goals"]
        ]
        after.append(table(["goal", "wanted", "verdict", "requests/s", "found"], goals, 3))
    after += paced({SYSTEMS[name][0]: one for name, one in kept.get("pace", {}).items()})
    figure = Figure("load", alt, panels)
    return section(figure, _load_before(kept), after + not_measured(kept))


def _load_before(kept: Row) -> list[str]:
    """With which settings the systems were driven, and what each of them completes."""
    settings = ", ".join(
        f"{key} {'-'.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in kept["settings"].items()
    )
    many = "-".join(str(n) for n in sorted({row["concurrency"] for row in kept["capacity"]}))
    words = (
        "Real engines on the same cores, driven by `vllm bench serve` at fixed mean rates of "
        f"requests\n(`{settings}`). *Capacity* is what a system completes with {many} requests at "
        "a time."
    )
    found = {row["system"]: number(row.get("throughput_rps")) for row in kept["capacity"]}
    capacity = [[name, found[system]] for system, (name, _) in SYSTEMS.items() if system in found]
    return [words, table(["system", "capacity, requests/s"], capacity)]


def load_rows(kept: Row) -> list[Row]:
    """In the order of the systems, then by rate."""
    order = list(SYSTEMS)
    return sorted(kept["rows"], key=lambda row: (order.index(row["system"]), row["request_rate"]))


def _by_system(rows: Sequence[Row], key: str) -> tuple[Series, ...]:
    found = {
        system: tuple(
            (row["request_rate"], row[key])
            for row in rows
            if row["system"] == system and row.get(key) is not None
        )
        for system in SYSTEMS
    }
    return tuple(Series(*SYSTEMS[system], points) for system, points in found.items() if points)


def prediction(raws: Sequence[Raw]) -> Section:
    """Predicted against measured TTFT, by model, phase and route; of the last run of each model."""
    models = {one["model"]: one for raw in raws for one in raw.results}
    alt = "Predicted over measured time to first token, a point for each request"
    figure = Figure("prediction", alt, tuple(map(_predicted, models.values())), shares_y=True)
    rows = []
    for one in models.values():
        for row in one["rows"]:
            # Runs before `--pace` kept no verdict.
            was_met = row["median_error"] <= 0.15 and row["p90_error"] <= 0.40
            cells = [one["model"], row.get("phase", "-"), row["target"]]
            cells += [verdict(row.get("met", was_met)), str(row["requests"])]
            rows.append([*cells, f"{row['median_error']:.0%}", f"{row['p90_error']:.0%}"])
    head = ["model", "traffic", "route", "goal", "requests", "median error", "P90"]
    verdicts = {name: one["pace"] for name, one in models.items() if "pace" in one}
    return section(figure, [], [table(head, rows, 4), *paced(verdicts)])


def _predicted(one: Row) -> Panel:
    records = [
        record
        for record in one["records"]
        # The bench gives no phase to what it sends only to settle.
        if record.get("phase") != ""
        and record["predicted_ttft_s"]
        and record["ttft_s"]
        and not record["num_retries"]
    ]
    series = []
    looks: tuple[Look, ...] = ("ours", "first", "second", "third")
    for target, look in zip(sorted({record["target"] for record in records}), looks, strict=False):
        points = tuple(
            (record["ttft_s"], record["predicted_ttft_s"])
            for record in records
            if record["target"] == target
        )
        series.append(Series(f"route: {target}", look, points, "points"))
    if measured := [record["ttft_s"] for record in records]:
        ends = tuple((value, value) for value in (min(measured), max(measured)))
        series.append(Series("predicted = measured", "limit", ends, "bare"))
    axes = "measured TTFT, s", "predicted TTFT, s"
    return Panel(one["model"], *axes, tuple(series), "xy")


def rehearsal(raws: Sequence[Raw]) -> Section:
    """The case study on paced engines: live and simulated TTFT over load, beside the plan."""
    kept = raws[-1].results
    panels = tuple(
        Panel(label, "requests/s that arrive", label, _curves(kept, key))
        for key, label in (
            ("throughput_rps", "answered, requests/s"),
            ("ttft_p90_s", "TTFT, P90, s"),
        )
    )
    alt = "Throughput and P90 of the time to first token over load, live and simulated, by region"
    keys = ("throughput_rps", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s")
    rows = [
        [
            *(row["region"], number(row["live"]["offered_rps"]), way),
            *(number(row[way].get(key)) for key in keys),
            *(f"{row[way]['remote_share']:.0%}", number(row[way]["link_gbps"])),
        ]
        for row in kept["rows"]
        for way in ("plan", "simulated", "live")
    ]
    head = ["region", "requests/s", "by", "answered/s", "TTFT mean, s", "P50", "P90", "P99"]
    verdicts = {
        f"{row['region']}, {row['live']['offered_rps']:.2f}/s": row["pace"] for row in kept["rows"]
    }
    after = [table([*head, "remote", "Gbit/s"], rows, 3), *paced(verdicts)]
    return section(Figure("rehearsal", alt, panels), [], after)


def _curves(kept: Row, key: str) -> tuple[Series, ...]:
    most_s = 20.0  # a TTFT beyond it is not drawn
    looks: Mapping[str, Look] = {"PrfaaS-PD": "ours", "homogeneous": "first", "naive": "second"}
    series: list[Series] = []
    for name, look in looks.items():
        curve = [one for one in kept["curve"] if one["region"] == name and one[key] <= most_s]
        live = [row["live"] for row in kept["rows"] if row["region"] == name]
        simulated = tuple((one["rate"], one[key]) for one in curve)
        measured = tuple((one["offered_rps"], one[key]) for one in live)
        series += [Series(f"{name}, simulated", look, simulated, "bare")] if simulated else []
        series += [Series(f"{name}, live", look, measured, "points")] if measured else []
    return tuple(series)


def capacity(raws: Sequence[Raw]) -> Section:
    """What planner and simulator promised for a region, beside what the region then did."""
    kept = raws[-1].results
    units = {"capacity": ("rps", "requests/s"), "conversation": ("s", "s")}
    rows = []
    for row in kept["rows"]:
        suffix, unit = units[row["part"]]
        cells = [f"{row['name']}, {unit}", row.get("by", "an engine beside a busy one")]
        cells += [row.get("binding", "-"), verdict(row.get("met"))]
        cells += [number(row[f"{which}_{suffix}"]) for which in ("predicted", "measured")]
        rows.append([*cells, f"{row['error']:+.0%}" if "error" in row else "-"])
    head = ["what", "profile of", "limited by", "goal", "predicted", "measured", "error"]
    after = [table(head, rows, 4), *paced(kept.get("pace", {})), *not_measured(kept)]
    return section(None, [], after)


SECTIONS: Final[Mapping[str, Callable[[Sequence[Raw]], Section]]] = {
    "e2e": e2e,
    "load": load,
    "prediction": prediction,
    "rehearsal": rehearsal,
    "capacity": capacity,
}
"""By bench; the page has markers of the same names."""
