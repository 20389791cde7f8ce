"""Requests on the instances of an arrangement, in virtual time.

    arrival -> [encode -> pull] -> prefill -> first token -> [pull] -> decode -> done

Media that are encoded apart from their prefill go through the live system's `EncodeQueue`. What it
leaves to the prefill is encoded there. A request goes on to the instance of the next stage that has
the least to do, and is pulled by it when there is room for its KVCache; until then the instance
before keeps it.

Deterministic: the same inputs give the same outcome. No I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any

from scheduler.encoding.queue import EncodeQueue
from scheduler.encoding.times import KnownTimes
from scheduler.encoding.values import (
    Effect,
    EncodeConfig,
    EncodeInstance,
    EncodeReason,
    EncodeRequest,
    EndRequest,
    StartPass,
)
from scheduler.stages.arrangement import Division, Stage
from scheduler.stages.batching import Batching, budgets_of, next_batch
from scheduler.stages.instance import Batch, Instance, Running
from scheduler.stages.outcome import Judge, StageOutcome
from scheduler.stages.profile import StageProfile, StageSizes, StageSlo
from scheduler.stages.traffic import StageRequest

_PASS_END, _KV_PULLED, _EMBEDDINGS_PULLED = range(3)
"""Kinds of events, in their order at one instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """Everything about the instances but their number. `encoding` has the settings of the encode
    stage's queue; its objectives are those of `slo`.
    """

    profile: StageProfile
    sizes: StageSizes
    slo: StageSlo
    batching: Batching
    encoding: EncodeConfig = field(default_factory=EncodeConfig)


def simulate(
    model: StageModel,
    division: Division,
    requests: Sequence[StageRequest],
    *,
    stop_below: float = 0.0,
) -> StageOutcome:
    """Play all requests. It stops early once their share within the objectives must end up below
    `stop_below`.
    """
    return _Simulation(model, division, requests, stop_below).run()


