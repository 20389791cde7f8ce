"""What each step of a request's life teaches the live scheduler.

Each event turns what happened into observations for `ModelKnowledge` and `Ledger`. This file does
not know HTTP and takes no decision. It only says whether an instance is full.
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
"""First tokens of one engine that come this close together are from one forward pass, seconds."""


SMALL_WAIT_S: Final = 0.1


def waited_s(
    predicted: Prediction, queue_s: float | None, tail_s: float | None, slot_s: float | None
) -> float:
    """How much longer than predicted the waits were that end with the load of the moment, as far
    as they were measured.

    What is below `SMALL_WAIT_S`, or a decode step of the batch that the request joins, is there at
    any load: it belongs to the place.
    """
    waits = (
        (predicted.queue_s, queue_s, SMALL_WAIT_S),
        (predicted.tail_s, tail_s, SMALL_WAIT_S),
        (predicted.slot_s, slot_s, SMALL_WAIT_S + predicted.step_s),
    )
    late_s = 0.0
    for expected_s, measured_s, small_s in waits:
        if measured_s is not None:
            error_s = measured_s - expected_s
            late_s += error_s - max(-small_s, min(error_s, small_s))
    return late_s


class Observation(Event[None], frozen=True):
    """Something that teaches the same to every gateway of the region, whichever made it."""

    def learn(self, live: LiveScheduler, now_s: float) -> None:
        """Take in what was observed at `now_s`."""
        raise NotImplementedError

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Learn, and nothing else."""
        self.learn(live, now_s)


class PromptCounted(Observation, frozen=True):
    """An engine rendered a prompt, or its answer said how long the prompt was."""

    model: str
    content: PromptContent
    num_tokens: int

    def learn(self, live: LiveScheduler, now_s: float) -> None:
        """Estimates of later prompts use it."""
        live.knowledge(self.model).lengths.counted(self.content, self.num_tokens)


class Calibrated(Observation, frozen=True):
    """An idle instance computed prompts that no cache knew: tokens and seconds of each.

    `place` is a route's target in `pd`. `key` names what the times are of: it changes with the
    instance's weights and KVCache layout.
    """

    model: str
    place: str
    key: str
    prefills: tuple[tuple[int, float], ...]
    pd: str = ""

    def learn(self, live: LiveScheduler, now_s: float) -> None:
        """The prefill times of the place begin from these."""
        place = live.place(self.place, self.pd)
        live.knowledge(self.model).calibrated(place, self.key, self.prefills)


class RequestArrived(Observation, frozen=True):
    """A request whose home is `pd` was let in, and no engine refused it. Its home would have to
    encode media of `media_tokens` tokens to prefill it.
    """

    model: str
    num_tokens: int
    cached_tokens: int
    pd: str = ""
    media_tokens: int = 0

    def learn(self, live: LiveScheduler, now_s: float) -> None:
        """It counts as demand, which plans rest on."""
        known = live.knowledge(self.model)
        known.traffic.arrived(self.num_tokens, self.cached_tokens, now_s, self.media_tokens)
        names = [pd.name for pd in live.settings.pd_clusters]
        home = self.pd or names[0]
        # Another gateway may have a PD cluster that this one has not been told of yet.
        if len(names) > 1 and home in names:
            known.traffic_of(home).arrived(
                self.num_tokens, self.cached_tokens, now_s, self.media_tokens
            )


class LegBegun(Observation, frozen=True):
    """A prefill is on its way to the target `place`. Its KVCache should have landed in `lands_s`.

    The landing takes `nbytes` at the node of `instance` in the PD cluster `pd`. It is for
    `num_tokens`, of which `landing_cached_tokens` are there already. The place has to compute
    `uncached_tokens`.
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
    pd: str = ""

    def learn(self, live: LiveScheduler, now_s: float) -> None:
        """The size of the landing is learnt, and that the place was tried."""
        known = live.knowledge(self.model)
        known.reserved(self.num_tokens, self.landing_cached_tokens, self.nbytes)
        known.tried(live.place(self.place, self.pd), now_s)

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """It is work ahead of others until it is over."""
        self.learn(live, now_s)
        leg = PrefillLeg(
            place=live.place(self.place, self.pd),
            num_tokens=self.num_tokens,
            uncached_tokens=self.uncached_tokens,
            begun_s=now_s,
            lands_at_s=now_s + self.lands_s,
            kv_bytes=self.nbytes,
            model=self.model,
            priority=self.priority,
            instance=self.instance,
            pd=live.pd(self.pd).name,
        )
        live.ledger.leg_begun(self.transfer_id, leg)


class LegOver(Event[None], frozen=True):
    """A prefill leg landed, failed, or is not wanted any more."""

    transfer_id: str

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Neither its job nor its transfer is under way any more."""
        live.ledger.leg_over(self.transfer_id, now_s)


