"""Prefill time and KVCache size of one prompt as plain numbers, for decisions made per request.

These are the curves of `scheduler.planning.curves`, evaluated in plain Python, at about a
microsecond a value. A profile also carries what measurement has taught since: a factor on the time.
This file knows no queue and no link.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from scheduler.planning.curves import Curve
from scheduler.planning.region_model import KvSize


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """Seconds that one instance needs to prefill a prompt of which a part is cached."""

    starts: tuple[float, ...]
    """Where the pieces of the curve begin, tokens, ascending; the first begins at 0."""
    coefficients: tuple[tuple[float, float, float], ...]
    """For each piece: constant in s, s per token, s per token squared."""
    factor: float = 1.0
    """Measured over predicted time."""

    def __post_init__(self) -> None:
        if not self.starts or len(self.starts) != len(self.coefficients):
            raise ValueError(
                f"{len(self.starts)} pieces with {len(self.coefficients)} triples of coefficients"
            )
        if not self.factor > 0:
            raise ValueError(f"factor {self.factor!r} must be above 0")

    @classmethod
    def of(cls, curve: Curve) -> PrefillProfile:
        """The profile of a measured curve, uncorrected."""
        return cls(
            tuple(float(start) for start in curve.starts),
            tuple((float(a), float(b), float(c)) for a, b, c in curve.coefficients),
        )

    def corrected(self, factor: float) -> PrefillProfile:
        """The same curve with another factor."""
        return replace(self, factor=factor)

    def plain(self) -> PrefillProfile:
        """The same times with the factor put into the coefficients."""
        factor = self.factor
        scaled = tuple((a * factor, b * factor, c * factor) for a, b, c in self.coefficients)
        return PrefillProfile(self.starts, scaled)

    def extended(self, reach_tokens: float, other: PrefillProfile) -> PrefillProfile:
        """This curve up to `reach_tokens`. From there on it grows as `other`, but never slower than
        it did itself.
        """
        own = dict(zip(self.starts, self.plain().coefficients, strict=True))
        pieces = {start: piece for start, piece in own.items() if start < reach_tokens}
        _, own_linear, own_square = pieces[max(pieces)]
        at_s = self.factor * self._at(reach_tokens)
        ends = (*other.starts[1:], math.inf)
        others = other.plain().coefficients
        for start, end, (_, linear, square) in zip(other.starts, ends, others, strict=True):
            if end > reach_tokens:
                start, linear = max(start, reach_tokens), max(linear, own_linear)
                square = max(square, own_square)
                constant = at_s - start * (linear + start * square)
                pieces[start] = constant, linear, square
                at_s = constant + end * (linear + end * square)
        return PrefillProfile(tuple(pieces), tuple(pieces.values()))

    def curve(self) -> Curve:
        """The corrected curve, as the planner takes it."""
        return Curve(np.array(self.coefficients), np.array(self.starts)).scaled(self.factor)

    def prefill_s(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """T(n) - (T(c) - T(0)): T of the whole prompt less what the cached tokens would have added.

        The fixed part T(0) is due however much is cached, so the result is never below it.
        """
        whole_s = self._at(num_tokens)
        if cached_tokens > 0:
            fixed_s = self.coefficients[0][0]
            whole_s = max(fixed_s, whole_s - self._at(min(cached_tokens, num_tokens)) + fixed_s)
        return whole_s * self.factor

    def _at(self, num_tokens: float) -> float:
        piece = bisect_right(self.starts, num_tokens) - 1 if len(self.starts) > 1 else 0
        constant, linear, square = self.coefficients[piece]
        return constant + num_tokens * (linear + num_tokens * square)


class KvProfile(msgspec.Struct, frozen=True):
    """Bytes of a prompt's KVCache: fixed ones whatever its length, and some for each token."""

    fixed_bytes: float
    token_bytes: float

    def __post_init__(self) -> None:
        if not (self.fixed_bytes >= 0 and self.token_bytes >= 0):
            raise ValueError(f"{self}: bytes must not be negative")

    @classmethod
    def of(cls, kv: KvSize, at_tokens: int) -> KvProfile:
        """The line through the fixed part and the curve's value at a typical length."""
        size = float(kv.size(at_tokens))
        return cls(kv.fixed_bytes, max(0.0, size - kv.fixed_bytes) / at_tokens)

    def token_part_bytes(self, num_tokens: int) -> float:
        """The bytes emitted while these tokens are computed."""
        return self.token_bytes * num_tokens

    def size_bytes(self, num_tokens: int) -> float:
        """All bytes of a prompt of this length."""
        return self.fixed_bytes + self.token_bytes * num_tokens
