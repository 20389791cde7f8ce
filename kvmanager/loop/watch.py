"""Finds gaps in which the event loop of a process stands still, and logs where it stood.

A heartbeat on the loop measures how late the loop runs what is due. While the heartbeat is late,
another thread looks at the stack of the loop's thread. Gaps over a limit are logged once they are
over. This module does not know what the loop runs; `gaps` decides whose time a gap was.

An idle agent may use 0.003 cores, and waking a thread costs up to 100 microseconds. So a loop that
has had nothing to do for a second beats only every 100 ms, at full multiples that other periodic
work can share (`aligned_delay_s`), and the thread wakes up five times a second. A busy loop beats
every 20 ms. A gap that begins between two beats is measured from the second one, so it may be up to
one period longer than reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import selectors
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, Self

from kvmanager.loop.gaps import (
    LEAST_GAP_S,
    Halt,
    LoopGap,
    LoopGaps,
    RawGap,
    Stack,
    describe,
    halt_of_sleeper,
    judge,
    keep_evident,
)
from kvmanager.loop.thread_times import (
    ThreadClock,
    ThreadClocks,
    ThreadTimes,
    gil_wait_s,
    num_own_switches,
    stolen_s,
)

logger = logging.getLogger("prfaas.kvmanager.loop.watch")

IDLE_PERIOD_S: Final = 0.1
BUSY_PERIOD_S: Final = 0.02
LIMIT_S: Final = 0.1
"""Gaps whose own part is at least this long are logged as warnings."""

_BUSY_SHARE: Final = 0.05
_BUSY_FOR_S: Final = 1.0
LOOK_S: Final = 0.02
"""Time between two looks at the stack of a late loop."""
_STARVED_S: Final = 1e-3
_READ_ALL_EVERY_S: Final = 1.0
"""To read /proc/stat, the kernel adds up every interrupt of every core, which takes long on big
machines.
"""
_IDLE_FILES: Final = frozenset(
    {__file__, asyncio.base_events.__file__, asyncio.runners.__file__, selectors.__file__}
)
"""A loop whose innermost frame is in one of these files waits for events or runs the heartbeat."""
_NOTHING: Final = ThreadTimes(0.0, 0.0)
_MAX_FRAMES: Final = 30
_LOG_EVERY_S: Final = 1.0
_MAX_KEPT: Final = 1000


def aligned_delay_s(period_s: float, now_s: float) -> float:
    """Seconds to the next full multiple of `period_s` that is at least half a period away.

    Timers that agree on such times wake the process once, not once each. Half a millisecond is
    added because uvloop counts whole ones.
    """
    full_periods = int((now_s + period_s / 2) / period_s) + 1
    return full_periods * period_s - now_s + 5e-4


def settle_heap() -> None:
    """Exempt the objects that exist now, mostly modules, from later garbage collections.

    Call it once the process is ready. A full collection would visit all of them, which takes 50 ms,
    and free none.
    """
    gc.collect()
    gc.freeze()


class LoopWatch:
    """Watches the loop that runs when it is entered, until it is left (`with`, on the loop).

    `on_gap` is called for each gap of at least `LEAST_GAP_S`, in the watching thread; the stack was
    looked at if the loop was late by `limit_s`. By default, gaps are counted and logged.
    """

    def __init__(
        self,
        *,
        limit_s: float = LIMIT_S,
        idle_period_s: float = IDLE_PERIOD_S,
        on_gap: Callable[[LoopGap], None] | None = None,
    ) -> None:
        self.gaps = LoopGaps()
        self._limit_s = limit_s
        self._idle_period_s = idle_period_s
        self._busy_period_s = min(BUSY_PERIOD_S, idle_period_s)
        self._log = GapLog(limit_s)
        self._on_gap = on_gap or self._log.add
        self._ended: deque[RawGap] = deque(maxlen=_MAX_KEPT)
        self._halts: deque[Halt] = deque(maxlen=8)
        self._stacks: Counter[Stack] = Counter()
        self._wake = threading.Event()
        self._closed = False
        self._collecting_s = self._gc_s = 0.0

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._watched_thread = threading.get_ident()
        # The frames that run the loop stand below everything that it runs; stacks leave them out.
        self._below = [frame.f_code for frame in _frames(sys._getframe())]
        self._native_id = threading.get_native_id()
        self._clock = ThreadClock(self._native_id)
        gc.callbacks.append(self._on_gc)
        self._due_s = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="prfaas-loop-watch", daemon=True)
        self._thread.start()
        # Only now, because starting a thread waits for its first turn on a core.
        self._busy_s = time.monotonic()
        self._rearm(self._busy_s, self._busy_period_s)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._closed = True
        self._wake.set()
        self._thread.join()
        # A gap may still be going on when the watch ends; it counts as well.
        self._note(time.monotonic())
        self._report()
        self._log.flush()
        gc.callbacks.remove(self._on_gc)
        self._clock.close()

    # ---- on the loop

    def _beat(self) -> None:
        now_s = time.monotonic()
        cpu_s = self._note(now_s)
        if cpu_s > _BUSY_SHARE * (now_s - self._beat_s):
            self._busy_s = now_s
        is_busy = now_s - self._busy_s < _BUSY_FOR_S
        self._rearm(now_s, self._busy_period_s if is_busy else self._idle_period_s)

    def _note(self, now_s: float) -> float:
        """Hand a gap that has ended to the thread, and return the CPU time since the last beat."""
        cpu_s = time.thread_time() - self._cpu_s
        if now_s - self._due_s >= LEAST_GAP_S:
            starved_s = self._clock.starved_s()
            if starved_s is not None and self._starved_s is not None:
                starved_s -= self._starved_s
            self._ended.append(
                RawGap(
                    since_s=self._beat_s,
                    due_s=self._due_s,
                    ran_s=now_s,
                    cpu_s=cpu_s,
                    starved_s=starved_s,
                    gc_s=self._gc_s,
                )
            )
            if now_s - self._due_s >= self._limit_s:
                self._wake.set()
        return cpu_s

    def _rearm(self, now_s: float, period_s: float) -> None:
        delay_s = aligned_delay_s(period_s, now_s)
        self._beat_s, self._due_s = now_s, now_s + delay_s
        self._cpu_s, self._starved_s = time.thread_time(), self._clock.starved_s()
        self._gc_s = 0.0
        self._timer = self._loop.call_later(delay_s, self._beat)

    def _on_gc(self, phase: str, info: dict[str, Any]) -> None:
        # A collection holds Python's lock in whichever thread it runs, so the loop waits for it.
        if phase == "start":
            self._collecting_s = time.monotonic()
        else:
            self._gc_s += time.monotonic() - self._collecting_s

    # ---- in the thread

    def _watch(self) -> None:
        own = ThreadClock(threading.get_native_id())
        with contextlib.closing(own), contextlib.closing(ThreadClocks()) as clocks:
            own_s = read_own_s = own.starved_s() or 0.0
            before_gap = clocks.read()
            stolen_before_s, read_all_s = stolen_s(), time.monotonic()
            while not self._closed:
                now_s = time.monotonic()
                late_s = now_s - self._due_s
                if late_s < LEAST_GAP_S:
                    # Reading these clocks costs time. As long as this thread does not wait for a
                    # core, other threads hardly do.
                    is_due = now_s - read_all_s >= _READ_ALL_EVERY_S
                    if is_due or own_s - read_own_s > _STARVED_S:
                        before_gap, read_own_s = clocks.read(), own_s
                    if is_due:
                        stolen_before_s, read_all_s = stolen_s(), now_s
                if late_s >= self._limit_s:
                    self._look()
                slept_s, lock_wait_s = self._sleep(max(self._limit_s - late_s, LOOK_S))
                earlier_s, own_s = own_s, own.starved_s() or 0.0
                halt = halt_of_sleeper(slept_s, own_s - earlier_s, lock_wait_s)
                if halt is not None:
                    self._halts.append(halt)
                if self._ended:
                    self._report(
                        _most_since(before_gap, clocks.read(), but=self._native_id),
                        _longest_theft_s(stolen_before_s),
                    )

    def _sleep(self, length_s: float) -> tuple[tuple[float, float, float], float]:
        """Sleep for `length_s`, or until a gap is over.

        Gives when the thread fell asleep, was due to wake up and woke up, and how long it then
        waited for the interpreter lock.
        """
        asleep_s, switches = time.monotonic(), num_own_switches()
        if self._wake.wait(length_s):
            self._wake.clear()
        return (asleep_s, asleep_s + length_s, time.monotonic()), gil_wait_s(switches)

    def _look(self) -> None:
        frame = sys._current_frames().get(self._watched_thread)
        if frame is not None:
            self._stacks[_stack(frame, self._below)] += 1

    def _report(self, other: ThreadTimes = _NOTHING, theft_s: float = 0.0) -> None:
        while self._ended:
            raw = self._ended.popleft()
            gap = judge(raw, self._halts, other_starved_s=other.starved_s, stolen_s=theft_s)
            if gap.gap_s >= self._limit_s:
                gap = replace(gap, stacks=tuple(self._stacks.most_common()))
                self._stacks.clear()
                gap = keep_evident(gap, _share_inside(gap), other.ran_s)
            self.gaps.add(gap)
            self._on_gap(gap)


class GapLog:
    """Logs gaps over the limit, at most one a second, and the number of gaps left out."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._logged_s = float("-inf")
        self._left_out_s: list[float] = []

    def add(self, gap: LoopGap) -> None:
        if gap.gap_s < self._limit_s:
            return
        if gap.own_s < self._limit_s:
            logger.debug("%s", describe(gap))  # nothing here could be mended
        elif gap.ended_s - self._logged_s < _LOG_EVERY_S:
            self._left_out_s.append(gap.own_s)
        else:
            self.flush()
            self._logged_s = gap.ended_s
            logger.warning("%s%s", describe(gap), _seen_at(gap))

    def flush(self) -> None:
        """Log how many gaps were left out, if any."""
        if self._left_out_s:
            logger.warning(
                "the event loop stood still %d times more within a second, at most %.0f ms own",
                len(self._left_out_s),
                max(self._left_out_s) * 1e3,
            )
            self._left_out_s.clear()