class LegAnswered(Event[None], frozen=True):
    """The request that a leg was for is answered or given up."""

    transfer_id: str

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """No engine holds its KVCache any more."""
        live.ledger.answer_over(self.transfer_id, now_s)


class Prefilled(Observation, frozen=True):
    """A prefill leg ended with all of its KVCache landed, `tail_s` after the prefill.

    `seconds` is the time that the prefill alone took. It is None where that is unknown because the
    prefill ended in one pass with another. `pd` is the PD cluster that decodes. `encoded_tokens`
    are the tokens of media that the instance encoded itself during it, None for a prompt of text.
    """

    model: str
    place: str
    instance: str
    num_tokens: int
    cached_tokens: int
    tail_s: float
    seconds: float | None
    pd: str = ""
    encoded_tokens: int | None = None

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """From the end of the prefill on, the next job has the instance for itself."""
        place = live.place(self.place, self.pd)
        live.ledger.prefill_ended(place, self.instance, now_s - self.tail_s)
        self.learn(live, now_s)

    def learn(self, live: LiveScheduler, now_s: float) -> None:
        """How long it took is learnt, where that is known."""
        place = live.place(self.place, self.pd)
        if self.seconds is not None:
            live.knowledge(self.model).prefilled(
                place,
                self.num_tokens,
                self.cached_tokens,
                self.seconds,
                now_s,
                encoded_tokens=self.encoded_tokens,
            )


class InstanceGiven(Event[bool], frozen=True):
    """A decode instance has one more request: a slot is held there, or a prompt was sent. `request`
    is its number in `RequestTaken`.
    """

    instance: str
    request: int = 0

    def apply(self, live: LiveScheduler, now_s: float) -> bool:
        """Whether the instance was full, so that the request waits inside it."""
        # Asked before the request itself is counted.
        is_full = live.is_full(self.instance)
        live.ledger.drop(self.request)
        live.ledger.begun(self.instance, now_s)
        return is_full


class InstanceOver(Event[None], frozen=True):
    """What an instance was given is answered, given up or moved elsewhere."""

    instance: str

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """The instance has one request less than earlier reports say."""
        live.ledger.ended(self.instance, now_s)


class DirectBegun(Event[int], frozen=True):
    """A prompt was given to one engine that computes it itself."""

    instance: str
    num_tokens: int
    uncached_tokens: int

    def apply(self, live: LiveScheduler, now_s: float) -> int:
        """The key for `DirectOver`. Until then the prompt is work ahead of others there."""
        prompt = DirectPrompt(self.instance, self.num_tokens, self.uncached_tokens, now_s)
        return live.ledger.direct_begun(prompt)


