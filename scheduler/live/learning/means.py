"""Averages of what requests show, and the time of a decode step over its batch. Pure, no clock."""

from __future__ import annotations

import math
from typing import Final

import msgspec

MEAN_GAIN: Final = 0.05


class MeanState(msgspec.Struct, frozen=True, array_like=True):
    """An average, and the number of values that it rests on."""

    num_seen: int
    value: float | None


class Mean:
    """An exponential average. Its first `1 / gain` values weigh alike; None before the first."""

    def __init__(self, gain: float = MEAN_GAIN) -> None:
        self._gain = gain
        self.num_seen = 0
        self.value: float | None = None

    def state(self) -> MeanState:
        """The argument of `restore`."""
        return MeanState(self.num_seen, self.value)

    def restore(self, state: MeanState) -> None:
        """Go on from a state."""
        self.num_seen, self.value = state.num_seen, state.value

    def observe(self, value: float) -> None:
        """Add a value. Values that are not finite are ignored."""
        if not math.isfinite(value):
            return
        self.num_seen += 1
        gain = max(self._gain, 1 / self.num_seen)
        self.value = value if self.value is None else self.value + gain * (value - self.value)


class StepLine:
    """The time of a decode step as a line over the requests in the batch.

    Answers count in classes of batches, each from a power of two to the next. So a quiet night,
    which has small batches only, does not wipe out what a busy day has shown of large ones.
    """

    def __init__(self) -> None:
        self._classes: dict[int, tuple[Mean, Mean]] = {}  # batch and step of each

    def observe(self, batch: int, step_s: float) -> None:
        """The steps of an answer took so long, in a batch of so many requests."""
        if batch > 0 and 0 <= step_s < math.inf:
            means = self._classes.setdefault(batch.bit_length(), (Mean(), Mean()))
            for mean, value in zip(means, (batch, step_s), strict=True):
                mean.observe(value)

    def at(self, batch: float) -> float | None:
        """The time of a step of such a batch, seconds; None before the first answer.

        While all answers had batches of one class, nothing says how steps grow: their mean.
        """
        points = [(b.value or 0.0, s.value or 0.0, b.num_seen) for b, s in self._classes.values()]
        if not points:
            return None
        # More values than a mean remembers make it no surer.
        weights = [min(num_seen, 1 / MEAN_GAIN) for _, _, num_seen in points]
        total = math.fsum(weights)
        x = math.fsum(w * p[0] for w, p in zip(weights, points, strict=True)) / total
        y = math.fsum(w * p[1] for w, p in zip(weights, points, strict=True)) / total
        pairs = [(w, p[0] - x, p[1] - y) for w, p in zip(weights, points, strict=True)]
        spread = math.fsum(w * dx * dx for w, dx, _ in pairs)
        slope = math.fsum(w * dx * dy for w, dx, dy in pairs) / spread if spread else 0.0
        # A larger batch takes no less time, and an empty one takes none or more.
        return y + min(max(slope, 0.0), y / x) * (batch - x)

    def state(self) -> list[tuple[MeanState, MeanState]]:
        """The argument of `restore`."""
        return [(batch.state(), step.state()) for batch, step in self._classes.values()]

    def restore(self, state: list[tuple[MeanState, MeanState]]) -> None:
        """Go on from a state."""
        for batch, step in state:
            if batch.value is not None:
                means = self._classes[int(batch.value).bit_length()] = Mean(), Mean()
                means[0].restore(batch)
                means[1].restore(step)