def _most_since(
    before: Mapping[int, ThreadTimes], now: Mapping[int, ThreadTimes], but: int
) -> ThreadTimes:
    """The longest time that any thread except `but` ran, and that any of them waited for a core,
    between the two readings.
    """
    ran_s = starved_s = 0.0
    for native_id, times in now.items():
        if native_id != but:
            # A new thread counts as well: whoever starts it waits until it has run once.
            earlier = before.get(native_id, _NOTHING)
            ran_s = max(ran_s, times.ran_s - earlier.ran_s)
            starved_s = max(starved_s, times.starved_s - earlier.starved_s)
    return ThreadTimes(ran_s, starved_s)


def _share_inside(gap: LoopGap) -> float:
    """The share of looks that found the loop's thread inside a callback; 0 without any look."""
    total = sum(count for _, count in gap.stacks)
    inside = sum(count for stack, count in gap.stacks if stack[-1][0] not in _IDLE_FILES)
    return inside / total if total else 0.0


def _longest_theft_s(before_s: Sequence[float]) -> float:
    """The longest time for which the hypervisor stopped any one core since `before_s` was read."""
    pairs = zip(before_s, stolen_s(), strict=False)  # a core may come or go meanwhile
    return max((total_s - earlier_s for earlier_s, total_s in pairs), default=0.0)


def _seen_at(gap: LoopGap) -> str:
    """Where the loop's thread was seen most often."""
    if not gap.stacks:
        return ""
    stack, times = gap.stacks[0]
    total = sum(count for _, count in gap.stacks)
    frames = "".join(traceback.format_list([(*frame, None) for frame in stack]))
    return f"; in {times} of {total} looks it was at\n{frames.rstrip()}"


def _stack(innermost: FrameType, below: Sequence[CodeType]) -> Stack:
    """The stack from the last frame that it shares with `below` to the innermost one."""
    frames = _frames(innermost)
    pairs = zip(frames, below, strict=False)
    shared = itertools.takewhile(lambda pair: pair[0].f_code is pair[1], pairs)
    num_shared = sum(1 for _ in shared)
    return tuple(
        (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        for frame in frames[max(0, num_shared - 1) :][-_MAX_FRAMES:]
    )


def _frames(innermost: FrameType) -> list[FrameType]:
    """All frames of the stack, the outermost first."""
    frames = []
    frame: FrameType | None = innermost
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]
