"""The time of an encoder pass as a line over the media tokens in it.

A value only: `times` learns such lines, and reports carry them to whoever predicts.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

_MOST_TOKENS: Final = 1 << 30
"""The budget where nothing bounds it."""


class EncodeLine(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of a pass: `fixed_s` for each and `token_s` for each media token in it."""

    fixed_s: float
    token_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.fixed_s < math.inf and 0 <= self.token_s < math.inf):
            raise ValueError(f"{self}: seconds must be finite and not negative")

    def seconds(self, num_tokens: float) -> float:
        """What a pass over media of `num_tokens` takes."""
        return self.fixed_s + self.token_s * num_tokens

    def tokens_within(self, objective_s: float) -> int:
        """The most media tokens of a pass that takes no longer than `objective_s`; 0: none does.

        This is the image budget of HydraInfer's Algorithm 1, which finds it by search. The largest
        n with seconds(n) <= objective needs none.
        """
        left_s = objective_s - self.fixed_s
        if left_s < 0:
            return 0
        if left_s >= self.token_s * _MOST_TOKENS:
            return _MOST_TOKENS
        return int(left_s / self.token_s)
