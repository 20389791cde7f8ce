"""The prefill instances of one cluster and the queue that they share.

An instance is given up to `max_concurrent` prompts, as a front gives them, and computes them in
that order, pass by pass. A pass takes `pass_tokens` of them, so that the end of one prompt and the
begin of the next may share it (vLLM's chunked prefill). Without `pass_tokens`, a pass is one
prompt. This file knows no links, and only the queue order of the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final, NamedTuple

from scheduler.live.long_term.conversion import PdRole
from scheduler.replay.jobs import Job
from scheduler.routing.front_placement import DEFAULT_PASS_TOKENS, Room
from scheduler.routing.order_config import LengthBucket, OrderConfig
from scheduler.routing.profiles import PrefillProfile
from scheduler.routing.queue_order import QueueOrder, WaitingJob

BY_ARRIVAL: Final = OrderConfig(
    buckets=(LengthBucket(math.inf, 1.0),), ageing_tokens_per_s=math.inf
)
"""First come, first served."""


class Chunk(NamedTuple):
    """The tokens of a job that one pass computes, and how long they take, seconds."""

    job: Job
    num_tokens: int
    seconds: float

    @property
    def is_last(self) -> bool:
        """Whether the job's prefill ends with it."""
        return self.job.computed_tokens + self.num_tokens >= self.job.uncached_tokens


class PrefillInstance:
    """One instance. `role_epoch` is the epoch of the order that gave it its role."""

    __slots__ = (
        "chunks",
        "ended_s",
        "is_lost",
        "is_usable",
        "jobs",
        "name",
        "role_epoch",
        "version",
    )
    role: ClassVar[PdRole] = "prefill"

    def __init__(self, name: str, role_epoch: int = 0) -> None:
        self.name = name
        self.role_epoch = role_epoch
        self.is_usable = True
        self.is_lost = False
        """Whether its cluster is lost. It is not usable then."""
        self.jobs: list[Job] = []
        """What it was given and has not computed, in that order."""
        self.chunks: list[Chunk] = []
        """The pass that it computes now; empty: none."""
        self.version = 0
        """The version of the only pending end of a pass. Ends with older versions are void."""
        self.ended_s = 0.0
        """When its last prefill ended."""

    @property
    def num_requests(self) -> int:
        return len(self.jobs)

    @property
    def num_tokens(self) -> int:
        """The prompt tokens that it has to compute, as a front counts them."""
        return sum(job.uncached_tokens for job in self.jobs)


