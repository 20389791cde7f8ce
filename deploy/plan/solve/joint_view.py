"""Tables and pictures of a plan for several homes (`joint_solving`)."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from deploy.plan.solve.tables import TOKENS_NOTE, print_fits
from deploy.table_style import new_table
from scheduler.planning.curves import FittedCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from deploy.plan.solve.joint_solving import JointSolution


def home_name(row: Mapping[str, Any]) -> str:
    """The PD cluster, with the model where it is not the file's first one."""
    name: str = row["pd_cluster"]
    return f"{name} ({row['model']})" if row["model"] else name


def print_joint(
    console: Console, document: Mapping[str, Any], fits: Mapping[str, FittedCurve]
) -> None:
    """Print what was found for each home and each pair of clusters, and what they share."""
    level = document["least_level"]
    console.print(
        f"[bold]{level:.3g} times the demand[/] is sustained at the least served PD cluster (exact)"
    )
    numbers = ("demand\nrequests/s", "highest\nrequests/s", "level", "prefill/\ndecode", "P90 TTFT")
    homes = new_table("home", numbers=numbers, title="homes of requests")
    pairs = new_table(
        "prefill at",
        "decode at",
        numbers=("instances", "link\nGbit/s", "sends\nGbit/s", "threshold\ntokens"),
        title="what each home has of prefill clusters and links",
    )
    for row in document["homes"]:
        plan = row["plan"]
        (split,) = plan["splits"]
        load = min(plan["ttft_under_load"], key=lambda point: abs(point["load"] - 0.8))
        homes.add_row(
            home_name(row),
            f"{row['demanded_rps']:.3g}",
            f"{row['throughput_rps']:.3f}",
            f"{row['level']:.2f}",
            f"{split['num_prefill']:g}/{split['num_decode']:g}",
            f"{load['ttft_p90_s']:.2f}",
        )
        for pair in row["pairs"]:
            pairs.add_row(
                pair["prefill_cluster"],
                home_name(row),
                f"{pair['instances']:.2f} of {pair['of_instances']:g}",
                f"{pair['rate_gbps']:.3g}",
                f"{pair['sends_gbps']:.2f}",
                f"{pair['threshold_tokens']:,.0f}" if pair["instances"] else "-",
            )
    shared = new_table("part", numbers=("size", "in use"), title="how full shared parts are then")
    for part in document["shared"]:
        name = escape(f"{part['kind']} {part['name']}")
        shared.add_row(name, f"{part['size']:g} {part['unit']}", f"{part['utilisation']:.0%}")
    for table in (homes, pairs, shared):
        console.print(table)
    console.print(
        "level: highest rate over demand, with all homes at their highest rates at once\n"
        "P90 TTFT: s, simulated at a load of 80%; --json has other loads, costs and goals"
    )
    for row in document["homes"]:
        console.print(escape(f"{home_name(row)}: {row['plan']['binding']}"))
    _print_goals(console, document)
    print_fits(console, fits)
    console.print(TOKENS_NOTE)


def _print_goals(console: Console, document: Mapping[str, Any]) -> None:
    for row in document["homes"]:
        for goal in row["plan"]["goals"].values():
            if not goal["met"]:
                advice = escape(goal["advice"])
                console.print(f"{escape(home_name(row))}: [red]NOT met[/]: {advice}")


def write_joint_plots(path: Path, solution: JointSolution) -> None:
    """Write the pictures as .png or .svg, or as one .html page with one picture more for each
    home. It needs matplotlib (extra `plan`).
    """
    from matplotlib.figure import Figure

    from deploy.plan.solve.plots import draw, page_of, plot_style, svg_of

    with plot_style():
        figure = Figure(figsize=(11, 8), layout="constrained")
        axes = figure.subplots(2, 2).ravel()
        document = solution.document
        _levels_panel(axes[0], document)
        _shares_panel(axes[1], document)
        _thresholds_panel(axes[2], document)
        _shared_panel(axes[3], document)
        if path.suffix != ".html":
            figure.savefig(path, dpi=130)
            return
        console = Console(record=True, width=120, file=io.StringIO())
        print_joint(console, document, {})
        sections = [f"<h1>Plan of a region</h1>{svg_of(figure)}"]
        for row in document["homes"]:
            home = solution.homes[row["model"], row["pd_cluster"]]
            sections.append(f"<h2>{home_name(row)}</h2>{svg_of(draw(home))}")
        path.write_text(page_of("".join(sections), console), encoding="utf-8")


def _levels_panel(axes: Axes, document: Mapping[str, Any]) -> None:
    rows = document["homes"]
    places = range(len(rows))
    axes.bar(
        [place - 0.2 for place in places],
        [row["demanded_rps"] for row in rows],
        width=0.4,
        label="demand",
        color="#e6e6e6",
        edgecolor="#1b1b1b",
        hatch="//",
    )
    axes.bar(
        [place + 0.2 for place in places],
        [row["throughput_rps"] for row in rows],
        width=0.4,
        label="highest rate",
        color="#9fb8cc",
        edgecolor="#1b1b1b",
    )
    _name_homes(axes, rows)
    axes.set(ylabel="requests/s", title="homes of requests")
    axes.legend()


def _shares_panel(axes: Axes, document: Mapping[str, Any]) -> None:
    """One bar for each home, of the instances that it has of each prefill cluster."""
    rows = document["homes"]
    names = sorted({pair["prefill_cluster"] for row in rows for pair in row["pairs"]})
    base = [0.0] * len(rows)
    hatches = ("", "//", "..", "xx", "\\\\", "++", "oo")
    for index, name in enumerate(names):
        heights = [
            sum(p["instances"] for p in row["pairs"] if p["prefill_cluster"] == name)
            for row in rows
        ]
        axes.bar(
            range(len(rows)),
            heights,
            bottom=base,
            label=name,
            hatch=hatches[index % len(hatches)],
            edgecolor="#1b1b1b",
            alpha=0.75,
        )
        base = [low + height for low, height in zip(base, heights, strict=True)]
    _name_homes(axes, rows)
    axes.set(ylabel="instances", title="what each home has of prefill clusters")
    if names:
        axes.legend(fontsize="small")


def _thresholds_panel(axes: Axes, document: Mapping[str, Any]) -> None:
    pairs = [
        (f"{pair['prefill_cluster']} to {home_name(row)}", pair["threshold_tokens"])
        for row in document["homes"]
        for pair in row["pairs"]
        if pair["instances"]
    ]
    axes.barh(
        [name for name, _ in pairs],
        [tokens for _, tokens in pairs],
        color="#9fb8cc",
        edgecolor="#1b1b1b",
    )
    axes.set(
        xlabel="threshold t, tokens (longer prompts are offloaded)",
        title="thresholds of pairs of clusters",
    )
    axes.invert_yaxis()


def _shared_panel(axes: Axes, document: Mapping[str, Any]) -> None:
    parts = document["shared"]
    bars = axes.barh(
        [f"{part['kind']} {part['name']}" for part in parts],
        [100 * part["utilisation"] for part in parts],
        color="#9fb8cc",
        edgecolor="#1b1b1b",
    )
    axes.bar_label(bars, fmt="%.0f%%", padding=2)
    # Beyond 100%, for the labels of full parts.
    axes.set(
        xlim=(0, 115),
        xlabel="in use with all homes at their highest rates, %",
        title="how full shared parts are",
    )
    axes.invert_yaxis()


def _name_homes(axes: Axes, rows: list[Mapping[str, Any]]) -> None:
    axes.set_xticks(range(len(rows)), [home_name(row) for row in rows], rotation=20)
