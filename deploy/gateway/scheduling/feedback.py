"""Tells the live scheduler how requests go. It is called at each step of a request's life.

It turns records and results into the events of `scheduler.live.feedback`. It does not know HTTP and
takes no decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from deploy.gateway.scheduling.scheduler import RegionScheduler, in_region
from deploy.gateway.serving.records import RequestRecord
from deploy.gateway.serving.ttft_parts import TtftParts
from kvmanager.landing import ReservedLanding
from local_pd.messages import DecodeSlot
from prfaas.engines.service_time import LEAST_SERVICE_S
from prfaas.jobs import PrefillResult
from scheduler.live.feedback import (
    AnswerDecoded,
    DirectAnswered,
    DirectBegun,
    DirectOver,
    DirectTook,
    FirstToken,
    InstanceGiven,
    InstanceOver,
    LegAnswered,
    LegBegun,
    LegOver,
    Prefilled,
    PromptCounted,
    RequestArrived,
    TtftMeasured,
    waited_s,
)
from scheduler.live.learning.prompt_length import PromptContent
from scheduler.routing.decision import HAND_OFF, RequestShape
from scheduler.routing.media import MediaShape
from scheduler.routing.prediction import Prediction


class Usage(msgspec.Struct, frozen=True):
    """The numbers of tokens in an engine's answer; 0 where it gives none."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _AnyUsage(msgspec.Struct):
    """Usage in the words of any API; Anthropic's input leaves out the tokens read from a cache."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int | None = 0

    def lengths(self) -> Usage:
        """The tokens of the prompt and of the answer."""
        inputs = self.input_tokens + (self.cache_read_input_tokens or 0)
        return Usage(
            max(0, self.prompt_tokens or inputs),
            max(0, self.completion_tokens or self.output_tokens),
        )


class _Whole(msgspec.Struct):
    usage: _AnyUsage | None = None


class _Answer(_Whole):
    response: _Whole | None = None
    """The answer in the last event of OpenAI's responses."""


