"""The queueing simulation event by event, for when bounded decode memory delays prefills.

The rules are in `scheduler.planning.load.queueing`, which runs this only where it must. Each event
changes a few counters and may make others possible. The heap holds the events with a known time.
This file may not know what the times are used for. No I/O, no randomness.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from typing import Final

import numpy as np

from scheduler.planning.load.queueing_model import (
    QueueingLink,
    Requests,
    System,
    Timeline,
    links_of,
)

DECODE_END: Final = 0
PREFILL_END: Final = 1
LANDED: Final = 2
"""The events of the loop, in their order at one instant. Arrivals come after all of them."""


class _LinkState:
    """The fluid queue of one link, updated from event to event."""

    __slots__ = ("_backlog_bytes", "_clock_s", "_inflow", "_link")

    def __init__(self, link: QueueingLink) -> None:
        self._link = link
        self._clock_s = 0.0
        self._inflow = 0.0
        self._backlog_bytes = 0.0

    def change(self, now_s: float, inflow_change: float, burst_bytes: float = 0.0) -> float:
        """Change the inflow and add a burst. Returns the seconds until everything so far has
        landed.
        """
        grown = (self._inflow - self._link.bytes_per_s) * (now_s - self._clock_s)
        # The link may have run empty on the way, and it sends nothing ahead of its emission.
        self._backlog_bytes = max(0.0, self._backlog_bytes + grown) + burst_bytes
        self._inflow += inflow_change
        self._clock_s = now_s
        return self._backlog_bytes / self._link.bytes_per_s + self._link.delay_s


class EventLoop:
    """All rules, one event after the other. `run` may be called once."""

    def __init__(self, system: System, requests: Requests) -> None:
        rates, bursts_bytes = requests.emission()
        self._rates, self._bursts_bytes = rates.tolist(), bursts_bytes.tolist()
        self._arrivals_s = requests.arrivals_s.tolist()
        self._service_s = requests.service_s.tolist()
        self._decode_s = requests.decode_s.tolist()
        self._station, self._pool = requests.station.tolist(), requests.pool.tolist()
        self._bytes = requests.whole_memory_bytes().tolist()
        links = [_LinkState(link) for link in system.links]
        self._link = [links[i] if i >= 0 else None for i in links_of(system, requests).tolist()]
        self._free_servers = [station.num_servers for station in system.stations]
        self._queues: list[deque[int]] = [deque() for _ in system.stations]
        self._free_slots = [pool.num_slots for pool in system.pools]
        self._landed_queues: list[deque[int]] = [deque() for _ in system.pools]
        self._free_bytes = [
            math.inf if pool.memory_bytes is None else math.floor(pool.memory_bytes)
            for pool in system.pools
        ]
        self._events: list[tuple[float, int, int]] = []
        self._start_s, self._landed_s, self._slot_s = ([math.nan] * len(requests) for _ in range(3))

    def run(self) -> Timeline:
        """Play all requests to their end."""
        arrivals_s, stations, queues = self._arrivals_s, self._station, self._queues
        handlers = {
            DECODE_END: self._decode_ended,
            PREFILL_END: self._prefill_ended,
            LANDED: self._landed,
        }
        events = self._events
        arriving, num_requests = 0, len(arrivals_s)
        while events or arriving < num_requests:
            # Strictly before: at one instant, ends come before an arrival (rule 4).
            if arriving < num_requests and (not events or arrivals_s[arriving] < events[0][0]):
                queues[stations[arriving]].append(arriving)
                self._start_prefills(stations[arriving], arrivals_s[arriving])
                arriving += 1
            else:
                now_s, kind, request = heappop(events)
                handlers[kind](request, now_s)
        start_s, slot_s = np.array(self._start_s), np.array(self._slot_s)
        return Timeline(
            start_s=start_s,
            prefill_end_s=start_s + np.array(self._service_s),
            landed_s=np.array(self._landed_s),
            slot_s=slot_s,
            done_s=slot_s + np.array(self._decode_s),
        )

    def _start_prefills(self, station: int, now_s: float) -> None:
        """Start the requests at the head of the queue that find a server and room."""
        queue = self._queues[station]
        while queue and self._free_servers[station]:
            request = queue[0]
            pool, nbytes = self._pool[request], self._bytes[request]
            # Later requests wait too: rule 3 keeps the queue first come, first served.
            if nbytes > self._free_bytes[pool]:
                return
            queue.popleft()
            self._free_bytes[pool] -= nbytes
            self._free_servers[station] -= 1
            self._start_s[request] = now_s
            if (link := self._link[request]) is not None:
                link.change(now_s, self._rates[request])
            heappush(self._events, (now_s + self._service_s[request], PREFILL_END, request))

    def _prefill_ended(self, request: int, now_s: float) -> None:
        station = self._station[request]
        tail_s = 0.0
        if (link := self._link[request]) is not None:
            tail_s = link.change(now_s, -self._rates[request], self._bursts_bytes[request])
        heappush(self._events, (now_s + tail_s, LANDED, request))
        self._free_servers[station] += 1
        self._start_prefills(station, now_s)

    def _landed(self, request: int, now_s: float) -> None:
        self._landed_s[request] = now_s
        pool = self._pool[request]
        if self._free_slots[pool]:
            self._free_slots[pool] -= 1
            self._start_decode(request, now_s)
        else:
            self._landed_queues[pool].append(request)

    def _start_decode(self, request: int, now_s: float) -> None:
        self._slot_s[request] = now_s
        heappush(self._events, (now_s + self._decode_s[request], DECODE_END, request))

    def _decode_ended(self, request: int, now_s: float) -> None:
        pool = self._pool[request]
        if self._landed_queues[pool]:
            self._start_decode(self._landed_queues[pool].popleft(), now_s)
        else:
            self._free_slots[pool] += 1
        self._free_bytes[pool] += self._bytes[request]
        # Memory is free for all stations at once; the earliest request of any is first.
        heads = [(queue[0], station) for station, queue in enumerate(self._queues) if queue]
        for _, station in sorted(heads):
            self._start_prefills(station, now_s)
