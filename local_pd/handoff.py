"""Prefill on one instance of a local PD cluster for decoding on another.

Inside a node the prefill engine writes the KVCache into the landing. Between nodes it goes through
the same transport as between sites, or vLLM's NixlConnector reads it from engine to engine. While
all prefill instances are full, jobs wait, urgent ones first and then as they came: a prompt on the
decode engine would hold up every answer there. The media of a prompt are encoded before its
instance is chosen. It does not choose the decode instance.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from local_pd.placement import InstanceChoice, PdInstance, PrefillWish, choose_prefill
from prfaas.encoding.embeddings import nodes_of
from prfaas.encoding.stage import EncodeStage
from prfaas.encoding.values import Encoded, Media
from prfaas.engines.errors import PrefillFailed
from prfaas.engines.instances import Instances
from prfaas.engines.ownership import cancel_requested
from prfaas.engines.prefill_run import AttemptFailed, PrefillRunner, check_job
from prfaas.jobs import PrefillJob, PrefillResult
from scheduler.reports import JobReport
from scheduler.routing.queue_order import priority_class

logger = logging.getLogger("prfaas.local_pd")

_LOOK_S: Final = 0.5
"""How often jobs that wait look at the instances although none of their jobs has ended, seconds."""

HandOffWay = Literal["auto", "transport", "nixl"]
"""auto: within a node through its arena, between nodes through the transport. transport: through
the transport everywhere. nixl: like auto, but between nodes by vLLM's NixlConnector.
"""


@dataclass(frozen=True, slots=True, eq=False)
class _Try:
    """A job on one instance, which must compute `uncached_tokens` of it."""

    job: PrefillJob
    uncached_tokens: int
    started_s: float


@dataclass(slots=True)
class Given:
    """The prefills that this front has given to one instance and that are under way."""

    tries: list[_Try] = field(default_factory=list)

    @property
    def num_jobs(self) -> int:
        """Prefills under way."""
        return len(self.tries)

    @property
    def num_tokens(self) -> int:
        """Uncached tokens of those."""
        return sum(item.uncached_tokens for item in self.tries)


class LocalHandoff:
    """Runs local prefills; `views` is a snapshot of the cluster's instances, and `landing_node` the
    node on which the KVCache of a job is to land ("" where nobody knows).
    """

    def __init__(
        self,
        cluster: str,
        instances: Instances,
        runner: PrefillRunner,
        views: Callable[[], Sequence[PdInstance]],
        landing_node: Callable[[PrefillJob], str],
        stage: EncodeStage,
        *,
        max_attempts: int,
        way: HandOffWay = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._instances = instances
        self._runner = runner
        self._views = views
        self._landing_node = landing_node
        self._stage = stage
        self._way = way
        self._max_attempts = max_attempts
        self._clock = clock
        self._given: dict[str, Given] = {}
        self._held: dict[str, tuple[PrefillJob, float]] = {}
        """The jobs that wait for an instance or their media, and since when, by transfer."""
        self._lines: dict[str, list[tuple[int, int]]] = {}
        """By model: those that wait for an instance, each a class of priority and a number."""
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[PrefillResult]] = set()
        self._closed = False

    @property
    def num_tokens(self) -> int:
        """Uncached tokens on all prefill instances."""
        return sum(given.num_tokens for given in self._given.values())

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for an instance or for their media."""
        return len(self._held)

    def jobs(self) -> tuple[JobReport, ...]:
        """All running jobs, each with its present instance, and those that wait."""
        now_s = self._clock()
        running = tuple(
            _reported(item.job, item.uncached_tokens, instance, now_s - item.started_s)
            for instance, given in self._given.items()
            for item in given.tries
        )
        return running + tuple(
            _reported(job, job.uncached_tokens, "", now_s - since_s)
            for job, since_s in self._held.values()
        )

    def given(self, instance: str) -> Given:
        """The prefills under way on one instance."""
        found = self._given.get(instance)
        if found is None:
            found = self._given[instance] = Given()
        return found

    async def forget(self, instance: str) -> None:
        """Wait until an instance that leaves has no prefills, and forget it."""
        while self.given(instance).tries:
            await self._changed.wait()
        del self._given[instance]

    async def run(self, job: PrefillJob) -> PrefillResult:
        """Prefill `job`, trying another instance when one fails. Raises PrefillFailed."""
        if self._closed:
            raise self._shutting_down()
        check_job(job)
        # A task of its own, so that `close` can end the job without cancelling the caller.
        task = asyncio.create_task(self._run(job), name=f"local prefill {job.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if cancel_requested():
                raise
            # `close` cancelled the job's task, not this one: the caller gets an error it can act
            # on.
            raise self._shutting_down() from None

    async def finish(self) -> None:
        """Refuse new jobs, and return when none runs."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        """End running jobs with code "closed", and refuse new ones."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: PrefillJob) -> PrefillResult:
        tried: list[str] = []
        failure: PrefillFailed | None = None
        encoded = await self._encode(job) if job.media and self._stage.is_there else None
        while len(tried) < self._max_attempts:
            node, since_s = self._landing_node(job), self._clock()
            choice = await self._choose(job, tried, node)
            if choice.name is None:
                raise failure or PrefillFailed("no_instance", f"{self._cluster}: {choice.reason}")
            tried.append(choice.name)
            try:
                return await self._try(
                    job, choice, node, encoded, attempt=len(tried), queue_s=self._clock() - since_s
                )
            except AttemptFailed as error:
                logger.warning("%s: local prefill on %s: %s", self._cluster, choice.name, error)
                self._instances.attempt_failed(choice.name, error)
                failure = PrefillFailed(error.code, error.message)
                if not error.retryable:
                    break
        assert failure is not None
        raise failure

    async def _choose(self, job: PrefillJob, tried: Sequence[str], node: str) -> InstanceChoice:
        """The instance for a job, when it is the first in line and one has room; the answer has no
        name if there is no instance for it at all.
        """
        line = self._lines.setdefault(job.model, [])
        place = priority_class(job.priority), next(self._numbers)
        insort(line, place)
        key = job.landing.transfer_id
        self._held[key] = job, self._clock()
        try:
            while True:
                if line[0] == place:
                    choice = choose_prefill(self._views(), _wish(job, tried, node))
                    if not choice.is_full:
                        return choice
                # An instance that became healthy tells nobody here.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._changed.wait()
        finally:
            line.remove(place)
            del self._held[key]
            self._tell_changed()

    def _tell_changed(self) -> None:
        """Wake all that wait for something to end here."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _encode(self, job: PrefillJob) -> Encoded:
        """Have the media of a job encoded. Raises PrefillFailed if no instance can prefill it: then
        the engine that decodes had better begin.
        """
        choice = choose_prefill(self._views(), _wish(job, (), self._landing_node(job)))
        if choice.name is None and not choice.is_full:
            raise PrefillFailed("no_instance", f"{self._cluster}: {choice.reason}")
        prefilling = (one for one in self._instances.by_name.values() if one.role == "prefill")
        key = job.landing.transfer_id
        self._held[key] = job, self._clock()
        try:
            return await self._stage.encode(Media.of(job, nodes_of(prefilling, job.model)))
        finally:
            del self._held[key]

    async def _try(
        self,
        job: PrefillJob,
        choice: InstanceChoice,
        node: str,
        encoded: Encoded | None,
        *,
        attempt: int,
        queue_s: float,
    ) -> PrefillResult:
        assert choice.name is not None
        name, instance = choice.name, self._instances.by_name[choice.name]
        # NixlConnector would not notice that two engines have different adapters of one name, and
        # its sender forgets the KVCache once one request has read it. It does not compare media.
        by_nixl = not job.adapter and job.num_choices == 1 and not job.media
        by_nixl = by_nixl and self._way == "nixl" and instance.spec.agent != node
        place = instance.place()
        given, mine = self.given(name), _Try(job, choice.uncached_tokens, self._clock())
        given.tries.append(mine)
        try:
            if by_nixl:
                return await self._runner.run_nixl(
                    job, place, queue_s=queue_s, attempt=attempt, reason=choice.reason
                )
            if encoded is not None:
                media = Media.of(job, frozenset((instance.spec.agent,)))
                encoded = await self._stage.bring(media, encoded, instance)
            result = await self._runner.run(
                job,
                place,
                queue_s=queue_s,
                attempt=attempt,
                reason=choice.reason,
                by_transport=self._way == "transport",
            )
            return result if encoded is None else encoded.noted(result)
        finally:
            given.tries.remove(mine)
            self._tell_changed()

    def _shutting_down(self) -> PrefillFailed:
        return PrefillFailed("closed", f"cluster {self._cluster} is shutting down")


def _wish(job: PrefillJob, tried: Sequence[str], node: str) -> PrefillWish:
    return PrefillWish(
        len(job.prompt_token_ids),
        job.model,
        job.cached_tokens,
        tried,
        node,
        job.landing.layout_fingerprint,
        bool(job.media),
    )


def _reported(job: PrefillJob, uncached_tokens: int, instance: str, for_s: float) -> JobReport:
    return JobReport(
        transfer_id=job.landing.transfer_id,
        num_tokens=len(job.prompt_token_ids),
        uncached_tokens=uncached_tokens,
        for_s=max(0.0, for_s),
        instance=instance,
        priority=job.priority,
        model=job.model,
    )