_answers = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True, slots=True)
class Feedback:
    """Feedback from one gateway."""

    scheduler: RegionScheduler

    def likely(self, model: str, shape: RequestShape, content: PromptContent) -> RequestShape:
        """`shape` with the length that others like it had, unless its prompt was counted.

        What a request is charged, what is predicted for it and what is measured of it use this one
        length.
        """
        if shape.is_exact:
            return shape
        lengths = self.scheduler.knowledge(model).lengths
        num_tokens = lengths.num_tokens(content, shape.bound_tokens)
        media = None
        if content.media and content.has_media:
            media = _at_the_end(num_tokens, lengths.media_tokens(content))
        return msgspec.structs.replace(shape, num_prompt_tokens=num_tokens, media=media)

    def counted(self, model: str, content: PromptContent, num_tokens: int) -> None:
        """An engine rendered a prompt, or its answer said how long the prompt was."""
        self.scheduler.tell(PromptCounted(model, content, num_tokens))

    def arrived(self, model: str, shape: RequestShape, *, home: str = "") -> None:
        """A request was let in, whose home is this PD cluster."""
        num_tokens = shape.num_prompt_tokens
        cached_tokens = min(shape.local_cached_tokens, num_tokens)
        media_tokens = _encoded_tokens(shape, home, cached_tokens) or 0
        event = RequestArrived(model, num_tokens, cached_tokens, home, media_tokens)
        self.scheduler.tell(event)

    def leg_begun(
        self,
        model: str,
        slot: DecodeSlot,
        shape: RequestShape,
        place: str,
        predicted: Prediction,
        *,
        priority: int = 0,
        pd: str = "",
    ) -> None:
        """A prefill is on its way to `place`, to be decoded in `pd`. It also teaches how large a
        landing is.
        """
        landing = slot.landing
        # What a prefill cluster without a cache has nobody knows; the PD cluster's is another one.
        cached_tokens = (
            shape.local_cached_tokens
            if place == HAND_OFF
            else shape.prefill_cached_tokens.get(place, 0)
        )
        event = LegBegun(
            transfer_id=landing.transfer_id,
            model=model,
            place=place,
            num_tokens=landing.num_tokens,
            uncached_tokens=max(0, landing.num_tokens - cached_tokens),
            landing_cached_tokens=landing.cached_tokens,
            nbytes=landing.nbytes,
            lands_s=predicted.landed_s,
            priority=priority,
            instance=in_region(pd, slot.instance),
            pd=pd,
        )
        self.scheduler.tell(event)

    def given(self, pd: str, instance: str, request: int = 0) -> bool:
        """A decode instance has one more request: a slot is held there, or a prompt was sent.
        `request` is the number under which admission let it in.

        Returns whether the instance was full, so that the request waits inside it.
        """
        return self.scheduler.ask(InstanceGiven(in_region(pd, instance), request))

    def over(self, pd: str, instance: str) -> None:
        """A request that was `given` is answered, given up or moved elsewhere."""
        self.scheduler.tell(InstanceOver(in_region(pd, instance)))

    def answer_over(self, transfer_id: str) -> None:
        """The request that a leg was for is answered or given up."""
        self.scheduler.tell(LegAnswered(transfer_id))

    def leg_over(self, landing: ReservedLanding) -> None:
        """The leg landed or failed, or its result is not wanted any more."""
        self.scheduler.tell(LegOver(landing.transfer_id))

    def prefilled(
        self,
        model: str,
        place: str,
        num_tokens: int,
        result: PrefillResult,
        *,
        pd: str = "",
        shape: RequestShape | None = None,
    ) -> None:
        """A prefill leg ended with all of its KVCache landed in `pd`. `shape` is the request's."""
        # A prefill this short ended in one pass with another, so its own time is unknown.
        is_shared = result.service_s <= LEAST_SERVICE_S < result.prefill_s
        cluster = pd if place == HAND_OFF else place
        event = Prefilled(
            model=model,
            place=place,
            instance=in_region(cluster, result.instance),
            num_tokens=num_tokens,
            cached_tokens=min(result.cached_tokens, num_tokens),
            tail_s=result.transfer_tail_s,
            seconds=None if is_shared else result.service_s or result.prefill_s,
            pd=pd,
            encoded_tokens=_left(
                _encoded_tokens(shape, cluster, result.cached_tokens), result.left_media_tokens
            ),
        )
        self.scheduler.tell(event)

    def direct_begun(self, pd: str, instance: str, shape: RequestShape) -> int:
        """A prompt was given to one engine of `pd`. Returns the key for `direct_over`."""
        event = DirectBegun(
            in_region(pd, instance), shape.num_prompt_tokens, shape.local_uncached_tokens
        )
        return self.scheduler.tell(event)

    def direct_over(self, key: int) -> None:
        """The engine has begun to answer, or never will."""
        self.scheduler.tell(DirectOver(key))

    def direct_answered(self, pd: str, instance: str, begun_s: float) -> float | None:
        """The first token from one engine came.

        Returns the time that its prompt alone took, None if that is unknown: it waited, and then
        ended in one pass with another.
        """
        return self.scheduler.tell(DirectAnswered(in_region(pd, instance), begun_s))

    def direct_took(
        self,
        model: str,
        shape: RequestShape,
        seconds: float | None,
        *,
        pd: str = "",
        left_tokens: int | None = None,
    ) -> None:
        """The time from `direct_answered` for a prompt that was looked up, at an engine of `pd`
        that was not full.

        At a full engine the time would contain the wait for a slot. `left_tokens` are those of the
        media that no other instance had encoded; None: all of them.
        """
        if seconds is not None:
            cached_tokens = shape.local_cached_tokens
            encoded_tokens = _left(_encoded_tokens(shape, pd, cached_tokens), left_tokens)
            self.scheduler.tell(DirectTook(model, shape, seconds, pd, encoded_tokens))

    def first_token(
        self,
        model: str,
        place: str,
        predicted: Prediction,
        ttft_s: float,
        *,
        was_full: bool = False,
        pd: str = "",
        has_media: bool = False,
        parts: TtftParts | None = None,
        prompt: tuple[int, int] = (0, 0),
    ) -> None:
        """The first byte of a stream came, by the route that was predicted.

        `was_full` says whether the decode instance, which is in `pd`, was full when it got the
        request. `parts` are those of the TTFT that were measured. `prompt` has its tokens and those
        that were cached at the place.
        """
        late_s = 0.0 if parts is None else _waited_s(predicted, parts)
        event = FirstToken(
            model, place, predicted, ttft_s, was_full, pd, has_media, late_s, *prompt
        )
        self.scheduler.ask(event)

    def measured(self, model: str, record: RequestRecord) -> None:
        """The parts of the TTFT of a request whose KVCache came from elsewhere are known."""
        if record.ttft_s is None or not record.is_stream or record.leg is None:
            return
        parts = {name: round(seconds, 6) for name, seconds in record.parts.known().items()}
        num_tokens = record.num_prompt_tokens or 0
        event = TtftMeasured(
            model, record.target, num_tokens, record.ttft_s, parts, pd=record.cluster
        )
        self.scheduler.tell(event)

    def ended(self, model: str, record: RequestRecord, num_answers: int = 1) -> None:
        """A request ended well, with so many answers, which an engine decoded side by side."""
        if record.outcome != "ok" or record.total_s is None or record.output_tokens <= 0:
            return
        # The first token of an answer in one piece is not seen, so its prediction stands for it.
        # A prompt too short to be counted takes little time beside its answer.
        first_s = record.ttft_s if record.is_stream else record.predicted_ttft_s
        seconds = max(0.0, record.total_s - (first_s or 0.0))
        # A step makes a token of each answer.
        num_tokens = max(1, round(record.output_tokens / max(1, num_answers)))
        self.scheduler.tell(
            AnswerDecoded(
                model,
                num_tokens,
                seconds,
                in_region(record.cluster, record.decode_instance),
            )
        )


