"""TTFT of a plan under load: draws requests, sends each over its route, simulates the queues.

Load is a share of what the hardware really sustains (`exact`). Arrivals are Poisson, lengths are
drawn from the traffic's distribution, and the output length is its mean. The same seed gives the
same requests at any load, so that loads can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.planning.load.queueing import (
    QueueingLink,
    Requests,
    SimulationResult,
    SlotPool,
    Spread,
    Station,
    System,
    poisson_arrivals,
    simulate,
)
from scheduler.planning.plan import Plan
from scheduler.planning.throughput import Mode

LOADS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
NUM_REQUESTS = 100_000


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """What requests meet at one load."""

    load: float
    """Share of the exact capacity."""
    rate_rps: float
    ttft: Spread
    queue: Spread
    tail: Spread
    """Time from the end of the prefill until the KVCache has landed."""
    slot_wait: Spread


def study_load(
    plan: Plan,
    loads: Sequence[float] = LOADS,
    *,
    num_requests: int = NUM_REQUESTS,
    seed: int = 1,
) -> list[LoadPoint]:
    """TTFT at each load. An instance with shared roles counts whole for its main role."""
    capacity_rps = plan.system_rps(Mode.EXACT)
    system, drawn = system_of(plan), draw(plan, num_requests, seed)
    points = []
    for load in loads:
        result = simulate(system, at_rate(drawn, load * capacity_rps))
        points.append(
            LoadPoint(
                load,
                load * capacity_rps,
                result.ttft,
                Spread.of(result.queue_s),
                Spread.of(result.tail_s),
                Spread.of(result.slot_wait_s),
            )
        )
    return points


def simulate_plan(
    plan: Plan, rate_rps: float, *, num_requests: int = NUM_REQUESTS, seed: int = 1
) -> SimulationResult:
    """One run at one rate, requests/s."""
    return simulate(system_of(plan), at_rate(draw(plan, num_requests, seed), rate_rps))


def draw(plan: Plan, num_requests: int, seed: int) -> Requests:
    """Requests that arrive at 1 a second on average, each on its route. `at_rate` scales them."""
    # One stream for each quantity: more draws of one must not shift the others.
    lengths_rng, routes_rng, arrivals_rng = (
        np.random.default_rng((seed, stream)) for stream in range(3)
    )
    tokens = plan.region.traffic.lengths.sample(num_requests, lengths_rng)
    taken = plan.routes_at(tokens, routes_rng.random(num_requests))
    region, routes = plan.region, plan.routes
    places = {cluster.name: i for i, cluster in enumerate(region.clusters)}
    pools = {pd.name: i for i, pd in enumerate(region.pd_clusters)}
    service_s = np.empty(num_requests)
    for index, route in enumerate(routes):
        mine = taken == index
        service_s[mine] = route.source.prefill(tokens[mine])
    kv_bytes = region.kv.size(tokens)
    hold_s = [r.target.step_s * region.traffic.output_tokens for r in routes]
    return Requests(
        arrivals_s=poisson_arrivals(1.0, num_requests, arrivals_rng),
        station=np.array([places[r.source.name] for r in routes])[taken],
        pool=np.array([pools[r.target.name] for r in routes])[taken],
        service_s=service_s,
        decode_s=np.array(hold_s)[taken],
        kv_token_bytes=kv_bytes - region.kv.fixed_bytes,
        kv_fixed_bytes=np.full(num_requests, region.kv.fixed_bytes),
        memory_bytes=kv_bytes,
    )


def at_rate(drawn: Requests, rate_rps: float) -> Requests:
    """The same requests at another rate than 1 a second."""
    return replace(drawn, arrivals_s=drawn.arrivals_s / rate_rps)


def highest_load_within(
    plan: Plan, ttft_p90_s: float, *, num_requests: int = NUM_REQUESTS, seed: int = 1
) -> float:
    """The highest share of the exact capacity at which 90% of first tokens come in time.

    It is 0 if even an empty region is too slow. Bisection finds it to 0.5% of capacity.
    """
    capacity_rps = plan.system_rps(Mode.EXACT)
    # The same requests at every load, or chance could make a higher load look better.
    system, drawn = system_of(plan), draw(plan, num_requests, seed)

    def is_kept(load: float) -> bool:
        found = simulate(system, at_rate(drawn, load * capacity_rps))
        return found.ttft.p90_s <= ttft_p90_s

    low, high = 0.0, 1.0
    # A load of 0 has no requests; a hundredth stands for an empty region.
    if not is_kept(0.01):
        return 0.0
    while high - low > 0.005:
        middle = (low + high) / 2
        low, high = (middle, high) if is_kept(middle) else (low, middle)
    return low


def system_of(plan: Plan) -> System:
    """The plan's instances as queues: a station per prefilling cluster, a pool per PD cluster."""
    region = plan.region
    pools = {pd.name: i for i, pd in enumerate(region.pd_clusters)}
    num_decode = {
        pd.name: pd.num_instances - plan.num_prefill[pd.name] for pd in region.pd_clusters
    }
    return System(
        stations=tuple(
            Station(
                _whole(plan.num_prefill.get(c.name, c.num_instances)),
                {pools[k.target]: i for i, k in enumerate(region.links) if k.source == c.name},
            )
            for c in region.clusters
        ),
        pools=tuple(
            SlotPool(
                round(num_decode[pd.name] * pd.batch_size),
                pd.step_s,
                None
                if pd.decode_memory_bytes is None
                else pd.decode_memory_bytes * _whole(num_decode[pd.name]),
            )
            for pd in region.pd_clusters
        ),
        # Bytes are under way in one direction: half a round trip.
        links=tuple(QueueingLink(link.bytes_per_s, link.rtt_s / 2) for link in region.links),
    )


def _whole(instances: float) -> int:
    """The nearest whole number, but 1 for a small part of an instance."""
    return max(1, round(instances)) if instances > 0 else 0
