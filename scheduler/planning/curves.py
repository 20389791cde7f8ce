"""Quantities that grow with the prompt: prefill time and KVCache size as curves over its length.

A `Curve` is piecewise quadratic, so its mean over a distribution follows exactly from the
distribution's first two moments. It comes from known coefficients, from a least-squares fit, or
from straight lines between measured points. Lengths are tokens; values are seconds or bytes,
depending on the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from scheduler.planning.lengths import Floats, Lengths


class CurveError(ValueError):
    """No sensible curve goes through the points. The message names the value and the way out."""


@dataclass(frozen=True)
class Curve:
    """y(l) = c0 + c1 l + c2 l^2 with the coefficients of the piece that l lies in."""

    coefficients: Floats
    """Shape (num_pieces, 3)."""
    starts: Floats
    """Where the pieces begin, ascending; the first begins at 0 and the last has no end."""

    @classmethod
    def quadratic(cls, constant: float, linear: float = 0.0, square: float = 0.0) -> Curve:
        return cls(np.array([[constant, linear, square]], float), np.zeros(1))

    def __call__(self, tokens: ArrayLike) -> Floats:
        """y at each length."""
        at = np.asarray(tokens, np.float64)
        piece = np.maximum(np.searchsorted(self.starts, at, side="right") - 1, 0)
        c = self.coefficients[piece]
        value: Floats = c[..., 0] + at * (c[..., 1] + at * c[..., 2])
        return value

    def sum_to(self, lengths: Lengths, tokens: ArrayLike) -> Floats:
        """E[y(L); L <= x] for each x: what prompts up to x need, per prompt of any length."""
        at = np.atleast_1d(np.asarray(tokens, np.float64))
        total = np.zeros(len(at))
        ends = np.append(self.starts[1:], np.inf)
        for coefficients, start, end in zip(self.coefficients, self.starts, ends, strict=True):
            here = lengths.moments_to(np.minimum(at, end)) - lengths.moments_to(
                np.minimum(at, start)
            )
            total += coefficients @ here
        return total

    def mean(self, lengths: Lengths) -> float:
        """E[y(L)]."""
        return float(self.sum_to(lengths, [lengths.max_tokens])[0])

    def scaled(self, factor: float) -> Curve:
        return Curve(self.coefficients * factor, self.starts)

    def behind(self, cached_tokens: float) -> Curve:
        """The curve for prompts of which so much is cached, over the length of the rest: y(c + l) -
        (y(c) - y(0)), as the router predicts a prefill.
        """
        if not cached_tokens:
            return self
        kept = np.append(self.starts[1:], np.inf) > cached_tokens
        constant, linear, square = self.coefficients[kept].T
        added = constant + cached_tokens * (linear + cached_tokens * square)
        saved = float(self(cached_tokens) - self(0.0))
        moved = np.stack([added - saved, linear + 2 * cached_tokens * square, square], axis=1)
        return Curve(moved, np.maximum(0.0, self.starts[kept] - cached_tokens))

    def raised(self, constant: float) -> Curve:
        """The curve with so much more at every length."""
        return Curve(self.coefficients + np.array([constant, 0.0, 0.0]), self.starts)


@dataclass(frozen=True)
class FittedCurve:
    """A curve, and how far it is from the points it was made from."""

    curve: Curve
    tokens: Floats
    values: Floats
    method: str

    @property
    def residuals(self) -> Floats:
        """(curve - point) / point for each point."""
        return (self.curve(self.tokens) - self.values) / self.values


def fit_quadratic(points: Sequence[tuple[float, float]]) -> FittedCurve:
    """The quadratic with the least squared relative error.

    Raises `CurveError` with fewer than 3 points, or when a coefficient is negative beyond rounding.
    Prefill work has a fixed part, a part per token and a part per pair of tokens, and none of them
    can be below zero.
    """
    tokens, values = _checked(points)
    if len(tokens) < 3:
        raise CurveError(
            f"{len(tokens)} points do not fix a quadratic: give 3, or use `fit: interpolate`"
        )
    # Lengths in units of the longest keep the three columns of similar size.
    scale = tokens[-1]
    rows = np.stack([np.ones(len(tokens)), tokens / scale, (tokens / scale) ** 2], axis=1)
    # Divided by the value, so that the squares are those of relative errors.
    found = np.linalg.lstsq(rows / values[:, None], np.ones(len(tokens)), rcond=None)[0]
    names = ("fixed part", "part per token", "part per token squared")
    for name, value in zip(names, found, strict=True):
        if value < -1e-9 * np.abs(found).max():
            raise CurveError(
                f"the {name} of a quadratic through these points is negative "
                f"({value / scale ** names.index(name):.3g}): measure again, "
                "or use `fit: interpolate`"
            )
    # What is left below zero is rounding.
    found = np.maximum(found, 0)
    curve = Curve.quadratic(found[0], found[1] / scale, found[2] / scale**2)
    return FittedCurve(curve, tokens, values, "quadratic")


def interpolate(points: Sequence[tuple[float, float]]) -> FittedCurve:
    """Straight lines between the points: constant below the first, the last slope beyond the last.

    Raises `CurveError` if a longer prompt is said to need less.
    """
    tokens, values = _checked(points)
    if len(tokens) < 2:
        raise CurveError("one point is no curve: give at least 2")
    drops = np.flatnonzero(np.diff(values) < 0)
    if len(drops):
        i = int(drops[0])
        raise CurveError(
            f"{tokens[i + 1]:g} tokens need {values[i + 1]:g}, less than the {values[i]:g} "
            f"of {tokens[i]:g} tokens: measure that point again"
        )
    slopes = np.diff(values) / np.diff(tokens)
    pieces = np.stack([values[:-1] - slopes * tokens[:-1], slopes, np.zeros(len(slopes))], axis=1)
    # Constant below the first point: a line extended to shorter prompts may fall below zero.
    coefficients = np.concatenate([[[values[0], 0.0, 0.0]], pieces])
    return FittedCurve(
        Curve(coefficients, np.concatenate([[0.0], tokens[:-1]])), tokens, values, "interpolate"
    )


def _checked(points: Sequence[tuple[float, float]]) -> tuple[Floats, Floats]:
    array = np.array(sorted(points), float).reshape(-1, 2)
    tokens, values = array[:, 0], array[:, 1]
    for length, value in points:
        if not (np.isfinite(length) and np.isfinite(value) and length > 0 and value > 0):
            raise CurveError(f"{length:g} tokens, {value:g}: both must be above 0")
    twice = np.flatnonzero(np.diff(tokens) == 0)
    if len(twice):
        raise CurveError(f"two points for {tokens[twice[0]]:g} tokens: keep one")
    return tokens, values
