"""TTFT under load: requests played through a region's queues, links, decode slots and memory.

The model. A request waits for a server of its prefill station, is prefilled, and has landed when
its KVCache is at the decode pool; it then waits for a decode slot and holds it for its decode time.

    TTFT = queue + prefill + transfer tail + wait for a slot + one decode step

1. Stations and decode pools serve first come, first served, whichever server is free first.
2. A link is a fluid queue that sends first whatever was emitted first, at its full rate while there
   is anything to send. Prefills on their way emit `kv_token_bytes / service_s` each; the fixed
   bytes come at the end. A request has landed when everything emitted up to the end of its prefill,
   its fixed bytes included, has been sent: tail = backlog / rate + delay. Without a link: no tail.
3. Where a pool's memory is bounded, a request takes its bytes when its prefill starts and gives
   them back when its decode ends. A prefill without room waits at the head of its station's queue
   and holds back those behind it, but not other stations.
4. At one instant, things that end come before things that begin, and earlier requests come first.

Two ways to the same timeline. Without rule 3 nothing that happens later in a request's life changes
what happens earlier in another's, so each stage is computed for all requests at once. Only if that
shows a limit overrun does the event loop run, which knows rule 3 and is about ten times slower.

The simulation is of a steady state only if the load is below what the system can carry. A station,
link or pool with a utilisation near 1, or mean memory above nine tenths of its limit, says that
waits grow with the number of requests simulated.

It may not know how lengths, prefill times or bytes come about, nor why a request goes where it
goes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappush, heapreplace

import numpy as np

from scheduler.planning.lengths import Floats
from scheduler.planning.load.queueing_events import EventLoop
from scheduler.planning.load.queueing_model import (
    DecodePool,
    Indexes,
    Link,
    Requests,
    Station,
    System,
    Timeline,
    check_fit,
    links_of,
    poisson_arrivals,
)

__all__ = [
    "DecodePool",
    "Link",
    "LinkLoad",
    "PoolLoad",
    "Requests",
    "SimulationResult",
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
        """Over all of `times_s`, with linear interpolation between order statistics."""
        p50_s, p90_s, p99_s = np.quantile(times_s, (0.5, 0.9, 0.99)).tolist()
        return cls(float(np.mean(times_s)), p50_s, p90_s, p99_s)


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What one link carried in the span: share of its capacity, bytes, highest backlog."""

    utilisation: float
    sent_bytes: float
    peak_backlog_bytes: float


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Share of a pool's slot time in use and mean memory held in the span, most memory ever held.

    Memory is None where the requests do not say theirs.
    """

    utilisation: float
    mean_memory_bytes: float | None
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SimulationResult:
    """What the requests after the warm-up saw, in order of arrival, and how busy everything was.

    The arrays have one entry for each request from `first_kept` on. Loads are over the span from
    the arrival of that request to the last arrival, so that neither filling nor draining dilutes
    them; they are nan where the span is empty. `timeline` has all requests.
    """

    first_kept: int
    queue_s: Floats
    prefill_s: Floats
    tail_s: Floats
    slot_wait_s: Floats
    ttft_s: Floats
    span_s: float
    station_utilisation: tuple[float, ...]
    links: tuple[LinkLoad, ...]
    pools: tuple[PoolLoad, ...]
    timeline: Timeline

    @property
    def ttft(self) -> Spread:
        """TTFT over the requests after the warm-up."""
        return Spread.of(self.ttft_s)


def simulate(system: System, requests: Requests, *, warmup: float = 0.1) -> SimulationResult:
    """Play `requests` through `system`; the first `warmup` share of them is left out of the result.

    Deterministic. ValueError where a request names what is not there, has no server or slot, or
    could never fit into its pool's memory.
    """
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup is {warmup:g}; it must be a share from 0 to below 1")
    check_fit(system, requests)
    timeline = timeline_in_stages(system, requests)
    if _overruns_a_limit(system, requests, timeline):
        timeline = EventLoop(system, requests).run()
    first_kept = min(int(warmup * len(requests)), len(requests) - 1)
    return _result(system, requests, timeline, first_kept)


# ---- stage by stage: no memory limit binds


def timeline_in_stages(system: System, requests: Requests) -> Timeline:
    """Everything but rule 3."""
    start_s = np.empty(len(requests))
    for index, station in enumerate(system.stations):
        at = np.flatnonzero(requests.station == index)
        start_s[at] = fcfs_starts(
            requests.arrivals_s[at], requests.service_s[at], station.num_servers
        )
    prefill_end_s = start_s + requests.service_s
    landed_s = prefill_end_s.copy()
    for index, link in enumerate(system.links):
        path = _link_path(system, requests, start_s, index)
        landed_s[path.requests] += path.prefill_end_bytes / link.bytes_per_s + link.delay_s
    slot_s = np.empty(len(requests))
    for index, pool in enumerate(system.pools):
        at = np.flatnonzero(requests.pool == index)
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
    """When each of a queue's requests gets a server, in the order in which they become ready.

    The recursion of Kiefer and Wolfowitz (On the theory of queues with many servers, 1955), with a
    heap of the times at which servers become free. Servers never used are not in the heap.
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
) -> tuple[Floats, Floats]:
    """Backlog and bytes sent so far of a link at each of `times_s` (ascending), its burst included.

    At each time the inflow changes by so many bytes/s and a burst may come. With X(t) = bytes in
    until t less rate * t, the backlog is X(t) less the lowest X(s-) of all s <= t: reflection at 0.
    """
    elapsed_s = np.diff(times_s, prepend=times_s[:1])
    inflow = np.cumsum(inflow_changes) - inflow_changes
    in_bytes = np.cumsum(inflow * elapsed_s + bursts_bytes)
    net_bytes = in_bytes - bytes_per_s * (times_s - times_s[:1])
    backlog_bytes = net_bytes - np.minimum.accumulate(net_bytes - bursts_bytes)
    return backlog_bytes, in_bytes - backlog_bytes


