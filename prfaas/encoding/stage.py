"""The encode stage of one front: the shell around `scheduler.encoding.queue`.

For each medium it posts one chat to an engine that encodes, with that medium alone. The engine puts
the embedding into its node's arena before it answers, and the engine that prefills finds it there.

Best effort: whatever fails or is late here, the engine that prefills encodes by itself, and the
answer is the same. So nothing here raises anything but cancellation. It does not know jobs' queues
or how prompts are prefilled.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import structs

from kvmanager.landing import ENCODES_ONLY
from kvmanager.tracing.spans import begin
from prfaas.encoding.chats import chat_of, named_media
from prfaas.encoding.embeddings import EmbeddingPlaces
from prfaas.encoding.metrics import EncodeMetrics, encode_metrics
from prfaas.encoding.values import Encoded, Media
from prfaas.engines.errors import EngineError, EngineRefused
from prfaas.engines.instance import Instance
from prfaas.engines.instances import Instances
from scheduler.encoding.queue import EncodeQueue
from scheduler.encoding.values import (
    Effect,
    EncodeConfig,
    EncodeInstance,
    EncodeReason,
    EncodeRequest,
    EndRequest,
    Medium,
    MediumEnd,
    StartPass,
    StopMedium,
)
from scheduler.reports import EncodeReport
from transport.tasks import start_task

if TYPE_CHECKING:  # which needs the extra `traces`
    from kvmanager.tracing.export import Tracer

logger = logging.getLogger("prfaas.encoding")

FIRST_TOKENS: Final = 576
"""The tokens of a medium before any was counted."""
_MEAN_GAIN: Final = 0.1
_PASSES_OF_ENCODERS: Final = 2
"""An engine that only encodes gets a pass more, whose media it reads while it encodes another. On
one that decodes as well, two passes could become one, which delays decodes twice as long.
"""
_OF_THE_REQUEST: Final = frozenset({400, 413, 415, 422})
"""Statuses with which an engine says that it cannot encode this medium."""


@dataclass(slots=True)
class _Waiter:
    """A request under way, and the parts of its chat by the names of its media."""

    media: Media
    parts: dict[str, bytes]
    done: asyncio.Future[EndRequest] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class EncodeStage:
    """Use it on one event loop. Tell it of changed instances, and `close` it."""

    def __init__(
        self,
        cluster: str,
        instances: Instances,
        config: EncodeConfig | None = None,
        *,
        metrics: EncodeMetrics | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when what waits or runs has changed."""
        self._cluster = cluster
        self._instances = instances
        self._config = config or EncodeConfig()
        self._metrics = metrics or encode_metrics()
        self._tracer = tracer
        self._clock = clock
        self._on_change = on_change
        self._queue = EncodeQueue(self._config)
        self._places = EmbeddingPlaces(instances.by_name)
        self._waiters: dict[str, _Waiter] = {}
        self._running: dict[tuple[int, str], asyncio.Task[EncodeReason]] = {}
        """By pass and identifier."""
        self._timer: asyncio.TimerHandle | None = None
        self._mean_tokens = 0.0
        """Of a medium, by what engines answered."""
        self._closed = False

    @property
    def is_there(self) -> bool:
        """Whether an instance of the cluster encodes for others."""
        return any(item.encodes for item in self._instances.by_name.values())

    @property
    def is_apart(self) -> bool:
        """Whether an instance does nothing else than encoding for others."""
        return any(item.role == "encode" for item in self._instances.by_name.values())

    def running_on(self, instance: str) -> int:
        """The media that an instance encodes for others."""
        return self._queue.running_on(instance)

    def report(self) -> EncodeReport | None:
        """The stage for a cluster report; None: no instance encodes for others."""
        if not self.is_there:
            return None
        report = self._queue.report(self._clock())
        return structs.replace(report, token_bytes=self._places.token_bytes)

    def instance_changed(self, instance: Instance) -> None:
        """An instance has come, or its usability or role has changed."""
        if not instance.encodes:
            # What it was given before its role changed has ended: it was drained.
            self._perform(self._queue.instance_left(instance.name, self._clock()))
            return
        if instance.gone.is_set():
            self._stop_all(instance.name)
        decodes = instance.role != "encode"
        view = EncodeInstance(
            name=instance.name,
            model=instance.spec.served_name,
            node=instance.spec.agent,
            healthy=instance.transfers and not instance.draining,
            decodes=decodes,
            max_passes=1 if decodes else _PASSES_OF_ENCODERS,
        )
        self._perform(self._queue.instance_changed(view, self._clock()))

    def forget(self, instance: str) -> None:
        """An instance has left."""
        self._stop_all(instance)
        self._perform(self._queue.instance_left(instance, self._clock()))

    async def encode(self, media: Media) -> Encoded:
        """Have media encoded, as far as they are not there and that is of use. Cancelling withdraws
        them.
        """
        begun_s = self._clock()
        span = begin(self._tracer, "encode", media.traceparent, begun_s)
        failed = "cancelled"
        try:
            encoded = await self._encode(media, begun_s)
            failed = ""
        finally:
            counts = {} if failed else encoded.counts
            found = {f"prfaas.media.{name}": number for name, number in counts.items()}
            span.end(self._clock(), {"prfaas.cluster": self._cluster, **found}, error=failed)
        self._metrics.ended(self._cluster, encoded.ends, encoded.seconds)
        return encoded

    async def bring(self, media: Media, encoded: Encoded, target: Instance) -> Encoded:
        """Have the node of the instance that prefills pull the embeddings that other nodes have.
        The answer has the time of that, too.
        """
        begun_s = self._clock()
        where = {one.identifier: one.node for one in encoded.ends if one.reason.is_there}
        nbytes = await self._places.pull(media, where, target, self._config.pull_s)
        if not nbytes:
            return encoded
        now_s = self._clock()
        self._metrics.pulled_bytes.labels(self._cluster).inc(nbytes)
        span = begin(self._tracer, "pull_embeddings", media.traceparent, begun_s)
        span.end(now_s, {"prfaas.instance": target.name, "prfaas.transfer_bytes": nbytes})
        return replace(encoded, seconds=encoded.seconds + now_s - begun_s)

    async def close(self) -> None:
        """End what is under way: the media are left to the prefill."""
        self._closed = True
        self._perform(self._queue.close(self._clock()))
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()

    async def _encode(self, media: Media, begun_s: float) -> Encoded:
        parts = named_media(media.chat)
        wanted = self._wanted(media, parts)
        last = {one.identifier: one.offset + one.length for one in media.items}
        ends = {
            name: MediumEnd(name, EncodeReason.CACHED)
            for name, end in last.items()
            if end <= media.cached_tokens
        }
        ends |= {
            one.identifier: MediumEnd(one.identifier, EncodeReason.UNNAMED)
            for one in wanted
            if one.identifier not in parts and one.identifier not in ends
        }
        left = [one for one in wanted if one.identifier not in ends]
        if left and not self._closed:
            found = await self._places.find(media, [one.identifier for one in left])
            ends |= {
                name: MediumEnd(name, EncodeReason.FOUND, node) for name, node in found.items()
            }
            left = [one for one in left if one.identifier not in ends]
        if self._closed:
            ends |= {one.identifier: MediumEnd(one.identifier, EncodeReason.CLOSED) for one in left}
        elif left:
            waiter = _Waiter(media, {one.identifier: parts[one.identifier] for one in left})
            done = await self._submitted(waiter, left)
            ends |= {one.identifier: one for one in done.media}
        seconds = max(0.0, self._clock() - begun_s)
        left_tokens = sum(one.num_tokens for one in wanted if ends[one.identifier].reason.is_left)
        return Encoded(tuple(ends[one.identifier] for one in wanted), seconds, left_tokens)

    def _wanted(self, media: Media, parts: Iterable[str]) -> list[Medium]:
        """The distinct media of a request. Where nobody has counted their tokens, all that have a
        name, with the tokens that media have on average.
        """
        counted = {one.identifier: Medium(one.identifier, one.length) for one in media.items}
        if counted:
            return list(counted.values())
        num_tokens = round(self._mean_tokens) or FIRST_TOKENS
        return [Medium(name, num_tokens) for name in parts]

    async def _submitted(self, waiter: _Waiter, left: list[Medium]) -> EndRequest:
        media = waiter.media
        request = EncodeRequest(
            media.key,
            tuple(left),
            media.model,
            media.nodes,
            media.wait_s,
            may_delay_decodes=media.may_delay_decodes,
        )
        self._waiters[media.key] = waiter
        try:
            self._perform(self._queue.submit(request, self._clock()))
            return await waiter.done
        finally:
            del self._waiters[media.key]
            # Ends nothing if the queue has ended it.
            self._perform(self._queue.withdraw(media.key, self._clock()))

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartPass():
                    self._start(effect)
                case StopMedium(number, identifier):
                    self._running[number, identifier].cancel()
                case EndRequest():
                    done = self._waiters[effect.key].done
                    # Whoever waited may have been cancelled in this turn of the loop.
                    if not done.done():
                        done.set_result(effect)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = self._clock()
        if (due_s := self._queue.next_tick_s) is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, due_s - now_s), self._tick)
        self._metrics.stands(self._cluster, self._queue.report(now_s))
        self._on_change()

    def _tick(self) -> None:
        self._perform(self._queue.tick(self._clock()))

    def _start(self, start: StartPass) -> None:
        instance = self._instances.by_name[start.instance]
        for medium in start.media:
            name = medium.identifier
            waiter = next(
                one
                for one in self._waiters.values()
                if one.media.model == start.model and name in one.parts
            )
            task = start_task(
                self._posted(instance, waiter.media, waiter.parts[name]),
                f"encode for {waiter.media.request_id}",
            )
            self._running[start.number, name] = task
            # A callback, because a task cancelled before its first step runs no code of its own.
            task.add_done_callback(partial(self._over, start.number, name))

    def _over(self, number: int, identifier: str, task: asyncio.Task[EncodeReason]) -> None:
        del self._running[number, identifier]
        is_lost = task.cancelled() or task.exception() is not None
        reason = EncodeReason.FAILED if is_lost else task.result()
        self._perform(self._queue.ended(number, identifier, reason, self._clock()))

    async def _posted(self, instance: Instance, media: Media, part: bytes) -> EncodeReason:
        """Have one medium encoded by an engine."""
        name = f"encode-{secrets.token_hex(8)}"
        instance.load.given()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                answer = await instance.http.prefill(
                    name,
                    chat_of(part),
                    ENCODES_ONLY,
                    model=instance.spec.served_name or media.model,
                    # An engine that has the prompt cached would not encode.
                    cache_salt=name,
                    timeout_s=self._config.timeout_s + 5.0,
                )
        except TimeoutError:
            logger.warning("%s: %s does not encode in time", media.request_id, instance.name)
            return EncodeReason.FAILED
        except EngineRefused as error:
            logger.warning("%s: %s: %s", media.request_id, instance.name, error)
            is_its_own = error.status in _OF_THE_REQUEST
            return EncodeReason.REFUSED if is_its_own else EncodeReason.FAILED
        except EngineError as error:
            self._instances.engine_lost(instance.name, str(error))
            return EncodeReason.FAILED
        finally:
            instance.load.request_ended()
        gain = _MEAN_GAIN if self._mean_tokens else 1.0
        self._mean_tokens += gain * (answer.num_prompt_tokens - self._mean_tokens)
        return EncodeReason.ENCODED

    def _stop_all(self, instance: str) -> None:
        """Give up what an instance that is gone was given."""
        for number in self._queue.passes_on(instance):
            for (of, _), task in list(self._running.items()):
                if of == number:
                    task.cancel()
