"""The queue of the encode stage: media of all requests wait here for instances that encode.

States of a medium: waiting -> running -> gone, with running -> waiting where its instance failed
and there is another one. Rules:

- A medium is known by its model and identifier. While it waits or runs, further requests for it
  wait for the same pass.
- Media start in the order in which they came. A *pass* is what an instance gets at a time: media of
  any requests, as many as it encodes within its objective (`EncodeConfig.pass_s`), by the times
  that were learnt of it. While nothing is known of its times, one medium.
- An instance that only encodes goes before one that decodes too. Among those alike, the one with
  the fewest media tokens is next; among equals one on a node where the prefill may run; among those
  the one that was used longest ago.
- Media are refused (`rule.predict`) where the instance that prefills is predicted to encode them
  sooner. Those that another request has running are waited for all the same.
- A request never waits longer than `timeout_s`.
- What nobody waits for any more is dropped, or stopped if it runs.

Whatever is not encoded here is encoded by the engine that prefills; no answer depends on it.

Pure: events in, effects out; time is an argument. It may not know engines, nodes' memory or tasks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from msgspec import structs

from scheduler.encoding.held import EncodePass, Entry, HeldInstance, HeldRequest, MediumKey
from scheduler.encoding.line import EncodeLine
from scheduler.encoding.rule import predict
from scheduler.encoding.times import EncodeTimes
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
from scheduler.reports import EncodeInstanceReport, EncodeReport

_MEAN_GAIN: Final = 0.05


class EncodeQueue:
    """The one mutator of a cluster's encode stage. Its events return the effects to perform."""

    def __init__(self, config: EncodeConfig | None = None) -> None:
        self._config = config or EncodeConfig()
        self.times = EncodeTimes()
        self._requests: dict[str, HeldRequest] = {}
        self._media: dict[MediumKey, Entry] = {}
        self._waiting: OrderedDict[MediumKey, Entry] = OrderedDict()
        self._instances: dict[str, HeldInstance] = {}
        self._passes: dict[int, EncodePass] = {}
        self._num_passes = 0
        self._mean_tokens = 0.0
        """Of a medium."""

    @property
    def num_waiting(self) -> int:
        """Media that wait."""
        return len(self._waiting)

    @property
    def next_tick_s(self) -> float | None:
        """When `tick` has something to do; None: nothing is under way."""
        # The timeout is the same for all, so the first one to come is the first one to end.
        first = next(iter(self._requests.values()), None)
        return None if first is None else first.since_s + self._config.timeout_s

    def running_on(self, instance: str) -> int:
        """Media on one instance."""
        found = self._instances.get(instance)
        return 0 if found is None else found.num_media

    def passes_on(self, instance: str) -> tuple[int, ...]:
        """The passes on one instance."""
        found = self._instances.get(instance)
        return () if found is None else tuple(found.passes)

    def submit(self, request: EncodeRequest, now_s: float) -> list[Effect]:
        """Take the media of a request: start them, queue them or leave them to the prefill."""
        if request.key in self._requests:
            raise ValueError(f"request {request.key} is already here")
        held = self._requests[request.key] = HeldRequest(request, now_s)
        fresh: dict[MediumKey, Medium] = {}
        for medium in request.media:
            gain = _MEAN_GAIN if self._mean_tokens else 1.0
            self._mean_tokens += gain * (medium.num_tokens - self._mean_tokens)
            key = request.model, medium.identifier
            entry = self._media.get(key)
            if entry is not None and entry.number is not None:
                entry.requests[request.key] = None
            else:
                fresh.setdefault(key, medium)
        # Media that wait already are counted in the report.
        num_tokens = sum(one.num_tokens for key, one in fresh.items() if key not in self._media)
        refused = self._refused(request, len(fresh), num_tokens, now_s)
        for key, medium in fresh.items():
            if refused is None:
                self._enqueue(key, medium, request)
            else:
                held.ends[medium.identifier] = MediumEnd(medium.identifier, refused)
        return [*self._ended_requests((request.key,), now_s), *self._advance(now_s)]

    def ended(
        self, number: int, identifier: str, reason: EncodeReason, now_s: float
    ) -> list[Effect]:
        """A medium of a pass is over: ENCODED, REFUSED because of what it is, or FAILED, which
        another instance may do better. A pass or a medium that is not known is ignored.
        """
        run = self._passes.get(number)
        entry = None if run is None else run.running.pop(identifier, None)
        if run is None or entry is None:
            return []
        run.is_whole &= reason is EncodeReason.ENCODED
        node = self._instances[run.instance].view.node
        if not run.running:
            self._end_pass(run, now_s)
        effects: list[Effect] = []
        if self._media.get(entry.key) is entry:
            entry.tried = (*entry.tried, run.instance)
            if reason is not EncodeReason.FAILED or not self._try_again(entry):
                effects = self._decide(entry, reason, node, now_s)
        return [*effects, *self._advance(now_s)]

    def withdraw(self, key: str, now_s: float) -> list[Effect]:
        """Nobody asks any more for a request. It gets no `EndRequest`."""
        held = self._requests.pop(key, None)
        return [] if held is None else [*self._let_go(held), *self._advance(now_s)]

    def instance_changed(self, view: EncodeInstance, now_s: float) -> list[Effect]:
        """Take in a new instance, or a change of its health, kind or limits."""
        known = self._instances.get(view.name)
        if known is None:
            self._instances[view.name] = HeldInstance(view)
        else:
            known.view = view
        return [*self._end_stranded(now_s), *self._advance(now_s)]

    def instance_left(self, name: str, now_s: float) -> list[Effect]:
        """Forget an instance. What runs there has failed."""
        known = self._instances.get(name)
        if known is None:
            return []
        known.view = EncodeInstance(name, known.view.model, known.view.node, healthy=False)
        running = [(run.number, one) for run in known.passes.values() for one in run.running]
        effects = [
            effect
            for number, one in running
            for effect in self.ended(number, one, EncodeReason.FAILED, now_s)
        ]
        del self._instances[name]
        self.times.forget(name)
        return [*effects, *self._end_stranded(now_s), *self._advance(now_s)]

    def tick(self, now_s: float) -> list[Effect]:
        """End the requests that waited too long."""
        effects: list[Effect] = []
        while (due_s := self.next_tick_s) is not None and due_s <= now_s:
            effects += self._cut(next(iter(self._requests)), EncodeReason.TIMEOUT, now_s)
        return [*effects, *self._advance(now_s)]

    def close(self, now_s: float) -> list[Effect]:
        """End all requests."""
        keys = list(self._requests)
        return [effect for key in keys for effect in self._cut(key, EncodeReason.CLOSED, now_s)]

    def report(self, now_s: float) -> EncodeReport:
        """The stage as decisions and people see it."""
        return EncodeReport(
            waiting_media=len(self._waiting),
            waiting_tokens=sum(one.medium.num_tokens for one in self._waiting.values()),
            instances=tuple(self._reported(one, now_s) for one in self._instances.values()),
        )

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls; for tests."""
        running = {id(one): one for run in self._passes.values() for one in run.running.values()}
        for key, entry in self._media.items():
            assert entry.key == key
            assert entry.requests, "nobody waits for it"
            assert (key in self._waiting) == (entry.number is None)
            assert entry.number is None or id(entry) in running
            assert all(key in self._requests[name].keys for name in entry.requests)
        assert self._waiting.keys() <= self._media.keys()
        for name, held in self._requests.items():
            assert held.keys, "it waits for nothing"
            assert all(name in self._media[key].requests for key in held.keys)
        for instance in self._instances.values():
            assert all(self._passes[number] is run for number, run in instance.passes.items())
        assert len(self._passes) == sum(len(one.passes) for one in self._instances.values())
        assert all(run.running for run in self._passes.values())

    def _refused(
        self, request: EncodeRequest, num_media: int, num_tokens: int, now_s: float
    ) -> EncodeReason | None:
        """Why new media of a request are left to the prefill; None: they are not."""
        if not num_media:
            return None
        if len(self._waiting) + num_media > self._config.max_waiting:
            return EncodeReason.QUEUE_FULL
        report = self.report(now_s)
        if not request.may_delay_decodes:
            only = tuple(one for one in report.instances if not one.decodes)
            report = structs.replace(report, instances=only)
        return predict(
            report,
            request.model,
            num_tokens,
            wait_s=request.wait_s,
            own_cost=self._config.own_cost,
        ).reason

    def _enqueue(self, key: MediumKey, medium: Medium, request: EncodeRequest) -> None:
        entry = self._media.get(key)
        if entry is None:
            entry = self._media[key] = self._waiting[key] = Entry(key, medium)
        entry.requests[request.key] = None
        entry.nodes |= request.nodes
        entry.may_delay_decodes |= request.may_delay_decodes

    def _try_again(self, entry: Entry) -> bool:
        """Let a medium whose instance failed wait for another one, if one is left."""
        if len(entry.tried) >= self._config.max_attempts or not self._may_run(entry):
            return False
        entry.number = None
        self._waiting[entry.key] = entry
        self._waiting.move_to_end(entry.key, last=False)
        return True

    def _may_run(self, entry: Entry) -> bool:
        return any(one.takes(entry) for one in self._instances.values())

    def _end_pass(self, run: EncodePass, now_s: float) -> None:
        instance = self._instances[run.instance]
        del self._passes[run.number], instance.passes[run.number]
        # What ran before it had the instance for itself.
        seconds = now_s - max(run.started_s, instance.ended_s)
        instance.ended_s = now_s
        if run.is_whole:
            kind = instance.view.kind
            self.times.observe(run.instance, kind, run.num_tokens, seconds, now_s)

    def _decide(self, entry: Entry, reason: EncodeReason, node: str, now_s: float) -> list[Effect]:
        """Tell all who wait for a medium what became of it."""
        del self._media[entry.key]
        self._waiting.pop(entry.key, None)
        name = entry.medium.identifier
        for key in entry.requests:
            self._requests[key].ends[name] = MediumEnd(
                name, reason, node if reason.is_there else ""
            )
            reason = EncodeReason.SHARED if reason is EncodeReason.ENCODED else reason
        return self._ended_requests(entry.requests, now_s)

    def _ended_requests(self, keys: Iterable[str], now_s: float) -> list[Effect]:
        """The effects for those of these requests that wait for nothing any more."""
        over = [key for key in keys if not self._requests[key].keys]
        return [_end(self._requests.pop(key), now_s) for key in over]

    def _cut(self, key: str, reason: EncodeReason, now_s: float) -> list[Effect]:
        """End a request: what it still waits for is left to the prefill."""
        held = self._requests.pop(key)
        effects = self._let_go(held)
        for _, name in held.keys:
            held.ends[name] = MediumEnd(name, reason)
        return [*effects, _end(held, now_s)]

    def _let_go(self, held: HeldRequest) -> list[Effect]:
        """Take a request off the media that it waits for; those without any other are dropped."""
        effects: list[Effect] = []
        for key in held.keys:
            entry = self._media[key]
            del entry.requests[held.request.key]
            if entry.requests:
                continue
            del self._media[key]
            self._waiting.pop(key, None)
            if entry.number is not None:
                effects.append(StopMedium(entry.number, entry.medium.identifier))
        return effects

    def _end_stranded(self, now_s: float) -> list[Effect]:
        """End the media that no instance can take any more."""
        stranded = [one for one in self._waiting.values() if not self._may_run(one)]
        return [
            effect
            for one in stranded
            for effect in self._decide(one, EncodeReason.NO_INSTANCE, "", now_s)
        ]

    def _advance(self, now_s: float) -> list[Effect]:
        """Start passes while an instance has room for one and media wait for it."""
        effects: list[Effect] = []
        while starts := self._next_passes(now_s):
            effects += starts
        return effects

    def _next_passes(self, now_s: float) -> list[StartPass]:
        """Start one more pass on each instance with room for one, as far as media wait for it."""
        free = [one for one in self._instances.values() if one.is_free]
        given: dict[str, list[Entry]] = {one.view.name: [] for one in free}
        room = {one.view.name: self._budget(one.view, now_s) for one in free}
        for entry in list(self._waiting.values()) if free else ():
            num_tokens = entry.medium.num_tokens
            with_room = [
                one
                for one in free
                if one.takes(entry) and _may_join(entry, given[one.view.name], room[one.view.name])
            ]
            if not with_room:
                continue
            best = min(with_room, key=lambda one: _rank(one, given[one.view.name], entry))
            given[best.view.name].append(entry)
            room[best.view.name] -= num_tokens
        return [
            self._start(one, given[one.view.name], now_s) for one in free if given[one.view.name]
        ]

    def _start(self, instance: HeldInstance, entries: list[Entry], now_s: float) -> StartPass:
        self._num_passes += 1
        number, name = self._num_passes, instance.view.name
        instance.last_used = number
        for entry in entries:
            entry.number = number
            del self._waiting[entry.key]
        media = tuple(one.medium for one in entries)
        run = EncodePass(
            number,
            name,
            now_s,
            sum(one.num_tokens for one in media),
            {one.medium.identifier: one for one in entries},
        )
        self._passes[number] = instance.passes[number] = run
        return StartPass(number, name, entries[0].key[0], media)

    def _line(self, view: EncodeInstance, now_s: float) -> EncodeLine | None:
        return self.times.line(view.name, view.kind, now_s)

    def _budget(self, view: EncodeInstance, now_s: float) -> int:
        """The media tokens of a pass; 0: one medium."""
        line = self._line(view, now_s)
        return 0 if line is None else line.tokens_within(self._config.pass_s(decodes=view.decodes))

    def _reported(self, instance: HeldInstance, now_s: float) -> EncodeInstanceReport:
        # At least a medium is given.
        budget = max(self._budget(instance.view, now_s), round(self._mean_tokens))
        return instance.report(self._line(instance.view, now_s), budget, now_s)


def _may_join(entry: Entry, given: list[Entry], room_tokens: int) -> bool:
    """Whether a medium may be in a pass with those that were given before it."""
    if not given:
        return True
    return entry.medium.num_tokens <= room_tokens and entry.key[0] == given[0].key[0]


def _rank(instance: HeldInstance, given: list[Entry], entry: Entry) -> tuple[bool, int, bool, int]:
    """The instance with the lowest one gets the medium."""
    view = instance.view
    num_tokens = instance.num_tokens + sum(one.medium.num_tokens for one in given)
    return view.decodes, num_tokens, view.node not in entry.nodes, instance.last_used


def _end(held: HeldRequest, now_s: float) -> EndRequest:
    media = tuple(held.ends[one.identifier] for one in held.request.media)
    return EndRequest(held.request.key, media, max(0.0, now_s - held.since_s))