@dataclass(frozen=True, slots=True)
class _LinkPath:
    """A link over time: at all prefill starts, then all prefill ends, then the times asked for."""

    requests: Indexes
    """Those whose KVCache crosses the link; the starts and the ends are in their order."""
    times_s: Floats
    backlog_bytes: Floats
    sent_bytes: Floats

    @property
    def prefill_end_bytes(self) -> Floats:
        """The backlog at each prefill's end."""
        return self.backlog_bytes[len(self.requests) : 2 * len(self.requests)]


def _link_path(
    system: System, requests: Requests, start_s: Floats, link: int, asked_s: Sequence[float] = ()
) -> _LinkPath:
    """Let the KVCache of all prefills whose pool is behind the link flow through it."""
    at = np.flatnonzero(links_of(system, requests) == link)
    rates, bursts_bytes = (values[at] for values in requests.emission())
    no_burst, no_change = np.zeros(len(at)), np.zeros(len(asked_s))
    times_s = np.concatenate((start_s[at], start_s[at] + requests.service_s[at], asked_s))
    order = np.argsort(times_s, kind="stable")
    backlog_bytes, sent_bytes = np.empty(len(order)), np.empty(len(order))
    backlog_bytes[order], sent_bytes[order] = fluid_backlog(
        times_s[order],
        np.concatenate((rates, -rates, no_change))[order],
        np.concatenate((no_burst, bursts_bytes, no_change))[order],
        system.links[link].bytes_per_s,
    )
    return _LinkPath(at, times_s, backlog_bytes, sent_bytes)


# ---- memory


def _overruns_a_limit(system: System, requests: Requests, timeline: Timeline) -> bool:
    """Whether a timeline computed without rule 3 breaks it anywhere."""
    return any(
        _peak_memory_bytes(requests, timeline, index) > pool.memory_bytes
        for index, pool in enumerate(system.pools)
        if pool.memory_bytes is not None
    )


