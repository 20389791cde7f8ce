"""What an instance computes in its next pass: HydraInfer's Algorithm 1, and what engines do.

Pure but for the requests and queues that it moves on. Time is no argument: none of the rules needs
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from scheduler.encoding.values import EncodeConfig, Medium
from scheduler.stages.instance import Batch, Instance, Running
from scheduler.stages.profile import MOST_TOKENS, Chunk, StageProfile, StageSizes, StageSlo

LEAST_TOKENS: Final = 256
"""The smallest token budget. With less, passes would be nearly all overhead."""


class Batching(StrEnum):
    """How an instance that prefills chooses its passes."""

    STAGE_LEVEL = "stage_level"
    """HydraInfer's Algorithm 1: decodes, then chunks of prompts within the token budget, or else
    media within the image budget, which are encoded while the decodes are computed."""
    ENGINE = "engine"
    """vLLM's engine V1: decodes, then chunks within the token budget, first come, first served. The
    pass that begins a prompt encodes all of its media first."""
    PREFILL_FIRST = "prefill_first"
    """Encode and prefill together, first come, first served, before any decode: vLLM's engine V0,
    whose decodes stand still meanwhile."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """The most work of one pass, beside its decodes."""

    tokens: int
    media_tokens: int


def budgets_of(
    profile: StageProfile,
    sizes: StageSizes,
    slo: StageSlo,
    *,
    batching: Batching,
    decodes: bool,
    config: EncodeConfig,
) -> Budgets:
    """The budgets of an instance: what one pass computes within the TPOT objective where requests
    decode, and else within the share of the TTFT objective that the encode stage has, too.

    HydraInfer finds them once and counts a token that is decoded like one that is prefilled, though
    it takes longer. For an engine they are what its operator would choose: a pass beside the step
    of a full KVCache, of which no more than half of the objective counts, is within it.
    """
    pass_s, step_s = config.pass_s(decodes=False), 0.0
    if decodes:
        pass_s = slo.tpot_s
    if decodes and batching is not Batching.STAGE_LEVEL:
        context = sizes.kv_room_tokens if profile.context_token_s else 0.0
        step_s = min(profile.step_s(profile.slots, context), slo.tpot_s / 2)
    media_tokens = profile.encode.tokens_within(pass_s - step_s)
    return Budgets(max(LEAST_TOKENS, profile.tokens_within(pass_s, step_s)), media_tokens)


def next_batch(instance: Instance, batching: Batching, budgets: Budgets) -> Batch | None:
    """The next pass of an instance; None if it has nothing to do."""
    return _RULES[batching](instance, budgets)


def _stage_level(instance: Instance, budgets: Budgets) -> Batch | None:
    decodes = instance.num_decoding > 0
    room = budgets.tokens - instance.num_decoding
    chunks = _chunks(instance, room, one_at_least=not decodes)
    if chunks:
        return Batch(decodes, chunks)
    # New media are encoded only while no prompt is prefilled.
    if instance.given:
        return Batch(decodes, passes=(instance.given.popleft(),), in_parallel=True)
    media = _media(instance, budgets.media_tokens)
    if media:
        return Batch(decodes, media=media, in_parallel=True)
    return _decodes_alone(instance)


def _engine(instance: Instance, budgets: Budgets) -> Batch | None:
    decodes = instance.num_decoding > 0
    # The encode stage's queue sends its media as requests, which are served like any others.
    if instance.given:
        return Batch(decodes, passes=(instance.given.popleft(),))
    chunks = _chunks(instance, budgets.tokens - instance.num_decoding, one_at_least=not decodes)
    if chunks:
        return Batch(decodes, chunks, _with_chunks(chunks))
    return _decodes_alone(instance)


def _prefill_first(instance: Instance, budgets: Budgets) -> Batch | None:
    if instance.given:
        return Batch(decodes=False, passes=(instance.given.popleft(),))
    # Whole prompts: this engine does not cut a prompt with media in chunks.
    chunks = _chunks(instance, MOST_TOKENS, one_at_least=True, whole=True)
    if chunks:
        return Batch(decodes=False, chunks=chunks, media=_with_chunks(chunks))
    return _decodes_alone(instance)


_RULES: dict[Batching, Callable[[Instance, Budgets], Batch | None]] = {
    Batching.STAGE_LEVEL: _stage_level,
    Batching.ENGINE: _engine,
    Batching.PREFILL_FIRST: _prefill_first,
}


def _chunks(
    instance: Instance, room: int, *, one_at_least: bool, whole: bool = False
) -> tuple[tuple[Running, Chunk], ...]:
    """Chunks of waiting prompts, in their order, of `room` tokens together.

    A prompt whose KVCache has no room holds up those behind it, as in vLLM.
    """
    found: list[tuple[Running, Chunk]] = []
    if one_at_least:
        room = max(room, 1)
    for running in instance.to_prefill:
        request, start = running.request, running.prefilled
        left = request.prompt_tokens - start
        if room <= 0 or (whole and found and left > room):
            break
        if running.home is not instance:
            # An instance that decodes it as well needs room for its output, too.
            more = request.output_tokens if instance.decodes else 0
            has_slot = not instance.decodes or instance.has_slot()
            if not has_slot or not instance.reserve(running, request.prompt_tokens + more):
                break
            instance.num_admitted += instance.decodes
        end = start + (left if whole else min(left, room))
        found.append((running, (start, end)))
        room -= end - start
    return tuple(found)


def _with_chunks(
    chunks: tuple[tuple[Running, Chunk], ...],
) -> tuple[tuple[Running, tuple[Medium, ...]], ...]:
    """The media of the prompts that these chunks begin."""
    return tuple((running, running.unencoded) for running, _ in chunks if running.unencoded)


def _media(instance: Instance, room: int) -> tuple[tuple[Running, tuple[Medium, ...]], ...]:
    """Media of waiting requests within the image budget, in their order; at least one."""
    found: list[tuple[Running, tuple[Medium, ...]]] = []
    for running in instance.to_encode:
        taken: list[Medium] = []
        for medium in running.unencoded:
            if (found or taken) and medium.num_tokens > room:
                break
            taken.append(medium)
            room -= medium.num_tokens
        if taken:
            found.append((running, tuple(taken)))
        if len(taken) < len(running.unencoded):
            break
    return tuple(found)


def _decodes_alone(instance: Instance) -> Batch | None:
    if not instance.num_decoding:
        return None
    return Batch(decodes=True, num_steps=max(1, instance.steps_alone()))
