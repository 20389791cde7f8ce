"""The requests of a stage simulation: text, media, output, drawn with Poisson arrivals.

Pure but for the random numbers, which a seed decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from scheduler.encoding.values import Medium
from scheduler.planning.lengths import Lengths
from scheduler.planning.load.queueing import poisson_arrivals

_RECENT: Final = 256
"""A repeated medium is one of so many latest ones."""


@dataclass(frozen=True, slots=True)
class StageRequest:
    """One request. `is_prefilled`: another cluster prefills it, and it comes with its KVCache."""

    arrival_s: float
    prompt_tokens: int
    """Text and media together."""
    media: tuple[Medium, ...]
    output_tokens: int
    is_prefilled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaTraffic:
    """What requests are like. `text` has the lengths of prompts without their media."""

    text: Lengths
    output_tokens: float
    output_sigma: float = 0.0
    """Standard deviation of the logarithm of output lengths."""
    share: float = 1.0
    """The share of requests with media."""
    media_per_request: float = 1.0
    """In the mean, of requests that have any: the whole number below or above it."""
    media_tokens: int = 576
    """Tokens of one medium in a prompt."""
    repeats: float = 0.0
    """The share of media that were sent lately, so that their embeddings are there."""

    def __post_init__(self) -> None:
        if not (0 <= self.share <= 1 and 0 <= self.repeats < 1):
            raise ValueError(f"share {self.share} and repeats {self.repeats} must be shares")
        if self.media_per_request < 1 or self.media_tokens < 1 or self.output_tokens < 1:
            raise ValueError(
                f"{self.media_per_request:g} media of {self.media_tokens} tokens, "
                f"{self.output_tokens:g} output tokens: each must be at least 1"
            )

    @property
    def encoded_tokens(self) -> float:
        """Media tokens to encode, per request of any kind."""
        return self.share * self.media_per_request * self.media_tokens * (1 - self.repeats)

    @property
    def tokens_of_media(self) -> float:
        """Media tokens in the prompt, per request of any kind."""
        return self.share * self.media_per_request * self.media_tokens


@dataclass(frozen=True, slots=True)
class Drawn:
    """Requests without arrivals. The same ones are played at every rate, so that rates differ in
    nothing else.
    """

    gaps: tuple[float, ...]
    """Time between arrivals at 1 request/s, seconds."""
    requests: tuple[StageRequest, ...]

    def at_rate(self, rate_rps: float, num: int) -> list[StageRequest]:
        """The first `num` requests, arriving at this rate."""
        found, now_s = [], 0.0
        for gap, request in zip(self.gaps[:num], self.requests, strict=False):
            now_s += gap / rate_rps
            found.append(
                StageRequest(
                    now_s,
                    request.prompt_tokens,
                    request.media,
                    request.output_tokens,
                    request.is_prefilled,
                )
            )
        return found


def draw(
    traffic: MediaTraffic, num: int, seed: int, elsewhere: Sequence[tuple[float, float]] = ()
) -> Drawn:
    """`num` requests. Prompts of these ranges of lengths, (from, to], are prefilled by another
    cluster.
    """
    rng = np.random.default_rng((seed, 20))
    gaps = np.diff(poisson_arrivals(1.0, num, rng), prepend=0.0).tolist()
    text = np.maximum(1, np.rint(traffic.text.sample(num, rng))).astype(int).tolist()
    outputs = _outputs(traffic, num, rng)
    requests = []
    for at, media in enumerate(draw_media(traffic, num, rng)):
        tokens = text[at] + sum(medium.num_tokens for medium in media)
        is_prefilled = any(low < tokens <= high for low, high in elsewhere)
        requests.append(StageRequest(0.0, tokens, media, outputs[at], is_prefilled))
    return Drawn(tuple(gaps), tuple(requests))


def draw_media(
    traffic: MediaTraffic, num: int, rng: np.random.Generator
) -> list[tuple[Medium, ...]]:
    """The media of `num` requests."""
    has_media = (rng.random(num) < traffic.share).tolist()
    least, odd = divmod(traffic.media_per_request, 1)
    more = (rng.random(num) < odd).tolist()
    drawn, next_medium = [], 0
    for at in range(num):
        media = []
        for _ in range((int(least) + more[at]) * has_media[at]):
            if next_medium and rng.random() < traffic.repeats:
                number = int(rng.integers(max(0, next_medium - _RECENT), next_medium))
            else:
                number, next_medium = next_medium, next_medium + 1
            media.append(Medium(f"m{number}", traffic.media_tokens))
        drawn.append(tuple(media))
    return drawn


def _outputs(traffic: MediaTraffic, num: int, rng: np.random.Generator) -> list[int]:
    sigma = traffic.output_sigma
    mean = math.log(traffic.output_tokens) - sigma**2 / 2
    drawn = rng.lognormal(mean, sigma, num) if sigma else np.full(num, traffic.output_tokens)
    return [max(1, round(tokens)) for tokens in drawn.tolist()]