def _peak_memory_bytes(requests: Requests, timeline: Timeline, pool: int) -> int:
    """The most memory that a pool's requests hold at any time."""
    at = np.flatnonzero(requests.pool == pool)
    nbytes = requests.whole_memory_bytes()[at]
    # Ends first in the array, so that the stable sort puts them first at one instant.
    times_s = np.concatenate((timeline.done_s[at], timeline.start_s[at]))
    order = np.argsort(times_s, kind="stable")
    return int(np.max(np.cumsum(np.concatenate((-nbytes, nbytes))[order]), initial=0))


# ---- what came of it


def _result(
    system: System, requests: Requests, timeline: Timeline, first_kept: int
) -> SimulationResult:
    kept = slice(first_kept, None)
    arrivals_s = requests.arrivals_s[kept]
    span = (float(arrivals_s[0]), float(arrivals_s[-1]))
    step_s = np.array([pool.step_s for pool in system.pools])[requests.pool[kept]]
    stations, links, pools = (
        range(len(parts)) for parts in (system.stations, system.links, system.pools)
    )
    return SimulationResult(
        first_kept=first_kept,
        queue_s=timeline.start_s[kept] - arrivals_s,
        prefill_s=requests.service_s[kept],
        tail_s=timeline.landed_s[kept] - timeline.prefill_end_s[kept],
        slot_wait_s=timeline.slot_s[kept] - timeline.landed_s[kept],
        ttft_s=timeline.slot_s[kept] + step_s - arrivals_s,
        span_s=span[1] - span[0],
        station_utilisation=tuple(
            _station_use(system, requests, timeline, i, span) for i in stations
        ),
        links=tuple(_link_load(system, requests, timeline, i, span) for i in links),
        pools=tuple(_pool_load(system, requests, timeline, i, span) for i in pools),
        timeline=timeline,
    )


def _station_use(
    system: System, requests: Requests, timeline: Timeline, index: int, span: tuple[float, float]
) -> float:
    at = requests.station == index
    busy_s = _overlap_s(timeline.start_s[at], timeline.prefill_end_s[at], span)
    return _share(busy_s, system.stations[index].num_servers, span)


def _link_load(
    system: System, requests: Requests, timeline: Timeline, index: int, span: tuple[float, float]
) -> LinkLoad:
    path = _link_path(system, requests, timeline.start_s, index, span)
    sent_bytes = float(path.sent_bytes[-1] - path.sent_bytes[-2])
    inside = (path.times_s >= span[0]) & (path.times_s <= span[1])
    return LinkLoad(
        utilisation=_share(sent_bytes, system.links[index].bytes_per_s, span),
        sent_bytes=sent_bytes,
        peak_backlog_bytes=float(np.max(path.backlog_bytes[inside])),
    )


def _pool_load(
    system: System, requests: Requests, timeline: Timeline, index: int, span: tuple[float, float]
) -> PoolLoad:
    at = requests.pool == index
    busy_s = _overlap_s(timeline.slot_s[at], timeline.done_s[at], span)
    utilisation = _share(busy_s, system.pools[index].num_slots, span)
    if requests.memory_bytes is None:
        return PoolLoad(utilisation, mean_memory_bytes=None, peak_memory_bytes=None)
    held = _overlap_s(
        timeline.start_s[at], timeline.done_s[at], span, requests.whole_memory_bytes()[at]
    )
    return PoolLoad(
        utilisation,
        mean_memory_bytes=_share(held, 1.0, span),
        peak_memory_bytes=_peak_memory_bytes(requests, timeline, index),
    )


def _overlap_s(
    begin_s: Floats, end_s: Floats, span: tuple[float, float], weights: Indexes | None = None
) -> float:
    """How much of all the intervals together lies within `span`, each as often as it weighs."""
    inside_s = np.clip(end_s, *span) - np.clip(begin_s, *span)
    return float(np.sum(inside_s if weights is None else inside_s * weights))


def _share(work: float, per_s: float, span: tuple[float, float]) -> float:
    """Work done as a share of what could have been done within `span`; nothing of nothing is 0."""
    if span[0] == span[1]:
        return math.nan
    return work / (per_s * (span[1] - span[0])) if per_s else 0.0
