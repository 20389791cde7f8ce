"""The requests of a rehearsal in the units of the profiles, as the command line changes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from deploy.plan.simulate.building import Simulation
from deploy.plan.solve.served import traced_traffic
from scheduler.planning.lengths import EmpiricalLengths, mean_tokens
from scheduler.planning.prefix_reuse import TracePrompt
from scheduler.planning.region_model import Traffic
from scheduler.replay.workload import Phase, Workload, drawn, traced

DEFAULT_DURATION_S: Final = 300.0
DEFAULT_LOAD: Final = 0.7
"""The share of the plan's highest rate that arrives, where nothing else is said."""
_SPARE: Final = 3.0
"""A backlog has prompts for so many times the plan's capacity: a plan may be wrong."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What a region.yaml does not say: the prompts that come, in tokens of its profiles."""

    traced: Sequence[TracePrompt] = ()
    block_tokens: int = 512
    lengths: Sequence[int] = ()
    """Each as frequent as the others."""
    output_tokens: float = 1024.0

    def traffic(self) -> Traffic:
        """The lengths as the planner takes them; nothing is cached."""
        if self.traced:
            return traced_traffic(self.traced, self.block_tokens, None, 0)
        lengths = EmpiricalLengths.of(self.lengths)
        return Traffic(lengths, self.output_tokens, mean_tokens(lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What arrives, where it is not as the file says. `num_clients` ask in a closed loop."""

    load: float | None = None
    rate_rps: float | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    num_clients: int | None = None
    seed: int = 1
    prompts: Prompts | None = None
    """For a region.yaml, which does not say which prompts come."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where requests come from. `make` takes a rate (None: its own), a duration and a seed."""

    capacity_rps: float
    rate_rps: float
    duration_s: float
    is_traced: bool
    make: Callable[[float | None, float, int], Workload]


def source_of_file(simulation: Simulation) -> Source:
    """The traffic of a rehearsal file."""
    spec, traffic = simulation.file.simulation, simulation.file.traffic

    def make(rate_rps: float | None, duration_s: float, seed: int) -> Workload:
        changes: dict[str, object] = {"duration": duration_s}
        changed = traffic
        if rate_rps is not None:
            changes |= {"load": None}
            changed = traffic.model_copy(update={"rate_rps": rate_rps})
        updates = {"simulation": spec.model_copy(update=changes), "traffic": changed}
        file = simulation.file.model_copy(update=updates)
        return replace(simulation, file=file).workload(seed)

    said = "duration" in spec.model_fields_set
    rate_rps = spec.load * simulation.capacity_rps if spec.load else traffic.rate_rps
    return Source(
        capacity_rps=simulation.capacity_rps,
        rate_rps=rate_rps or DEFAULT_LOAD * simulation.capacity_rps,
        duration_s=spec.duration if said else DEFAULT_DURATION_S,
        is_traced=traffic.lengths.trace is not None,
        make=make,
    )


def source_of_prompts(prompts: Prompts, capacity_rps: float) -> Source:
    """The traffic for a region.yaml."""
    traffic, own_rps = prompts.traffic(), DEFAULT_LOAD * capacity_rps

    def make(rate_rps: float | None, duration_s: float, seed: int) -> Workload:
        if prompts.traced:
            return traced(prompts.traced, prompts.block_tokens)
        phase = Phase(
            duration_s=duration_s,
            rate_rps=rate_rps or own_rps,
            lengths=traffic.lengths,
            output_tokens=traffic.output_tokens,
        )
        return drawn([phase], seed)

    return Source(
        capacity_rps=capacity_rps,
        rate_rps=own_rps,
        duration_s=DEFAULT_DURATION_S,
        is_traced=bool(prompts.traced),
        make=make,
    )


def requests_of(source: Source, wanted: Wanted) -> Workload:
    """The requests. ValueError if a trace is asked for another rate."""
    duration_s, num = wanted.duration_s or source.duration_s, wanted.num_requests
    rate_rps = wanted.rate_rps
    if wanted.load is not None:
        rate_rps = wanted.load * source.capacity_rps
    if source.is_traced and rate_rps is not None:
        raise ValueError(
            "a trace has its own rate: leave out --load and --rate, or change "
            "simulation.trace_speed"
        )
    if wanted.num_clients is not None and not source.is_traced:
        # When they arrive does not matter, only how many there are.
        rate_rps = _SPARE * source.capacity_rps + 2 * wanted.num_clients / duration_s
    if num is not None:
        # Four standard deviations more than are expected.
        duration_s = (num + 4 * math.sqrt(num) + 16) / (rate_rps or source.rate_rps)
    found = source.make(rate_rps, duration_s, wanted.seed)
    if source.is_traced and wanted.duration_s is not None and wanted.num_clients is None:
        num = max(1, sum(at_s < wanted.duration_s for at_s in found.arrivals_s))
    return found if num is None else first(found, num)


def first(workload: Workload, num: int) -> Workload:
    """The first `num` requests."""
    cut = {
        name: values[:num]
        for name in ("arrivals_s", "prompt_tokens", "output_tokens", "block_ids")
        if (values := getattr(workload, name)) is not None
    }
    return replace(workload, **cut)
