"""Pictures of a plan: throughput over threshold, split and link rate; first tokens over load.

Lines differ in dashes and marks as well as in colour, so that they can be told apart in grey. It
needs matplotlib (extra `plan`).
"""

from __future__ import annotations

import io
import textwrap
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.console import Console

from deploy.plan.solve.solving import Solution, binding_words, without_prefill_clusters
from kvmanager.config_files.units import GBIT_PER_S
from scheduler.planning.plan import Plan
from scheduler.planning.solve import best_plan
from scheduler.planning.threshold_search import search_thresholds, threshold_grid
from scheduler.planning.throughput import Mode

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#1b1b1b", "linestyle": "-", "linewidth": 2.2},
    {"color": "#c25b12", "linestyle": "--", "linewidth": 1.6},
    {"color": "#1f6fb2", "linestyle": "-.", "linewidth": 1.6},
    {"color": "#4d8f3c", "linestyle": ":", "linewidth": 2.0},
)
_BEST: dict[str, Any] = {
    "color": "#b3123a",
    "marker": "*",
    "markersize": 14,
    "linestyle": "none",
    "zorder": 5,
}
TITLE_CHARACTERS = 100
_LINK_POINTS = 25


def write_plots(path: Path, solution: Solution) -> None:
    """Write the pictures as .png or .svg, or as one .html page with them and the numbers."""
    with plot_style():
        figure = draw(solution)
        if path.suffix == ".html":
            path.write_text(_page(figure, solution), encoding="utf-8")
        else:
            figure.savefig(path, dpi=130)


def plot_style() -> AbstractContextManager[None]:
    """The style in which the planner's pictures are drawn."""
    return mpl.rc_context(
        {"font.size": 9, "svg.fonttype": "none", "axes.grid": True, "legend.framealpha": 1.0}
    )


def draw(solution: Solution) -> Figure:
    """Four panels for a pair of clusters, three if no single threshold describes the plan."""
    plan = solution.plan
    threshold_tokens = plan.threshold_tokens
    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2).ravel()
    if threshold_tokens is not None and plan.region.links:
        _threshold_panel(axes[0], plan, threshold_tokens)
        _split_panel(axes[1], plan, threshold_tokens)
    else:
        _parts_panel(axes[0], solution)
        _lengths_panel(axes[1], plan)
    if plan.region.links:
        _link_panel(axes[2], plan)
    else:
        axes[2].set_axis_off()
        axes[2].text(0.5, 0.5, "no link in this plan", ha="center")
    _load_panel(axes[3], solution)
    figure.suptitle(textwrap.fill(binding_words(plan), TITLE_CHARACTERS))
    return figure


def _threshold_panel(axes: Axes, plan: Plan, threshold_tokens: float) -> None:
    region = plan.region
    pd = region.pd_clusters[0]
    grid = threshold_grid(region, 400)
    num_prefill = plan.num_prefill[pd.name]
    found = search_thresholds(region, Mode.EXACT, grid, [num_prefill])
    share = found.split.offload_fraction
    # At the ends of the grid one side has no requests, and so no limit.
    with np.errstate(divide="ignore", invalid="ignore"):
        remote = found.prefill_cluster_rps / share
        local = found.pd_prefill_rps[:, 0] / (1 - share)
    top = 2.2 * float(found.system_rps.max())
    for values, label, style in zip(
        (found.system_rps[:, 0], remote, local, np.full(len(grid), found.pd_decode_rps[0])),
        ("region", "prefill cluster and link", "local prefill", "decode"),
        _STYLES,
        strict=True,
    ):
        axes.plot(grid, np.where(values <= 2 * top, values, np.nan), label=label, **style)
    axes.plot(
        [threshold_tokens],
        [plan.system_rps(Mode.EXACT)],
        label=f"best: {threshold_tokens:,.0f} tokens",
        **_BEST,
    )
    axes.set(
        xscale="log",
        xlim=(max(region.traffic.lengths.min_tokens, 1), region.traffic.lengths.max_tokens),
        ylim=(0, top),
        xlabel="threshold t, tokens (longer prompts are offloaded)",
        ylabel="highest rate, requests/s",
        title=f"over the threshold ({num_prefill:g} of {pd.num_instances} local instances prefill)",
    )
    axes.xaxis.set_major_formatter(FuncFormatter(_tokens))
    axes.legend(loc="upper right")


def _split_panel(axes: Axes, plan: Plan, threshold_tokens: float) -> None:
    pd = plan.region.pd_clusters[0]
    columns = np.arange(pd.num_instances)
    fixed = search_thresholds(plan.region, Mode.EXACT, [threshold_tokens], columns)
    every = search_thresholds(plan.region, Mode.EXACT, threshold_grid(plan.region), columns)
    axes.plot(
        columns,
        every.system_rps.max(axis=0),
        label="best threshold for each",
        marker="o",
        **_STYLES[0],
    )
    axes.plot(
        columns,
        fixed.system_rps[0],
        label=f"threshold {threshold_tokens:,.0f} tokens",
        marker="s",
        **_STYLES[1],
    )
    axes.plot(
        columns,
        np.minimum(fixed.pd_decode_rps, 2 * every.system_rps.max()),
        label="decode",
        **_STYLES[3],
    )
    best = plan.num_prefill[pd.name]
    axes.plot(
        [best],
        [plan.system_rps(Mode.EXACT)],
        label=f"best: {best:g} prefill, {pd.num_instances - best:g} decode",
        **_BEST,
    )
    axes.set(
        ylim=(0, None),
        xlabel=f"local prefill instances (the others of {pd.num_instances} decode)",
        ylabel="highest rate, requests/s",
        title="over the division of the PD cluster",
    )
    axes.legend(loc="lower center")


