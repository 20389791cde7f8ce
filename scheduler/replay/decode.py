"""The decode instances of the PD cluster: batches whose step takes longer the larger they are.

A request joins the least full usable instance when its KVCache has landed, and waits for one when
all batches are full. Every step of an instance gives one token to each of its requests. Progress is
kept as one number per instance, the steps done so far, so that a change of the batch touches none
of its requests.

This file knows no prefill and no policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import ClassVar

from scheduler.live.long_term.conversion import PdRole
from scheduler.replay.jobs import Job

# Steps are sums of floats, so a request may miss its last step by a rounding error.
_ROUNDING_STEPS = 1e-6


def step_table(points: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """Step time by batch size, from 0 to the largest of the (batch, seconds) points.

    It is linear between points, and constant below the first.
    """
    known = sorted(points)
    if not known or known[0][0] < 1 or known[0][1] <= 0:
        raise ValueError(f"decode steps {known}: batches must be at least 1, seconds above 0")
    table = [known[0][1]] * (known[0][0] + 1)
    for (low, low_s), (high, high_s) in pairwise(known):
        if low == high or high_s < low_s:
            raise ValueError(f"decode steps {known}: a larger batch cannot take less time")
        slope = (high_s - low_s) / (high - low)
        table += [low_s + slope * (batch - low) for batch in range(low + 1, high + 1)]
    return tuple(table)


class DecodeInstance:
    """One engine. Its requests are in the order of their last steps. `role_epoch` is the epoch of
    the order that gave it its role.
    """

    __slots__ = (
        "at_s",
        "is_lost",
        "is_usable",
        "name",
        "role_epoch",
        "running",
        "steps",
        "version",
    )
    role: ClassVar[PdRole] = "decode"

    def __init__(self, name: str, role_epoch: int = 0) -> None:
        self.name = name
        self.role_epoch = role_epoch
        self.is_usable = True
        self.is_lost = False
        """Whether its cluster is lost. It is not usable then."""
        self.running: list[tuple[float, int, Job]] = []
        self.steps = 0.0
        self.at_s = 0.0
        self.version = 0
        """The version of the only pending event. Events with older versions are void."""

    @property
    def num_requests(self) -> int:
        return len(self.running)

    @property
    def num_tokens(self) -> int:
        """The tokens that it has still to generate."""
        return int(sum(last - self.steps for last, _, _ in self.running))


class DecodePool:
    """The decode instances of a region in virtual time.

    It calls `schedule` with (time, instance, version); at that time `ended` must be called with the
    instance and the version. It calls `begun` with each request that gets a slot, and the time.
    """

    def __init__(
        self,
        instances: Sequence[DecodeInstance],
        slots_per_instance: int,
        step_s: Sequence[float],
        schedule: Callable[[float, DecodeInstance, int], None],
        *,
        begun: Callable[[Job, float], None],
    ) -> None:
        """With `slots_per_instance` requests the objective holds; at most `len(step_s) - 1` run."""
        self.instances = list(instances)
        self.slots_per_instance = slots_per_instance
        self.waiting: deque[Job] = deque()
        self.num_running = 0
        self.busy_s = 0.0
        """The sum of the times that ended requests had a slot."""
        self._step_s = step_s
        self._most = len(step_s) - 1
        self._is_level = len(set(step_s[1:])) == 1
        self._schedule = schedule
        self._begun = begun
        self.slots_total = 0
        """The slots of the usable instances within the objective, as of the last `recount`."""
        self.recount()

    @property
    def num_usable(self) -> int:
        """The usable instances, as of the last `recount`."""
        return self.slots_total // self.slots_per_instance

    def recount(self) -> None:
        """Count the slots again, after an instance came, went or changed `is_usable`."""
        self.slots_total = self.slots_per_instance * sum(i.is_usable for i in self.instances)

    def land(self, job: Job, now_s: float) -> None:
        """The request can decode: it gets a slot, or waits for one."""
        instance = self._least_full()
        if instance is None:
            self.waiting.append(job)
        else:
            self._begin(instance, job, now_s)

    def ended(self, instance: DecodeInstance, version: int, now_s: float) -> list[Job]:
        """Take out the requests that have their last token; none for a void event. Waiting requests
        take their slots.
        """
        if version != instance.version:
            return []
        self._advance(instance, now_s)
        done: list[Job] = []
        running, until = instance.running, instance.steps + _ROUNDING_STEPS
        while running and running[0][0] <= until:
            job = heappop(running)[2]
            job.done_s = now_s
            self.busy_s += now_s - job.slot_s
            done.append(job)
        self.num_running -= len(done)
        self._reschedule(instance)
        self.fill(now_s)
        return done

    def lose(self) -> list[Job]:
        """Lose all instances. Returns the jobs that waited or ran."""
        jobs = [job for instance in self.instances for *_, job in instance.running]
        jobs += self.waiting
        for instance in self.instances:
            instance.is_lost, instance.is_usable = True, False
            instance.running.clear()
            # Its pending event is void.
            instance.version += 1
        self.waiting.clear()
        self.num_running = 0
        self.recount()
        return jobs

    def regain(self) -> None:
        """All instances are there again, idle."""
        for instance in self.instances:
            instance.is_lost, instance.is_usable = False, True
        self.recount()

    def fill(self, now_s: float) -> None:
        """Let waiting requests begin where there is room."""
        while self.waiting and (instance := self._least_full()) is not None:
            self._begin(instance, self.waiting.popleft(), now_s)

    def _least_full(self) -> DecodeInstance | None:
        best, fewest = None, self._most
        for instance in self.instances:
            if instance.is_usable and len(instance.running) < fewest:
                best, fewest = instance, len(instance.running)
        return best

    def _begin(self, instance: DecodeInstance, job: Job, now_s: float) -> None:
        self._advance(instance, now_s)
        last = instance.steps + job.output_tokens
        heappush(instance.running, (last, job.index, job))
        job.slot_s = now_s
        job.step_s = self._step_s[len(instance.running)]
        self.num_running += 1
        self._begun(job, now_s)
        # If every batch has the same step time, a new request changes no other's end: the pending
        # event holds unless the new one ends first.
        if not self._is_level or instance.running[0][2] is job:
            self._reschedule(instance)

    def _advance(self, instance: DecodeInstance, now_s: float) -> None:
        if instance.running:
            step_s = self._step_s[len(instance.running)]
            instance.steps += (now_s - instance.at_s) / step_s
        instance.at_s = now_s

    def _reschedule(self, instance: DecodeInstance) -> None:
        instance.version += 1
        if instance.running:
            left = max(0.0, instance.running[0][0] - instance.steps)
            end_s = instance.at_s + left * self._step_s[len(instance.running)]
            self._schedule(end_s, instance, instance.version)
