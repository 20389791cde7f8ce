"""Plan and simulation files for the engines of a region of the lab, and a trace from its recording.

Pure but for reading the recording: `bench_capacity.py` writes the files and runs what reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.gateway.scheduling.recorder import SUFFIX
from scheduler.live.events import AdmitAsked
from scheduler.replay.recording import Entry, frames_in

CAPACITY_GOAL: Final = 0.10
PROFILE: Final = "engine"
LOOPBACK_LINK: Final = {"rate": "5Gbit", "rtt": "1ms"}
"""What an agent carries at least between two engines of this machine: no plan's limit here."""
CACHE_TOKENS: Final = 200_000
"""More than a conversation of a bench has, in each cluster."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A region to plan. `measured_as`: the system of `bench_load.py` that has this shape, "" where
    none has. `shares`: instances of the PD cluster may prefill and decode.
    """

    name: str
    num_prefill_clusters: int
    num_pd_instances: int
    shares: bool = False
    measured_as: str = ""

    @property
    def num_engines(self) -> int:
        return self.num_prefill_clusters + self.num_pd_instances

    def clusters(self) -> dict[str, Any]:
        """The clusters and links, as plan files have them."""
        names = [f"far{number}" for number in range(self.num_prefill_clusters)]
        return {
            "prefill_clusters": [
                {"name": name, "instances": 1, "profile": PROFILE} for name in names
            ],
            "pd_clusters": [
                {"name": "near", "instances": self.num_pd_instances, "profile": PROFILE}
            ],
            "links": [{"from": name, "to": "near", **LOOPBACK_LINK} for name in names],
            "instances": "shared" if self.shares else "whole",
        }


SHAPES: Final = (
    Shape("PD alone", 0, 2, measured_as="prfaas-pd"),
    Shape("prefill cluster + PD that only decodes", 1, 1, measured_as="prfaas-remote"),
    Shape("prefill cluster + PD", 1, 1, shares=True, measured_as="prfaas"),
    Shape("2 prefill clusters + PD", 2, 1),
)


def plan_file(
    shape: Shape, profile: Path, lengths: Sequence[int], output_tokens: int, tokens_per_s: float
) -> dict[str, Any]:
    """A plan for prompts of just these lengths."""
    return {
        "traffic": {
            "lengths": {"histogram": [{"tokens": length, "weight": 1} for length in lengths]},
            "output_tokens": output_tokens,
        },
        "profiles": {PROFILE: {"file": str(profile), "fit": "interpolate"}},
        "slo": {"tokens_per_s": tokens_per_s},
        **shape.clusters(),
    }


def simulation_file(
    shape: Shape,
    profile: Path,
    trace: Path,
    block_tokens: int,
    tokens_per_s: float,
    service: Mapping[str, float],
    render_s: float,
) -> dict[str, Any]:
    """The trace, all of it prefilled in the prefill cluster, which is served as `service`, what a
    gateway has learnt of it, says. Rendering a prompt takes `render_s`, which a simulation does not
    know.
    """
    clusters = shape.clusters()
    caches = [one["name"] for key in ("prefill_clusters", "pd_clusters") for one in clusters[key]]
    sources = [one["name"] for one in clusters["prefill_clusters"]]
    seconds = {
        "overhead": service["overhead_s"] + service["render"] * render_s,
        "decode": service["decode_s"],
        "busy": service["busy_s"],
    }
    beside = {key: f"{value:f}s" for key, value in seconds.items() if value}
    return {
        "traffic": {"lengths": {"trace": {"file": str(trace), "block_tokens": block_tokens}}},
        "profiles": {PROFILE: {"file": str(profile), "fit": "interpolate"}},
        "slo": {"tokens_per_s": tokens_per_s},
        **clusters,
        "simulation": {
            "cache_tokens": dict.fromkeys(caches, CACHE_TOKENS),
            "prefill_factors": dict.fromkeys(sources, service["prefill"]),
            "contention": dict.fromkeys(sources, beside),
            "policy": "remote",
            "policies": {"remote": {"routing": "static", "threshold_tokens": 1}},
        },
    }


def capacity_row(
    name: str,
    by: str,
    answer: Mapping[str, Any],
    measured_rps: float | None,
    goal: float = CAPACITY_GOAL,
) -> dict[str, Any]:
    """Predicted against measured, requests/s; without a measurement, nothing is met or missed."""
    row = {
        "part": "capacity",
        "name": name,
        "by": by,
        "predicted_rps": round(answer["throughput_rps"], 3),
        "binding": answer["binding"],
        "measured_rps": measured_rps,
    }
    if not measured_rps:
        return row
    error = answer["throughput_rps"] / measured_rps - 1
    return {**row, "error": round(error, 3), "met": abs(error) <= goal}


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt of a conversation as its client sent it, and the TTFT that it saw."""

    talk: int
    num_tokens: int
    ttft_s: float


def recorded_arrivals(directory: Path) -> list[tuple[float, int]]:
    """Seconds and tokens of every request that a flight recorder's files tell of, in order."""
    found = []
    # Admission is asked once for each, as soon as it has its route. `RequestArrived` comes later:
    # with the answer.
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        with path.open("rb") as stream:
            for frame in frames_in(stream):
                if isinstance(frame, Entry) and isinstance(frame.event, AdmitAsked):
                    found.append((frame.now_s, frame.event.num_tokens))
    return found


def trace_of(
    arrivals: Iterable[tuple[float, int]],
    turns: Sequence[Turn],
    *,
    output_tokens: int,
    block_tokens: int,
) -> list[Mapping[str, Any]]:
    """The lines of a trace: recorded times and lengths. A recording holds no prompt, so `turns`
    (in the order in which they were sent) say which conversation a prompt goes on with. ValueError
    for an arrival that nobody sent.
    """
    left = list(turns)
    lines: list[Mapping[str, Any]] = []
    ordered = sorted(arrivals)
    for at_s, num_tokens in ordered:
        turn = next((one for one in left if one.num_tokens == num_tokens), None)
        if turn is None:
            raise ValueError(f"the recording has a prompt of {num_tokens} tokens that nobody sent")
        left.remove(turn)
        # Whole blocks alone: what fills the last one is another text in the next turn.
        blocks = [1_000_000 * turn.talk + number for number in range(num_tokens // block_tokens)]
        lines.append(
            {
                "timestamp": round(1e3 * (at_s - ordered[0][0]), 1),
                "input_length": num_tokens,
                "output_length": output_tokens,
                "hash_ids": blocks,
            }
        )
    return lines