class _Simulation:
    def __init__(
        self,
        model: StageModel,
        division: Division,
        requests: Sequence[StageRequest],
        stop_below: float,
    ) -> None:
        self._model = model
        self._requests = requests
        self._judge = Judge(model.slo, requests, stop_below)
        slo = model.slo
        self._instances = [
            Instance(f"{group}{at}", group, model.profile, model.sizes, slo.tpot_s)
            for group, num in division.groups
            for at in range(num)
        ]
        budgets = partial(
            budgets_of,
            model.profile,
            model.sizes,
            slo,
            batching=model.batching,
            config=model.encoding,
        )
        self._budgets = {
            group: budgets(decodes=Stage.DECODE in group) for group, _ in division.groups
        }
        self._prefilling = [one for one in self._instances if one.prefills]
        self._decoding = [one for one in self._instances if one.decodes]
        self._by_name = {one.name: one for one in self._instances}
        self._queue: EncodeQueue | None = None
        apart = [one for one in self._instances if one.encodes and not one.prefills]
        if apart:
            self._queue = EncodeQueue(model.encoding)
            self._queue.times = KnownTimes(model.profile.encode)
            for one in apart:
                self._queue.instance_changed(EncodeInstance(one.name, decodes=one.decodes), 0.0)
        self._known: set[str] = set()
        """Media whose embeddings are there."""
        self._encoding: dict[str, Running] = {}
        self._events: list[tuple[float, int, int, Any, Any]] = []
        self._num_pushed = 0

    def run(self) -> StageOutcome:
        requests, events = self._requests, self._events
        index, now_s = 0, 0.0
        while (events or index < len(requests)) and not self._judge.is_decided:
            if index < len(requests) and (not events or requests[index].arrival_s < events[0][0]):
                now_s = requests[index].arrival_s
                self._arrive(Running(requests[index]), index, now_s)
                index += 1
                continue
            now_s, kind, _, first, second = heappop(events)
            if self._queue is not None and (self._queue.next_tick_s or now_s) < now_s:
                self._perform(self._queue.tick(now_s), now_s)
            if kind == _PASS_END:
                if first.version == second and first.batch is not None:
                    self._pass_ended(first, now_s)
            elif kind == _KV_PULLED:
                self._kv_pulled(first, second, now_s)
            else:
                self._to_prefill(first, second, now_s)
        return self._judge.outcome(now_s, self._instances)

    def _push(self, kind: int, at_s: float, first: Any, second: Any) -> None:
        self._num_pushed += 1
        heappush(self._events, (at_s, kind, self._num_pushed, first, second))

    # ---- from stage to stage

    def _arrive(self, running: Running, index: int, now_s: float) -> None:
        request = running.request
        if request.is_prefilled:
            self._to_decode(running, now_s)
            return
        fresh = {one.identifier: one for one in request.media if one.identifier not in self._known}
        running.unencoded = tuple(fresh.values())
        target = min(self._prefilling, key=_prefill_load)
        if not running.unencoded:
            running.encoded_s = now_s
            self._to_prefill(running, target, now_s)
        elif self._queue is None:
            self._encode_here(running, target, now_s)
        else:
            key = str(index)
            self._encoding[key] = running
            line_s = self._model.profile.prefill.prefill_s(target.pending_tokens)
            wait_s = line_s if target.pending_tokens else 0.0
            asked = EncodeRequest(key, running.unencoded, wait_s=wait_s)
            self._perform(self._queue.submit(asked, now_s), now_s)

    def _encode_here(self, running: Running, target: Instance, now_s: float) -> None:
        """The instance that prefills encodes, too."""
        target.num_requests += 1
        if self._model.batching is Batching.STAGE_LEVEL and target.encodes:
            target.to_encode.append(running)
            # It will be prefilled here, so that it counts for the choice of an instance.
            target.pending_tokens += running.request.prompt_tokens
            self._wake(target, now_s)
        else:
            self._queue_prefill(running, target, now_s)

    def _to_prefill(self, running: Running, target: Instance, now_s: float) -> None:
        target.num_requests += 1
        self._queue_prefill(running, target, now_s)

    def _queue_prefill(self, running: Running, target: Instance, now_s: float) -> None:
        target.to_prefill.append(running)
        target.pending_tokens += running.request.prompt_tokens
        self._wake(target, now_s)

    def _to_decode(self, running: Running, now_s: float) -> None:
        target = min(self._decoding, key=_decode_load)
        target.incoming.append(running)
        self._pull(target, now_s)

    def _pull(self, target: Instance, now_s: float) -> None:
        """Pull the KVCache of requests for which there is room now, one after the other."""
        while target.incoming and target.has_slot():
            running, source = target.incoming[0], target.incoming[0].home
            request, kv_bytes = running.request, running.kv_bytes
            if not target.reserve(running, request.prompt_tokens + request.output_tokens):
                return
            target.incoming.popleft()
            target.num_pulling += 1
            size = kv_bytes or self._model.sizes.kv.size_bytes(request.prompt_tokens)
            begin_s = max(now_s, target.pull_free_s)
            target.pull_free_s = begin_s + self._model.sizes.pull_s(size)
            running.kv_pull_s = target.pull_free_s - now_s
            self._push(_KV_PULLED, target.pull_free_s, running, (source, kv_bytes))

    def _kv_pulled(
        self, running: Running, source: tuple[Instance | None, float], now_s: float
    ) -> None:
        before, kv_bytes = source
        target = running.home
        assert target is not None
        target.num_pulling -= 1
        target.num_requests += 1
        target.add_decode(running, now_s)
        self._wake(target, now_s)
        if before is not None:
            before.release(kv_bytes)
            self._wake(before, now_s)

    # ---- the encode stage's queue

    def _perform(self, effects: Iterable[Effect], now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, StartPass):
                instance = self._by_name[effect.instance]
                instance.given.append(effect)
                self._wake(instance, now_s)
            elif isinstance(effect, EndRequest):
                self._encoded_apart(effect, now_s)

    def _encoded_apart(self, end: EndRequest, now_s: float) -> None:
        running = self._encoding.pop(end.key)
        there = {one.identifier for one in end.media if one.reason.is_there}
        pulled = [one for one in running.unencoded if one.identifier in there]
        running.unencoded = tuple(one for one in running.unencoded if one.identifier not in there)
        target = min(self._prefilling, key=_prefill_load)
        running.encoded_s = now_s
        if not pulled:
            self._to_prefill(running, target, now_s)
            return
        tokens = sum(one.num_tokens for one in pulled)
        begin_s = max(now_s, target.pull_free_s)
        sizes = self._model.sizes
        target.pull_free_s = begin_s + sizes.pull_s(sizes.embedding_bytes(tokens))
        running.embedding_pull_s = target.pull_free_s - now_s
        self._push(_EMBEDDINGS_PULLED, target.pull_free_s, running, target)

    # ---- passes

    def _wake(self, instance: Instance, now_s: float) -> None:
        if instance.batch is not None:
            end_s = instance.cut(now_s)
            if end_s is not None:
                self._push(_PASS_END, end_s, instance, instance.version)
            return
        batch = next_batch(instance, self._model.batching, self._budgets[instance.group])
        if batch is not None:
            end_s = instance.begin(batch, now_s)
            self._push(_PASS_END, end_s, instance, instance.version)

    def _pass_ended(self, instance: Instance, now_s: float) -> None:
        batch, done = instance.end(now_s)
        for running in done:
            self._done(running, instance, now_s)
        self._media_encoded(instance, batch, now_s)
        for running, (_, end) in batch.chunks:
            if end == running.request.prompt_tokens:
                self._prefilled(running, instance, now_s)
        for given in batch.passes:
            assert self._queue is not None
            for medium in given.media:
                self._known.add(medium.identifier)
                encoded = EncodeReason.ENCODED
                effects = self._queue.ended(given.number, medium.identifier, encoded, now_s)
                self._perform(effects, now_s)
        if instance.incoming:
            self._pull(instance, now_s)
        self._wake(instance, now_s)

    def _media_encoded(self, instance: Instance, batch: Batch, now_s: float) -> None:
        for running, media in batch.media:
            encoded = {one.identifier for one in media}
            self._known |= encoded
            running.unencoded = tuple(
                one for one in running.unencoded if one.identifier not in encoded
            )
            running.encoded_s = now_s
            if instance.to_encode and instance.to_encode[0] is running and not running.unencoded:
                instance.to_encode.popleft()
                instance.to_prefill.append(running)

    def _prefilled(self, running: Running, instance: Instance, now_s: float) -> None:
        instance.to_prefill.popleft()
        instance.num_requests -= 1
        instance.num_admitted -= instance.decodes
        running.first_token_s = now_s
        if running.request.output_tokens == 1:
            instance.release(running.kv_bytes)
            self._judge.done(running, now_s)
        elif instance.decodes:
            instance.num_requests += 1
            instance.add_decode(running, now_s)
        else:
            self._to_decode(running, now_s)

    def _done(self, running: Running, instance: Instance, now_s: float) -> None:
        instance.num_requests -= 1
        self._judge.done(running, now_s)


def _prefill_load(instance: Instance) -> tuple[float, int]:
    """The instance with the lowest one prefills next: by its requests where it decodes, too, since
    each of them takes part in every pass, and else by the tokens before it.
    """
    if instance.decodes:
        return instance.num_requests, instance.pending_tokens
    return instance.pending_tokens, instance.num_requests


def _decode_load(instance: Instance) -> tuple[int, float]:
    """The instance with the lowest one decodes next."""
    waiting = len(instance.incoming)
    return waiting + instance.num_decoding + instance.num_pulling, instance.kv_used_bytes
