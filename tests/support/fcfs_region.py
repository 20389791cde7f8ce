"""First come, first served: a region as queues alone, to hold simulations and live runs against.

Knows neither PrfaaS nor its simulator. Each prompt goes to the prefill instance that would end it
first, of those that may take it, then waits for a free decode slot and keeps it for its answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefiller:
    """One instance: seconds of a prompt, seconds until its KVCache is where it decodes, and which
    prompts it may take.
    """

    prefill_s: Callable[[int], float]
    transfer_s: Callable[[int], float] = lambda tokens: 0.0
    takes: Callable[[int], bool] = lambda tokens: True


def first_tokens_s(
    arrivals: Sequence[tuple[float, int]],
    prefillers: Sequence[Prefiller],
    num_slots: int,
    step_s: float,
    num_steps: int,
) -> list[float]:
    """The TTFT of each (time, tokens of the prompt) in order of arrival, seconds. The first token
    comes with the first of the `num_steps` steps of an answer.
    """
    free_s = [0.0] * len(prefillers)
    slots_s = [0.0] * num_slots
    found = []
    for at_s, tokens in arrivals:
        ends = {
            i: max(at_s, free_s[i]) + one.prefill_s(tokens)
            for i, one in enumerate(prefillers)
            if one.takes(tokens)
        }
        best = min(ends, key=lambda i: ends[i] + prefillers[i].transfer_s(tokens))
        free_s[best] = ends[best]
        landed_s = ends[best] + prefillers[best].transfer_s(tokens)
        begin_s = max(landed_s, heapq.heappop(slots_s))
        heapq.heappush(slots_s, begin_s + num_steps * step_s)
        found.append(begin_s + step_s - at_s)
    return found
