"""TTFT under load: requests played through a region's queues, links, decode slots and memory.

A request waits for a server of its prefill station and is prefilled. It has landed when its KVCache
is at the decode pool. Then it waits for a decode slot and holds it for its decode time.

    TTFT = queue + prefill + transfer tail + wait for a slot + one decode step

1. Stations and decode pools serve first come, first served, on whichever server is free first.
2. A link is a fluid queue. It sends first what was emitted first, at its full rate while there is
   anything to send. Running prefills emit `kv_token_bytes / service_s` each; the fixed bytes come
   at the end. A request has landed when everything emitted up to the end of its prefill, its fixed
   bytes included, has been sent: tail = backlog / rate + delay. Without a link there is no tail.
3. Where a pool's memory is bounded, a request takes its bytes when its prefill starts and gives
   them back when its decode ends. A prefill without room waits at the head of its station's queue
   and holds back those behind it, but not other stations.
4. At one instant, ends come before beginnings, and earlier requests come first.

The same timeline is computed in two ways. Without rule 3 no later event in one request's life
changes an earlier one in another's, so each stage is computed for all requests at once. Only if the
result exceeds a limit does the event loop run, which knows rule 3 and is about ten times slower.

The simulation describes a steady state only if the load is below what the system can carry. Near
the capacity of a station, link or pool, waits grow with the number of requests simulated.

This file may not know where lengths, prefill times or bytes come from, nor why a request takes its
route.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappush, heapreplace

import numpy as np

from scheduler.planning.lengths import Floats
from scheduler.planning.load.queueing_events import EventLoop
from scheduler.planning.load.queueing_model import (
    Indexes,
    QueueingLink,
    Requests,
    SlotPool,
    Station,
    System,
    Timeline,
    check_fit,
    links_of,
    poisson_arrivals,
)

__all__ = [
    "QueueingLink",
    "Requests",
    "SimulationResult",
    "SlotPool",
    "Spread",
    "Station",
    "System",
    "Timeline",
    "poisson_arrivals",
    "simulate",
]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and quantiles of a time in seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, times_s: Floats) -> Spread:
        """Percentiles of all `times_s`, with linear interpolation between order statistics."""
        p50_s, p90_s, p99_s = np.quantile(times_s, (0.5, 0.9, 0.99)).tolist()
        return cls(float(np.mean(times_s)), p50_s, p90_s, p99_s)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SimulationResult:
    """What the requests after the warm-up saw, one entry each, in order of arrival.

    `timeline` has all requests.
    """

    queue_s: Floats
    tail_s: Floats
    slot_wait_s: Floats
    ttft_s: Floats
    timeline: Timeline

    @property
    def ttft(self) -> Spread:
        """TTFT over the requests after the warm-up."""
        return Spread.of(self.ttft_s)


def simulate(system: System, requests: Requests, *, warmup: float = 0.1) -> SimulationResult:
    """Play `requests` through `system`. The result leaves out the first `warmup` share of them.

    Deterministic. ValueError if a request names a place that is not there or has no server or slot,
    or could never fit into its pool's memory.
    """
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup is {warmup:g}; it must be a share from 0 to below 1")
    check_fit(system, requests)
    timeline = timeline_in_stages(system, requests)
    if _overruns_a_limit(system, requests, timeline):
        timeline = EventLoop(system, requests).run()
    # At least one request is kept: there are no quantiles of none.
    kept = slice(min(int(warmup * len(requests)), len(requests) - 1), None)
    arrivals_s = requests.arrivals_s[kept]
    step_s = np.array([pool.step_s for pool in system.pools])[requests.pool[kept]]
    return SimulationResult(
        queue_s=timeline.start_s[kept] - arrivals_s,
        tail_s=timeline.landed_s[kept] - timeline.prefill_end_s[kept],
        slot_wait_s=timeline.slot_s[kept] - timeline.landed_s[kept],
        ttft_s=timeline.slot_s[kept] + step_s - arrivals_s,
        timeline=timeline,
    )


# ---- stage by stage: no memory limit binds


def timeline_in_stages(system: System, requests: Requests) -> Timeline:
    """The timeline by all rules except rule 3."""
    start_s = np.empty(len(requests))
    for index, station in enumerate(system.stations):
        at = np.flatnonzero(requests.station == index)
        start_s[at] = fcfs_starts(
            requests.arrivals_s[at], requests.service_s[at], station.num_servers
        )
    prefill_end_s = start_s + requests.service_s
    landed_s = prefill_end_s.copy()
    crossed = links_of(system, requests)
    for index, link in enumerate(system.links):
        at = np.flatnonzero(crossed == index)
        backlog_bytes = _backlog_at_ends(requests, at, start_s, link.bytes_per_s)
        landed_s[at] += backlog_bytes / link.bytes_per_s + link.delay_s
    slot_s = np.empty(len(requests))
    for index, pool in enumerate(system.pools):
        at = np.flatnonzero(requests.pool == index)
        # Slots are taken in the order of landing, not of arrival.
        at = at[np.argsort(landed_s[at], kind="stable")]
        slot_s[at] = fcfs_starts(landed_s[at], requests.decode_s[at], pool.num_slots)
    return Timeline(
        start_s=start_s,
        prefill_end_s=prefill_end_s,
        landed_s=landed_s,
        slot_s=slot_s,
        done_s=slot_s + requests.decode_s,
    )


def fcfs_starts(ready_s: Floats, hold_s: Floats, num_servers: int) -> list[float]:
    """When each request of a queue gets a server, in the order in which they become ready.

    This is the recursion of Kiefer and Wolfowitz (On the theory of queues with many servers, 1955),
    with a heap of the times at which servers become free. Unused servers are not in the heap.
    """
    starts_s: list[float] = []
    free_s: list[float] = []
    for ready, hold in zip(ready_s.tolist(), hold_s.tolist(), strict=True):
        if len(free_s) < num_servers:
            start = ready
            heappush(free_s, start + hold)
        else:
            start = max(ready, free_s[0])
            heapreplace(free_s, start + hold)
        starts_s.append(start)
    return starts_s


def fluid_backlog(
    times_s: Floats, inflow_changes: Floats, bursts_bytes: Floats, bytes_per_s: float
) -> Floats:
    """The backlog of a link at each of `times_s` (ascending), its burst included, in bytes.

    At each time the inflow changes by some bytes/s and a burst may come. With X(t) = bytes in until
    t less rate * t, the backlog is X(t) less the lowest X(s-) of all s <= t (reflection at 0).
    """
    elapsed_s = np.diff(times_s, prepend=times_s[:1])
    # Without the change at this time: until now the inflow before it has filled the link.
    inflow = np.cumsum(inflow_changes) - inflow_changes
    in_bytes = np.cumsum(inflow * elapsed_s + bursts_bytes)
    net_bytes = in_bytes - bytes_per_s * (times_s - times_s[:1])
    backlog_bytes: Floats = net_bytes - np.minimum.accumulate(net_bytes - bursts_bytes)
    return backlog_bytes


def _backlog_at_ends(
    requests: Requests, at: Indexes, start_s: Floats, bytes_per_s: float
) -> Floats:
    """A link's backlog at the end of each prefill, bytes. `at` are the requests that cross it."""
    rates, bursts_bytes = (values[at] for values in requests.emission())
    times_s = np.concatenate((start_s[at], start_s[at] + requests.service_s[at]))
    order = np.argsort(times_s, kind="stable")
    backlog_bytes = np.empty(len(order))
    backlog_bytes[order] = fluid_backlog(
        times_s[order],
        np.concatenate((rates, -rates))[order],
        np.concatenate((np.zeros(len(at)), bursts_bytes))[order],
        bytes_per_s,
    )
    return backlog_bytes[len(at) :]


# ---- memory


def _overruns_a_limit(system: System, requests: Requests, timeline: Timeline) -> bool:
    """Whether a timeline computed without rule 3 breaks it anywhere."""
    return any(
        _peak_memory_bytes(requests, timeline, index) > pool.memory_bytes
        for index, pool in enumerate(system.pools)
        if pool.memory_bytes is not None
    )


def _peak_memory_bytes(requests: Requests, timeline: Timeline, pool: int) -> int:
    """The most memory that a pool's requests hold at any time, bytes."""
    at = np.flatnonzero(requests.pool == pool)
    nbytes = requests.whole_memory_bytes()[at]
    # Ends come first in the array, so that the stable sort puts them first at one instant (rule 4).
    times_s = np.concatenate((timeline.done_s[at], timeline.start_s[at]))
    order = np.argsort(times_s, kind="stable")
    return int(np.max(np.cumsum(np.concatenate((-nbytes, nbytes))[order]), initial=0))
