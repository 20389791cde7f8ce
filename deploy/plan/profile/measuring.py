"""Measures an engine: single prefills of random tokens, then streams that decode together.

It measures the engine as a service sees it: whole requests through its HTTP API, one kind at a time
on an otherwise idle engine. Beside the client's time of a prefill, the engine's own metrics give
theirs if they have it. No prompt shares a prefix with another (random tokens and a `cache_salt` of
its own), so prefix caching cannot help; this is checked, too. A request of another client before,
during or after a sample is an error and never part of a result.

It does not know files, terminals or the date. `stats` makes numbers of the samples.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from deploy.plan.profile.engine import (
    Counters,
    EngineBusyError,
    ProfiledEngine,
    ProfilingError,
    ServedModel,
    Streamed,
)
from deploy.plan.profile.noise_images import noise_uri
from deploy.plan.profile.stats import (
    MIN_STEPS,
    DecodeSample,
    DecodeSetup,
    EncodeSample,
    Measured,
    PrefillSample,
    decode_step,
)

DEFAULT_BATCH_SIZES: Final = (1, 4, 16)
IMAGE_COUNTS: Final = (1, 2, 4)
"""Images of a chat. Several counts tell the fixed part of a pass."""

_PREFILL_S: Final = "vllm:request_prefill_time_seconds_sum"
_FINISHED: Final = "vllm:request_prefill_time_seconds_count"
_SUCCESSES: Final = "vllm:request_success_total"
_COMPUTED_TOKENS: Final = "vllm:request_prefill_kv_computed_tokens_sum"
_STEP_S: Final = "vllm:inter_token_latency_seconds_sum"
_STEPS: Final = "vllm:inter_token_latency_seconds_count"
_PREEMPTIONS: Final = "vllm:num_preemptions_total"

_SHORTEST_TOKENS: Final = 256
_MOST_LENGTHS: Final = 10
_SETTLE_S: Final = 5.0
_POLL_S: Final = 0.02
_WARM_UP_TOKENS: Final = 8
_STEP_WORK_TOKENS: Final = 200
"""A decode step takes about as long as a prefill of this many tokens, for the progress bar only."""
_IMAGE_WORK_TOKENS: Final = 500
_FEWEST_TOKEN_IDS: Final = 16
# Every vocabulary has these ids.
_SMALL_IDS: Final = tuple(range(256))


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What to measure: prompt lengths, samples of each, and how many streams decode at once."""

    lengths: tuple[int, ...]
    repeats: int
    batch_sizes: tuple[int, ...]
    setup: DecodeSetup
    image_side: int | None = None
    """The side of the images whose encoding is measured, pixels; None: it is not measured."""

    @property
    def total_work(self) -> int:
        """All work with its warm-ups, in prompt tokens."""
        prefill = sum(self.lengths) * (1 + self.repeats)
        images = 0 if self.image_side is None else sum(map(self.encode_work, IMAGE_COUNTS))
        return prefill + sum(map(self.decode_work, self.batch_sizes)) + images

    def encode_work(self, num_images: int) -> int:
        """About the work of chats with so many images, in prompt tokens."""
        return 2 * num_images * _IMAGE_WORK_TOKENS * (1 + self.repeats)

    def decode_work(self, batch_size: int) -> int:
        """The work of a warm-up and a run of `batch_size` streams, in prompt tokens."""
        steps = _WARM_UP_TOKENS + self.setup.output_tokens
        return 2 * batch_size * self.setup.context_tokens + steps * _STEP_WORK_TOKENS


@dataclass(frozen=True, slots=True)
class Wishes:
    """The values that the user asked for. If one is empty or None, the engine's limits decide."""

    lengths: tuple[int, ...] = ()
    repeats: int = 5
    batch_sizes: tuple[int, ...] = ()
    output_tokens: int = 64
    context_tokens: int | None = None
    image_side: int | None = None


@dataclass(frozen=True, slots=True)
class ProfilingProgress:
    """`work` tokens of `ProfilePlan.total_work` are done; `doing` is the present step."""

    work: int
    doing: str
    detail: str = ""


def make_plan(wishes: Wishes, max_model_len: int, kv_tokens: int | None) -> ProfilePlan:
    """The plan for `wishes`; where there is none, what fits an engine with these limits, in tokens.

    `kv_tokens` is the capacity of its KVCache. Raises ProfilingError for impossible wishes.
    """
    lengths = tuple(sorted(set(wishes.lengths))) or default_lengths(max_model_len)
    # A prompt must leave room for the one token of its answer.
    if not lengths or lengths[-1] > max_model_len - 1:
        raise ProfilingError(
            f"the engine takes {max_model_len} tokens, prompt and output together: "
            f"no length can be above {max_model_len - 1}"
        )
    room = max_model_len - wishes.output_tokens
    context = wishes.context_tokens or min(1024, max(room, 1))
    if not 0 < context <= room:
        raise ProfilingError(
            f"{context} tokens of context and {wishes.output_tokens} of output are more than "
            f"the {max_model_len} tokens the engine takes: choose a smaller --decode-context "
            "or --output-tokens"
        )
    setup = DecodeSetup(context, wishes.output_tokens)
    batch_sizes = tuple(sorted(set(wishes.batch_sizes)))
    if not batch_sizes:
        fitting = kv_tokens // (context + wishes.output_tokens) if kv_tokens else None
        batch_sizes = tuple(n for n in DEFAULT_BATCH_SIZES if fitting is None or n <= fitting)
    return ProfilePlan(lengths, wishes.repeats, batch_sizes or (1,), setup, wishes.image_side)


