"""Chooses the boundaries of a request whose window tails and recurrent states are cached.

Pure. States and windows are expensive: with only one boundary at the end, they are half of all
bytes at 10K tokens of the paper's model. They are worth their memory where a later request resumes:
at the end of a request, where the next turn starts, and where prompts part from each other. For
short and medium prompts regular boundaries may pay as well (MiMo). Boundaries at every block never
do.
"""

from __future__ import annotations

import msgspec


class StatePlacement(msgspec.Struct, frozen=True):
    """A placement policy. A boundary is kept when any rule asks for it.

    The defaults have the most hits in Mooncake's conversation trace where memory is short (the
    paper's sizes, LRU; docs/results/index.md has the table): 142,000 to 144,000 hit tokens for each
    GB of 256 with ends or with both rules, 90,000 with branches, at most 137,000 with regular
    boundaries added, and 27,000 with every block.
    Regular boundaries take memory that KV would use better; with 1,000 GB they hit at best 0.6%
    more tokens. An engine has states only where its steps end, counted from the point where it
    resumed. So `every_tokens` needs an engine that ends its steps at its multiples.
    """

    ends: bool = True
    """Keep the last boundary of a prompt and of its answer so far, where the next turn resumes."""
    branches: bool = True
    """Keep the boundary at which a prompt parts from cached prompts."""
    every_tokens: int = 0
    """Keep multiples of this many tokens within the first `dense_tokens`; 0: none."""
    dense_tokens: int = 0
    """Tokens from the start of a prompt to which `every_tokens` applies."""
    every_block: bool = False
    """Keep every boundary. It needs so much memory that it is only for measurements."""

    def wants(
        self, boundary_tokens: int, *, is_end: bool = False, branch_tokens: int | None = None
    ) -> bool:
        """Whether to keep windows and states at `boundary_tokens` (a block boundary).

        `is_end`: it is the last boundary of the prompt, or the last so far of the answer.
        `branch_tokens`: where this prompt parts from what is cached, if it does.
        """
        if self.every_block:
            return True
        if (self.ends and is_end) or (self.branches and boundary_tokens == branch_tokens):
            return True
        return bool(
            self.every_tokens
            and boundary_tokens <= self.dense_tokens
            and boundary_tokens % self.every_tokens == 0
        )
