"""Input and output of the queueing simulation: a region, its requests, their timelines.

These are the value types of `scheduler.planning.load.queueing`, which has the rules. Constructors
raise ValueError for a value that cannot be meant, `check_fit` for requests that a region cannot
serve. No clock; random draws come from a generator that the caller seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduler.planning.lengths import Floats

Indexes = NDArray[np.intp]

INSTANT_S: Final = 1e-6
"""A prefill shorter than this emits everything at its end, seconds. As a rate, its bytes would be
so large that the sums of the others would lose digits.
"""


@dataclass(frozen=True, slots=True)
class Station:
    """Prefill instances with one queue.

    `links` gives, by decode pool, the link that KVCache for the pool crosses. A pool without one is
    where the instances are.
    """

    num_servers: int
    links: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_servers < 0:
            raise ValueError(f"num_servers is {self.num_servers}; it must not be negative")


@dataclass(frozen=True, slots=True)
class QueueingLink:
    """One direction between two clusters: its rate, and how long a byte is under way."""

    bytes_per_s: float
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < math.inf:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s:g}; it must be finite and above 0")
        if not 0 <= self.delay_s < math.inf:
            raise ValueError(f"delay_s is {self.delay_s:g}; it must be finite and not negative")


@dataclass(frozen=True, slots=True)
class SlotPool:
    """Decode instances as one pool of slots (instances times batch size).

    `step_s` is the time of one decode step, the last part of every TTFT. `memory_bytes` bounds what
    its requests hold from the start of their prefill to the end of their decode; None: no bound.
    """

    num_slots: int
    step_s: float
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.num_slots < 0:
            raise ValueError(f"num_slots is {self.num_slots}; it must not be negative")
        if not 0 <= self.step_s < math.inf:
            raise ValueError(f"step_s is {self.step_s:g}; it must be finite and not negative")
        if self.memory_bytes is not None and not 0 <= self.memory_bytes < math.inf:
            raise ValueError(
                f"memory_bytes is {self.memory_bytes:g}; it must be finite and not negative, "
                "None for no bound"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A region. Requests name stations and pools, stations name pools and links, by position."""

    stations: tuple[Station, ...]
    pools: tuple[SlotPool, ...]
    links: tuple[QueueingLink, ...] = ()

    def __post_init__(self) -> None:
        for index, station in enumerate(self.stations):
            for pool, link in station.links.items():
                for name, named, parts in (
                    ("link", link, self.links),
                    ("pool", pool, self.pools),
                ):
                    if not 0 <= named < len(parts):
                        raise ValueError(
                            f"stations[{index}] names {name} {named}; there are {len(parts)}"
                        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Requests:
    """What arrives: arrays of equal length with one entry per request, in the order of arrival.

    `kv_token_bytes` leave at an even rate during the prefill, `kv_fixed_bytes` at its end; both are
    used only where there is a link from the station to the pool. `decode_s` is how long a decode
    slot is held, the first step included. `memory_bytes` is what the request takes of its pool's
    memory (rounded up to whole bytes); None where no pool is bounded.
    """

    arrivals_s: Floats
    station: Indexes
    pool: Indexes
    service_s: Floats
    decode_s: Floats
    kv_token_bytes: Floats
    kv_fixed_bytes: Floats
    memory_bytes: Floats | None = None

    def __post_init__(self) -> None:
        if self.arrivals_s.ndim != 1 or len(self.arrivals_s) == 0:
            raise ValueError(
                f"arrivals_s has shape {self.arrivals_s.shape}; one time per request is needed"
            )
        for name in ("station", "pool"):
            self._check_shape(name, getattr(self, name))
            if not np.issubdtype(getattr(self, name).dtype, np.integer):
                raise ValueError(f"{name} holds {getattr(self, name).dtype}; positions are needed")
        for name in ("arrivals_s", "service_s", "decode_s", "kv_token_bytes", "kv_fixed_bytes"):
            self._check_amounts(name, getattr(self, name))
        if self.memory_bytes is not None:
            self._check_amounts("memory_bytes", self.memory_bytes)
        steps_back = np.flatnonzero(np.diff(self.arrivals_s) < 0)
        if len(steps_back):
            later = int(steps_back[0]) + 1
            raise ValueError(
                f"arrivals_s[{later}] is {self.arrivals_s[later]:g}, before the one before it; "
                "sort the requests by arrival"
            )

    def __len__(self) -> int:
        return len(self.arrivals_s)

    def emission(self) -> tuple[Floats, Floats]:
        """KVCache bytes/s that each prefill emits while it runs, and the bytes at its end."""
        lasts = self.service_s >= INSTANT_S
        rates = np.zeros(len(self))
        np.divide(self.kv_token_bytes, self.service_s, out=rates, where=lasts)
        return rates, self.kv_fixed_bytes + np.where(lasts, 0, self.kv_token_bytes)

    def whole_memory_bytes(self) -> Indexes:
        """Memory as integers, 0 if not given. Integers add up exactly in any order."""
        if self.memory_bytes is None:
            return np.zeros(len(self), np.intp)
        return np.ceil(self.memory_bytes).astype(np.intp)

    def _check_amounts(self, name: str, values: Floats) -> None:
        self._check_shape(name, values)
        wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if len(wrong):
            raise ValueError(
                f"{name}[{wrong[0]}] is {values[wrong[0]]:g}; it must be finite and not negative"
            )

    def _check_shape(self, name: str, values: Floats | Indexes) -> None:
        if values.shape != self.arrivals_s.shape:
            raise ValueError(
                f"{name} has shape {values.shape}, arrivals_s {self.arrivals_s.shape}; "
                "one value per request is needed"
            )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Timeline:
    """The times at which each request's prefill began and ended, its KVCache had landed, and its
    decode began and ended. They are on the clock of `Requests.arrivals_s`.
    """

    start_s: Floats
    prefill_end_s: Floats
    landed_s: Floats
    slot_s: Floats
    done_s: Floats


def check_fit(system: System, requests: Requests) -> None:
    """Raise ValueError where `requests` need something that `system` does not have."""
    servers = [station.num_servers for station in system.stations]
    slots = [pool.num_slots for pool in system.pools]
    for name, used, unit, sizes in (
        ("station", requests.station, "num_servers", servers),
        ("pool", requests.pool, "num_slots", slots),
    ):
        outside = used[(used < 0) | (used >= len(sizes))]
        if len(outside):
            raise ValueError(f"a request names {name} {outside[0]}; there are {len(sizes)}")
        counts = np.bincount(used, minlength=len(sizes))
        for index, size in enumerate(sizes):
            if size == 0 and counts[index]:
                raise ValueError(f"{name} {index} has {unit} 0; requests for it: {counts[index]}")
    for index, pool in enumerate(system.pools):
        if pool.memory_bytes is not None:
            _check_memory(index, pool.memory_bytes, requests)


def _check_memory(index: int, limit_bytes: float, requests: Requests) -> None:
    if requests.memory_bytes is None:
        raise ValueError(f"pool {index} has a memory limit; the requests need memory_bytes")
    largest = np.max(requests.whole_memory_bytes(), where=requests.pool == index, initial=0)
    if largest > limit_bytes:
        raise ValueError(
            f"memory_bytes of a request is {largest}, the limit of pool {index} "
            f"{math.floor(limit_bytes)}; it could never start"
        )


def links_of(system: System, requests: Requests) -> Indexes:
    """The link that each request's KVCache crosses, -1 for none."""
    table = np.full((len(system.stations), len(system.pools)), -1, np.intp)
    for index, station in enumerate(system.stations):
        for pool, link in station.links.items():
            table[index, pool] = link
    found: Indexes = table[requests.station, requests.pool]
    return found


def poisson_arrivals(rate_rps: float, num_requests: int, rng: np.random.Generator) -> Floats:
    """Arrival times in seconds of a Poisson process with `rate_rps` requests/s, from time 0 on."""
    if not 0 < rate_rps < math.inf:
        raise ValueError(f"rate_rps is {rate_rps:g}; it must be finite and above 0")
    if num_requests < 1:
        raise ValueError(f"num_requests is {num_requests}; at least one is needed")
    return np.cumsum(rng.exponential(1 / rate_rps, num_requests))
