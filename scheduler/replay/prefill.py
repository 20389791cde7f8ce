"""The prefill instances of one cluster and the queue that they share.

An instance computes one prompt at a time. This file knows no links, and only the queue
order of the policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import ClassVar

from scheduler.live.long_term.conversion import PdRole
from scheduler.replay.jobs import Job
from scheduler.routing.order_config import OrderConfig
from scheduler.routing.profiles import PrefillProfile
from scheduler.routing.queue_order import QueueOrder, WaitingJob


class PrefillInstance:
    """One instance. `until_s` is the predicted end of its prefill. `role_epoch` is the epoch of the
    order that gave it its role.
    """

    __slots__ = ("is_lost", "is_usable", "job", "name", "role_epoch", "until_s")
    role: ClassVar[PdRole] = "prefill"

    def __init__(self, name: str, role_epoch: int = 0) -> None:
        self.name = name
        self.role_epoch = role_epoch
        self.is_usable = True
        self.is_lost = False
        """Whether its cluster is lost. It is not usable then."""
        self.job: Job | None = None
        self.until_s = 0.0
        """0 while it has no job."""

    @property
    def num_requests(self) -> int:
        return int(self.job is not None)

    @property
    def num_tokens(self) -> int:
        """The prompt tokens that it is computing."""
        return 0 if self.job is None else self.job.num_tokens


class PrefillStation:
    """The prefill instances of one cluster in virtual time. `profile` is the plan's; real prefills
    take `factor` times as long.
    """

    def __init__(
        self,
        name: str,
        profile: PrefillProfile,
        num_instances: int,
        order: OrderConfig | None,
        factor: float = 1.0,
    ) -> None:
        self.name = name
        self.profile = profile
        self.factor = factor
        self.instances = [PrefillInstance(f"{name}-{i}") for i in range(num_instances)]
        self.busy_s = 0.0
        """Real seconds of all prefills that were started."""
        self.num_running = 0
        self.is_lost = False
        """Whether the cluster is lost."""
        self._order: QueueOrder[int] | None = None if order is None else QueueOrder(order)
        self._queue: deque[Job] = deque()
        self._waiting: dict[int, Job] = {}

    def jobs(self) -> Iterator[tuple[Job, str]]:
        """All jobs with their instances, "" for those that wait."""
        for instance in self.instances:
            if instance.job is not None:
                yield instance.job, instance.name
        for job in (*self._queue, *self._waiting.values()):
            yield job, ""

    @property
    def num_queued(self) -> int:
        return len(self._queue) if self._order is None else len(self._waiting)

    def real_s(self, num_tokens: int, cached_tokens: int) -> float:
        """How long a prefill really takes here, before jitter."""
        return self.profile.prefill_s(num_tokens, cached_tokens) * self.factor

    def push(self, job: Job) -> None:
        """Put a job into the queue."""
        if self._order is None:
            self._queue.append(job)
            return
        self._waiting[job.index] = job
        uncached = job.num_tokens - job.cached_tokens
        self._order.add(WaitingJob(job.index, 0, uncached, job.arrival_s, str(job.pd)))

    def start(self, now_s: float) -> tuple[PrefillInstance, Job] | None:
        """Begin the next prefill, if one waits and an instance is free."""
        if not (self._queue or self._waiting):
            return None
        instance = self._free()
        if instance is None:
            return None
        job = self._next(now_s)
        return (instance, job) if self._begin(instance, job, now_s) else None

    def start_at_once(self, job: Job, now_s: float) -> PrefillInstance | None:
        """Begin the job's prefill now, if no job waits and an instance is free."""
        if self._queue or self._waiting:
            return None
        instance = self._free()
        if instance is not None:
            self._begin(instance, job, now_s)
        return instance

    def finish(self, instance: PrefillInstance) -> None:
        """The instance's prefill is over."""
        instance.job = None
        instance.until_s = 0.0
        self.num_running -= 1

    def queued_s(self, uncached_tokens: int, now_s: float, pd: int = 0) -> float:
        """Predicted seconds of the waiting prefills that would begin before a new one for this PD
        cluster.
        """
        if self._order is None:
            return sum(job.believed_s for job in self._queue)
        if not self._waiting:
            return 0.0
        waiting = self._waiting
        new = WaitingJob(-1, 0, uncached_tokens, now_s, str(pd))
        ahead = self._order.ahead_of(new, now_s)
        return sum([waiting[job.key].believed_s for job in ahead])

    def wait_s(self, job: Job, now_s: float) -> float:
        """About how long a new job will wait for an instance."""
        free_s = self.free_s(now_s)
        if not free_s:
            return 0.0
        queued_s = self.queued_s(job.num_tokens - job.cached_tokens, now_s, job.pd)
        return free_s[0] + queued_s / len(free_s)

    def instance_of(self, job: Job) -> PrefillInstance | None:
        """The instance that has the job; None while it waits."""
        return next((one for one in self.instances if one.job is job), None)

    def free_s(self, now_s: float) -> tuple[float, ...]:
        """How long until each usable instance should be free, ascending."""
        found = [
            instance.until_s - now_s if instance.until_s > now_s else 0.0
            for instance in self.instances
            if instance.is_usable
        ]
        found.sort()
        return tuple(found)

    def num_busy(self) -> int:
        """How many instances prefill."""
        return self.num_running

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
            if instance.job is not None and is_taken(instance.job):
                taken.append(instance.job)
                self.finish(instance)
        waiting = [job for job in (*self._queue, *self._waiting.values()) if is_taken(job)]
        for job in waiting:
            if self._order is None:
                self._queue.remove(job)
            else:
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

    def _free(self) -> PrefillInstance | None:
        for instance in self.instances:
            if instance.job is None and instance.is_usable:
                return instance
        return None

    def _next(self, now_s: float) -> Job:
        if self._order is None:
            return self._queue.popleft()
        chosen = self._order.next(now_s)
        assert chosen is not None
        self._order.started(chosen.key)
        return self._waiting.pop(chosen.key)

    def _begin(self, instance: PrefillInstance, job: Job, now_s: float) -> bool:
        # The instance waits for a cached prefix that is still being moved to it.
        begin_s = max(now_s, job.move_s)
        job.start_s = begin_s
        job.instance = instance.name
        instance.job = job
        instance.until_s = begin_s + job.believed_s
        self.num_running += 1
        self.busy_s += job.service_s
        return True
