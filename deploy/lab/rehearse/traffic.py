"""The requests of a rehearsal in the units of the profiles, as the command line changes them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from deploy.plan.simulate.building import Simulation
from scheduler.replay.workload import Workload

DEFAULT_DURATION_S: Final = 300.0
_SPARE: Final = 3.0
"""A backlog has prompts for so many times the plan's capacity: a plan may be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What arrives, where it is not as the file says. `num_clients` ask in a closed loop."""

    load: float | None = None
    rate_rps: float | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    num_clients: int | None = None
    seed: int = 1


def span_s(simulation: Simulation, wanted: Wanted) -> float:
    """How long requests arrive, seconds."""
    spec = simulation.file.simulation
    said_s = spec.duration if "duration" in spec.model_fields_set else DEFAULT_DURATION_S
    return wanted.duration_s or said_s


def requests_of(simulation: Simulation, wanted: Wanted) -> Workload:
    """The requests. ValueError if a trace is asked for another rate."""
    duration_s, num = span_s(simulation, wanted), wanted.num_requests
    rate_rps = wanted.rate_rps or (
        None if wanted.load is None else wanted.load * simulation.capacity_rps
    )
    if wanted.num_clients is not None:
        # Their arrivals do not matter, only their lengths.
        rate_rps = _SPARE * simulation.capacity_rps + 2 * wanted.num_clients / duration_s
    is_traced = simulation.file.traffic.lengths.trace is not None
    if is_traced and (wanted.load or wanted.rate_rps):
        raise ValueError(
            "a trace has its own rate: leave out --load and --rate, or change "
            "simulation.trace_speed"
        )
    if num is not None and not is_traced:
        rps = rate_rps or _rate_rps(simulation)
        # Four standard deviations more than are expected.
        duration_s = (num + 4 * math.sqrt(num) + 16) / rps
    found = _with(simulation, rate_rps, duration_s).workload(wanted.seed)
    if is_traced and num is None and wanted.duration_s:
        num = sum(at_s < wanted.duration_s for at_s in found.arrivals_s)
    return found if num is None else first(found, num)


def first(workload: Workload, num: int) -> Workload:
    """The first `num` requests."""
    cut = {
        name: values[:num]
        for name in ("arrivals_s", "prompt_tokens", "output_tokens", "block_ids")
        if (values := getattr(workload, name)) is not None
    }
    return replace(workload, **cut)


def _rate_rps(simulation: Simulation) -> float:
    load = simulation.file.simulation.load
    return load * simulation.capacity_rps if load else simulation.file.traffic.rate_rps or 1.0


def _with(simulation: Simulation, rate_rps: float | None, duration_s: float) -> Simulation:
    """The simulation with another constant rate, unless None, and another duration."""
    file = simulation.file
    changes: dict[str, object] = {"duration": duration_s}
    traffic = file.traffic
    if rate_rps is not None:
        changes |= {"load": None}
        traffic = traffic.model_copy(update={"rate_rps": rate_rps})
    spec = file.simulation.model_copy(update=changes)
    return replace(
        simulation, file=file.model_copy(update={"simulation": spec, "traffic": traffic})
    )
