"""What each step of a request's life teaches the live scheduler.

Each event turns what happened into observations of `ModelKnowledge` and `Ledger`. Does not know
HTTP and takes no decision, but says whether an instance is full.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from scheduler.live.core import Event, LiveScheduler
from scheduler.live.learning.knowledge import ModelKnowledge
from scheduler.live.learning.prompt_length import PromptContent
from scheduler.live.ledger import DirectPrompt, PrefillLeg
from scheduler.routing.decision import ONE_ENGINE, RequestShape, one_engine_reason
from scheduler.routing.prediction import Prediction

SAME_PASS_S: Final = 5e-3
"""First tokens of one engine that are this close came from one forward pass."""


class PromptCounted(Event[None], frozen=True):
    """An engine rendered a prompt, or its answer said how long the prompt was."""

    model: str
    content: PromptContent
    num_tokens: int

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Later prompts of such a size are taken to be as long."""
        live.knowledge(self.model).lengths.counted(self.content, self.num_tokens)


class RequestArrived(Event[None], frozen=True):
    """A request was let in, and no engine refused it."""

    model: str
    num_tokens: int
    cached_tokens: int

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """It is demand, which plans rest on."""
        traffic = live.knowledge(self.model).traffic
        traffic.arrived(self.num_tokens, self.cached_tokens, now_s)


class LegBegun(Event[None], frozen=True):
    """A prefill is on its way to `place`; its KVCache should have landed in `lands_s`.

    The landing is for `num_tokens`, of which `landing_cached_tokens` are there, and takes
    `nbytes` at the node of `instance`. The place has `uncached_tokens` to compute.
    """

    transfer_id: str
    model: str
    place: str
    num_tokens: int
    uncached_tokens: int
    landing_cached_tokens: int
    nbytes: int
    lands_s: float
    priority: int = 0
    instance: str = ""

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """It is work ahead of others until it is over; how much a landing takes is learnt."""
        known = live.knowledge(self.model)
        known.reserved(self.num_tokens, self.landing_cached_tokens, self.nbytes)
        leg = PrefillLeg(
            place=self.place,
            num_tokens=self.num_tokens,
            uncached_tokens=self.uncached_tokens,
            begun_s=now_s,
            lands_at_s=now_s + self.lands_s,
            kv_bytes=self.nbytes,
            model=self.model,
            priority=self.priority,
            instance=self.instance,
        )
        live.ledger.leg_begun(self.transfer_id, leg)


class LegOver(Event[None], frozen=True):
    """A prefill leg landed, failed, or is not wanted any more."""

    transfer_id: str

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Nothing of it waits or runs."""
        live.ledger.leg_over(self.transfer_id, now_s)


class LegAnswered(Event[None], frozen=True):
    """The request that a leg was for is answered or given up."""

    transfer_id: str

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """No engine holds its KVCache."""
        live.ledger.answer_over(self.transfer_id, now_s)


class Prefilled(Event[None], frozen=True):
    """A prefill leg ended with all of its KVCache landed, `tail_s` after the prefill.

    `seconds` is what the prefill took by itself; None: nobody can say, as it ended in one pass
    with another.
    """

    model: str
    place: str
    instance: str
    num_tokens: int
    cached_tokens: int
    tail_s: float
    seconds: float | None

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """The next job of the instance has it for itself since then."""
        live.ledger.prefill_ended(self.place, self.instance, now_s - self.tail_s)
        if self.seconds is not None:
            live.knowledge(self.model).prefilled(
                self.place, self.num_tokens, self.cached_tokens, self.seconds, now_s
            )


class InstanceGiven(Event[bool], frozen=True):
    """A decode instance has a request more: a slot is held there, or a prompt was sent."""

    instance: str

    def apply(self, live: LiveScheduler, now_s: float) -> bool:
        """Whether the instance was full, so that the request waits inside of it."""
        is_full = live.is_full(self.instance)
        live.ledger.begun(self.instance, now_s)
        return is_full


class InstanceOver(Event[None], frozen=True):
    """What an instance was given is answered, given up or elsewhere."""

    instance: str

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """It has one request less than a report of before says."""
        live.ledger.ended(self.instance, now_s)


class DirectBegun(Event[int], frozen=True):
    """A prompt was given to one engine that computes it itself."""

    instance: str
    num_tokens: int
    uncached_tokens: int

    def apply(self, live: LiveScheduler, now_s: float) -> int:
        """It is work ahead of others there; the key for `DirectOver`."""
        prompt = DirectPrompt(self.instance, self.num_tokens, self.uncached_tokens, now_s)
        return live.ledger.direct_begun(prompt)


class DirectOver(Event[None], frozen=True):
    """The engine answers, or will not."""

    key: int

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Its prompt is no work ahead of others any more."""
        live.ledger.direct_over(self.key)