class DirectOver(Event[None], frozen=True):
    """The engine has begun to answer, or never will."""

    key: int

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Its prompt is not work ahead of others any more."""
        live.ledger.direct_over(self.key)


class DirectAnswered(Event[float | None], frozen=True):
    """The first token came of a prompt that one engine got at `begun_s`."""

    instance: str
    begun_s: float

    def apply(self, live: LiveScheduler, now_s: float) -> float | None:
        """The time that its prompt alone took, or None.

        It is unknown when the prompt waited and then ended in one pass with another one.
        """
        # Read before `prefill_ended` makes this prompt the last one that ended here.
        seconds = live.ledger.alone_s(ONE_ENGINE, self.instance, self.begun_s, now_s)
        live.ledger.prefill_ended(ONE_ENGINE, self.instance, now_s)
        live.ledger.direct_computed(self.instance, self.begun_s)
        is_alone = seconds >= SAME_PASS_S or seconds >= now_s - self.begun_s
        return seconds if is_alone else None


class DirectTook(Observation, frozen=True):
    """The answer of `DirectAnswered` for a prompt that was looked up, at an engine of `pd` that was
    not full.

    At a full engine the time would contain the wait for a slot. `encoded_tokens` are the tokens of
    media that the engine encoded itself, None for a prompt of text.
    """

    model: str
    shape: RequestShape
    seconds: float
    pd: str = ""
    encoded_tokens: int | None = None

    def learn(self, live: LiveScheduler, now_s: float) -> None:
        """The time teaches only where the length is known."""
        known, num_tokens = live.knowledge(self.model), self.shape.num_prompt_tokens
        if _is_length_known(live, known, self.shape):
            cached_tokens = min(self.shape.local_cached_tokens, num_tokens)
            place = live.place(ONE_ENGINE, self.pd)
            known.prefilled(
                place,
                num_tokens,
                cached_tokens,
                self.seconds,
                now_s,
                encoded_tokens=self.encoded_tokens,
            )


class FirstToken(Observation, frozen=True):
    """The first byte of a stream came, by the route that was predicted, whose target is `place`.

    `was_full` says whether the decode instance was full when it got the request. It is in `pd`.
    `has_media` says whether the prompt has images or other media. Its waits (queue, transfer tail
    and decode slot) took `waited_s` longer than predicted, as far as they were measured. The prompt
    has `num_tokens`, of which the place was to have `cached_tokens`; 0: nobody counted them.
    """

    model: str
    place: str
    predicted: Prediction
    ttft_s: float
    was_full: bool = False
    pd: str = ""
    has_media: bool = False
    waited_s: float = 0.0
    num_tokens: int = 0
    cached_tokens: int = 0

    def learn(self, live: LiveScheduler, now_s: float) -> None:
        """The prediction's error, and under normal conditions how the place serves, are learnt.

        The delay by a full instance or by a link that is not clear does not belong to the place:
        their state predicts it, and it ends with that state. Neither does a wait that was longer or
        shorter than predicted: learnt as the place's own, it would keep prompts away that could
        show that it is over.
        """
        live.knowledge(self.model).answered(
            live.place(self.place, self.pd),
            self.predicted,
            self.ttft_s,
            now_s,
            teaches_service=live.is_link_clear(self.place, self.pd) and not self.was_full,
            has_media=self.has_media,
            waited_s=self.waited_s,
            prompt=(self.num_tokens, self.cached_tokens),
        )


class TtftMeasured(Event[None], frozen=True):
    """The parts of the TTFT of a stream whose KVCache came from `place`, in seconds, by the names
    of `deploy.gateway.serving.ttft_parts`. `pd` has decoded it.
    """

    model: str
    place: str
    num_tokens: int
    ttft_s: float
    parts: dict[str, float]
    pd: str = ""

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Nothing is learnt: it is for those who read a recording."""


class AnswerDecoded(Observation, frozen=True):
    """An answer of `num_tokens` ended well, `seconds` after its first token, at `instance`."""

    model: str
    num_tokens: int
    seconds: float
    instance: str = ""

    def learn(self, live: LiveScheduler, now_s: float) -> None:
        """How long answers are and how long a step takes is learnt."""
        batch = live.batch_of(self.instance)
        live.knowledge(self.model).decoded(self.num_tokens, self.seconds, now_s, batch)


class CacheMoveBegun(Event[int], frozen=True):
    """A cached prefix is on its way between two clusters."""

    source: str
    target: str

    def apply(self, live: LiveScheduler, now_s: float) -> int:
        """The key for `CacheMoveOver`."""
        return live.moves.begun((self.source, self.target), now_s)


class CacheMoveOver(Event[None], frozen=True):
    """A cache move arrived, or `failed`. It sent `nbytes` in `seconds`; 0 if nothing was
    measured.
    """

    key: int
    failed: bool
    nbytes: int = 0
    seconds: float = 0.0
    rtt_s: float = 0.0

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """The rate between these clusters is learnt. After a failure, none is moved there for a
        while.
        """
        sent = self.nbytes, self.seconds, self.rtt_s
        live.moves.over(self.key, sent, now_s, failed=self.failed)


def _is_length_known(live: LiveScheduler, known: ModelKnowledge, shape: RequestShape) -> bool:
    """Whether the length of a prompt was counted, or is as well estimated as it ever will be.

    Without prefill clusters no prompt is counted, so estimates must do. Beside prefill clusters
    only short prompts are not counted, and they would say little of others.
    """
    is_text = one_engine_reason(shape) is None
    is_guess_good = known.lengths.is_known and is_text and not live.settings.prefill_clusters
    return shape.is_exact or is_guess_good


ObservationEvent: TypeAlias = (
    PromptCounted
    | Calibrated
    | RequestArrived
    | LegBegun
    | Prefilled
    | DirectTook
    | FirstToken
    | AnswerDecoded
)
FeedbackEvent: TypeAlias = (
    ObservationEvent
    | LegOver
    | LegAnswered
    | TtftMeasured
    | InstanceGiven
    | InstanceOver
    | DirectBegun
    | DirectOver
    | DirectAnswered
    | CacheMoveBegun
    | CacheMoveOver
)
