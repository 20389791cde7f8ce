"""Prefill time of one place, learnt from the prefills that ran there.

    seconds(n, c) = a + b (n - c) + q (n^2 - c^2) + s P(n, c)        a, b, q, s >= 0

The prompt has n tokens, of which c were cached. P is the time by the prior profile, or by a guess
where there is none. With `s` alone, one length teaches about all others; a (s), b (s per token) and
q (s per token squared) bend the curve as far as the data ask for it.

- It is a least squares fit of log(measured / predicted). So half and double weigh the same, and a
  noisy place does not look slow. A residual beyond `_MOST_ERROR` counts as that value, so that a
  stall teaches little.
- Older prefills weigh less, with a half-life in prefills. It is long, because long prompts are
  rare.
- Speed may change faster than old prefills are forgotten. When the latest prefills together clearly
  disagree with the curve, their median scales it until the curve has followed.
- The more the prefills scatter, the less the curve may bend: the ridge is their variance over the
  variance that is expected of the bend.

Pure; knows neither queues nor why a prefill took as long as it did.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from scheduler.planning.lengths import Floats
from scheduler.routing.profiles import PrefillProfile

GUESS: Final = PrefillProfile((0.0,), ((0.0, 1e-3, 0.0),))
"""The guess for a place of which nothing is known: 1 ms per token. The first prefill replaces its
level.
"""
MIN_SEEN: Final = 3
"""The number of prefills that makes a place known."""
_POSSIBLE_S: Final = (1e-6, 1e6)
_HALF_LIFE: Final = 100.0
_MOST_ERROR: Final = 0.4
_LEAST_SCATTER: Final = 0.005
_BEND: Final = 0.4
"""The share of the time by which the bend is expected to differ from the prior."""
_PRIOR_ERROR: Final = 2.0
"""The share by which the whole prior may be off. It is large: the level moves rather than the bend.
"""
_LEAST_RIDGE: Final = 1e-9
_EARLY_VARIANCE: Final = 0.3
"""Added to the variance, over the square of the number of prefills. Two or three prefills lie on
some curve however much they scatter, so their residuals say nothing yet.
"""
_NUM_LATEST: Final = 24
_NUM_ERRORS: Final = 32
_CLEAR: Final = 3.5
"""How many standard errors the latest median must be off to be no chance."""
_PASSES: Final = 3
_CONVERGED: Final = 1e-3
_SAME: Final = 1e-6
"""The relative error of a prediction that counts as right."""

_ACTIVE: Final = np.array([m for m in itertools.product((0.0, 1.0), repeat=4) if any(m)])
"""Each way in which some of the coefficients (s, a, b, q) are above 0."""
# For each way: `_KEPT` keeps the equations of the active coefficients, and `_OTHERS` puts 1 on
# the diagonal of the others, so that all ways are solved as one batch.
_KEPT: Final = _ACTIVE[:, :, None] * _ACTIVE[:, None, :]
_OTHERS: Final = np.eye(4) * (1 - _ACTIVE)[:, None, :]


class ProfileState(msgspec.Struct, frozen=True, array_like=True):
    """A learned profile as it is kept and sent. `prefills` are those that are remembered, the
    oldest first: a row of the fit, and seconds. `found` are the coefficients of the fit.
    """

    prior: PrefillProfile | None
    profile: PrefillProfile
    num_seen: int
    found: tuple[float, float, float, float]
    prefills: list[tuple[float, float, float, float, float]]
    first: list[tuple[int, int, float]]
    errors: list[float]


class LearnedProfile:
    """T(n) of one place."""

    def __init__(self, prior: PrefillProfile | None = None, *, memory: int = 256) -> None:
        """`memory` is the number of prefills that are remembered. ValueError below 1."""
        if memory < 1:
            raise ValueError(f"memory {memory} must be at least 1")
        self._prior = prior
        self._profile = prior or GUESS
        self._shape = self._profile.plain()
        self._memory = memory
        self._rows = np.empty((2 * memory, 4))
        self._seconds = np.empty(2 * memory)
        self._weights = np.exp2(np.arange(1 - memory, 1) / _HALF_LIFE)
        self._end = 0
        self.num_seen = 0
        """How many prefills taught something."""
        self._found = np.array([1.0, 0.0, 0.0, 0.0])
        self._first: list[tuple[int, int, float]] = []
        self._errors: deque[float] = deque(maxlen=_NUM_ERRORS)

    @classmethod
    def restored(cls, state: ProfileState) -> LearnedProfile:
        """The profile that `state` was made of: it predicts and learns as that would."""
        found = cls(state.prior)
        for *row, seconds in state.prefills[-found._memory :]:
            found._remember(tuple(row), seconds)
        found._profile, found.num_seen = state.profile, state.num_seen
        found._found = np.array(state.found)
        found._first = list(state.first)
        found._errors.extend(state.errors)
        return found

    def state(self) -> ProfileState:
        """The argument of `restored`."""
        kept = slice(max(0, self._end - self._memory), self._end)
        rows = np.column_stack((self._rows[kept], self._seconds[kept]))
        s, a, b, q = self._found.tolist()
        return ProfileState(
            self._prior,
            self._profile,
            self.num_seen,
            (s, a, b, q),
            [(row[0], row[1], row[2], row[3], row[4]) for row in rows.tolist()],
            list(self._first),
            list(self._errors),
        )

    @property
    def profile(self) -> PrefillProfile:
        """The best estimate now; the prior, or `GUESS`, before anything was observed."""
        return self._profile

    @property
    def has_prior(self) -> bool:
        """Whether it began from measured times."""
        return self._prior is not None

    @property
    def reach_tokens(self) -> float:
        """The longest prompt that the estimate rests on; infinite with a prior."""
        if self._prior is not None:
            return math.inf
        rows = self._rows[max(0, self._end - self._memory) : self._end]
        # A row has n - c, and its product with n + c.
        uncached, product = rows[:, 2], rows[:, 3]
        return float((product / uncached + uncached).max(initial=0.0)) / 2

    @property
    def is_known(self) -> bool:
        """Whether the estimate rests on something: a prior, or enough prefills."""
        return self._prior is not None or self.num_seen >= MIN_SEEN

    @property
    def error(self) -> float | None:
        """Median of |predicted / measured - 1| of the latest prefills; None before the first.

        Each one was predicted from those before it.
        """
        return statistics.median(self._errors) if self._errors else None

    def observe(self, num_tokens: int, cached_tokens: int, seconds: float) -> None:
        """A prefill took `seconds` by itself. Impossible values are ignored."""
        if not (0 < num_tokens < math.inf and 0 <= cached_tokens <= num_tokens):
            return
        if not _POSSIBLE_S[0] <= seconds <= _POSSIBLE_S[1]:
            return
        # Engines compute at least the last token, to sample from it, however much is cached.
        cached = min(cached_tokens, num_tokens - 1)
        error = math.inf
        if self.is_known:
            error = abs(self._profile.prefill_s(num_tokens, cached) / seconds - 1)
            self._errors.append(error)
        self._remember(self._row(num_tokens, cached), seconds)
        if self.num_seen < MIN_SEEN:
            self._first.append((num_tokens, cached, seconds))
        self.num_seen += 1
        # A prefill that took as long as predicted changes nothing, and a fit takes time.
        if error > _SAME:
            self._learn()

    def scaled(self, shape: PrefillProfile) -> PrefillProfile:
        """The profile `shape` of another place, at the level of the first few prefills here.

        Before there were any, it is `shape` itself. Disturbances make a prefill slower, never
        faster. So a single one that was slower than `shape` is believed by half, in logarithms, and
        of two the faster one counts.
        """
        ratios = [
            seconds / shape.prefill_s(num_tokens, cached)
            for num_tokens, cached, seconds in self._first
        ]
        if not ratios:
            return shape
        level = statistics.median_low(ratios)
        if len(ratios) == 1:
            level = min(level, math.sqrt(level))
        return shape.corrected(shape.factor * level)

    def _row(self, num_tokens: int, cached: int) -> tuple[float, float, float, float]:
        num_uncached = num_tokens - cached
        shape_s = max(self._shape.prefill_s(num_tokens, cached), 1e-12)
        return shape_s, 1.0, float(num_uncached), float(num_uncached * (num_tokens + cached))

    def _remember(self, row: tuple[float, ...], seconds: float) -> None:
        # There is room for twice the memory. So rows stay contiguous, and are moved once in
        # `memory` prefills.
        if self._end == len(self._seconds):
            self._rows[: self._memory] = self._rows[self._memory :]
            self._seconds[: self._memory] = self._seconds[self._memory :]
            self._end = self._memory
        self._rows[self._end] = row
        self._seconds[self._end] = seconds
        self._end += 1

    def _learn(self) -> None:
        start = max(0, self._end - self._memory)
        rows, seconds = self._rows[start : self._end], self._seconds[start : self._end]
        weights = self._weights[len(self._weights) - len(seconds) :]
        if self._prior is None and self.num_seen <= MIN_SEEN:
            # A guess may be off by any factor, and an engine's first prefill often is a stall. Of
            # two prefills the faster one is believed.
            scale = statistics.median_low((seconds / rows[:, 0]).tolist())
            self._found = np.array([scale, 0.0, 0.0, 0.0])
        for _ in range(_PASSES):
            step = self._pass(rows, seconds, weights)
            if step < _CONVERGED:
                break
        self._profile = self._fitted(self._level(rows, seconds))

    def _pass(self, rows: Floats, seconds: Floats, weights: Floats) -> float:
        """One Gauss-Newton step. Returns the largest relative change of a prediction."""
        predicted = rows @ self._found
        # A stall may pull as much as an error of this size, and no more.
        errors = np.log(seconds / predicted).clip(-_MOST_ERROR, _MOST_ERROR)
        relative = rows / predicted[:, None]
        weighted = relative.T * weights
        matrix, wanted = weighted @ relative, weighted @ (1 + errors)
        total = float(weights.sum())
        variance = max(_LEAST_SCATTER**2, float(weights @ errors**2) / total)
        variance += _EARLY_VARIANCE / total**2
        ridge = self._ridge(variance) * matrix.diagonal() / total
        matrix[np.diag_indices(4)] += ridge
        if self._prior is not None:
            wanted[0] += ridge[0]
        self._found = _least(matrix, wanted)
        return float(np.abs(rows @ self._found / predicted - 1).max())

    def _ridge(self, variance: float) -> Floats:
        """The ridge of each coefficient, as a share of its own weight in one prefill."""
        bend = max(_LEAST_RIDGE, variance / _BEND**2)
        scale = _LEAST_RIDGE if self._prior is None else variance / _PRIOR_ERROR**2
        return np.array([scale, bend, bend, bend])

    def _level(self, rows: Floats, seconds: Floats) -> float:
        """The factor that the latest prefills ask for; 1 unless they clearly disagree."""
        if len(seconds) < _NUM_LATEST:
            return 1.0
        # The median and the quartiles, since a few stalls among the latest must not count.
        latest = slice(-_NUM_LATEST, None)
        ratios = np.log(seconds[latest] / (rows[latest] @ self._found)).tolist()
        low, median, high = statistics.quantiles(ratios, n=4)
        # For a normal distribution, the standard deviation is the quartile range / 1.35, and the
        # standard error of the median is 1.25 standard deviations / sqrt(n).
        chance = 1.25 * max(_LEAST_SCATTER, (high - low) / 1.35) / math.sqrt(_NUM_LATEST)
        return math.exp(median) if abs(median) > _CLEAR * chance else 1.0

    def _fitted(self, level: float) -> PrefillProfile:
        scale, *bend = (float(value) * level for value in self._found)
        a, b, q = bend
        return PrefillProfile(
            self._shape.starts,
            tuple(
                (scale * constant + a, scale * linear + b, scale * square + q)
                for constant, linear, square in self._shape.coefficients
            ),
        )


def profile_through(prefills: Sequence[tuple[int, float]]) -> PrefillProfile | None:
    """The line through the shortest and the longest of some prefills without a cache; tokens and
    seconds. With one length only, the time counts as per token. None without a usable prefill.
    """
    # Of several of one length the fastest counts: disturbances only ever make a prefill slower.
    found: dict[int, float] = {}
    for num_tokens, seconds in prefills:
        if num_tokens > 0 and _POSSIBLE_S[0] <= seconds <= _POSSIBLE_S[1]:
            found[num_tokens] = min(seconds, found.get(num_tokens, math.inf))
    if not found:
        return None
    short, long = min(found), max(found)
    slope = found[long] / long
    if short < long:
        # A line may neither fall nor begin below zero.
        slope = min(slope, max(0.0, (found[long] - found[short]) / (long - short)))
    return PrefillProfile((0.0,), ((found[long] - slope * long, slope, 0.0),))


def _least(matrix: Floats, wanted: Floats) -> Floats:
    """The x >= 0 with the least x'Mx - 2 w'x. With 4 coefficients, all active sets can be tried."""
    # Scaled to a unit diagonal: s is near 1 and q near 1e-9, too far apart to solve well.
    scale = np.sqrt(matrix.diagonal())
    normal = matrix / np.outer(scale, scale)
    target = wanted / scale
    found = np.linalg.solve(normal * _KEPT + _OTHERS, (_ACTIVE * target)[:, :, None])[:, :, 0]
    gains = np.where((found >= 0).all(axis=1), found @ target, -math.inf)
    best: Floats = found[int(gains.argmax())] / scale
    return best