def default_lengths(max_model_len: int) -> tuple[int, ...]:
    """Powers of two from 256 and the longest prompt. Of more than 10, the shortest are left out."""
    longest = max_model_len - 2
    powers = []
    tokens = _SHORTEST_TOKENS
    while tokens <= longest:
        powers.append(tokens)
        tokens *= 2
    # Two lengths that are nearly equal would only measure their noise.
    if longest > 0 and (not powers or longest >= 1.25 * powers[-1]):
        powers.append(longest)
    return tuple(powers[-_MOST_LENGTHS:])


async def measure(
    engine: ProfiledEngine,
    model: ServedModel,
    plan: ProfilePlan,
    measured: Measured,
    on_progress: Callable[[ProfilingProgress], None],
    rng: random.Random,
) -> None:
    """Carry out `plan`. Every sample joins `measured` when it is whole.

    Raises ProfilingError, and EngineBusyError when the engine has other work than ours. It can be
    cancelled at any time; the engine then drops the running request.
    """
    run = _Run(engine, model.name, plan, measured, on_progress, rng)
    await run.prepare()
    for tokens in plan.lengths:
        await run.prefills(tokens)
    for batch_size in plan.batch_sizes:
        if not await run.decodes(batch_size):
            # A larger batch would not decode together either.
            break
    if plan.image_side is not None:
        await run.images(plan.image_side)
    run.say("done")


