"""The prefix cache of one cluster over the time of a replay: the most recently used blocks.

The rule of `scheduler.planning.prefix_reuse`, asked and filled at different moments. A block's id
stands for the whole prefix up to it. Knows no bytes and no tiers.
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
        """Cached tokens at the start of a prompt; never its last one, which must be computed."""
        recent, num_hit = self._recent, 0
        for block in blocks:
            if block not in recent:
                break
            num_hit += 1
        return max(0, min(num_hit * self._block_tokens, num_tokens - 1))

    def add(self, blocks: Sequence[int]) -> None:
        """A prompt was computed here, or its KVCache landed."""
        recent = self._recent
        # From the end: a prefix outlives what hangs on it.
        for block in reversed(blocks):
            recent.pop(block, None)
            recent[block] = None
        while len(recent) > self._max_blocks:
            del recent[next(iter(recent))]
