"""The decode instances of the PD cluster: batches whose step takes longer the larger they are.

A request joins the batch of its instance when its KVCache has landed, and waits while that is full.
One without an instance of its own joins the least full one. Every step of an instance gives one
token to each of its requests. Progress is kept as one number per instance, the steps done so far,
so that a change of the batch touches none of its requests.

A request that an instance serves whole has its prompt computed there first: each chunk of it
lengthens a step, so it holds up the whole batch. Prompts are computed one after the other.

This file knows no policy.
"""

from __future__ import annotations

import math
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
        "chunk_s",
        "is_lost",
        "is_usable",
        "name",
        "num_coming",
        "prompt_ends",
        "prompts",
        "role_epoch",
        "running",
        "steps",
        "version",
        "waiting",
    )
    role: ClassVar[PdRole] = "decode"

    def __init__(self, name: str, role_epoch: int = 0) -> None:
        self.name = name
        self.role_epoch = role_epoch
        self.is_usable = True
        self.is_lost = False
        """Whether its cluster is lost. It is not usable then."""
        self.running: list[tuple[float, int, Job]] = []
        self.prompts: deque[Job] = deque()
        """Requests that it serves whole and whose prompts it has not computed."""
        self.prompt_ends = 0.0
        """The step after which the first of them is computed."""
        self.chunk_s = 0.0
        """What that one adds to each step until then, seconds."""
        self.waiting: deque[Job] = deque()
        """Requests that it was given and that have no slot."""
        self.num_coming = 0
        """The requests that it was given and whose KVCache has not landed."""
        self.steps = 0.0
        self.at_s = 0.0
        self.version = 0
        """The version of the only pending event. Events with older versions are void."""

    @property
    def num_slots_used(self) -> int:
        return len(self.running) + len(self.prompts)

    @property
    def num_requests(self) -> int:
        """All that it was given, also what it waits for."""
        return self.num_slots_used + len(self.waiting) + self.num_coming

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
        load_steps: int | None = None,
        pass_tokens: int | None = None,
    ) -> None:
        """With `slots_per_instance` requests the objective holds; at most `len(step_s) - 1` run.

        `load_steps` are the steps that an engine begins while it loads a request's KVCache; None:
        the request joins the batch at once, in the middle of a step. A step computes up to
        `pass_tokens` of a prompt; None: all of it.
        """
        self.instances = list(instances)
        self.slots_per_instance = slots_per_instance
        self.waiting: deque[Job] = deque()
        """Requests without an instance, while no batch has room."""
        self.num_running = 0
        self.busy_s = 0.0
        """The sum of the times that ended requests had a slot."""
        self._step_s = step_s
        self._most = len(step_s) - 1
        self._is_level = len(set(step_s[1:])) == 1
        self._schedule = schedule
        self._begun = begun
        self._load_steps = load_steps
        self._pass_tokens = pass_tokens
        self.slots_total = 0
        """The slots of the usable instances within the objective, as of the last `recount`."""
        self.recount()

    @property
    def num_usable(self) -> int:
        """The usable instances, as of the last `recount`."""
        return self.slots_total // self.slots_per_instance

    @property
    def num_waiting(self) -> int:
        """The requests that have landed and have no slot."""
        return len(self.waiting) + sum(len(one.waiting) for one in self.instances)

    def recount(self) -> None:
        """Count the slots again, after an instance came, went or changed `is_usable`."""
        self.slots_total = self.slots_per_instance * sum(i.is_usable for i in self.instances)

    def reserve(self, job: Job) -> str:
        """Give the request to the instance with the fewest; the name is "" if none is usable."""
        usable = [one for one in self.instances if one.is_usable]
        if not usable:
            return ""
        instance = job.decoder = min(usable, key=lambda one: one.num_requests)
        instance.num_coming += 1
        return instance.name

    def release(self, job: Job) -> DecodeInstance | None:
        """The request is not on its way to its instance any more, which is returned."""
        instance, job.decoder = job.decoder, None
        if instance is not None:
            instance.num_coming -= 1
        return instance

    def land(self, job: Job, now_s: float) -> None:
        """The request can decode, or its instance can compute its prompt: it gets a slot, or waits
        for one.
        """
        instance = self.release(job) or self._least_full()
        if instance is None:
            self.waiting.append(job)
        elif instance.num_slots_used < self._most:
            self._begin(instance, job, now_s)
        else:
            instance.waiting.append(job)

    def ended(self, instance: DecodeInstance, version: int, now_s: float) -> list[Job]:
        """Take out the requests that have their last token; none for a void event. Waiting requests
        take their slots.
        """
        if version != instance.version:
            return []
        self._advance(instance, now_s)
        done: list[Job] = []
        running, until = instance.running, instance.steps + _ROUNDING_STEPS
        if instance.prompts and instance.prompt_ends <= until:
            self._computed(instance, now_s)
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
        jobs = [*self.waiting]
        for instance in self.instances:
            jobs += [job for *_, job in instance.running]
            jobs += [*instance.prompts, *instance.waiting]
            instance.is_lost, instance.is_usable = True, False
            instance.running.clear()
            instance.prompts.clear()
            instance.waiting.clear()
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
        for instance in self.instances:
            while instance.waiting and instance.num_slots_used < self._most:
                self._begin(instance, instance.waiting.popleft(), now_s)
        while self.waiting and (least := self._least_full()) is not None:
            self._begin(least, self.waiting.popleft(), now_s)

    def _least_full(self) -> DecodeInstance | None:
        best, fewest = None, self._most
        for instance in self.instances:
            if instance.is_usable and instance.num_slots_used < fewest:
                best, fewest = instance, instance.num_slots_used
        return best

    def _begin(self, instance: DecodeInstance, job: Job, now_s: float) -> None:
        self._advance(instance, now_s)
        self.num_running += 1
        if job.is_whole:
            job.turn_s = now_s
            instance.prompts.append(job)
            if len(instance.prompts) == 1:
                self._compute(instance, now_s)
            self._reschedule(instance)
            return
        wait_steps = self._until_next(instance)
        # An engine with nothing to compute loads at once.
        if instance.num_slots_used:
            wait_steps += self._load_steps or 0
        heappush(
            instance.running, (instance.steps + wait_steps + job.output_tokens, job.index, job)
        )
        job.step_s = self._step_of(instance)
        job.slot_s = now_s + wait_steps * job.step_s
        self._begun(job, now_s)
        # If every batch has the same step time, a new request changes no other's end: the pending
        # event holds unless the new one ends first.
        if not self._is_level or instance.prompts or instance.running[0][2] is job:
            self._reschedule(instance)

    def _until_next(self, instance: DecodeInstance) -> float:
        """The part of a step until the next one begins, which a new request must wait for."""
        if self._load_steps is None or not instance.num_slots_used:
            return 0.0
        return math.ceil(instance.steps - _ROUNDING_STEPS) - instance.steps

    def _compute(self, instance: DecodeInstance, now_s: float) -> None:
        """Begin to compute the first of the prompts."""
        job = instance.prompts[0]
        job.start_s = now_s
        tokens = job.uncached_tokens
        num_steps = 1.0 if self._pass_tokens is None else math.ceil(tokens / self._pass_tokens)
        if instance.running:
            num_steps += self._until_next(instance)
        instance.prompt_ends = instance.steps + num_steps
        instance.chunk_s = job.service_s / num_steps

    def _computed(self, instance: DecodeInstance, now_s: float) -> None:
        """The first of the prompts is computed, and has its first token."""
        job = instance.prompts.popleft()
        job.prefill_end_s = job.landed_s = job.ready_s = job.slot_s = now_s
        job.step_s = 0.0
        heappush(instance.running, (instance.steps + job.output_tokens - 1, job.index, job))
        if instance.prompts:
            self._compute(instance, now_s)
        self._begun(job, now_s)

    def _step_of(self, instance: DecodeInstance) -> float:
        """How long a step of the instance takes now; 0 while it has nothing to do."""
        decode_s = self._step_s[len(instance.running)] if instance.running else 0.0
        return decode_s + instance.chunk_s if instance.prompts else decode_s

    def _advance(self, instance: DecodeInstance, now_s: float) -> None:
        step_s = self._step_of(instance)
        if step_s > 0:
            instance.steps += (now_s - instance.at_s) / step_s
        elif not instance.num_slots_used:
            instance.steps = 0.0
        instance.at_s = now_s

    def _reschedule(self, instance: DecodeInstance) -> None:
        instance.version += 1
        ends = [instance.running[0][0]] if instance.running else []
        if instance.prompts:
            ends.append(instance.prompt_ends)
        if ends:
            left = max(0.0, min(ends) - instance.steps)
            self._schedule(
                instance.at_s + left * self._step_of(instance), instance, instance.version
            )