def _waited_s(predicted: Prediction, parts: TtftParts) -> float:
    """The answer of `waited_s` for the parts that were measured."""
    queue_s = parts.engine_queue_s
    if queue_s is not None:
        queue_s += parts.queue_s or 0.0
    return waited_s(predicted, queue_s, parts.transfer_tail_s, parts.load_wait_s)


def _at_the_end(num_tokens: int, media_tokens: Sequence[int]) -> MediaShape:
    """Media of these lengths in a prompt that was not counted. Nobody knows where they lie; at its
    end, the cached part of the prompt has the fewest of them.
    """
    spans, end = [], num_tokens
    for length in reversed(media_tokens):
        spans.append((max(0, end - length), length))
        end = max(0, end - length)
    return MediaShape(tuple(reversed(spans)))


def _encoded_tokens(shape: RequestShape | None, cluster: str, cached_tokens: int) -> int | None:
    """The media tokens that an instance of a cluster has to encode for a prompt of which so much is
    cached; None for text.
    """
    if shape is None or shape.media is None:
        return None
    return shape.media.to_encode(cluster, cached_tokens)


def _left(media_tokens: int | None, left_tokens: int | None) -> int | None:
    """The part of these media tokens that an instance encoded itself."""
    if media_tokens is None or left_tokens is None:
        return media_tokens
    return min(media_tokens, left_tokens)


def usage_of(body: bytes) -> Usage:
    """The lengths that an answer, or the last event of a stream, reports."""
    try:
        answer = _answers.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return Usage()
    usage = answer.usage
    if usage is None and answer.response is not None:
        usage = answer.response.usage
    return Usage() if usage is None else usage.lengths()
