"""The requests of a replay, in the order of their arrival: drawn at random, or from a trace.

They are plain lists, because the replay reads them one by one. This file knows no clusters and no
policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.encoding.values import Medium
from scheduler.planning.lengths import Lengths
from scheduler.planning.load.queueing import poisson_arrivals
from scheduler.planning.prefix_reuse import TracePrompt
from scheduler.stages.traffic import MediaTraffic, draw_media


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Workload:
    """One entry per request. `block_ids` None: no prompt shares a prefix with another one."""

    arrivals_s: Sequence[float]
    """Ascending, on the clock of the replay."""
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    block_ids: Sequence[Sequence[int]] | None = None
    """The blocks of each prompt, as in `scheduler.planning.prefix_reuse.TracePrompt`."""
    block_tokens: int = 512
    homes: Sequence[int] | None = None
    """The PD cluster that each request belongs to, by its place. None: the first one."""
    media: Sequence[tuple[Medium, ...]] | None = None
    """The media of each request. `prompt_tokens` has their tokens, too. None: all is text."""

    def __post_init__(self) -> None:
        num = len(self.arrivals_s)
        for name in ("prompt_tokens", "output_tokens", "block_ids", "homes", "media"):
            values = getattr(self, name)
            if values is not None and len(values) != num:
                raise ValueError(f"{len(values)} {name} for {num} arrivals; give one for each")
        if not num:
            raise ValueError("the workload has no request; give at least one")
        if any(b < a for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)):
            raise ValueError("arrivals_s go back; sort the requests by arrival")

    def __len__(self) -> int:
        return len(self.arrivals_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Traffic of one kind for some time: Poisson arrivals, lengths drawn independently.

    Output lengths are log-normal with the mean `output_tokens`; `output_sigma` is the standard
    deviation of their logarithm. 0: all have the same length.
    """

    duration_s: float
    rate_rps: float
    lengths: Lengths
    output_tokens: float
    output_sigma: float = 0.0

    def __post_init__(self) -> None:
        for name in ("duration_s", "rate_rps", "output_tokens"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be above 0")
        if not 0 <= self.output_sigma < math.inf:
            raise ValueError(f"output_sigma is {self.output_sigma!r}; it must not be negative")


def drawn(phases: Iterable[Phase], seed: int) -> Workload:
    """The requests of one phase after the other.

    The same seed draws the same quantiles of lengths at any rate, so that loads can be compared.
    """
    arrivals: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    begin_s = 0.0
    for number, phase in enumerate(phases):
        # One stream for each quantity, so that more arrivals do not shift the lengths.
        rngs = [np.random.default_rng((seed, number, stream)) for stream in range(3)]
        times = _arrivals(phase, rngs[0])
        num = len(times)
        arrivals += [begin_s + at for at in times]
        tokens = np.maximum(1, np.rint(phase.lengths.sample(num, rngs[1]))) if num else []
        prompts += [int(value) for value in tokens]
        outputs += _outputs(phase, num, rngs[2])
        begin_s += phase.duration_s
    return Workload(arrivals_s=arrivals, prompt_tokens=prompts, output_tokens=outputs)


def with_media(text: Workload, traffic: MediaTraffic, seed: int) -> Workload:
    """The same requests with media, which have a random stream of their own."""
    media = draw_media(traffic, len(text), np.random.default_rng((seed, 98)))
    prompts = [
        tokens + sum(one.num_tokens for one in found)
        for tokens, found in zip(text.prompt_tokens, media, strict=True)
    ]
    return replace(text, prompt_tokens=prompts, media=media)


def at_homes(workloads: Sequence[Workload]) -> Workload:
    """The drawn workloads of several PD clusters as one."""
    rows = sorted(
        (at_s, home, prompt, output)
        for home, work in enumerate(workloads)
        for at_s, prompt, output in zip(
            work.arrivals_s, work.prompt_tokens, work.output_tokens, strict=True
        )
    )
    arrivals_s, homes, prompts, outputs = (list(column) for column in zip(*rows, strict=True))
    return Workload(
        arrivals_s=arrivals_s, prompt_tokens=prompts, output_tokens=outputs, homes=homes
    )


def traced(prompts: Sequence[TracePrompt], block_tokens: int, speed: float = 1.0) -> Workload:
    """A trace, played `speed` times as fast as it was recorded."""
    if not 0 < speed < math.inf:
        raise ValueError(f"speed is {speed!r}; it must be above 0")
    ordered = sorted(prompts, key=lambda prompt: prompt.arrival_s)
    return Workload(
        arrivals_s=[prompt.arrival_s / speed for prompt in ordered],
        prompt_tokens=[prompt.input_tokens for prompt in ordered],
        # A replay's decode needs a token to end with.
        output_tokens=[max(1, prompt.output_tokens) for prompt in ordered],
        block_ids=[prompt.block_ids for prompt in ordered],
        block_tokens=block_tokens,
    )


def _arrivals(phase: Phase, rng: np.random.Generator) -> list[float]:
    times: list[float] = []
    most = phase.rate_rps * phase.duration_s
    while not times or times[-1] < phase.duration_s:
        # The expected number and four standard deviations: one round is nearly always enough.
        num = int(most - len(times) + 4 * math.sqrt(most)) + 16
        after = times[-1] if times else 0.0
        times += (after + poisson_arrivals(phase.rate_rps, max(num, 16), rng)).tolist()
    return [at for at in times if at < phase.duration_s]


def _outputs(phase: Phase, num: int, rng: np.random.Generator) -> list[int]:
    if not phase.output_sigma:
        return [max(1, round(phase.output_tokens))] * num
    sigma = phase.output_sigma
    # The mean of a log-normal is exp(mu + sigma^2 / 2).
    drawn_tokens = rng.lognormal(math.log(phase.output_tokens) - sigma**2 / 2, sigma, num)
    return [max(1, round(value)) for value in drawn_tokens.tolist()]
