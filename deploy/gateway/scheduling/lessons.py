"""What requests teach the scheduler as they go: called at each step of a request's life.

Turns records and results into observations of `ModelKnowledge`, `Ledger` and the moves of cached
prefixes. Does not know HTTP and takes no decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import msgspec

from deploy.gateway.serving.records import RequestRecord
from kvmanager.landing import Landing
from prfaas.engines.service_time import LEAST_SERVICE_S
from prfaas.jobs import PrefillResult
from scheduler.live.knowledge import ModelKnowledge
from scheduler.live.ledger import DirectPrompt, PrefillLeg
from scheduler.live.prompt_length import PromptContent
from scheduler.live.router import RegionScheduler
from scheduler.routing.decision import ONE_ENGINE, RequestShape, one_engine_reason
from scheduler.routing.prediction import Prediction

SAME_PASS_S: Final = 5e-3
"""First tokens of one engine that are this close came from one forward pass."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens as an engine's answer counts them; 0: it does not say."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: Usage | None = None


_answers = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True, slots=True)
class Lessons:
    """Of one gateway."""

    scheduler: RegionScheduler

    def likely(self, model: str, shape: RequestShape, content: PromptContent) -> RequestShape:
        """`shape` with the length that others like it had, unless it was counted. What is charged,
        predicted and measured of a request all rest on this one length.
        """
        if shape.is_exact:
            return shape
        lengths = self.scheduler.knowledge(model).lengths
        return replace(shape, num_prompt_tokens=lengths.num_tokens(content, shape.bound_tokens))

    def counted(self, model: str, content: PromptContent, num_tokens: int) -> None:
        """An engine rendered a prompt, or its answer said how long the prompt was."""
        self.scheduler.knowledge(model).lengths.counted(content, num_tokens)

    def measured(self, model: str, predicted: Prediction | None) -> Prediction:
        """`predicted`, or that all comes at once where it is only guessed or there is none: nobody
        is refused for a guess, and then the present load counts.
        """
        if predicted is None or not self.scheduler.knowledge(model).is_measured:
            return Prediction()
        return predicted

    def arrived(self, model: str, shape: RequestShape) -> None:
        """A request was let in."""
        known, num_tokens = self.scheduler.knowledge(model), shape.num_prompt_tokens
        cached_tokens = min(shape.local_cached_tokens, num_tokens)
        known.traffic.arrived(num_tokens, cached_tokens, self.scheduler.clock())

    def leg_begun(
        self,
        model: str,
        landing: Landing,
        shape: RequestShape,
        place: str,
        predicted: Prediction,
        *,
        priority: int = 0,
    ) -> None:
        """A prefill is on its way to `place`; how much a landing takes is learnt by that, too."""
        known, now_s = self.scheduler.knowledge(model), self.scheduler.clock()
        known.reserved(landing.num_tokens, landing.cached_tokens, landing.nbytes)
        cached_tokens = shape.prefill_cached_tokens.get(place, shape.local_cached_tokens)
        leg = PrefillLeg(
            place=place,
            num_tokens=landing.num_tokens,
            uncached_tokens=max(0, landing.num_tokens - cached_tokens),
            begun_s=now_s,
            lands_at_s=now_s + predicted.landed_s,
            kv_bytes=landing.nbytes,
            model=model,
            priority=priority,
        )
        self.scheduler.ledger.leg_begun(landing.transfer_id, leg)

    def given(self, instance: str) -> bool:
        """A decode instance has a request more: a slot is held there, or a prompt was sent. Whether
        the instance was full, so that the request waits inside of it.
        """
        is_full = self.scheduler.is_full(instance)
        self.scheduler.ledger.begun(instance, self.scheduler.clock())
        return is_full

    def over(self, instance: str) -> None:
        """What was `given` is answered, given up or elsewhere."""
        self.scheduler.ledger.ended(instance, self.scheduler.clock())

    def answer_over(self, transfer_id: str) -> None:
        """The request that a leg was for is answered or given up."""
        self.scheduler.ledger.answer_over(transfer_id, self.scheduler.clock())

    def leg_over(self, landing: Landing) -> None:
        """It landed, failed, or is not wanted any more."""
        self.scheduler.ledger.leg_over(landing.transfer_id, self.scheduler.clock())

    def prefilled(self, model: str, place: str, num_tokens: int, result: PrefillResult) -> None:
        """A prefill leg ended with all of its KVCache landed."""
        ended_s = self.scheduler.clock() - result.transfer_tail_s
        self.scheduler.ledger.prefill_ended(place, result.instance, ended_s)
        if result.service_s <= LEAST_SERVICE_S < result.prefill_s:
            # It ended in one pass with another: nobody can say what it took by itself.
            return
        cached_tokens = min(result.cached_tokens, num_tokens)
        seconds = result.service_s or result.prefill_s
        known, now_s = self.scheduler.knowledge(model), self.scheduler.clock()
        known.prefilled(place, num_tokens, cached_tokens, seconds, now_s)

    def direct_begun(self, instance: str, shape: RequestShape) -> int:
        """A prompt was given to one engine; the key for `direct_over`."""
        prompt = DirectPrompt(
            instance, shape.num_prompt_tokens, shape.local_uncached_tokens, self.scheduler.clock()
        )
        return self.scheduler.ledger.direct_begun(prompt)

    def direct_over(self, key: int) -> None:
        """Its engine answers, or will not."""
        self.scheduler.ledger.direct_over(key)

    def direct_answered(self, instance: str, begun_s: float) -> float | None:
        """One engine's first token is there. What its prompt took by itself; None where nobody can
        say: it waited, and ended in one pass with another.
        """
        now_s, ledger = self.scheduler.clock(), self.scheduler.ledger
        seconds = ledger.alone_s(ONE_ENGINE, instance, begun_s, now_s)
        ledger.prefill_ended(ONE_ENGINE, instance, now_s)
        ledger.direct_computed(instance, begun_s)
        return seconds if seconds >= SAME_PASS_S or seconds >= now_s - begun_s else None

    def direct_took(self, model: str, shape: RequestShape, seconds: float | None) -> None:
        """What `direct_answered` said of a prompt that was looked up, at an engine that was not
        full: there it would have been the wait for a slot.
        """
        known, now_s = self.scheduler.knowledge(model), self.scheduler.clock()
        if seconds is None or not self._is_length_known(known, shape):
            return
        num_tokens = shape.num_prompt_tokens
        cached_tokens = min(shape.local_cached_tokens, num_tokens)
        known.prefilled(ONE_ENGINE, num_tokens, cached_tokens, seconds, now_s)

    def _is_length_known(self, known: ModelKnowledge, shape: RequestShape) -> bool:
        """Whether a prompt is counted, or estimated where none ever will be: for want of prefill
        clusters. Beside these only short prompts are not counted, and would say little of others.
        """
        is_counted_anywhere = bool(self.scheduler.thresholds.base_tokens())
        is_text = one_engine_reason(shape) is None
        return shape.is_exact or (known.lengths.is_known and is_text and not is_counted_anywhere)

    def first_token(
        self,
        model: str,
        place: str,
        predicted: Prediction,
        ttft_s: float,
        *,
        was_full: bool = False,
    ) -> None:
        """A stream's first byte is there, by the route that was predicted. `was_full`: the decode
        instance was when it was given the request.

        What a full instance or a link that is not clear cost is no overhead of the place: their
        state predicts it, and it goes with that.
        """
        scheduler, now_s = self.scheduler, self.scheduler.clock()
        scheduler.knowledge(model).answered(
            place,
            predicted,
            ttft_s,
            now_s,
            teaches_overhead=scheduler.is_link_clear(place) and not was_full,
        )

    def ended(self, model: str, record: RequestRecord) -> None:
        """An answer ended well."""
        if record.outcome != "ok" or record.total_s is None or record.output_tokens <= 0:
            return
        # Not seen in one piece. A prompt too short to be counted takes little beside its answer.
        first_s = record.ttft_s if record.is_stream else record.predicted_ttft_s
        self.scheduler.knowledge(model).decoded(
            record.output_tokens,
            max(0.0, record.total_s - (first_s or 0.0)),
            self.scheduler.clock(),
        )


def usage_of(body: bytes) -> Usage:
    """What an answer, or the last event of a stream, says of its lengths."""
    try:
        usage = _answers.decode(body).usage
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return Usage()
    if usage is None:
        return Usage()
    return Usage(max(0, usage.prompt_tokens), max(0, usage.completion_tokens))
