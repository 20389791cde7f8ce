"""The job queue of a prefill cluster: which job runs on which instance, and when one is refused.

States of a job: queued -> running -> gone, with running -> queued once, when its instance failed
it and another one is there. Rules:

- The queue is bounded; a job over the bound is refused at once, with the bound in the message.
- Lower priority value first, then first come. A job that is tried again keeps its old place.
- An instance takes at most `max_concurrent` jobs. Of those with room the one that the job prefers
  (part of its prompt is cached there) wins, then the one with the fewest prompt tokens under way
  (prefill time follows tokens), then the fewest jobs, then the one that was used longest ago. A
  job never waits for a preferred instance while another one has room.
- With no healthy instance that may serve a job, the job fails at once: its decode engine is
  waiting and computes the prompt itself as soon as it hears of that.
- A job never waits longer than `max_wait_s`.

Pure: events in, effects out; time is an argument. It may not know engines, transfers or tasks.
"""

from bisect import insort
from dataclasses import dataclass, field

from kvmanager.engines.errors import PrefillCode


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Bounds. `max_attempts` counts instances tried for one job."""

    max_queued: int = 64
    max_wait_s: float = 120.0
    max_attempts: int = 2

    def __post_init__(self) -> None:
        if self.max_queued < 0 or self.max_attempts < 1 or self.max_wait_s <= 0:
            raise ValueError("max_queued >= 0, max_attempts >= 1 and max_wait_s > 0 are needed")


@dataclass(frozen=True, slots=True)
class InstanceView:
    """What the queue needs to know of an instance. `model` "" serves every job; `node` is another
    name that jobs may prefer it by.
    """

    name: str
    model: str
    healthy: bool
    draining: bool = False
    max_concurrent: int = 4
    node: str = ""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job as the queue sees it; `key` is unique among the jobs it holds. `prefer` names
    instances or nodes, the best first.
    """

    key: str
    model: str
    priority: int
    num_tokens: int
    prefer: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """Run the job on this instance. `queue_s` is the time it waited since it was submitted."""

    key: str
    instance: str
    queue_s: float
    attempt: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The job is over without a result; the queue has forgotten it."""

    key: str
    code: PrefillCode
    message: str


Effect = Start | Fail


@dataclass(slots=True)
class _Entry:
    job: QueuedJob
    order: int
    submitted_s: float
    attempt: int = 0
    tried: tuple[str, ...] = ()
    instance: str | None = None
    withdrawn: bool = False
    last_failure: tuple[PrefillCode, str] | None = None

    @property
    def rank(self) -> tuple[int, int]:
        return (self.job.priority, self.order)


@dataclass(slots=True)
class _Instance:
    view: InstanceView
    running: set[str] = field(default_factory=set)
    running_tokens: int = 0
    last_used: int = 0

    @property
    def usable(self) -> bool:
        return self.view.healthy and not self.view.draining

    @property
    def has_room(self) -> bool:
        return self.usable and len(self.running) < self.view.max_concurrent

    @property
    def load(self) -> tuple[int, int, int]:
        return (self.running_tokens, len(self.running), self.last_used)

    def serves(self, model: str) -> bool:
        return not model or not self.view.model or self.view.model == model


class PrefillQueue:
    """The one mutator of a cluster's jobs. Its events return the effects to perform, in order."""

    def __init__(self, name: str, config: QueueConfig) -> None:
        self.name = name
        self._config = config
        self._entries: dict[str, _Entry] = {}
        self._waiting: list[_Entry] = []
        self._instances: dict[str, _Instance] = {}
        self._num_submitted = 0
        self._num_started = 0

    @property
    def depth(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Jobs on instances, those being stopped included."""
        return len(self._entries) - len(self._waiting)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait."""
        return sum(entry.job.num_tokens for entry in self._waiting)

    @property
    def running_tokens(self) -> int:
        """Prompt tokens on instances."""
        return sum(instance.running_tokens for instance in self._instances.values())

    def running_on(self, name: str) -> int:
        """Jobs on one instance."""
        return len(self._instances[name].running) if name in self._instances else 0

    def holds(self, key: str) -> bool:
        """Whether a job is queued or running."""
        return key in self._entries

    def submit(self, job: QueuedJob, now_s: float) -> list[Effect]:
        """A new job. Starts it, queues it (no effect for it) or fails it."""
        if job.key in self._entries:
            raise ValueError(f"job {job.key} is already here")
        trouble = self._no_instance(job.model, ())
        if trouble is not None:
            return [Fail(job.key, "no_instance", trouble)]
        self._num_submitted += 1
        entry = _Entry(job, self._num_submitted, now_s)
        self._entries[job.key] = entry
        self._enqueue(entry)
        effects = self._advance(now_s)
        if entry in self._waiting and len(self._waiting) > self._config.max_queued:
            self._drop(entry)
            effects.append(Fail(job.key, "queue_full", self._full_message()))
        return effects

    def instance_changed(self, view: InstanceView, now_s: float) -> list[Effect]:
        """An instance is new, or its health, draining or limits changed."""
        known = self._instances.get(view.name)
        if known is None:
            self._instances[view.name] = _Instance(view)
        else:
            known.view = view
        return self._advance(now_s)

    def finished(self, key: str, now_s: float) -> list[Effect]:
        """A running job is over, well or because it was withdrawn; its place is free."""
        self._drop(self._entries[key])
        return self._advance(now_s)

    def failed(
        self, key: str, code: PrefillCode, message: str, *, retryable: bool, now_s: float
    ) -> list[Effect]:
        """A running job failed on its instance: once more elsewhere, if that makes sense."""
        entry = self._entries[key]
        assert entry.instance is not None
        tried = (*entry.tried, entry.instance)
        again = retryable and not entry.withdrawn and entry.attempt < self._config.max_attempts
        self._drop(entry)
        if not again or self._no_instance(entry.job.model, tried) is not None:
            return [Fail(key, code, message), *self._advance(now_s)]
        entry.tried, entry.last_failure = tried, (code, message)
        self._entries[key] = entry
        self._enqueue(entry)
        effects = self._advance(now_s)
        if entry in self._waiting and len(self._waiting) > self._config.max_queued:
            self._drop(entry)
            effects.append(Fail(key, code, message))
        return effects

    def withdraw(self, key: str, now_s: float) -> list[Effect]:
        """The submitter went away: a queued job is forgotten, a running one not tried again.

        The shell stops a running one and then says `finished` or `failed`.
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

    def next_deadline_s(self) -> float | None:
        """When `tick` has something to do if nothing else happens."""
        times_s = [entry.submitted_s for entry in self._waiting]
        return min(times_s) + self._config.max_wait_s if times_s else None

    def check_invariants(self) -> None:
        """For tests: what must hold between any two calls."""
        assert self._waiting == sorted(self._waiting, key=lambda entry: entry.rank)
        assert len(self._waiting) <= self._config.max_queued
        waiting = {entry.job.key for entry in self._waiting}
        running = {key for instance in self._instances.values() for key in instance.running}
        assert not waiting & running
        assert waiting | running == set(self._entries)
        for name, instance in self._instances.items():
            assert all(self._entries[key].instance == name for key in instance.running)
            tokens = sum(self._entries[key].job.num_tokens for key in instance.running)
            assert instance.running_tokens == tokens

    def _enqueue(self, entry: _Entry) -> None:
        insort(self._waiting, entry, key=_rank)

    def _drop(self, entry: _Entry) -> None:
        """Forget the job wherever it is."""
        del self._entries[entry.job.key]
        if entry.instance is None:
            self._waiting.remove(entry)
            return
        instance = self._instances[entry.instance]
        instance.running.remove(entry.job.key)
        instance.running_tokens -= entry.job.num_tokens
        entry.instance = None

    def _advance(self, now_s: float) -> list[Effect]:
        """Start what can start, fail what cannot wait any longer."""
        effects: list[Effect] = []
        for entry in list(self._waiting):
            effect = self._settle(entry, now_s)
            if effect is not None:
                effects.append(effect)
        return effects

    def _settle(self, entry: _Entry, now_s: float) -> Effect | None:
        trouble = self._no_instance(entry.job.model, entry.tried)
        if trouble is not None:
            self._drop(entry)
            code, message = entry.last_failure or ("no_instance", trouble)
            return Fail(entry.job.key, code, message)
        if now_s - entry.submitted_s >= self._config.max_wait_s:
            self._drop(entry)
            message = f"waited {self._config.max_wait_s:g} s in the queue of {self.name}"
            return Fail(entry.job.key, "queue_timeout", message)
        with_room = [
            item for item in self._candidates(entry.job.model, entry.tried) if item.has_room
        ]
        if not with_room:
            return None
        prefer = entry.job.prefer
        best = min(with_room, key=lambda item: (_rank_in(prefer, item.view), item.load))
        return self._start(entry, best, now_s)

    def _start(self, entry: _Entry, chosen: _Instance, now_s: float) -> Start:
        self._waiting.remove(entry)
        self._num_started += 1
        entry.instance = chosen.view.name
        entry.attempt += 1
        chosen.running.add(entry.job.key)
        chosen.running_tokens += entry.job.num_tokens
        chosen.last_used = self._num_started
        queue_s = now_s - entry.submitted_s
        return Start(entry.job.key, chosen.view.name, queue_s, entry.attempt)

    def _candidates(self, model: str, tried: tuple[str, ...]) -> list[_Instance]:
        return [
            instance
            for name, instance in self._instances.items()
            if instance.usable and instance.serves(model) and name not in tried
        ]

    def _no_instance(self, model: str, tried: tuple[str, ...]) -> str | None:
        """Why no instance can take such a job, now or after waiting; None when one can."""
        if self._candidates(model, tried):
            return None
        states = ", ".join(
            f"{name} {_why_not(item, model)}" for name, item in self._instances.items()
        )
        return f"no usable instance in {self.name}: {states or 'none configured'}"

    def _full_message(self) -> str:
        return (
            f"the queue of {self.name} is full: {self._config.max_queued} jobs wait,"
            f" {self.num_running} run"
        )


def _rank(entry: _Entry) -> tuple[int, int]:
    return entry.rank


def _rank_in(prefer: tuple[str, ...], view: InstanceView) -> int:
    names = (view.name, view.node)
    return next((rank for rank, name in enumerate(prefer) if name in names), len(prefer))


def _why_not(instance: _Instance, model: str) -> str:
    if not instance.serves(model):
        return f"serves {instance.view.model}, not {model}"
    if not instance.view.healthy:
        return "is not healthy"
    return "is draining" if instance.view.draining else "was tried"
