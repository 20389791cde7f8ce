"""Which boundaries of a request deserve their window tails and recurrent states in the cache.

Pure. States and windows are dear: at 10K tokens of the paper's model they are half of all bytes if
there is one at the end alone. They are worth their memory where a later request resumes: at the end
of a request (the next turn starts there) and where prompts part from each other, and for short and
medium prompts at some density (MiMo). At every block they never are.
"""

from __future__ import annotations

import msgspec


class StatePlacement(msgspec.Struct, frozen=True):
    """A placement policy; a boundary is kept when any rule asks for it.

    The defaults find the most of Mooncake's conversation trace where memory is short (the paper's
    sizes, LRU, `make bench BENCH_ARGS="kv --trace FILE"`; the README of the benches has the table):
    142,000 to 144,000 hit tokens for each GB of 256 with ends and with both, 90,000 with branches,
    at most 137,000 with a density beside them, 27,000 with everything. Densities cost room that KV
    would use better; given 1,000 GB they find 0.6% more tokens at best. An engine has states only
    where its steps end, counted from where it resumed: multiples of `every_tokens` need one that
    ends its steps there.
    """

    ends: bool = True
    """At the last boundary of a prompt, and of its answer so far: the next turn resumes there."""
    branches: bool = True
    """Where a prompt parts from what is cached."""
    every_tokens: int = 0
    """At multiples of this many tokens, within the first `dense_tokens`; 0: no such rule."""
    dense_tokens: int = 0
    """Tokens from the start of a prompt to which `every_tokens` applies."""
    every_block: bool = False
    """At every boundary; it needs so much memory that it is only for measurements."""

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