class _Run:
    def __init__(
        self,
        engine: ProfiledEngine,
        model: str,
        plan: ProfilePlan,
        measured: Measured,
        on_progress: Callable[[ProfilingProgress], None],
        rng: random.Random,
    ) -> None:
        self._engine = engine
        self._model = model
        self._plan = plan
        self._measured = measured
        self._on_progress = on_progress
        self._rng = rng
        self._token_ids: Sequence[int] = _SMALL_IDS
        self._work = 0

    async def prepare(self) -> None:
        """Choose the tokens of prompts, and check that no other client uses the engine."""
        ordinary = await self._engine.ordinary_tokens(self._model)
        if len(ordinary) >= _FEWEST_TOKEN_IDS:
            self._token_ids = ordinary
            text = f"prompts are drawn from {len(ordinary)} of the tokenizer's ordinary tokens"
        else:
            text = "/tokenize gives no ordinary tokens, so prompts are drawn from the ids below 256"
        self._measured.notes.append(text)
        counters = await self._idle()
        if counters.num_ranks > 1:
            self._measured.notes.append(
                f"the engine has {counters.num_ranks} data-parallel ranks; "
                "batch sizes are over all of them together"
            )

    async def prefills(self, tokens: int) -> None:
        """Run a warm-up and the samples of one length."""
        for i in range(1 + self._plan.repeats):
            self.say(f"prefill of {tokens} tokens", f"{i}/{self._plan.repeats}" if i else "warm-up")
            measured = await self._prefill(tokens)
            if i:
                self._measured.prefill.append(measured)
            self._work += tokens

    async def decodes(self, batch_size: int) -> bool:
        """Run a warm-up and the run of one batch size. False if the streams would not decode
        together.
        """
        streams = f"{batch_size} stream{'s' if batch_size > 1 else ''}"
        self.say(f"decode of {streams}", "warm-up")
        await self._decode(batch_size, _WARM_UP_TOKENS)
        self.say(f"decode of {streams}")
        sample, num_preempted = await self._decode(batch_size, self._plan.setup.output_tokens)
        self._work += self._plan.decode_work(batch_size)
        why = ""
        if num_preempted:
            why = f"the engine preempted {num_preempted:g} of them, its KVCache is too small"
        elif decode_step(sample) is None:
            why = (
                f"fewer than {MIN_STEPS} steps had them all: the engine runs fewer at a time "
                "(--max-num-seqs, KVCache), or --output-tokens is too small"
            )
        if why:
            self._measured.notes.append(
                f"a batch of {batch_size} was not measured, nor any larger: {why}"
            )
            return False
        self._measured.decode.append(sample)
        return True

    async def images(self, side: int) -> None:
        """Run the warm-ups and samples of chats with images, as many images as the engine takes."""
        without = await self._chat(side, 0)
        for num_images in IMAGE_COUNTS:
            words = f"chat with {num_images} image{'s' if num_images > 1 else ''}"
            for i in range(1 + self._plan.repeats):
                self.say(words, f"{i}/{self._plan.repeats}" if i else "warm-up")
                try:
                    chat = await self._chat(side, num_images)
                except EngineBusyError:
                    raise
                except ProfilingError as error:
                    if num_images == IMAGE_COUNTS[0] or i:
                        raise ProfilingError(f"{error} (--images: {words})") from error
                    self._measured.notes.append(f"no {words} was measured: {error}")
                    return
                text = await self._prefill(chat.tokens)
                if i:
                    image_tokens = chat.tokens - without.tokens
                    found = EncodeSample(num_images, image_tokens, chat, text)
                    self._measured.encode.append(found)
            self._work += self._plan.encode_work(num_images)

    async def _chat(self, side: int, num_images: int) -> PrefillSample:
        before = await self._idle()
        uris = [noise_uri(side, self._rng) for _ in range(num_images)]
        answer = await self._engine.chat(
            self._model, "What is this?", uris, cache_salt=self._salt()
        )
        after = await self._settled(before, 1)
        tokens = answer.num_prompt_tokens
        self._check_computed(before, after, tokens)
        engine_s = after.since(before, _PREFILL_S)
        return PrefillSample(tokens, answer.ended_s - answer.started_s, engine_s)

    def say(self, doing: str, detail: str = "") -> None:
        """Report the progress of the work."""
        self._on_progress(ProfilingProgress(self._work, doing, detail))

    async def _prefill(self, tokens: int) -> PrefillSample:
        before = await self._idle()
        answer = await self._stream(tokens, 1)
        after = await self._settled(before, 1)
        self._check_computed(before, after, tokens)
        engine_s = after.since(before, _PREFILL_S)
        return PrefillSample(tokens, answer.ended_s - answer.started_s, engine_s)

    def _check_computed(self, before: Counters, after: Counters, tokens: int) -> None:
        computed = after.since(before, _COMPUTED_TOKENS)
        if computed is not None and computed != tokens:
            raise ProfilingError(
                f"{self._engine.url} computed {computed:g} tokens of a random prompt of {tokens}: "
                "the rest came from some cache, so this is no prefill time"
            )

    async def _decode(self, batch_size: int, output_tokens: int) -> tuple[DecodeSample, float]:
        """The streams' times, and how many of the streams were preempted."""
        context = self._plan.setup.context_tokens
        before = await self._idle()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._stream(context, output_tokens))
                    for _ in range(batch_size)
                ]
        except ExceptionGroup as failed:
            # The streams fail for the same reason, so one error is enough.
            raise failed.exceptions[0] from None
        after = await self._settled(before, batch_size)
        steps, total_s = after.since(before, _STEPS), after.since(before, _STEP_S)
        mean_s = total_s / steps if steps and total_s else None
        sample = DecodeSample(tuple(task.result().tokens for task in tasks), mean_s)
        return sample, after.since(before, _PREEMPTIONS) or 0

    async def _stream(self, tokens: int, output_tokens: int) -> Streamed:
        prompt = self._rng.choices(self._token_ids, k=tokens)
        return await self._engine.stream(
            self._model, prompt, output_tokens=output_tokens, cache_salt=self._salt()
        )

    def _salt(self) -> str:
        return f"{self._rng.getrandbits(128):032x}"

    async def _idle(self) -> Counters:
        """The counters of an engine without requests. It gets a moment to finish those it had."""
        deadline_s = time.monotonic() + _SETTLE_S
        while True:
            counters = await self._engine.counters()
            if not counters.num_running and not counters.num_waiting:
                return counters
            if time.monotonic() > deadline_s:
                raise EngineBusyError(
                    f"{self._engine.url} is busy: {counters.num_running} requests running and "
                    f"{counters.num_waiting} waiting, none of them ours; take it out of service "
                    "while it is profiled"
                )
            await asyncio.sleep(_POLL_S)

    async def _settled(self, before: Counters, num_ours: int) -> Counters:
        """The counters once they include our requests and no other ones."""
        deadline_s = time.monotonic() + _SETTLE_S
        while True:
            counters = await self._idle()
            finished = counters.since(before, _FINISHED)
            if finished is None:
                finished = counters.since(before, _SUCCESSES)
            # An engine without either counter can only be asked whether it is idle.
            if finished is None or finished == num_ours:
                return counters
            if finished > num_ours:
                raise EngineBusyError(
                    f"{self._engine.url} answered {finished - num_ours:g} requests of somebody "
                    "else during a sample; take it out of service while it is profiled"
                )
            if time.monotonic() > deadline_s:
                raise ProfilingError(
                    f"{self._engine.url}/metrics counted {finished:g} of our {num_ours} requests: "
                    "do several engines share this URL? Profile one of them"
                )
            await asyncio.sleep(_POLL_S)