def _link_panel(axes: Axes, plan: Plan) -> None:
    region = plan.region
    today = sum(link.bytes_per_s for link in region.links)
    factors = np.geomspace(0.01, 3, _LINK_POINTS)
    best, frozen = [], []
    for factor in factors:
        links = tuple(replace(k, bytes_per_s=k.bytes_per_s * factor) for k in region.links)
        there = replace(region, links=links)
        best.append(best_plan(there).system_rps(Mode.EXACT))
        frozen.append(plan.kept_in(there).system_rps(Mode.EXACT))
    alone = best_plan(without_prefill_clusters(region)).system_rps(Mode.EXACT)
    rates = factors * today / GBIT_PER_S
    axes.plot(rates, best, label="planned for the rate", **_STYLES[0])
    axes.plot(rates, frozen, label="today's plan kept", **_STYLES[1])
    axes.axhline(alone, label="PD clusters alone", **_STYLES[3])
    axes.plot(
        [today / GBIT_PER_S],
        [plan.system_rps(Mode.EXACT)],
        label=f"this plan: {today / GBIT_PER_S:g} Gbit/s",
        **_BEST,
    )
    several = " (sum of all links)" if len(region.links) > 1 else ""
    axes.set(
        xscale="log",
        ylim=(0, None),
        xlabel=f"link rate, Gbit/s{several}",
        ylabel="highest rate, requests/s",
        title="over the link",
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.legend(loc="lower right")


def _load_panel(axes: Axes, solution: Solution) -> None:
    loads = [100 * point.load for point in solution.loads]
    for name, style, mark in zip(("p50", "p90", "p99"), _STYLES, "o^s", strict=False):
        values = [getattr(point.ttft, f"{name}_s") for point in solution.loads]
        axes.plot(loads, values, label=name.upper(), marker=mark, **style)
    goal = solution.document["goals"].get("ttft_p90")
    if goal is not None:
        axes.axhline(goal["wanted_s"], label=f"goal for P90: {goal['wanted_s']:g} s", **_STYLES[3])
    axes.set(
        yscale="log",
        xlabel="load, % of the rate that the hardware sustains",
        ylabel="time to first token, s",
        title="first tokens under Poisson load (simulated)",
    )
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="upper left")


def _parts_panel(axes: Axes, solution: Solution) -> None:
    parts = solution.document["parts"]
    names = [f"{part['kind']} {part['name']}" for part in parts]
    used = [100 * part["utilisation"] for part in parts]
    bars = axes.barh(names, used, color="#9fb8cc", edgecolor="#1b1b1b")
    axes.bar_label(bars, fmt="%.0f%%", padding=2)
    # Beyond 100%, for the labels of full parts.
    axes.set(xlim=(0, 115), xlabel="in use at the highest rate, %", title="how full each part is")
    axes.invert_yaxis()


def _lengths_panel(axes: Axes, plan: Plan) -> None:
    edges = plan.classes.edges
    low = np.zeros(len(edges) - 1)
    hatches = ("", "//", "..", "xx", "\\\\", "++", "oo")
    for index, (route, part) in enumerate(zip(plan.routes, plan.fractions, strict=True)):
        axes.stairs(
            low + 100 * part,
            np.maximum(edges, plan.region.traffic.lengths.min_tokens),
            baseline=low,
            fill=True,
            label=route.name,
            hatch=hatches[index % len(hatches)],
            edgecolor="#1b1b1b",
            alpha=0.75,
            linewidth=0.3,
        )
        low = low + 100 * part
    axes.set(
        xscale="log",
        ylim=(0, 100),
        xlabel="prompt length, tokens",
        ylabel="share of prompts of this length, %",
        title="who prefills what",
    )
    axes.xaxis.set_major_formatter(FuncFormatter(_tokens))
    axes.legend(loc="upper left")


def _tokens(value: float, _position: Any) -> str:
    return f"{value:,.0f}"


def _page(figure: Figure, solution: Solution) -> str:
    """The pictures and the numbers."""
    from deploy.plan.solve.tables import print_solution

    console = Console(record=True, width=100, file=io.StringIO())
    print_solution(console, solution.document, {})
    return page_of(f"<h1>Plan of a region</h1>{svg_of(figure)}", console)


def svg_of(figure: Figure) -> str:
    """The picture as an SVG element."""
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    svg = picture.getvalue()
    # Only the element: a page cannot hold the XML declaration and doctype before it.
    return svg[svg.index("<svg") :]


def page_of(pictures: str, console: Console) -> str:
    """One page of pictures and of what the console recorded. It loads nothing from elsewhere."""
    numbers = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>prfaas plan</title>'
        '<body style="font-family: sans-serif; max-width: 75em; margin: 1em auto">'
        f"{pictures}{numbers}</body></html>\n"
    )
