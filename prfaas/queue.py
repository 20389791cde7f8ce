"""The job queue of a prefill cluster: assigns jobs to instances, and refuses or fails jobs.

States of a job: queued -> running -> gone, with running -> queued once, when it failed on its
instance and there is another one. Rules:

- The queue is bounded. A job over the bound is refused at once, with the bound in the message.
- Jobs start in the order of `scheduler.routing.queue_order`: fewest uncached tokens first, with
  ageing, in buckets of lengths that share the cluster. A waiting job's uncached tokens are those on
  the instance that has most of it cached. A job that is tried again keeps its `submitted_s`, and so
  its place.
- PD clusters share the cluster fairly. Among the jobs of one PD cluster, more urgent classes of
  priority go first, until a job of another class is due. A job is due before it is given up.
  `queue_order` makes the classes from priorities.
- An instance takes at most as many jobs as its `room` says. Among instances with room
  `scheduler.routing.front_placement` chooses, by the tokens cached there and the uncached tokens
  under way; among equal ones it takes the one that was used longest ago. A job never waits for an
  instance while another has room.
- A job runs only on an instance that lays KVCache out as its landing does, as far as both layouts
  are known. Engines whose arguments change one after the other differ for a while.
- Without a healthy instance that may serve a job, the job fails at once: its decode engine is
  waiting, and computes the prompt as soon as it is told.
- A job that is held starts only when it is let go; meanwhile others may start. It keeps its place.
- A job never waits longer than `max_wait_s`. A job that was tried before then fails with the error
  of that try.

Pure: events in, effects out; time is an argument. It may not know engines, transfers or tasks.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prfaas.engines.errors import PrefillCode
from prfaas.queue_values import Effect, FailJob, QueueConfig, QueuedJob, QueueInstance, StartJob
from scheduler.reports import JobReport, same_layout, same_model
from scheduler.routing.front_placement import TokenLoad, place_prefill
from scheduler.routing.queue_order import QueueOrder, WaitingJob, priority_class


@dataclass(slots=True)
class _Entry:
    """A job. `uncached_tokens` are those on its instance, or on the best one while it waits."""

    job: QueuedJob
    number: int
    submitted_s: float
    uncached_tokens: int
    started_s: float = 0.0
    attempt: int = 0
    tried: tuple[str, ...] = ()
    instance: str | None = None
    withdrawn: bool = False
    held: bool = False
    """Whether it waits for something else than an instance."""
    turn_s: float | None = None
    """Since when it could have started, were it not held."""
    held_s: float = 0.0
    last_failure: tuple[PrefillCode, str] | None = None

    @property
    def age_key(self) -> tuple[float, int]:
        return self.submitted_s, self.number

    @property
    def waiting_job(self) -> WaitingJob[str]:
        job = self.job
        urgency = priority_class(job.priority)
        return WaitingJob(job.key, urgency, job.uncached_tokens, self.submitted_s, job.pd)

    def report(self, now_s: float) -> JobReport:
        since_s = self.submitted_s if self.instance is None else self.started_s
        return JobReport(
            transfer_id=self.job.key,
            num_tokens=self.job.num_tokens,
            uncached_tokens=self.uncached_tokens,
            for_s=max(0.0, now_s - since_s),
            instance=self.instance or "",
            priority=self.job.priority,
            model=self.job.model,
            pd=self.job.pd,
        )


@dataclass(slots=True)
class _Instance:
    view: QueueInstance
    running: set[str] = field(default_factory=set)
    running_tokens: int = 0
    last_used: int = 0

    @property
    def usable(self) -> bool:
        return self.view.healthy and not self.view.draining

    @property
    def has_room(self) -> bool:
        room = self.view.room
        return self.usable and room.has_place(len(self.running), self.running_tokens)

    @property
    def load(self) -> TokenLoad:
        return TokenLoad(
            self.view.name, self.view.node, self.running_tokens, num_jobs=len(self.running)
        )

    def serves(self, model: str) -> bool:
        return same_model(self.view.model, model)

    def fills(self, landing: str) -> bool:
        """Whether its KVCache may be what a landing of this layout takes."""
        return same_layout(self.view.layout_fingerprint, landing)


class PrefillQueue:
    """The one mutator of a cluster's jobs. Its events return the effects to perform, in order."""

    def __init__(self, name: str, config: QueueConfig) -> None:
        self.name = name
        self._config = config
        self._entries: dict[str, _Entry] = {}
        self._order: QueueOrder[str] = QueueOrder(config.bounded_order)
        self._by_age: list[_Entry] = []
        """The waiting jobs, the oldest first."""
        self._instances: dict[str, _Instance] = {}
        self._num_submitted = 0
        self._num_started = 0

    @property
    def depth(self) -> int:
        """Jobs that wait."""
        return len(self._order)

    @property
    def num_running(self) -> int:
        """Jobs on instances, including those that are being stopped."""
        return len(self._entries) - len(self._order)

    @property
    def queued_tokens(self) -> int:
        """Uncached tokens that wait."""
        return self._order.uncached_tokens

    @property
    def running_tokens(self) -> int:
        """Uncached tokens on instances."""
        return sum(instance.running_tokens for instance in self._instances.values())

    def running_on(self, name: str) -> int:
        """Jobs on one instance."""
        return len(self._instances[name].running) if name in self._instances else 0

    def holds(self, key: str) -> bool:
        """Whether a job is queued or running."""
        return key in self._entries

    def jobs(self, now_s: float) -> tuple[JobReport, ...]:
        """All waiting and running jobs, in no order. Their `transfer_id` is the key."""
        return tuple(entry.report(now_s) for entry in self._entries.values())

    def submit(self, job: QueuedJob, now_s: float, *, held: bool = False) -> list[Effect]:
        """Take a new job: start it, queue it (without an effect) or fail it. `held`: it may not
        start before `let_go`.
        """
        if job.key in self._entries:
            raise ValueError(f"job {job.key} is already here")
        trouble = self._no_instance(job, ())
        if trouble is not None:
            return [FailJob(job.key, "no_instance", trouble)]
        self._num_submitted += 1
        entry = _Entry(job, self._num_submitted, now_s, job.uncached_tokens, held=held)
        self._enqueue(entry)
        effects = self._advance(now_s)
        if self._is_over_bound(entry):
            self._drop(entry)
            effects.append(FailJob(job.key, "queue_full", self._full_message()))
        return effects

    def let_go(self, key: str, now_s: float) -> list[Effect]:
        """A held job may start. Does nothing for one that is gone."""
        entry = self._entries.get(key)
        if entry is None:
            return []
        if entry.held and entry.turn_s is not None:
            entry.held_s = now_s - entry.turn_s
        entry.held = False
        return self._advance(now_s)

    def instance_changed(self, view: QueueInstance, now_s: float) -> list[Effect]:
        """Take in a new instance, or a change of its health, draining or limits."""
        known = self._instances.get(view.name)
        if known is None:
            self._instances[view.name] = _Instance(view)
        else:
            known.view = view
        return [*self._fail_stranded(), *self._advance(now_s)]

    def instance_left(self, name: str, now_s: float) -> list[Effect]:
        """Forget an instance without jobs. A queued job that only it could take fails."""
        assert not self.running_on(name)
        self._instances.pop(name, None)
        return [*self._fail_stranded(), *self._advance(now_s)]

    def finished(self, key: str, now_s: float) -> list[Effect]:
        """A running job has succeeded or was withdrawn, so its place is free."""
        self._drop(self._entries[key])
        return self._advance(now_s)

    def failed(
        self, key: str, code: PrefillCode, message: str, *, retryable: bool, now_s: float
    ) -> list[Effect]:
        """A running job failed on its instance. Queue it again if another one may do better."""
        entry = self._entries[key]
        assert entry.instance is not None
        tried = (*entry.tried, entry.instance)
        again = retryable and not entry.withdrawn and entry.attempt < self._config.max_attempts
        self._drop(entry)
        if not again or self._no_instance(entry.job, tried) is not None:
            return [FailJob(key, code, message), *self._advance(now_s)]
        entry.tried, entry.last_failure = tried, (code, message)
        self._enqueue(entry)
        effects = self._advance(now_s)
        if self._is_over_bound(entry):
            self._drop(entry)
            effects.append(FailJob(key, code, message))
        return effects

    def withdraw(self, key: str, now_s: float) -> list[Effect]:
        """The submitter went away. A queued job is forgotten, a running one is not tried again.

        The shell must stop a running job and then call `finished` or `failed`.
        """
        entry = self._entries.get(key)
        if entry is None:
            return []
        entry.withdrawn = True
        if entry.instance is not None:
            return []
        self._drop(entry)
        return self._advance(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Fail the jobs that waited too long."""
        return self._advance(now_s)

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls; for tests."""
        self._order.check_invariants()
        assert self._by_age == sorted(self._by_age, key=_age_key)
        assert self.depth == len(self._by_age) <= self._config.max_queued
        waiting = {entry.job.key for entry in self._by_age if entry.job.key in self._order}
        assert len(waiting) == self.depth
        running = {key for instance in self._instances.values() for key in instance.running}
        assert not waiting & running
        assert waiting | running == set(self._entries)
        for name, instance in self._instances.items():
            assert all(self._entries[key].instance == name for key in instance.running)
            tokens = sum(self._entries[key].uncached_tokens for key in instance.running)
            assert instance.running_tokens == tokens

    def _enqueue(self, entry: _Entry) -> None:
        entry.uncached_tokens = entry.job.uncached_tokens
        self._entries[entry.job.key] = entry
        self._order.add(entry.waiting_job)
        insort(self._by_age, entry, key=_age_key)

    def _drop(self, entry: _Entry) -> None:
        """Forget the job wherever it is."""
        del self._entries[entry.job.key]
        if entry.instance is None:
            self._order.remove(entry.job.key)
            self._forget_age(entry)
            return
        instance = self._instances[entry.instance]
        instance.running.remove(entry.job.key)
        instance.running_tokens -= entry.uncached_tokens
        entry.instance = None

    def _forget_age(self, entry: _Entry) -> None:
        del self._by_age[bisect_left(self._by_age, entry.age_key, key=_age_key)]

    def _is_over_bound(self, entry: _Entry) -> bool:
        return entry.job.key in self._order and self.depth > self._config.max_queued

    def _advance(self, now_s: float) -> list[Effect]:
        """Fail the jobs that cannot wait any longer, and start those that can start."""
        effects: list[Effect] = list(self._expire(now_s))
        while (start := self._start_next(now_s)) is not None:
            effects.append(start)
        return effects

    def _fail_stranded(self) -> list[Effect]:
        """Fail the jobs that no instance may serve any more."""
        effects: list[Effect] = []
        for entry in list(self._by_age):
            trouble = self._no_instance(entry.job, entry.tried)
            if trouble is not None:
                self._drop(entry)
                effects.append(
                    FailJob(entry.job.key, *(entry.last_failure or ("no_instance", trouble)))
                )
        return effects

    def _expire(self, now_s: float) -> Iterator[FailJob]:
        patience_s = self._config.max_wait_s
        while self._by_age and now_s - self._by_age[0].submitted_s >= patience_s:
            entry = self._by_age[0]
            self._drop(entry)
            message = f"waited {patience_s:g} s in the queue of {self.name}"
            yield FailJob(entry.job.key, *(entry.last_failure or ("queue_timeout", message)))

    def _start_next(self, now_s: float) -> StartJob | None:
        with_room = [item for item in self._instances.values() if item.has_room]
        if not with_room or not self._by_age:
            return None
        chosen = self._order.next(now_s, self._may_start(with_room, now_s))
        return None if chosen is None else self._start(self._entries[chosen.key], with_room, now_s)

    def _may_start(self, with_room: list[_Instance], now_s: float) -> Callable[[str], bool]:
        """A function that says whether an instance `with_room` takes a job now. It keeps its
        answers, since many jobs have the same model and layout, and no failed instances.
        """
        known: dict[tuple[str, str, tuple[str, ...], bool], bool] = {}

        def may_start(key: str) -> bool:
            entry = self._entries[key]
            job, tried = entry.job, entry.tried
            asked = job.model, job.layout_fingerprint, tried, job.has_media
            if asked not in known:
                known[asked] = any(_takes(item, job, tried) for item in with_room)
            if entry.held and known[asked] and entry.turn_s is None:
                entry.turn_s = now_s
            return known[asked] and not entry.held

        return may_start

    def _start(self, entry: _Entry, with_room: list[_Instance], now_s: float) -> StartJob:
        job = entry.job
        able = [item for item in with_room if _takes(item, job, entry.tried)]
        able.sort(key=lambda item: item.last_used)
        placement = place_prefill([item.load for item in able], job.num_tokens, job.cached_tokens)
        self._order.started(job.key)
        self._forget_age(entry)
        self._num_started += 1
        instance = self._instances[placement.instance]
        instance.running.add(job.key)
        instance.running_tokens += placement.uncached_tokens
        instance.last_used = self._num_started
        entry.instance, entry.uncached_tokens = placement.instance, placement.uncached_tokens
        entry.started_s = now_s
        entry.attempt += 1
        return StartJob(
            job.key,
            placement.instance,
            queue_s=now_s - entry.submitted_s - entry.held_s,
            attempt=entry.attempt,
            reason=placement.reason,
            held_s=entry.held_s,
        )

    def _no_instance(self, job: QueuedJob, tried: tuple[str, ...]) -> str | None:
        """Why no instance can take such a job, now or later; None: one can."""
        if any(item.usable and _takes(item, job, tried) for item in self._instances.values()):
            return None
        states = ", ".join(
            f"{name} {_why_not(item, job)}" for name, item in self._instances.items()
        )
        return f"no usable instance in {self.name}: {states or 'none configured'}"

    def _full_message(self) -> str:
        return (
            f"the queue of {self.name} is full: {self._config.max_queued} jobs wait,"
            f" {self.num_running} run"
        )


def _age_key(entry: _Entry) -> tuple[float, int]:
    return entry.age_key


def _takes(instance: _Instance, job: QueuedJob, tried: tuple[str, ...]) -> bool:
    return (
        instance.serves(job.model)
        and instance.fills(job.layout_fingerprint)
        and not (job.has_media and instance.view.text_only)
        and instance.view.name not in tried
    )


def _why_not(instance: _Instance, job: QueuedJob) -> str:
    if not instance.serves(job.model):
        return f"serves {instance.view.model}, not {job.model}"
    if not instance.view.healthy:
        return "is not healthy"
    if not instance.fills(job.layout_fingerprint):
        return f"lays KVCache out otherwise than the landing: {instance.view.layout}"
    if job.has_media and instance.view.text_only:
        return "has no encoder of media"
    return "is draining" if instance.view.draining else "was tried"
