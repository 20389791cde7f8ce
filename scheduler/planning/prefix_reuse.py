"""How much of each prompt of a trace a prefix cache of a given size would have held.

A trace names each block of a prompt by an id that stands for the whole prefix up to and including
that block (the Mooncake trace format). The cache keeps the most recently used blocks. Sizes are
blocks and tokens; this file knows no bytes and no machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TracePrompt:
    """One request of a trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: Sequence[int]


def cached_tokens(
    prompts: Iterable[TracePrompt], block_tokens: int, cache_blocks: int | None
) -> list[int]:
    """The number of cached tokens at the start of each prompt when it arrives, in order.

    Only whole leading blocks count, and never the last token of a prompt, which must be computed
    for an answer. `cache_blocks` None: nothing is ever evicted; 0: no cache.
    """
    recent: dict[int, None] = {}  # least recently used first
    found: list[int] = []
    for prompt in prompts:
        num_hit = 0
        for block in prompt.block_ids:
            if block not in recent:
                break
            num_hit += 1
        found.append(max(0, min(num_hit * block_tokens, prompt.input_tokens - 1)))
        # The last block first, so that it is evicted before the blocks it depends on.
        for block in reversed(prompt.block_ids):
            recent.pop(block, None)
            recent[block] = None
        if cache_blocks is not None:
            for block in list(_oldest(recent, len(recent) - cache_blocks)):
                del recent[block]
    return found


def _oldest(recent: dict[int, None], num: int) -> Iterable[int]:
    for block, _ in zip(recent, range(num), strict=False):
        yield block
