"""The front of a prefill cluster that runs inside its user's process.

queue.py decides, and prfaas.engines.prefill_run runs one try on one instance. This file is the
shell that owns the tasks between them. It does not know routing or decoding.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kvmanager.logs import about_request
from kvmanager.tracing.spans import begin
from prfaas.encoding.embeddings import nodes_of
from prfaas.encoding.metrics import EncodeMetrics
from prfaas.encoding.stage import EncodeStage
from prfaas.encoding.values import Encoded, Media
from prfaas.engines.departures import Departures
from prfaas.engines.errors import PrefillFailed
from prfaas.engines.instance import Instance, InstanceSpec
from prfaas.engines.instances import Instances, InstancesConfig
from prfaas.engines.members import MemberOrder
from prfaas.engines.prefill_run import (
    AttemptFailed,
    PrefillRunner,
    RunnerConfig,
    check_job,
)
from prfaas.engines.timing import TimedPrefills, TimingOrder, time_prefills
from prfaas.engines.traced_job import traced_job
from prfaas.jobs import PrefillJob, PrefillResult
from prfaas.metrics import PrefillMetrics, prefill_metrics
from prfaas.queue import PrefillQueue
from prfaas.queue_values import Effect, FailJob, QueueConfig, QueuedJob, QueueInstance, StartJob
from scheduler.encoding.values import EncodeConfig
from scheduler.reports import ClusterReport, serves
from transport.tasks import start_task

if TYPE_CHECKING:  # which needs the extra `traces`
    from kvmanager.tracing.export import Tracer

logger = logging.getLogger("prfaas.prefill")

_TICK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class PrefillClusterConfig:
    """The settings of an embedded prefill cluster."""

    queue: QueueConfig = field(default_factory=QueueConfig)
    instances: InstancesConfig = field(default_factory=InstancesConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    encode: EncodeConfig = field(default_factory=EncodeConfig)


@dataclass(slots=True)
class _Ticket:
    """A submitted job: the future that its submitter awaits, and the task of its present try."""

    job: PrefillJob
    done: asyncio.Future[PrefillResult]
    queued_s: float
    """Since when it waits in the queue (time.monotonic)."""
    task: asyncio.Task[PrefillResult] | None = None
    encoding: asyncio.Task[None] | None = None
    """The task that waits for its media; None: it has none to wait for."""
    encoded: Encoded | None = None

    def resolve(self, result: PrefillResult) -> None:
        """Tell the submitter, if it still waits."""
        if not self.done.done():
            self.done.set_result(result)

    def refuse(self, error: PrefillFailed) -> None:
        """Tell the submitter, if it still waits."""
        if not self.done.done():
            self.done.set_exception(error)


class EmbeddedPrefillCluster:
    """The front inside this process. `start` it on the event loop that will use it."""

    def __init__(
        self,
        name: str,
        instances: Sequence[InstanceSpec],
        config: PrefillClusterConfig | None = None,
        *,
        metrics: PrefillMetrics | None = None,
        encode_metrics: EncodeMetrics | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = config or PrefillClusterConfig()
        self._name = name
        self._config = config
        self._clock = clock
        self._metrics = metrics or prefill_metrics()
        self._queue = PrefillQueue(name, config.queue)
        self._tracer = tracer
        self._runner = PrefillRunner(config.runner, tracer)
        self._instances = Instances(name, instances, config.instances, self._instance_changed)
        self._stage = EncodeStage(
            name,
            self._instances,
            config.encode,
            metrics=encode_metrics,
            tracer=tracer,
            clock=clock,
            on_change=self._tell_changed,
        )
        for spec in instances:
            # The queue knows all that prefill from the start; probes will say when each is usable.
            if spec.role != "encode":
                self._queue.instance_changed(_view(spec), 0.0)
        self.departures = Departures(self._instances, idle=self._until_idle, forget=self._forget)
        self._tickets: dict[str, _Ticket] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        """Start supervised engines and probing; returns after the first probe of each instance."""
        await self._instances.start()
        self._ticker = start_task(self._tick(), f"queue of {self._name}")

    async def wait_ready(
        self, timeout_s: float, progress: Callable[[str], None] | None = None
    ) -> None:
        """Wait until all instances are healthy; see `Instances.wait_ready` for errors."""
        await self._instances.wait_ready(timeout_s, progress)

    async def submit(self, job: PrefillJob) -> PrefillResult:
        with traced_job(self._tracer, self._name, job) as job:
            return await self._counted(job)

    async def _counted(self, job: PrefillJob) -> PrefillResult:
        try:
            result = await self._submit(job)
        except PrefillFailed as error:
            self._metrics.jobs.labels(self._name, error.code).inc()
            raise
        except asyncio.CancelledError:
            self._metrics.jobs.labels(self._name, "cancelled").inc()
            raise
        self._metrics.finished(self._name, result)
        return result

    async def report(self) -> ClusterReport:
        instances = tuple(
            item.report(self._running_on(item.name)) for item in self._instances.by_name.values()
        )
        return ClusterReport(
            name=self._name,
            healthy=not self._closed and any(serves(item, "") for item in instances),
            queue_depth=self._queue.depth,
            running=self._queue.num_running,
            instances=instances,
            max_queued=self._config.queue.max_queued,
            queued_tokens=self._queue.queued_tokens,
            running_tokens=self._queue.running_tokens,
            jobs=self._queue.jobs(self._clock()),
            encode=self._stage.report(),
        )

    async def drain(self, instance: str) -> None:
        self._instances.set_draining(instance, draining=True)
        try:
            await self._until_idle(self._instances.known(instance))
        finally:
            self._instances.drained(instance)

    async def resume(self, instance: str) -> None:
        self._instances.set_draining(instance, draining=False)

    async def change_members(self, order: MemberOrder) -> None:
        self.departures.order(order)

    async def time_prefills(self, order: TimingOrder) -> TimedPrefills:
        instance = self._instances.known(order.instance)
        if instance.role == "encode":
            return TimedPrefills(reason=f"{instance.name} only encodes")
        if self._running_on(instance.name):
            return TimedPrefills(reason=f"{instance.name} is busy")
        return await time_prefills(instance, order)

    async def finish(self) -> None:
        """Refuse new jobs, and return when none is queued or runs."""
        self._closed = True
        while self._tickets:
            await self._changed.wait()

    async def close(self) -> None:
        self._closed = True
        await self.departures.close()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        tickets = dict(self._tickets)
        for key, ticket in tickets.items():
            ticket.refuse(PrefillFailed("closed", f"cluster {self._name} is shutting down"))
            self._take_back(key, ticket)
        tasks = [ticket.task for ticket in tickets.values() if ticket.task is not None]
        waits = [ticket.encoding for ticket in tickets.values() if ticket.encoding is not None]
        await asyncio.gather(*tasks, *waits, return_exceptions=True)
        await self._stage.close()
        await self._runner.close()
        await self._instances.close()

    async def _until_idle(self, instance: Instance) -> None:
        while self._running_on(instance.name) > 0:
            await self._changed.wait()

    async def _forget(self, instance: Instance) -> None:
        # Prefills that were given up there still give their outboxes back.
        await self._until_idle(instance)
        self._stage.forget(instance.name)
        self._perform(self._queue.instance_left(instance.name, self._clock()))
        self._count_usable()

    async def _submit(self, job: PrefillJob) -> PrefillResult:
        if self._closed:
            raise PrefillFailed("closed", f"cluster {self._name} is shutting down")
        check_job(job)
        key = job.landing.transfer_id
        if key in self._tickets:
            raise PrefillFailed("invalid", f"transfer {key} has a job in {self._name} already")
        ticket = _Ticket(job, asyncio.get_running_loop().create_future(), time.monotonic())
        self._tickets[key] = ticket
        # With media, its turn may come while they are encoded, and others start meanwhile.
        waits = bool(job.media) and self._stage.is_there
        self._perform(self._queue.submit(_queued(job), self._clock(), held=waits))
        if waits and self._tickets.get(key) is ticket:
            ticket.encoding = start_task(self._encode(key, ticket), f"media of {key}")
        try:
            return await ticket.done
        except asyncio.CancelledError:
            self._take_back(key, ticket)
            raise

    async def _encode(self, key: str, ticket: _Ticket) -> None:
        """Wait for the media of a held job, and let it go."""
        nodes = nodes_of(self._instances.by_name.values(), ticket.job.model)
        try:
            ticket.encoded = await self._stage.encode(Media.of(ticket.job, nodes))
        finally:
            self._perform(self._queue.let_go(key, self._clock()))

    def _take_back(self, key: str, ticket: _Ticket) -> None:
        """Withdraw a job: from the queue at once, from an instance when its try has cleaned up."""
        if self._tickets.get(key) is not ticket:
            return
        if ticket.task is None:
            del self._tickets[key]
        else:
            ticket.task.cancel()
        self._perform(self._queue.withdraw(key, self._clock()))
        if ticket.encoding is not None:
            ticket.encoding.cancel()

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, FailJob):
                ticket = self._tickets.pop(effect.key)
                if ticket.encoding is not None:
                    ticket.encoding.cancel()
                ticket.refuse(PrefillFailed(effect.code, effect.message))
            else:
                self._start(self._tickets[effect.key], effect)
        self._metrics.waiting.labels(self._name).set(self._queue.depth)
        self._metrics.waiting_tokens.labels(self._name).set(self._queue.queued_tokens)
        self._metrics.running.labels(self._name).set(self._queue.num_running)
        self._tell_changed()

    def _tell_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _start(self, ticket: _Ticket, start: StartJob) -> None:
        if start.attempt > 1:
            self._metrics.retries.labels(self._name).inc()
        instance = self._instances.by_name[start.instance]
        waited = begin(self._tracer, "queue", ticket.job.traceparent, ticket.queued_s)
        # Its media may have kept it after its turn had come.
        waited_until_s = max(ticket.queued_s, time.monotonic() - start.held_s)
        waited.end(waited_until_s, {"prfaas.attempt": start.attempt})
        job = ticket.job
        with about_request(job.request_id, job.traceparent[3:35]):
            ticket.task = asyncio.create_task(
                self._run(ticket, instance, start),
                name=f"prefill {start.key}",
            )
        # A callback, because a task cancelled before its first step runs no code of its own.
        ticket.task.add_done_callback(lambda task: self._try_over(ticket, start, task))

    async def _run(self, ticket: _Ticket, instance: Instance, start: StartJob) -> PrefillResult:
        """One try. What it needs of its media comes to its node first."""
        job, encoded = ticket.job, ticket.encoded
        if encoded is not None:
            # What passed while it would have waited anyway is in `queue_s`.
            encoded = replace(encoded, seconds=start.held_s)
            media = Media.of(job, frozenset((instance.spec.agent,)))
            encoded = await self._stage.bring(media, encoded, instance)
        result = await self._runner.run(
            job,
            instance.place(),
            queue_s=start.queue_s,
            attempt=start.attempt,
            reason=start.reason,
        )
        return result if encoded is None else encoded.noted(result)

    def _try_over(
        self, ticket: _Ticket, start: StartJob, task: asyncio.Task[PrefillResult]
    ) -> None:
        """A try has ended. The queue and the submitter are each told exactly once."""
        ticket.task, ticket.queued_s = None, time.monotonic()
        error = None if task.cancelled() else task.exception()
        if error is None:
            del self._tickets[start.key]
            if not task.cancelled():
                ticket.resolve(task.result())
            self._perform(self._queue.finished(start.key, self._clock()))
            return
        with about_request(ticket.job.request_id, ticket.job.traceparent[3:35]):
            if not isinstance(error, AttemptFailed):
                logger.error("%s: prefill %s", self._name, start.key, exc_info=error)
                error = AttemptFailed("engine_failed", f"{type(error).__name__}: {error}")
            logger.warning("%s: prefill %s on %s: %s", self._name, start.key, start.instance, error)
        self._instances.attempt_failed(start.instance, error)
        retryable, now_s = error.retryable, self._clock()
        self._perform(
            self._queue.failed(
                start.key, error.code, error.message, retryable=retryable, now_s=now_s
            )
        )

    def _running_on(self, instance: str) -> int:
        """Jobs on an instance, and media that it encodes for others."""
        return self._queue.running_on(instance) + self._stage.running_on(instance)

    def _instance_changed(self, instance: Instance) -> None:
        self._stage.instance_changed(instance)
        if instance.role != "encode":
            view = replace(
                _view(instance.spec),
                healthy=instance.transfers,
                draining=instance.draining,
                layout_fingerprint=instance.layout_fingerprint,
                layout=instance.layout,
                text_only=instance.text_only,
            )
            self._perform(self._queue.instance_changed(view, self._clock()))
        self._count_usable()

    def _count_usable(self) -> None:
        usable = sum(
            item.transfers and not item.draining and item.role != "encode"
            for item in self._instances.by_name.values()
        )
        self._metrics.healthy_instances.labels(self._name).set(usable)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._perform(self._queue.tick(self._clock()))


def _view(spec: InstanceSpec) -> QueueInstance:
    """An instance that no probe has found healthy yet."""
    return QueueInstance(
        name=spec.name,
        model=spec.served_name,
        healthy=False,
        room=spec.room,
        node=spec.agent,
    )


def _queued(job: PrefillJob) -> QueuedJob:
    return QueuedJob(
        job.landing.transfer_id,
        job.model,
        job.priority,
        len(job.prompt_token_ids),
        job.cached_tokens,
        job.pd,
        job.landing.layout_fingerprint,
        bool(job.media),
    )
