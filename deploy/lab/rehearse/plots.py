"""Pictures of a rehearsal: TTFT live beside simulated, over time and length, and who is under way.

It needs matplotlib (extra `plan`).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from deploy.lab.rehearse.columns import Served
from deploy.lab.rehearse.report import Played
from deploy.lab.rehearse.scale import Scale
from deploy.plan.simulate.plots import STYLES, plot_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_plots(path: Path, played: Sequence[Played]) -> None:
    """Write the pictures as .png or .svg."""
    with plot_style():
        draw(played).savefig(path, dpi=130)


def as_svg(played: Sequence[Played]) -> str:
    """The pictures as the text of an SVG file."""
    text = io.StringIO()
    with plot_style():
        draw(played).savefig(text, format="svg")
    return text.getvalue()


def draw(played: Sequence[Played]) -> Figure:
    """Four panels with two lines for each region, live and simulated."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2).ravel()
    lines = [
        (f"{one.name}, {way}", served, one.rehearsal.scale)
        for one in played
        for way, served in (("live", one.live_requests), ("simulated", one.simulated_requests))
    ]
    for number, (label, served, scale) in enumerate(lines):
        style = STYLES[number % len(STYLES)] | {"label": label}
        _share_panel(axes[0], served, scale, style)
        _time_panel(axes[1], served, scale, style)
        _length_panel(axes[2], served, scale, style)
        _under_way_panel(axes[3], served, scale, style)
    for part in axes:
        part.set_ylim(bottom=0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(labels)))
    return figure


def _done(served: Sequence[Served]) -> list[Served]:
    return [one for one in served if one.fate == "ok" and one.ttft_s is not None]


def _share_panel(axes: Axes, served: Sequence[Served], scale: Scale, style: dict[str, Any]) -> None:
    ttft_s = np.sort([(one.ttft_s or 0.0) / scale.slowdown for one in _done(served)])
    axes.plot(ttft_s, 100 * np.arange(1, len(ttft_s) + 1) / max(1, len(ttft_s)), **style)
    axes.set(title="answered requests by TTFT", xlabel="TTFT, s", ylabel="% not later")


def _time_panel(axes: Axes, served: Sequence[Served], scale: Scale, style: dict[str, Any]) -> None:
    done = sorted(_done(served), key=lambda one: one.at_s)
    at_s = [one.at_s / scale.slowdown for one in done]
    axes.plot(at_s, [(one.ttft_s or 0.0) / scale.slowdown for one in done], **style)
    axes.set(title="TTFT by arrival", xlabel="arrival, s", ylabel="TTFT, s")


def _length_panel(
    axes: Axes, served: Sequence[Served], scale: Scale, style: dict[str, Any]
) -> None:
    done = _done(served)
    axes.plot(
        [one.prompt_tokens * scale.tokens for one in done],
        [(one.ttft_s or 0.0) / scale.slowdown for one in done],
        linestyle="",
        marker=".",
        color=style["color"],
    )
    axes.set(title="TTFT by length", xlabel="prompt, tokens", ylabel="TTFT, s")


def _under_way_panel(
    axes: Axes, served: Sequence[Served], scale: Scale, style: dict[str, Any]
) -> None:
    events = sorted(
        event
        for one in served
        if one.end_s is not None
        for event in ((one.at_s, 1), (one.end_s, -1))
    )
    at_s = [at / scale.slowdown for at, _ in events]
    axes.step(at_s, np.cumsum([change for _, change in events]), where="post", **style)
    axes.set(title="requests under way", xlabel="time, s", ylabel="requests")