class PrefillStation:
    """The prefill instances of one cluster in virtual time. `profile` is the plan's; real prefills
    take `factor` times as long.
    """

    def __init__(
        self,
        name: str,
        profile: PrefillProfile,
        num_instances: int,
        order: OrderConfig = BY_ARRIVAL,
        factor: float = 1.0,
        *,
        max_concurrent: int = 1,
        pass_tokens: int | None = None,
    ) -> None:
        self.name = name
        self.profile = profile
        self.factor = factor
        self.max_concurrent = max_concurrent
        self.instances = [PrefillInstance(f"{name}-{i}") for i in range(num_instances)]
        self.busy_s = 0.0
        """Real seconds of all prefills that were started."""
        self.is_lost = False
        """Whether the cluster is lost."""
        self._pass_tokens = pass_tokens
        self._order: QueueOrder[int] = QueueOrder(order)
        # PD clusters take turns in a queue that has an order of its own.
        self._has_turns = order is not BY_ARRIVAL
        self._waiting: dict[int, Job] = {}

    def jobs(self) -> Iterator[tuple[Job, str]]:
        """All jobs with their instances, "" for those that wait."""
        for instance in self.instances:
            for job in instance.jobs:
                yield job, instance.name
        for job in self._waiting.values():
            yield job, ""

    @property
    def num_queued(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """The jobs that instances have."""
        return sum(len(instance.jobs) for instance in self.instances)

    @property
    def num_busy(self) -> int:
        """How many instances have a job."""
        return sum(bool(instance.jobs) for instance in self.instances)

    def real_s(self, num_tokens: int, cached_tokens: int) -> float:
        """How long a prefill really takes here, before jitter."""
        return self.profile.prefill_s(num_tokens, cached_tokens) * self.factor

    def push(self, job: Job) -> None:
        """Put a job into the queue."""
        self._waiting[job.index] = job
        pd = str(job.pd) if self._has_turns else ""
        self._order.add(WaitingJob(job.index, 0, job.uncached_tokens, job.arrival_s, pd))

    def start(self, now_s: float) -> tuple[PrefillInstance, Job] | None:
        """Give the next job to an instance, if one waits and an instance has room for it."""
        if not self._waiting:
            return None
        room = Room(self.max_concurrent, self._pass_tokens or DEFAULT_PASS_TOKENS)
        free = [
            one
            for one in self.instances
            if one.is_usable and room.has_place(len(one.jobs), one.num_tokens)
        ]
        chosen = self._order.next(now_s) if free else None
        if chosen is None:
            return None
        self._order.started(chosen.key)
        job = self._waiting.pop(chosen.key)
        # As fronts place what no instance has cached more of than others.
        instance = min(free, key=lambda one: (one.num_tokens, len(one.jobs)))
        instance.jobs.append(job)
        job.instance, job.given_s = instance.name, now_s
        return instance, job

    def next_pass(
        self, instance: PrefillInstance, is_held: Callable[[Job], bool], now_s: float
    ) -> Sequence[Job]:
        """The jobs of the next pass of an idle instance. It passes over those that are held, and
        waits for a cached prefix that is still being moved only if there is nothing else.
        """
        ready = [job for job in instance.jobs if not is_held(job)]
        ready.sort(key=lambda job: max(0.0, job.move_s - now_s))
        if self._pass_tokens is None or not ready:
            return ready[:1]
        found: list[Job] = []
        left = self._pass_tokens
        for job in ready:
            if left <= 0 or (found and job.move_s > now_s):
                break
            found.append(job)
            left -= job.uncached_tokens - job.computed_tokens
        return found

    def begin_pass(self, instance: PrefillInstance, jobs: Sequence[Job]) -> float:
        """Begin a pass with these jobs. Returns how long it takes, seconds."""
        left = math.inf if self._pass_tokens is None else self._pass_tokens
        for job in jobs:
            num_tokens = int(min(left, job.uncached_tokens - job.computed_tokens))
            left -= num_tokens
            seconds = job.service_s * self._share(job, num_tokens)
            instance.chunks.append(Chunk(job, num_tokens, seconds))
        instance.version += 1
        return sum(chunk.seconds for chunk in instance.chunks)

    def _share(self, job: Job, num_tokens: int) -> float:
        """The part of a job's prefill that its next tokens take."""
        done = job.computed_tokens
        if num_tokens == job.uncached_tokens:
            return 1.0
        cached, profile = job.cached_tokens, self.profile
        before_s = profile.prefill_s(cached + done, cached) if done else 0.0
        after_s = profile.prefill_s(cached + done + num_tokens, cached)
        return (after_s - before_s) / profile.prefill_s(job.num_tokens, cached)

    def end_pass(self, instance: PrefillInstance, now_s: float) -> Iterator[tuple[Job, bool]]:
        """The pass is over. Yields its jobs, and whether the prefill of each is over."""
        chunks, instance.chunks = instance.chunks, []
        for chunk in chunks:
            job, is_last = chunk.job, chunk.is_last
            job.computed_tokens += chunk.num_tokens
            if is_last:
                instance.jobs.remove(job)
                job.turn_s = max(job.given_s, job.move_s, instance.ended_s)
                instance.ended_s = now_s
            yield job, is_last

    def queued_s(self) -> float:
        """Predicted seconds of the waiting prefills."""
        return sum(job.believed_s for job in self._waiting.values())

    def wait_s(self) -> float:
        """About how long a new job will wait for an instance, if what runs has just begun."""
        given_s = sum(job.believed_s for one in self.instances for job in one.jobs)
        return (given_s + self.queued_s()) / max(1, self.num_usable)

    def instance_of(self, job: Job) -> PrefillInstance | None:
        """The instance that has the job; None while it waits."""
        return next((one for one in self.instances if job in one.jobs), None)

    def lose(self) -> list[Job]:
        """Lose all instances. Returns the jobs that waited or ran."""
        self.is_lost = True
        jobs = self.take_away(lambda job: True)
        for instance in self.instances:
            instance.is_lost, instance.is_usable = True, False
        return jobs

    def take_away(self, is_taken: Callable[[Job], bool]) -> list[Job]:
        """Take away the jobs that are chosen, waiting or running."""
        taken = []
        for instance in self.instances:
            taken += [job for job in instance.jobs if is_taken(job)]
            instance.jobs = [job for job in instance.jobs if not is_taken(job)]
            if instance.chunks and all(is_taken(chunk.job) for chunk in instance.chunks):
                instance.version += 1
            instance.chunks = [one for one in instance.chunks if not is_taken(one.job)]
        waiting = [job for job in self._waiting.values() if is_taken(job)]
        for job in waiting:
            del self._waiting[job.index]
            self._order.remove(job.index)
        return taken + waiting

    def regain(self) -> None:
        """All instances are there again, idle."""
        self.is_lost = False
        for instance in self.instances:
            instance.is_lost, instance.is_usable = False, True

    @property
    def num_usable(self) -> int:
        return sum(instance.is_usable for instance in self.instances)
