"""The result of a simulation as plain values, and as a table. Keys have their units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from deploy.table_style import TABLE_STYLE
from kvmanager.config_files.units import GBIT_PER_S
from scheduler.replay.jobs import Fate
from scheduler.replay.results import Outcome, Percentiles

_ROWS: Final = (
    ("offered_rps", "requests/s offered", "{:.3f}"),
    ("goodput_rps", "requests/s within the objective", "{:.3f}"),
    ("good_share", "  share of all", "{:.1%}"),
    ("refused", "refused before prefill", "{:,}"),
    ("refused_late", "refused after prefill", "{:,}"),
    ("fell_back", "KVCache too late, prefilled at home", "{:,}"),
    ("lost", "lost", "{:,}"),
    ("wasted_prefill_share", "prefill time wasted", "{:.2%}"),
    ("remote_share", "share prefilled remotely", "{:.1%}"),
    ("one_engine_share", "share served by one engine", "{:.1%}"),
    ("cached_tokens", "tokens found cached", "{:,}"),
    ("spilled_share", "share decoded away from home", "{:.1%}"),
    ("ttft_mean_s", "TTFT mean, s", "{:.2f}"),
    ("ttft_p50_s", "TTFT P50, s", "{:.2f}"),
    ("ttft_p90_s", "TTFT P90, s", "{:.2f}"),
    ("ttft_p99_s", "TTFT P99, s", "{:.2f}"),
    ("encode_mean_s", "  of it delay by images, mean, s", "{:.3f}"),
    ("images_encoded_apart", "images encoded apart", "{:,}"),
    ("images_found", "images found encoded", "{:,}"),
    ("images_left", "images left to the prefill", "{:,}"),
    ("tbt_p50_ms", "TBT P50, ms", "{:.1f}"),
    ("tbt_p99_ms", "TBT P99, ms", "{:.1f}"),
    ("egress_gbps", "egress, Gbit/s", "{:.2f}"),
    ("prediction_error", "TTFT prediction, median error", "{:.1%}"),
    ("role_changes", "role changes", "{}"),
    ("late_samples_share", "oldest transfer over 2x its time", "{:.2%}"),
)


def document_of(outcome: Outcome, from_s: float = 0.0) -> dict[str, Any]:
    """One policy's numbers. Requests before `from_s` are the warm-up and do not count."""
    found = outcome.summary(from_s)
    late = outcome.lateness
    sent = sum(outcome.egress_bytes.values())
    return {
        "requests": found.num_requests,
        "offered_rps": found.offered_rps,
        "goodput_rps": found.goodput_rps,
        "good_share": found.good_share,
        "done": found.num_done,
        "refused": found.num_refused,
        "refused_late": found.num_refused_late,
        "fell_back": found.num_fell_back,
        "lost": found.num_lost,
        "wasted_prefill_share": outcome.wasted_share,
        "remote_share": found.num_remote / max(1, found.num_requests),
        **_places(outcome, from_s),
        **_seconds("ttft", found.ttft),
        "tbt_p50_ms": _known(found.tbt.p50_s * 1000),
        "tbt_p90_ms": _known(found.tbt.p90_s * 1000),
        "tbt_p99_ms": _known(found.tbt.p99_s * 1000),
        "egress_bytes": dict(outcome.egress_bytes),
        "egress_gbps": sent / max(1e-9, outcome.span_s) / GBIT_PER_S,
        "prediction_error": _known(found.prediction_error),
        "role_changes": [
            {"at_s": change.at_s, "instance": change.instance, "to": change.to_role}
            for change in outcome.role_changes
        ],
        "rebalancing": list(outcome.rebalances),
        "transfers": {
            "samples": late.num_seen,
            "late_samples": late.num_late,
            "late_foreseeable": late.num_foreseeable,
            "worst_ratio": late.worst,
        },
        "late_samples_share": late.num_late / late.num_seen if late.num_seen else None,
        **_homes(outcome, from_s),
        **_images(outcome, from_s),
    }


