"""The result of a rehearsal: values for JSON, tables for a terminal, one file to hand on."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from msgspec import structs
from rich.console import Console
from rich.table import Table

from deploy.lab.pace.passes import Verdict
from deploy.lab.rehearse.columns import Column, Served
from deploy.lab.rehearse.deriving import Rehearsal
from deploy.table_style import TABLE_STYLE

_ROWS: Final = (
    ("throughput_rps", "requests/s answered (plan: at most)", "{:.3f}"),
    ("offered_rps", "requests/s offered", "{:.3f}"),
    ("completed", "answered", "{:,}"),
    ("refused", "refused", "{:,}"),
    ("failed", "failed", "{:,}"),
    ("ttft_mean_s", "TTFT mean, s (plan: without queues)", "{:.2f}"),
    ("ttft_p50_s", "TTFT P50, s", "{:.2f}"),
    ("ttft_p90_s", "TTFT P90, s", "{:.2f}"),
    ("ttft_p99_s", "TTFT P99, s", "{:.2f}"),
    ("tpot_mean_s", "TPOT mean, s", "{:.4f}"),
    ("remote_share", "share prefilled remotely", "{:.1%}"),
    ("link_gib", "over the link, GiB", "{:.2f}"),
    ("link_gbps", "over the link, mean Gbit/s", "{:.2f}"),
    ("cached_tokens", "prompt tokens found cached", "{:,}"),
    ("prediction_p50", "TTFT prediction, median error", "{:.1%}"),
    ("prediction_p90", "TTFT prediction, P90 error", "{:.1%}"),
)
PROVES: Final = (
    "Live is real vLLM whose passes take the time of a profile: scheduling, layer-wise streaming, "
    "overlap, transport and the plan are those of production. It says nothing of device copies, "
    "CUDA graphs or a real WAN."
)


@dataclass(frozen=True, kw_only=True)
class Played:
    """One region, played. `span_s` is how long requests arrived, real seconds."""

    rehearsal: Rehearsal
    plan: Column
    simulated: Column
    live: Column
    simulated_requests: Sequence[Served]
    live_requests: Sequence[Served]
    verdict: Verdict
    span_s: float

    @property
    def name(self) -> str:
        return self.rehearsal.name

    @property
    def columns(self) -> dict[str, Column]:
        return {"plan": self.plan, "simulated": self.simulated, "live": self.live}

    @property
    def is_good(self) -> bool:
        """Whether it kept its pace and every request was answered or refused."""
        return not self.verdict.reasons and not self.live.failed


def document_of(played: Sequence[Played], seed: int) -> dict[str, Any]:
    """All regions as plain values."""
    regions = {
        one.name: {
            **{name: column.document() for name, column in one.columns.items()},
            "pace": structs.asdict(one.verdict),
            "scale": asdict(one.rehearsal.scale),
            "num_prefill": dict(one.rehearsal.plan.num_prefill),
            "threshold_tokens": one.rehearsal.plan.threshold_tokens,
            "region": one.rehearsal.region,
        }
        for one in played
    }
    return {"seed": seed, "regions": regions, "compared": list(comparisons(played))}


def comparisons(played: Sequence[Played]) -> Iterator[dict[str, Any]]:
    """The first region against each other one: throughput over its, and the change of TTFT."""
    for other in played[1:]:
        for way, mine in played[0].columns.items():
            its = other.columns[way]
            found: dict[str, Any] = {"region": played[0].name, "against": other.name, "by": way}
            if mine.throughput_rps and its.throughput_rps:
                found["throughput_ratio"] = mine.throughput_rps / its.throughput_rps
            for name in ("ttft_mean_s", "ttft_p90_s"):
                before, after = getattr(its, name), getattr(mine, name)
                if before and after:
                    found[f"{name.removesuffix('_s')}_change"] = after / before - 1
            yield found


def lines(one: Played) -> list[list[str]]:
    """The table of a region: a label and a cell for each column."""
    columns = one.columns.values()
    found = []
    for key, label, form in _ROWS:
        values = [getattr(column, key) for column in columns]
        if any(value is not None for value in values):
            found.append([label, *("-" if v is None else form.format(v) for v in values)])
    routes = [column.routes for column in columns]
    for route in sorted({name for known in routes if known for name in known}):
        cells = ("-" if known is None else f"{known.get(route, 0):,}" for known in routes)
        found.append([f"  by {route}", *cells])
    return found


def heading(one: Played) -> str:
    """What was played, in one line."""
    plan, scale = one.rehearsal.plan, one.rehearsal.scale
    pd = plan.region.pd_clusters[0]
    num_prefill = round(plan.num_prefill[pd.name])
    parts = [f"{int(c.num_instances)} in {c.name}" for c in plan.region.prefill_clusters]
    parts.append(f"{num_prefill} + {pd.num_instances - num_prefill} in {pd.name}")
    told = f"{one.name}: instances {', '.join(parts)} (prefill + decode)"
    if plan.region.prefill_clusters:
        told += f"; threshold {plan.threshold_tokens or 0:,.0f} tokens"
    told += f"; a real token is {scale.tokens}, one of an answer {scale.output_tokens}"
    return told if scale.slowdown == 1 else f"{told}, times are {scale.slowdown:g} times as long"


def verdict_line(one: Played) -> str:
    """Whether the run counts, and why not."""
    found = one.verdict
    numbers = (
        f"{found.num_passes:,} passes, off by {found.off_p50:.2%} (P50) and "
        f"{found.off_p99:.2%} (P99), {found.late:.2%} late; machine {found.busy:.0%} busy"
    )
    if found.reasons:
        return f"VOID: {'; '.join(found.reasons)} ({numbers})"
    return f"pace kept: {numbers}"


def comparison_line(found: dict[str, Any]) -> str:
    parts = []
    if "throughput_ratio" in found:
        parts.append(f"{found['throughput_ratio']:.2f} times the requests/s")
    for key, label in (("ttft_mean_change", "mean"), ("ttft_p90_change", "P90")):
        if key in found:
            parts.append(f"TTFT {label} {found[key]:+.0%}")
    return f"{found['region']} against {found['against']}, {found['by']}: {', '.join(parts)}"


def print_played(console: Console, played: Sequence[Played]) -> None:
    """A table for each region, and how they compare."""
    for one in played:
        table = Table(**TABLE_STYLE)
        table.add_column("")
        for name in one.columns:
            table.add_column(name, justify="right")
        for line in lines(one):
            table.add_row(*line)
        console.print(heading(one), highlight=False, soft_wrap=True)
        console.print(table)
        style = "red" if one.verdict.reasons else ""
        console.print(verdict_line(one), style=style, highlight=False, soft_wrap=True)
    for found in comparisons(played):
        console.print(comparison_line(found), highlight=False, soft_wrap=True)


def write_report(path: Path, played: Sequence[Played], command: str, picture: str = "") -> None:
    """One file to hand on: Markdown, or HTML with `picture`, an SVG."""
    if path.suffix == ".md":
        path.write_text("\n".join(_markdown(played, command)) + "\n")
        return
    path.write_text("\n".join(_html(played, command, picture)) + "\n")


def _markdown(played: Sequence[Played], command: str) -> Iterator[str]:
    yield from ("# Rehearsal", "", f"`{command}`", "", PROVES, "")
    for one in played:
        yield from (f"## {one.name}", "", heading(one), "")
        yield f"| | {' | '.join(one.columns)} |"
        yield f"|---|{'---:|' * len(one.columns)}"
        for line in lines(one):
            yield f"| {' | '.join(line)} |"
        yield from ("", verdict_line(one), "")
    for found in comparisons(played):
        yield f"- {comparison_line(found)}"


_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "td,th{padding:.15rem .8rem;text-align:right}td:first-child{text-align:left}"
    "table{border-collapse:collapse}tr{border-bottom:1px solid #ddd}.void{color:#b3123a}"
)


def _html(played: Sequence[Played], command: str, picture: str) -> Iterator[str]:
    text = html.escape
    yield f"<!doctype html><meta charset=utf-8><title>Rehearsal</title><style>{_STYLE}</style>"
    yield f"<h1>Rehearsal</h1><p><code>{text(command)}</code></p><p>{text(PROVES)}</p>"
    for found in comparisons(played):
        yield f"<p>{text(comparison_line(found))}</p>"
    if picture:
        # Without the XML declaration, which belongs to a file of its own.
        yield picture[picture.index("<svg") :]
    for one in played:
        yield f"<h2>{text(one.name)}</h2><p>{text(heading(one))}</p><table><tr><th></th>"
        yield "".join(f"<th>{text(name)}</th>" for name in one.columns) + "</tr>"
        for line in lines(one):
            yield f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in line)}</tr>"
        mark = " class=void" if one.verdict.reasons else ""
        yield f"</table><p{mark}>{text(verdict_line(one))}</p>"
