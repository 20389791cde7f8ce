"""Pictures of a simulation over time: queues, first tokens, refusals, thresholds, roles, links.

Lines differ in dashes as well as in colour, so that they can be told apart in grey. It needs
matplotlib (extra `plan`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvmanager.config_files.units import GBIT_PER_S
from scheduler.planning.lengths import Floats
from scheduler.replay.jobs import Fate
from scheduler.replay.results import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#1b1b1b", "linestyle": "-", "linewidth": 1.6},
    {"color": "#c25b12", "linestyle": "--", "linewidth": 1.4},
    {"color": "#1f6fb2", "linestyle": "-.", "linewidth": 1.4},
    {"color": "#4d8f3c", "linestyle": ":", "linewidth": 1.8},
    {"color": "#8a5aa8", "linestyle": (0, (6, 1, 1, 1, 1, 1)), "linewidth": 1.4},
    {"color": "#b8a100", "linestyle": (0, (9, 2)), "linewidth": 1.6},
    {"color": "#d36fa0", "linestyle": (0, (2, 1)), "linewidth": 1.6},
    {"color": "#2aa5a0", "linestyle": (0, (4, 1, 1, 1)), "linewidth": 1.4},
)
_MOST_COLUMNS = 4
_BINS = 100


def write_plots(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Write the pictures as .png or .svg, with one line per policy in each panel."""
    with plot_style():
        draw(outcomes).savefig(path, dpi=130)


def plot_style() -> AbstractContextManager[None]:
    """The look of pictures that are drawn and saved within it."""
    return mpl.rc_context(
        {"font.size": 9, "svg.fonttype": "none", "axes.grid": True, "legend.framealpha": 1.0}
    )


def draw(outcomes: Mapping[str, Outcome]) -> Figure:
    """Eight panels over virtual time."""
    figure = Figure(figsize=(12, 12), layout="constrained")
    axes = figure.subplots(4, 2, sharex=True).ravel()
    panels = (
        _queue_panel,
        _decode_panel,
        _ttft_panel,
        _refusal_panel,
        _threshold_panel,
        _role_panel,
        _sent_panel,
        _rate_panel,
    )
    for panel, part in zip(panels, axes, strict=True):
        for number, outcome in enumerate(outcomes.values()):
            panel(part, outcome, STYLES[number % len(STYLES)])
        part.set_ylim(bottom=0)
    for part in axes[-2:]:
        part.set_xlabel("time, s")
    handles = [
        Line2D([], [], label=name, **STYLES[number % len(STYLES)])
        for number, name in enumerate(outcomes)
    ]
    figure.legend(
        handles=handles, loc="outside upper center", ncols=min(_MOST_COLUMNS, len(handles))
    )
    return figure


def _queue_panel(axes: Axes, outcome: Outcome, style: dict[str, Any]) -> None:
    series = outcome.series
    queued = [series.array(key) for key in series.values if key.startswith("queued:")]
    axes.plot(series.at_s, np.sum(queued, axis=0), **style)
    axes.set(title="waiting for a prefill instance", ylabel="prompts")


def _decode_panel(axes: Axes, outcome: Outcome, style: dict[str, Any]) -> None:
    series = outcome.series
    wanted = series.array("decode_used") + series.array("decode_waiting")
    slots = np.maximum(1.0, series.array("decode_slots"))
    axes.plot(series.at_s, 100 * wanted / slots, **style)
    axes.set(title="decoding or waiting for it", ylabel="% of the slots")


def _ttft_panel(axes: Axes, outcome: Outcome, style: dict[str, Any]) -> None:
    edges = np.linspace(0, max(outcome.span_s, 1e-9), _BINS + 1)
    at = np.digitize(outcome.arrival_s, edges) - 1
    done = outcome.fate == Fate.DONE
    p90 = [_p90(outcome.ttft_s[(at == i) & done]) for i in range(_BINS)]
    axes.plot(edges[:-1], p90, **style)
    axes.axhline(outcome.slo.ttft_s, color="#b3123a", linewidth=0.8)
    axes.set(title="TTFT P90 by arrival; the objective is red", ylabel="s")


def _p90(values: Floats) -> float:
    return float(np.quantile(values, 0.9)) if len(values) else math.nan


def _refusal_panel(axes: Axes, outcome: Outcome, style: dict[str, Any]) -> None:
    axes.plot(outcome.series.at_s, outcome.series.array("refused_rps"), **style)
    axes.set(title="refused", ylabel="requests/s")


def _threshold_panel(axes: Axes, outcome: Outcome, style: dict[str, Any]) -> None:
    for values in _each(outcome, "threshold:"):
        axes.plot(outcome.series.at_s, values, **style)
    axes.set(title="threshold t", ylabel="tokens")


def _role_panel(axes: Axes, outcome: Outcome, style: dict[str, Any]) -> None:
    axes.plot(outcome.series.at_s, outcome.series.array("num_prefill"), **style)
    axes.set(title="local instances that prefill", ylabel="instances")


def _sent_panel(axes: Axes, outcome: Outcome, style: dict[str, Any]) -> None:
    for values in _each(outcome, "link_sent:"):
        axes.plot(outcome.series.at_s, values / GBIT_PER_S, **style)
    axes.set(title="sent over links", ylabel="Gbit/s")


def _rate_panel(axes: Axes, outcome: Outcome, style: dict[str, Any]) -> None:
    # First, so that what each policy saw is drawn on top of it.
    for values in _each(outcome, "link_rate:"):
        axes.plot(outcome.series.at_s, values / GBIT_PER_S, color="#a0a0a0", linewidth=3.5)
    for values in _each(outcome, "link_seen:"):
        axes.plot(outcome.series.at_s, values / GBIT_PER_S, **style)
    axes.set(title="rate of links as seen; the true one is wide", ylabel="Gbit/s")


def _each(outcome: Outcome, prefix: str) -> Iterator[Floats]:
    series = outcome.series
    return (series.array(key) for key in series.values if key.startswith(prefix))