def _places(outcome: Outcome, from_s: float) -> dict[str, Any]:
    """Which requests one engine served, and what was found cached where they were prefilled."""
    served = [
        job for job in outcome.jobs if job.arrival_s >= from_s and job.fate is not Fate.REFUSED
    ]
    return {
        "one_engine_share": sum(job.is_whole for job in served) / max(1, len(served)),
        "cached_tokens": sum(job.cached_tokens for job in served),
    }


def _homes(outcome: Outcome, from_s: float) -> dict[str, Any]:
    """What became of the requests of each home; nothing with one PD cluster."""
    if len(outcome.pd_names) < 2:
        return {}
    jobs = [job for job in outcome.jobs if job.arrival_s >= from_s]
    homes: list[dict[str, Any]] = []
    for place, name in enumerate(outcome.pd_names):
        mine = [job for job in jobs if job.home == place]
        ttft_s = outcome.ttft_s[[job.index for job in mine if job.fate is Fate.DONE]]
        homes.append(
            {
                "home": name,
                "requests": len(mine),
                "done": len(ttft_s),
                "spilled": sum(job.pd != place for job in mine),
                **_seconds("ttft", Percentiles.of(ttft_s)),
            }
        )
    spilled = sum(row["spilled"] for row in homes) / max(1, len(jobs))
    return {"spilled_share": spilled, "homes": homes}


def _images(outcome: Outcome, from_s: float) -> dict[str, Any]:
    """What became of the media of requests that were served; nothing where none had any."""
    jobs = [
        job
        for job in outcome.jobs
        if job.media and job.arrival_s >= from_s and job.fate is Fate.DONE
    ]
    if not jobs:
        return {}
    apart, left = sum(job.media_apart for job in jobs), sum(job.media_left for job in jobs)
    return {
        "images_encoded_apart": apart,
        "images_left": left,
        "images_found": sum(len(job.media) for job in jobs) - apart - left,
        "encode_mean_s": sum(job.encode_s for job in jobs) / len(jobs),
    }


def requests_of(outcome: Outcome) -> list[dict[str, Any]]:
    """Each request in order of arrival, what was decided and what became of it, for JSON."""
    return [
        {
            "arrival_s": job.arrival_s,
            "prompt_tokens": job.num_tokens,
            **job.decided._asdict(),
            "fell_back": job.fell_back,
            "fate": job.fate.name.lower(),
            "ttft_s": _known(ttft_s),
        }
        for job, ttft_s in zip(outcome.jobs, outcome.ttft_s.tolist(), strict=True)
    ]


def series_of(outcome: Outcome) -> dict[str, list[float]]:
    """The state of the region over time, for JSON."""
    return {"at_s": list(outcome.series.at_s), **outcome.series.values}


def print_outcomes(console: Console, documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table with a column for each policy."""
    table = Table(**TABLE_STYLE)
    table.add_column("")
    for name in documents:
        table.add_column(name, justify="right")
    for key, label, form in _ROWS:
        values = [document.get(key) for document in documents.values()]
        if any(_is_told(key, value) for value in values):
            table.add_row(label, *(_text(form, value) for value in values))
    console.print(table)
    for name, document in documents.items():
        for home in document.get("homes", ()):
            console.print(
                f"{name}: {home['home']}: {home['requests']:,} requests, {home['spilled']:,} "
                f"decoded elsewhere, TTFT P90 {_text('{:.2f}', home['ttft_p90_s'])} s",
                highlight=False,
            )
        for change in document["role_changes"]:
            console.print(
                f"{name}: {change['at_s']:.0f} s {change['instance']} now {change['to']}",
                highlight=False,
            )


def _is_told(key: str, value: Any) -> bool:
    """Whether a row is shown. Counts of what never happened are left out."""
    always = ("offered_rps", "goodput_rps", "good_share")
    return bool(value) or key in always


def _text(form: str, value: Any) -> str:
    if value is None:
        return "-"
    return form.format(len(value) if isinstance(value, Sequence) else value)


def _seconds(name: str, found: Percentiles) -> dict[str, float | None]:
    return {
        f"{name}_{part}": _known(getattr(found, part))
        for part in ("mean_s", "p50_s", "p90_s", "p99_s")
    }


def _known(value: float) -> float | None:
    # JSON has neither infinity nor NaN.
    return value if math.isfinite(value) else None
