"""Whether what processes hold grows: lines through what they held when the region was at rest.

Pure; does not know where samples come from.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

MIB = 1 << 20
WARM_UP = 0.25
"""Share of a run in which caches, windows and tables with bounds may fill up."""
LEAST_RESTS = 12
"""Through fewer rests no line is judged."""
MAX_MEMORY_GROWTH_BYTES = 2 * MIB
"""Over the last half of a run. CPython takes and gives back memory in arenas of 1 MiB, so that the
readings of a process that holds the same things differ by one or two of them.
"""
MAX_TABLE_GROWTH = 0.1
MAX_TABLE_GROWTH_ENTRIES = 8
"""After the warm-up: tables that keep what ended lately follow the load, which is drawn, and pools
of threads have up to eight.
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """Resources of one process. `memory_bytes` is its own resident memory: no mapped files,
    which are code and arenas. `tables` are the sizes that it shows of its tables, by name.
    """

    at_s: float
    pid: int
    is_at_rest: bool
    rss_bytes: int
    memory_bytes: int
    num_descriptors: int
    num_threads: int
    tables: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """The line of least squares through one number of a process."""

    first: float
    last: float
    growth: float
    """Between the first and the last rest that it goes through."""


def line(points: Sequence[tuple[float, float]]) -> Line:
    """Through at least two points (seconds, number)."""
    times, numbers = zip(*points, strict=True)
    slope = statistics.linear_regression(times, numbers).slope
    return Line(numbers[0], numbers[-1], slope * (times[-1] - times[0]))


def after(samples: Sequence[Sample], share: float, begin_s: float, end_s: float) -> list[Sample]:
    """The samples at rest after `share` of the run."""
    since_s = begin_s + share * (end_s - begin_s)
    return [sample for sample in samples if sample.is_at_rest and sample.at_s >= since_s]


def grown(name: str, samples: Sequence[Sample], begin_s: float, end_s: float) -> list[str]:
    """Sentences about what grew too much in the process `name`, which was never restarted.

    With too few rests for a line, only descriptors are judged: in the second half there may be no
    more than there were at some rest before.
    """
    rests = after(samples, WARM_UP, begin_s, end_s)
    if len(rests) < LEAST_RESTS:
        return _descriptors_kept(name, [sample for sample in samples if sample.is_at_rest])
    found = []
    descriptors = line([(sample.at_s, sample.num_descriptors) for sample in rests])
    if round(descriptors.growth) > 0:
        found.append(f"{name}: {descriptors.growth:+.1f} descriptors after the warm-up")
    half = after(samples, 0.5, begin_s, end_s)
    memory = line([(sample.at_s, sample.memory_bytes) for sample in half])
    if memory.growth > MAX_MEMORY_GROWTH_BYTES:
        told = f"{memory.growth / MIB:+.1f} MiB in the last half"
        found.append(f"{name}: {told}, from {memory.first / MIB:.1f} MiB")
    sized = [(sample.at_s, {"threads": sample.num_threads} | sample.tables) for sample in rests]
    for table in sorted(set().union(*(tables for _, tables in sized))):
        sizes = line([(at_s, tables.get(table, 0.0)) for at_s, tables in sized])
        limit = MAX_TABLE_GROWTH_ENTRIES + MAX_TABLE_GROWTH * sizes.first
        if sizes.growth > limit:
            found.append(f"{name}: {table} {sizes.growth:+.0f}, from {sizes.first:.0f}")
    return found


def _descriptors_kept(name: str, rests: Sequence[Sample]) -> list[str]:
    half = len(rests) // 2
    before = max((sample.num_descriptors for sample in rests[:half]), default=0)
    last = rests[-1].num_descriptors if rests else 0
    if half and last > before:
        return [f"{name}: {last} descriptors at the end, at most {before} in the first half"]
    return []
