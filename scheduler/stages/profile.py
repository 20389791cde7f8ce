"""How long one pass of an instance takes, and how many bytes a request has in each stage.

A pass may hold a decode step for all running requests, chunks of prompts, and media to encode. The
language model computes decodes and chunks together; the encoder runs beside it or before it.
Values only: this file knows no queue and no arrangement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from scheduler.encoding.line import EncodeLine
from scheduler.routing.profiles import KvProfile, PrefillProfile

Chunk = tuple[int, int]
"""From which token of a prompt a pass computes, and up to which."""
MOST_TOKENS: Final = 8192
"""The most prompt tokens of a pass: vLLM's `max_num_batched_tokens` of a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProfile:
    """The speed of one instance. `decode_steps` has seconds of a step by batch size, from 0 up to
    the most requests that decode at once; each token of their contexts adds `context_token_s`.
    """

    encode: EncodeLine
    prefill: PrefillProfile
    decode_steps: tuple[float, ...]
    context_token_s: float = 0.0
    overlap: float = 0.0
    """The share of the shorter one of an encoder pass and a language pass that costs no time where
    both run in parallel: 0: one after the other, 1: the longer one alone counts."""

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap {self.overlap!r} must be from 0 to 1")
        if len(self.decode_steps) < 2:
            raise ValueError("decode_steps has no batch of 1; give the seconds of a step")

    @property
    def slots(self) -> int:
        """The most requests that decode at once on an instance."""
        return len(self.decode_steps) - 1

    def step_s(self, num_decodes: int, context_tokens: float) -> float:
        """One decode step of a batch whose contexts have so many tokens together."""
        if not num_decodes:
            return 0.0
        return self.decode_steps[num_decodes] + self.context_token_s * context_tokens

    def language_s(
        self, num_decodes: int, context_tokens: float, chunks: Iterable[Chunk] = ()
    ) -> float:
        """A pass of the language model. Decodes and chunks share the fixed part of a pass."""
        fixed_s = self.prefill.prefill_s(0)
        # With the fixed part taken away, chunks of one prompt add up to the whole prompt.
        chunk_s = [
            self.prefill.prefill_s(end) - (self.prefill.prefill_s(start) if start else fixed_s)
            for start, end in chunks
        ]
        step_s = self.step_s(num_decodes, context_tokens)
        return max(step_s, fixed_s if chunk_s else 0.0) + sum(chunk_s)

    def pass_s(self, language_s: float, media_tokens: int, *, in_parallel: bool) -> float:
        """A pass with an encoder part over so many media tokens; 0: none."""
        if not media_tokens:
            return language_s
        encode_s = self.encode.seconds(media_tokens)
        hidden_s = self.overlap * min(language_s, encode_s) if in_parallel else 0.0
        return language_s + encode_s - hidden_s

    def tokens_within(self, objective_s: float, step_s: float = 0.0) -> int:
        """The most tokens of a prompt that one pass computes within this time, beside decodes that
        take `step_s`; at least 1.
        """
        fixed_s = self.prefill.prefill_s(0)
        left_s = objective_s - max(fixed_s, step_s) + fixed_s
        low, high = 1, MOST_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            if self.prefill.prefill_s(middle) <= left_s:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """Bytes of a request, the room for them, and the way between instances.

    An instance pulls what another one has computed, one pull at a time: `latency_s`, and then its
    bytes at `bytes_per_s`.
    """

    embedding_token_bytes: float
    kv: KvProfile
    kv_room_bytes: float = math.inf
    """The KVCache that one instance has room for."""
    bytes_per_s: float = math.inf
    latency_s: float = 0.0

    @property
    def kv_room_tokens(self) -> float:
        """The tokens whose KVCache one instance has room for."""
        return self.kv_room_bytes / self.kv.token_bytes if self.kv.token_bytes else math.inf

    def embedding_bytes(self, media_tokens: float) -> float:
        return self.embedding_token_bytes * media_tokens

    def pull_s(self, num_bytes: float) -> float:
        """How long one pull takes."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class StageSlo:
    """A request keeps its objective if its first token comes within `ttft_s`, and 90% of its
    further tokens within `tpot_s` after the one before. Goodput is the highest rate at which the
    `share` of all requests does.
    """

    ttft_s: float
    tpot_s: float
    share: float = 0.9

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tpot_s > 0 and 0 < self.share < 1):
            raise ValueError(f"{self}: times must be above 0, the share between 0 and 1")
