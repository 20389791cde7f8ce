"""The encode stages of a replay: the live system's `EncodeQueue` of each cluster, in virtual time.

A request's media go into the queue of the cluster that prefills it, while it waits for an instance.
An instance that has got it holds its prefill until the queue is done with it. What is not there by
then is encoded by that instance before the prefill, and so are all media of clusters without encode
instances. An embedding that was made in a cluster is found there until the cluster is lost.

No clock: the driver calls it back at the times that it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from scheduler.encoding.line import EncodeLine
from scheduler.encoding.queue import EncodeQueue
from scheduler.encoding.times import KnownTimes
from scheduler.encoding.values import (
    Effect,
    EncodeInstance,
    EncodeReason,
    EncodeRequest,
    EndRequest,
    StartPass,
)
from scheduler.replay.jobs import Job
from scheduler.replay.model import EncodingModel
from scheduler.reports import EncodeReport
from scheduler.routing.media import MediaShape


class EncodeStage:
    """How one cluster encodes. `queue` is None without encode instances."""

    def __init__(self, name: str, encoding: EncodingModel) -> None:
        self.line = encoding.lines[name]
        self.known: set[str] = set()
        """Media whose embeddings are there."""
        self.queue: EncodeQueue | None = None
        num = encoding.num_instances.get(name, 0)
        self._instances = [EncodeInstance(f"{name}-encode-{at}") for at in range(num)]
        if num:
            self.queue = EncodeQueue(encoding.config)
            self.queue.times = KnownTimes(self.line)
            self.regain(0.0)

    def lose(self, now_s: float) -> list[Effect]:
        """Lose the instances and all embeddings."""
        self.known.clear()
        queue = self.queue
        if queue is None:
            return []
        return [
            effect for one in self._instances for effect in queue.instance_left(one.name, now_s)
        ]

    def regain(self, now_s: float) -> None:
        """The instances are there again, idle. No media wait for them."""
        if self.queue is not None:
            for one in self._instances:
                self.queue.instance_changed(one, now_s)

    def report(self, now_s: float) -> EncodeReport | None:
        """The stage as a front reports it."""
        return None if self.queue is None else self.queue.report(now_s)

    def left(self, job: Job) -> tuple[int, int]:
        """How many of the job's media have no embedding here, and their tokens. Equal media count
        once.
        """
        left = {
            one.identifier: one.num_tokens for one in job.media if one.identifier not in self.known
        }
        return len(left), sum(left.values())


class EncodeStages:
    """The stages of all clusters, by their names.

    `end_later(at_s, name, pass)` has `pass_ended` called then, and `tick_later(at_s, name)` has
    `tick` called. `ended(job, now_s)` hears that a job waits for no stage any more.
    """

    def __init__(
        self,
        encoding: EncodingModel,
        names: Iterable[str],
        *,
        end_later: Callable[[float, str, StartPass], None],
        tick_later: Callable[[float, str], None],
        ended: Callable[[Job, float], None],
    ) -> None:
        self._stages = {name: EncodeStage(name, encoding) for name in names}
        self._timeout_s = encoding.config.timeout_s
        self._end_later, self._tick_later, self._ended = end_later, tick_later, ended
        self._waiting: dict[str, tuple[Job, str]] = {}
        """Jobs whose media are in a queue, and the clusters of these."""

    def line(self, name: str) -> EncodeLine:
        """The encoder passes of the instances of a cluster."""
        return self._stages[name].line

    def report(self, name: str, now_s: float) -> EncodeReport | None:
        """The encode stage of a cluster; None if it has none."""
        return self._stages[name].report(now_s)

    def waits(self, job: Job) -> bool:
        """Whether a stage still has media of the job."""
        return str(job.index) in self._waiting

    def left(self, job: Job, name: str) -> tuple[int, int]:
        """The job's media without embeddings in a cluster: how many, and their tokens."""
        return self._stages[name].left(job)

    def shape(self, job: Job) -> MediaShape | None:
        """The job's media as routing sees them; None for text. They come before the text."""
        if not job.media:
            return None
        spans, offset = [], 0
        for medium in job.media:
            spans.append((offset, medium.num_tokens))
            offset += medium.num_tokens
        embedded = {
            name: frozenset(
                number for number, one in enumerate(job.media) if one.identifier in stage.known
            )
            for name, stage in self._stages.items()
        }
        return MediaShape(tuple(spans), embedded=embedded)

    def submit(self, job: Job, name: str, wait_s: float, now_s: float) -> None:
        """The job waits for its prefill in a cluster, for about `wait_s`."""
        stage = self._stages[name]
        fresh = {one.identifier: one for one in job.media if one.identifier not in stage.known}
        if stage.queue is None or not fresh:
            return
        key = str(job.index)
        self._waiting[key] = job, name
        asked = EncodeRequest(key, tuple(fresh.values()), wait_s=wait_s)
        self._perform(name, stage.queue.submit(asked, now_s), now_s)
        if key in self._waiting:
            self._tick_later(now_s + self._timeout_s, name)

    def withdraw(self, job: Job, now_s: float) -> None:
        """The job is not prefilled there any more."""
        found = self._waiting.pop(str(job.index), None)
        if found is not None and (queue := self._stages[found[1]].queue) is not None:
            self._perform(found[1], queue.withdraw(str(job.index), now_s), now_s)

    def pass_ended(self, name: str, ended: StartPass, now_s: float) -> None:
        """An instance has encoded the media of a pass, unless it was lost meanwhile."""
        stage = self._stages[name]
        queue = stage.queue
        if queue is None or ended.number not in queue.passes_on(ended.instance):
            return
        stage.known.update(one.identifier for one in ended.media)
        for one in ended.media:
            effects = queue.ended(ended.number, one.identifier, EncodeReason.ENCODED, now_s)
            self._perform(name, effects, now_s)

    def tick(self, name: str, now_s: float) -> None:
        """Some request may have waited too long."""
        queue = self._stages[name].queue
        if queue is not None:
            self._perform(name, queue.tick(now_s), now_s)

    def prefilled(self, job: Job, name: str) -> None:
        """What the instance encoded itself is there now."""
        self._stages[name].known.update(one.identifier for one in job.media)

    def lose(self, name: str, now_s: float) -> None:
        """A cluster is lost."""
        self._perform(name, self._stages[name].lose(now_s), now_s)

    def regain(self, name: str, now_s: float) -> None:
        """A cluster is there again."""
        self._stages[name].regain(now_s)

    def _perform(self, name: str, effects: Sequence[Effect], now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, StartPass):
                tokens = sum(one.num_tokens for one in effect.media)
                self._end_later(now_s + self.line(name).seconds(tokens), name, effect)
            elif isinstance(effect, EndRequest) and effect.key in self._waiting:
                job, _ = self._waiting.pop(effect.key)
                job.media_apart = sum(end.reason.is_there for end in effect.media)
                self._ended(job, now_s)
