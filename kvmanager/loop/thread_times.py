"""Reads from the kernel how long threads ran and how long they waited for a core (Linux).

It does not know why they waited: other processes, a CPU quota, or other virtual machines.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from typing import Final, NamedTuple


class ThreadTimes(NamedTuple):
    """How long a thread has run and how long it has waited for a core, since it started."""

    ran_s: float
    starved_s: float


class ThreadClock:
    """The times of one thread. Any thread may read it."""

    def __init__(self, native_id: int) -> None:
        try:
            path = f"/proc/self/task/{native_id}/schedstat"
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # the thread is over, or the kernel does not count this
            self._file = -1

    def read(self) -> ThreadTimes | None:
        """None when the kernel does not tell."""
        if self._file < 0:
            return None
        try:
            # Time on a core, time waited for one, both in nanoseconds, and number of runs.
            ran_ns, starved_ns, _ = os.pread(self._file, 64, 0).split()
        except OSError:
            return None  # the thread is over
        return ThreadTimes(int(ran_ns) * 1e-9, int(starved_ns) * 1e-9)

    def starved_s(self) -> float | None:
        """How long the thread has waited for a core; None when the kernel does not tell."""
        times = self.read()
        return None if times is None else times.starved_s

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class ThreadClocks:
    """The times of all threads that run Python."""

    def __init__(self) -> None:
        self._clocks: dict[int, ThreadClock] = {}

    def read(self) -> dict[int, ThreadTimes]:
        """By native thread id. Threads of which the kernel tells nothing are missing."""
        alive = {thread.native_id or 0 for thread in threading.enumerate()} - {0}  # 0: not started
        for native_id in self._clocks.keys() - alive:
            self._clocks.pop(native_id).close()
        times = {}
        for native_id in alive:
            if native_id not in self._clocks:
                self._clocks[native_id] = ThreadClock(native_id)
            read = self._clocks[native_id].read()
            if read is not None:
                times[native_id] = read
        return times

    def close(self) -> None:
        """Idempotent."""
        for clock in self._clocks.values():
            clock.close()
        self._clocks.clear()


_CLOCK_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_STEAL_FIELD: Final = 8


def stolen_s() -> tuple[float, ...]:
    """How long the hypervisor has kept each core from running anything, since boot.

    By its own counters, a thread on such a core neither computes nor waits for a core.
    Resolution: one clock tick, 10 ms. Empty where the kernel does not tell.
    Source: proc(5), `/proc/stat`, field `steal`.
    """
    try:
        with open("/proc/stat", "rb") as file:
            lines = file.readlines()
    except OSError:
        return ()
    cores = (line.split() for line in lines[1:] if line.startswith(b"cpu"))
    return tuple(int(fields[_STEAL_FIELD]) / _CLOCK_TICKS_PER_S for fields in cores)


def num_own_switches() -> int:
    """How often this thread has given up its core by itself (voluntary context switches)."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def gil_wait_s(switches_before: int) -> float:
    """About how long this thread has waited for the interpreter lock since `num_own_switches`.

    A thread that waits for the lock sleeps, and asks for it again after each switch interval, so
    each interval is one voluntary switch. The result holds only for a thread that slept on purpose
    once meanwhile: that sleep accounts for two switches, which are left out.
    """
    return max(0, num_own_switches() - switches_before - 2) * sys.getswitchinterval()
