"""Predicted against measured time to first token, by model, phase and route."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from report_figures import Axis, Figure, Look, Panel, Section, Series, paced, table
from report_raw import Raw

_KEPT: Final = (
    "phase",
    "target",
    "num_prompt_tokens",
    "ttft_s",
    "predicted_ttft_s",
    "num_retries",
)
LOOKS: Final[tuple[Look, ...]] = ("ours", "first", "second", "third")

_INTRODUCTION: Final = """\
## Predicted time to first token

What the gateway predicted when it routed a request, against what followed, on a region of real
engines that started with nothing learnt. Every request is a point; on the line the prediction came
true. Goal: an error of at most {goals}, for each
route. `tests/bench/bench_prediction.py` says what the traffic of a row is."""
_GOALS: Final = "15% in the median and 40% at P90"
_PACED_GOALS: Final = f"10% in the median and 30% at P90, of the first requests {_GOALS}"


def section(raws: Sequence[Raw]) -> Section:
    """Of the last run of each model."""
    models = {one["model"]: one for raw in raws for one in raw.results}
    figure = Figure(
        "prediction",
        "Predicted over measured time to first token, a point for each request",
        tuple(_panel(one) for one in models.values()),
        min(2, len(models)),
        shares_y=True,
    )
    picture = f"![{figure.alt}](results/curves/{figure.name}.svg)"
    verdicts = {name: one["pace"] for name, one in models.items() if "pace" in one}
    introduction = _INTRODUCTION.format(goals=_PACED_GOALS if verdicts else _GOALS)
    parts = [introduction, picture, _table(list(models.values())), *paced(verdicts)]
    return Section("prediction", "\n\n".join(parts), (figure,))


def trimmed(results: Any) -> Any:
    """Of a request's record, which has kilobytes, what tells of its prediction."""
    return [
        one | {"records": [{key: record.get(key) for key in _KEPT} for record in one["records"]]}
        for one in results
    ]


def _panel(one: Mapping[str, Any]) -> Panel:
    records = [
        record
        for record in one["records"]
        # The bench gives no phase to what it sends only to settle.
        if record.get("phase") != ""
        and record["predicted_ttft_s"]
        and record["ttft_s"]
        and not record["num_retries"]
    ]
    targets = sorted({record["target"] for record in records})
    measured = [record["ttft_s"] for record in records]
    series = []
    for target, look in zip(targets, LOOKS, strict=False):
        points = tuple(
            (record["ttft_s"], record["predicted_ttft_s"])
            for record in records
            if record["target"] == target
        )
        series.append(Series(f"route: {target}", look, points, "points"))
    if measured:
        least, most = min(measured), max(measured)
        series.append(
            Series("predicted = measured", "limit", ((least, least), (most, most)), "bare")
        )
    return Panel(
        one["model"],
        Axis("measured TTFT, s", True),
        Axis("predicted TTFT, s", True),
        tuple(series),
    )


def _table(models: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for one in models:
        for row in one["rows"]:
            # Runs before `--pace` kept no verdict.
            was_met = row["median_error"] <= 0.15 and row["p90_error"] <= 0.40
            rows.append(
                [
                    one["model"],
                    # A bench of one kind of traffic has no phases.
                    row.get("phase", "-"),
                    row["target"],
                    "met" if row.get("met", was_met) else "*missed*",
                    str(row["requests"]),
                    f"{row['median_error']:.0%}",
                    f"{row['p90_error']:.0%}",
                ]
            )
    head = ["model", "traffic", "route", "goal", "requests", "median error", "P90"]
    return table(head, rows, 4)
