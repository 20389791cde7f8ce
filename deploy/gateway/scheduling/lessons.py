"""What requests teach the scheduler as they go: called at each step of a request's life.

Turns records and results into observations of `ModelKnowledge`, `Ledger` and the moves of cached
prefixes. Does not know HTTP and takes no decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import msgspec

from deploy.gateway.records import RequestRecord
from deploy.gateway.scheduling.ledger import DirectPrompt, PrefillLeg
from deploy.gateway.scheduling.prompt_length import PromptContent
from deploy.gateway.scheduling.router import RegionScheduler
from kvmanager.engines.jobs import Landing, PrefillResult
from kvmanager.engines.service_time import LEAST_SERVICE_S
from scheduler.prediction import Prediction
from scheduler.routing import ONE_ENGINE, RequestShape

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

    def given(self, instance: str) -> None:
        """A decode instance has a request more: a slot is held there, or a prompt was sent."""
        self.scheduler.ledger.begun(instance, self.scheduler.clock())

    def over(self, instance: str) -> None:
        """What was `given` is answered, given up or elsewhere."""
        self.scheduler.ledger.ended(instance, self.scheduler.clock())

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
        """What `direct_answered` said of a prompt that was looked up."""
        if shape.is_exact and seconds is not None:
            known, now_s = self.scheduler.knowledge(model), self.scheduler.clock()
            num_tokens = shape.num_prompt_tokens
            cached_tokens = min(shape.local_cached_tokens, num_tokens)
            known.prefilled(ONE_ENGINE, num_tokens, cached_tokens, seconds, now_s)

    def first_token(self, model: str, place: str, predicted: Prediction, ttft_s: float) -> None:
        """A stream's first byte is there, by the route that was predicted."""
        scheduler, now_s = self.scheduler, self.scheduler.clock()
        is_link_clear = scheduler.is_link_clear(place)
        scheduler.knowledge(model).answered(
            place, predicted, ttft_s, now_s, is_link_clear=is_link_clear
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
