"""Splits gaps of an event loop into the process's own part and the machine's, and counts them.

A gap is a stretch in which the loop ran nothing that was due. The machine's part of it is the time
in which the kernel ran something else, the hypervisor ran other machines, or the whole process was
stopped. The rest is the process's own: computing, or waiting for files, locks or Python's
interpreter lock. Pure: no clocks.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

LEAST_GAP_S: Final = 0.01
"""A shorter delay is an ordinary pause between two callbacks and no gap."""

BUCKETS_S: Final = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histogram's buckets."""

LATELY_S: Final = 60.0

Frame = tuple[str, int, str]
"""File, line and function."""

Stack = tuple[Frame, ...]
"""The innermost frame is the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawGap:
    """A gap as the loop sees it: a callback due at `due_s` ran at `ran_s`.

    `cpu_s` is the CPU time of the loop's thread and `starved_s` the time for which it waited for a
    core, both since `since_s`, when the previous callback ran. `starved_s` None: the kernel does
    not tell.
    """

    since_s: float
    due_s: float
    ran_s: float
    cpu_s: float
    starved_s: float | None
    gc_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopGap:
    """A gap, split: `gap_s` is the sum of `own_s` and `machine_s`. `cpu_s` and `gc_s` (garbage
    collection) are parts of `own_s`. `stacks` counts the stacks in which the loop's thread was
    seen.
    """

    ended_s: float
    gap_s: float
    own_s: float
    cpu_s: float
    gc_s: float
    stacks: tuple[tuple[Stack, int], ...] = ()

    @property
    def machine_s(self) -> float:
        """The time in which the loop had no core or the process was stopped."""
        return self.gap_s - self.own_s


@dataclass(frozen=True, slots=True)
class Halt:
    """A stretch in which the whole process was stopped for `most_s` or a little less."""

    began_s: float
    ended_s: float
    most_s: float

    def within_s(self, began_s: float, ended_s: float) -> float:
        """The most of it that can lie between two times."""
        return min(self.most_s, max(0.0, min(self.ended_s, ended_s) - max(self.began_s, began_s)))


def judge(
    raw: RawGap,
    halts: Iterable[Halt] = (),
    *,
    other_starved_s: float = 0.0,
    stolen_s: float = 0.0,
) -> LoopGap:
    """Split a gap into the process's own part and the machine's.

    The time without a core counts from `since_s` on, so some of it may have passed shortly before
    the gap; all of it is taken off. `other_starved_s` is how long another thread of the process
    waited for a core meanwhile. Where the loop computed nothing, it may have waited for a lock of
    that thread, mostly Python's own, so this time counts as the machine's. `stolen_s` is how long
    the hypervisor stopped any one core meanwhile: the loop, or the thread that it waited for, may
    have been on that core. CPU time is always own time. Where the kernel does not tell how long the
    thread waited for a core, only CPU time is.
    """
    gap_s = raw.ran_s - raw.due_s
    least_own_s = max(0.0, min(gap_s, raw.cpu_s - (raw.due_s - raw.since_s)))
    if raw.starved_s is None:
        own_s = min(gap_s, raw.cpu_s)
    else:
        # A thread that is stopped does not wait for a core: the two never overlap. A hypervisor
        # that stops every core halts the process too: the two are not added.
        halted_s = sum(halt.within_s(raw.due_s, raw.ran_s) for halt in halts)
        halted_s = max(halted_s, stolen_s)
        rest_s = gap_s - halted_s - raw.starved_s
        held_up_s = min(other_starved_s, max(0.0, rest_s - raw.cpu_s))
        own_s = max(least_own_s, rest_s - held_up_s)
    return LoopGap(
        ended_s=raw.ran_s,
        gap_s=gap_s,
        own_s=own_s,
        cpu_s=min(raw.cpu_s, own_s),
        gc_s=min(raw.gc_s, own_s),
    )


def keep_evident(gap: LoopGap, looks_inside: float, other_ran_s: float) -> LoopGap:
    """`gap` with its own part reduced to what there is evidence for.

    CPU time of the loop's thread is evidence. While it computed nothing, it either stood inside a
    callback, which a share `looks_inside` (0 to 1) of the looks at its stack shows, or it waited
    for Python's lock, which another thread held while it ran for `other_ran_s`. What is left over
    is the machine's, such as pages of the program that the kernel reads from disk, or clocks that
    stop with their core.
    """
    blocked_s = gap.own_s - gap.cpu_s
    evident_s = min(blocked_s, max(blocked_s * looks_inside, other_ran_s))
    return replace(gap, own_s=gap.cpu_s + evident_s)


def halt_of_sleeper(
    slept_s: tuple[float, float, float], starved_s: float, gil_wait_s: float
) -> Halt | None:
    """The halt of the process that a late waking of a sleeping thread shows, if there was one.

    `slept_s` is when that thread fell asleep, when it was due to wake up, and when it woke up. Of
    the delay, `starved_s` was a wait for a core and about `gil_wait_s` a wait for the interpreter
    lock; both happen in a process that runs. The halt may have begun before the thread was due.
    """
    asleep_s, due_s, awake_s = slept_s
    halted_s = awake_s - due_s - starved_s - gil_wait_s
    if halted_s < LEAST_GAP_S + gil_wait_s / 2:
        return None
    return Halt(asleep_s, awake_s, halted_s + (due_s - asleep_s))


class LoopGaps:
    """Counts the gaps of one loop: histograms of both parts, and the longest own ones."""

    def __init__(self) -> None:
        self.own = GapHistogram()
        self.machine = GapHistogram()
        self.longest_own_s = 0.0
        # End times rise and lengths fall: a later gap that is longer makes earlier ones irrelevant.
        self._lately: deque[tuple[float, float]] = deque()

    def add(self, gap: LoopGap) -> None:
        """Count a gap. Call it in the order in which gaps end."""
        self.own.add(gap.own_s)
        self.machine.add(gap.machine_s)
        self.longest_own_s = max(self.longest_own_s, gap.own_s)
        while self._lately and self._lately[-1][1] <= gap.own_s:
            self._lately.pop()
        self._lately.append((gap.ended_s, gap.own_s))
        self._forget(gap.ended_s)

    def longest_own_lately_s(self, now_s: float) -> float:
        """The longest own gap that ended within `LATELY_S`."""
        self._forget(now_s)
        return self._lately[0][1] if self._lately else 0.0

    def _forget(self, now_s: float) -> None:
        while self._lately and self._lately[0][0] < now_s - LATELY_S:
            self._lately.popleft()


class GapHistogram:
    """Counts gaps by length. Gaps shorter than `LEAST_GAP_S` are not counted."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, length_s: float) -> None:
        if length_s >= LEAST_GAP_S:
            self._counts[bisect.bisect_left(BUCKETS_S, length_s)] += 1
            self.sum_s += length_s

    def buckets(self) -> Sequence[tuple[str, int]]:
        """Upper bound and number of gaps that are not longer, as Prometheus wants them."""
        total = 0
        buckets = []
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets


def describe(gap: LoopGap) -> str:
    """One line about a gap, for a log."""
    text = f"the event loop stood still for {gap.gap_s * 1e3:.0f} ms, {gap.own_s * 1e3:.0f} ms own"
    details = [f"{gap.cpu_s * 1e3:.0f} ms computing"] if gap.cpu_s >= 1e-3 else []
    if gap.gc_s >= 1e-3:
        details.append(f"{gap.gc_s * 1e3:.0f} ms collecting garbage")
    return f"{text} ({', '.join(details)})" if details else text
