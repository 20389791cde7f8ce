"""The case study on paced engines: live and simulated TTFT over load, beside the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from report_figures import Axis, Figure, Look, Panel, Section, Series, number, paced, table
from report_raw import Raw

_INTRODUCTION: Final = """\
## The case study, rehearsed

`prfaas rehearse` played the case study of the paper at the size of one machine, 2 H200 and 4 H20
instances and half of the link, on real engines at the pace of these GPUs, against 6 H20 alone
(homogeneous) and all prefill on the H200 (naive). All regions got the same requests. Lines are
simulated, points are live."""
_LOOKS: Final[Mapping[str, Look]] = {"PrfaaS-PD": "ours", "homogeneous": "first", "naive": "second"}
_MOST_S: Final = 20.0
"""The highest TTFT that is drawn."""
_ROWS: Final = ("throughput_rps", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s")


def section(raws: Sequence[Raw]) -> Section:
    """Of the last run, which has the rows of all its parts."""
    kept = raws[-1].results
    figure = Figure(
        "rehearsal",
        "Throughput and P90 of the time to first token over load, live and simulated, by region",
        (
            _panel(kept, "throughput_rps", "answered, requests/s"),
            _panel(kept, "ttft_p90_s", "TTFT, P90, s"),
        ),
        2,
    )
    picture = f"![{figure.alt}](results/curves/{figure.name}.svg)"
    head = ["region", "requests/s", "by", "answered/s", "TTFT mean, s", "P50", "P90", "P99"]
    head += ["remote", "Gbit/s"]
    verdicts = {_title(row): row["pace"] for row in kept["rows"]}
    parts = [_INTRODUCTION, picture, table(head, _cells(kept["rows"]), 3), *paced(verdicts)]
    return Section("rehearsal", "\n\n".join(parts), (figure,))


def _title(row: Mapping[str, Any]) -> str:
    return f"{row['region']}, {row['live']['offered_rps']:.2f}/s"


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    found = []
    for row in rows:
        for way in ("plan", "simulated", "live"):
            one = row[way]
            cells = [row["region"], number(row["live"]["offered_rps"]), way]
            cells += [number(one.get(key)) for key in _ROWS]
            found.append([*cells, f"{one['remote_share']:.0%}", number(one["link_gbps"])])
    return found


def _panel(kept: Mapping[str, Any], key: str, label: str) -> Panel:
    series = []
    for name, look in _LOOKS.items():
        curve = [one for one in kept["curve"] if one["region"] == name]
        drawn = tuple((one["rate"], one[key]) for one in curve if one[key] <= _MOST_S)
        live = tuple(
            (row["live"]["offered_rps"], row["live"][key])
            for row in kept["rows"]
            if row["region"] == name
        )
        if drawn:
            series.append(Series(f"{name}, simulated", look, drawn, "bare"))
        if live:
            series.append(Series(f"{name}, live", look, live, "points"))
    x = Axis("requests/s that arrive")
    return Panel(label, x, Axis(label), tuple(series))