class DirectAnswered(Event[float | None], frozen=True):
    """The first token of a prompt that was given to one engine at `begun_s` is there."""

    instance: str
    begun_s: float

    def apply(self, live: LiveScheduler, now_s: float) -> float | None:
        """What its prompt took by itself; None where nobody can say: it waited, and ended in one
        pass with another.
        """
        seconds = live.ledger.alone_s(ONE_ENGINE, self.instance, self.begun_s, now_s)
        live.ledger.prefill_ended(ONE_ENGINE, self.instance, now_s)
        live.ledger.direct_computed(self.instance, self.begun_s)
        is_alone = seconds >= SAME_PASS_S or seconds >= now_s - self.begun_s
        return seconds if is_alone else None


class DirectTook(Event[None], frozen=True):
    """What `DirectAnswered` said of a prompt that was looked up, at an engine that was not full:
    there it would have been the wait for a slot.
    """

    model: str
    shape: RequestShape
    seconds: float

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """The time teaches only where the length is known."""
        known, num_tokens = live.knowledge(self.model), self.shape.num_prompt_tokens
        if _is_length_known(live, known, self.shape):
            cached_tokens = min(self.shape.local_cached_tokens, num_tokens)
            known.prefilled(ONE_ENGINE, num_tokens, cached_tokens, self.seconds, now_s)


class FirstToken(Event[None], frozen=True):
    """A stream's first byte is there, by the route that was predicted. `was_full`: the decode
    instance was when it was given the request.
    """

    model: str
    place: str
    predicted: Prediction
    ttft_s: float
    was_full: bool = False

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """What a full instance or a link that is not clear cost is no overhead of the place: their
        state predicts it, and it goes with that. Nor is what a queue cost: later arrivals may
        overtake in it, which no prediction knows.
        """
        waited = self.was_full or self.predicted.queue_s > 0
        live.knowledge(self.model).answered(
            self.place,
            self.predicted,
            self.ttft_s,
            now_s,
            teaches_overhead=live.is_link_clear(self.place) and not waited,
        )


class AnswerDecoded(Event[None], frozen=True):
    """An answer of so many tokens ended well, so long after its first one."""

    model: str
    num_tokens: int
    seconds: float

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """How long answers are and how long a step takes is learnt."""
        live.knowledge(self.model).decoded(self.num_tokens, self.seconds, now_s)


class CacheMoveBegun(Event[int], frozen=True):
    """A cached prefix is on its way between two clusters."""

    source: str
    target: str

    def apply(self, live: LiveScheduler, now_s: float) -> int:
        """The key for `CacheMoveOver`."""
        return live.moves.begun((self.source, self.target), now_s)


class CacheMoveOver(Event[None], frozen=True):
    """It has arrived, or not: `failed`. What was sent took so long; 0: nothing was measured."""

    key: int
    failed: bool
    nbytes: int = 0
    seconds: float = 0.0
    rtt_s: float = 0.0

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """How fast moves are between these clusters is learnt; after a failure none is made for a
        while.
        """
        sent = self.nbytes, self.seconds, self.rtt_s
        live.moves.over(self.key, sent, now_s, failed=self.failed)


def _is_length_known(live: LiveScheduler, known: ModelKnowledge, shape: RequestShape) -> bool:
    """Whether a prompt is counted, or estimated where none ever will be: for want of prefill
    clusters. Beside these only short prompts are not counted, and would say little of others.
    """
    is_text = one_engine_reason(shape) is None
    is_guess_good = known.lengths.is_known and is_text and not live.settings.prefill_clusters
    return shape.is_exact or is_guess_good


FeedbackEvent: TypeAlias = (
    PromptCounted
    | RequestArrived
    | LegBegun
    | LegOver
    | LegAnswered
    | Prefilled
    | InstanceGiven
    | InstanceOver
    | DirectBegun
    | DirectOver
    | DirectAnswered
    | DirectTook
    | FirstToken
    | AnswerDecoded
    | CacheMoveBegun
    | CacheMoveOver
)
