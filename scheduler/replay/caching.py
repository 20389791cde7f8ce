"""The prefix cache of one cluster during a replay: the most recently used blocks.

It has the rule of `scheduler.planning.prefix_reuse`, with look-ups and additions at different
times. The id of a block stands for the whole prefix up to it. This file knows no bytes and no
tiers.
"""

from __future__ import annotations

from collections.abc import Sequence


class ReplayCache:
    """Blocks by id, the least recently used first."""

    def __init__(self, max_blocks: int, block_tokens: int) -> None:
        if max_blocks < 0 or block_tokens < 1:
            raise ValueError(
                f"max_blocks {max_blocks} must not be negative, block_tokens {block_tokens} "
                "at least 1"
            )
        self._max_blocks = max_blocks
        self._block_tokens = block_tokens
        self._recent: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._recent)

    def hit_tokens(self, blocks: Sequence[int], num_tokens: int) -> int:
        """Cached tokens at the start of a prompt; never its last token, which must be computed."""
        recent, num_hit = self._recent, 0
        for block in blocks:
            if block not in recent:
                break
            num_hit += 1
        return max(0, min(num_hit * self._block_tokens, num_tokens - 1))

    def add(self, blocks: Sequence[int]) -> None:
        """Add the blocks of a prompt that was computed here or whose KVCache landed."""
        recent = self._recent
        # The last block first, so that it is evicted before the blocks it depends on.
        for block in reversed(blocks):
            recent.pop(block, None)
            recent[block] = None
        while len(recent) > self._max_blocks:
            del recent[next(iter(recent))]
