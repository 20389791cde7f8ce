"""How long prompts are: distributions of uncached input lengths, seen through their moments.

The throughput model needs only P, E[L] and E[L^2] of a distribution up to a length; simulation
draws samples. Lengths are tokens and may be fractional. No I/O, no clock; random draws come from a
generator that the caller seeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

# The zeroth to the second: a curve is quadratic in the length.
NUM_MOMENTS = 3


class Lengths(Protocol):
    """A distribution of prompt lengths on [min_tokens, max_tokens]."""

    @property
    def min_tokens(self) -> float: ...

    @property
    def max_tokens(self) -> float: ...

    def moments_to(self, tokens: ArrayLike) -> Floats:
        """E[L^k; L <= x] for k = 0, 1, 2 and each x: shape (3, len(x)). Row 0 is P(L <= x)."""

    def quantile(self, shares: ArrayLike) -> Floats:
        """The lengths below which these shares of the prompts lie."""

    def sample(self, num: int, rng: np.random.Generator) -> Floats:
        """`num` lengths drawn at random."""

    def scaled(self, factor: float) -> Lengths:
        """The distribution with every length times `factor`."""


def mean_tokens(lengths: Lengths) -> float:
    """E[L]."""
    return float(lengths.moments_to([lengths.max_tokens])[1, 0])


@dataclass(frozen=True)
class LogNormalLengths:
    """ln L is normal with `mu` and `sigma`, truncated to [min_tokens, max_tokens] and renormalised.

    The moments have closed forms: E[L^k; L <= x] of a log-normal distribution is
    exp(k mu + k^2 sigma^2 / 2) Phi((ln x - mu) / sigma - k sigma).
    """

    mu: float
    sigma: float
    min_tokens: float
    max_tokens: float

    def __post_init__(self) -> None:
        if not self.sigma > 0:
            raise ValueError(f"sigma is {self.sigma:g}; it must be above 0")
        if not 0 < self.min_tokens < self.max_tokens:
            raise ValueError(
                f"lengths from {self.min_tokens:g} to {self.max_tokens:g} tokens: "
                "the minimum must be above 0 and below the maximum"
            )
        if self._share_inside < 1e-6:
            raise ValueError(
                f"mu {self.mu:g} and sigma {self.sigma:g} put no length between "
                f"{self.min_tokens:g} and {self.max_tokens:g} tokens"
            )

    def moments_to(self, tokens: ArrayLike) -> Floats:
        inside = np.clip(
            np.atleast_1d(np.asarray(tokens, np.float64)), self.min_tokens, self.max_tokens
        )
        scores = (np.log(inside) - self.mu) / self.sigma
        rows = []
        for k in range(NUM_MOMENTS):
            scale = math.exp(k * self.mu + (k * self.sigma) ** 2 / 2) / self._share_inside
            rows.append(scale * (_normal_cdf(scores - k * self.sigma) - self._below(k)))
        return np.stack(rows)

    def quantile(self, shares: ArrayLike) -> Floats:
        low = self._below(0)
        wanted = np.clip(np.atleast_1d(np.asarray(shares, np.float64)), 0, 1)
        below = low + wanted * self._share_inside
        normal = NormalDist(self.mu, self.sigma)
        # `inv_cdf` is undefined at 0 and 1.
        tokens = [math.exp(normal.inv_cdf(min(max(p, 1e-300), 1 - 1e-16))) for p in below]
        return np.clip(tokens, self.min_tokens, self.max_tokens)

    def sample(self, num: int, rng: np.random.Generator) -> Floats:
        drawn = np.empty(0)
        while len(drawn) < num:
            missing = num - len(drawn)
            # Rejection: draw as many as are likely needed with those outside the bounds, and some
            # more.
            more = rng.lognormal(self.mu, self.sigma, int(1.1 * missing / self._share_inside) + 16)
            kept = more[(more >= self.min_tokens) & (more <= self.max_tokens)]
            drawn = np.concatenate([drawn, kept[:missing]])
        return drawn

    def scaled(self, factor: float) -> LogNormalLengths:
        return LogNormalLengths(
            self.mu + math.log(factor),
            self.sigma,
            self.min_tokens * factor,
            self.max_tokens * factor,
        )

    def _below(self, k: int) -> float:
        score = (math.log(self.min_tokens) - self.mu) / self.sigma
        return NormalDist().cdf(score - k * self.sigma)

    @cached_property
    def _share_inside(self) -> float:
        normal = NormalDist(self.mu, self.sigma)
        return normal.cdf(math.log(self.max_tokens)) - normal.cdf(math.log(self.min_tokens))


@dataclass(frozen=True)
class EmpiricalLengths:
    """Observed lengths with weights, as from a trace or a histogram."""

    tokens: Floats
    """Ascending, above 0."""
    weights: Floats
    """One for each length, above 0, with any sum."""
    _cumulative: Floats = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.tokens) == 0 or len(self.tokens) != len(self.weights):
            raise ValueError(f"{len(self.tokens)} lengths with {len(self.weights)} weights")
        if self.tokens[0] <= 0 or np.any(np.diff(self.tokens) < 0) or np.any(self.weights <= 0):
            raise ValueError("lengths must ascend and, like their weights, be above 0")
        shares = self.weights / self.weights.sum()
        powers = np.stack([shares * self.tokens**k for k in range(NUM_MOMENTS)])
        # A leading column of zeros is for lengths below the shortest.
        sums = np.concatenate([np.zeros((NUM_MOMENTS, 1)), np.cumsum(powers, axis=1)], axis=1)
        object.__setattr__(self, "_cumulative", sums)

    @classmethod
    def of(cls, tokens: ArrayLike, weights: ArrayLike | None = None) -> EmpiricalLengths:
        """Lengths in any order. Lengths of 0 (all of the prompt is cached) are left out."""
        values = np.atleast_1d(np.asarray(tokens, np.float64))
        each = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
        kept = (values > 0) & (each > 0)
        order = np.argsort(values[kept], kind="stable")
        return cls(values[kept][order], each[kept][order])

    @property
    def min_tokens(self) -> float:
        return float(self.tokens[0])

    @property
    def max_tokens(self) -> float:
        return float(self.tokens[-1])

    def moments_to(self, tokens: ArrayLike) -> Floats:
        at = np.atleast_1d(np.asarray(tokens, np.float64))
        return self._cumulative[:, np.searchsorted(self.tokens, at, side="right")]

    def quantile(self, shares: ArrayLike) -> Floats:
        wanted = np.clip(np.atleast_1d(np.asarray(shares, np.float64)), 0, 1)
        # Sums of shares may be above a wanted share by rounding only.
        at = np.searchsorted(self._cumulative[0, 1:], wanted - 1e-12)
        found: Floats = self.tokens[np.minimum(at, len(self.tokens) - 1)]
        return found

    def sample(self, num: int, rng: np.random.Generator) -> Floats:
        return self.quantile(rng.random(num))

    def scaled(self, factor: float) -> EmpiricalLengths:
        return EmpiricalLengths(self.tokens * factor, self.weights)


def _normal_cdf(scores: Floats) -> Floats:
    return np.fromiter((0.5 * math.erfc(-z / math.sqrt(2)) for z in scores), float, len(scores))
