"""Recent arrivals, in bounded memory, as the traffic that the planner takes.

Lengths are counted in narrow logarithmic bins, with a row of them for each slice of time. Older
slices weigh less, with a half-life. Where the distribution clearly changed (two-sample
Kolmogorov-Smirnov test at the best cut between old and new), everything before the cut is dropped.
Constant traffic thus gets long windows and little noise, and a shift is seen within minutes.

Prompts and outputs are followed apart, because the length of an output is known only at its end and
either may change alone. Time is an argument. What is told late counts for its own slice. This file
knows no clusters, no queues and no plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from scheduler.live.learning.media_window import MediaDemand, MediaWindow, MediaWindowState
from scheduler.planning.lengths import EmpiricalLengths, Floats
from scheduler.planning.region_model import Traffic

BINS_PER_OCTAVE = 32
NUM_BINS = 24 * BINS_PER_OCTAVE
"""Up to 16M tokens. Longer prompts are counted in the last bin."""
POINTS_PER_BIN = 4
"""How many lengths, evenly spread over it, a bin becomes."""
SLICE_S: Final = 60.0
HALF_LIFE_S: Final = 3600.0
"""The age at which a request counts half."""
MEMORY_S: Final = 7200.0
"""Older requests are dropped."""
NUM_SLICES: Final = math.ceil(MEMORY_S / SLICE_S)
"""Rows of 3 KiB that are kept, for prompts and again for outputs."""
MIN_RECENT: Final = 100
"""A cut is tried only with at least this many requests on either side: with fewer the asymptotic
bound of the test does not hold."""
CHANGE_ODDS = 1e-6
"""The probability that two samples of one distribution are taken for different, for each cut."""
# The KS distance that chance exceeds with probability p is about sqrt(-ln(p / 2) / 2) times
# sqrt(1 / n + 1 / m) for samples of n and m.
_KS_SCALE = math.sqrt(-math.log(CHANGE_ODDS / 2) / 2)
Rows = np.ndarray[tuple[int], np.dtype[np.int64]]
Counts = np.ndarray[Any, np.dtype[np.int32]]
_EDGES: Floats = np.exp2(np.arange(NUM_BINS + 1) / BINS_PER_OCTAVE)


@dataclass(frozen=True)
class LengthSample:
    """A weighted sample of token counts."""

    lengths: EmpiricalLengths
    mean_tokens: float
    num: float
    """The number of equally weighted values with the same error (Kish's effective sample size)."""
    relative_error: float
    """Standard error of the mean, over the mean."""
    window_s: float
    """How far back it reaches, seconds; at least 1."""


@dataclass(frozen=True)
class MeasuredTraffic:
    """Measured traffic, and how far to trust it."""

    uncached: LengthSample
    """The parts of prompts that had to be prefilled."""
    output: LengthSample
    input_tokens: float
    """Mean length of whole prompts."""
    hit_ratio: float
    """The share of all prompt tokens that were cached."""
    rate_rps: float
    """Arrivals per second over the window of `uncached`."""
    media: MediaDemand | None = None
    """The media in that window; None without any."""
    cached_before: float = 0.0
    """The mean number of cached tokens before an uncached one: (E[n^2 - c^2] - E[l^2]) / 2 E[l]
    for prompts of n tokens with c cached and l uncached ones."""

    @property
    def num_requests(self) -> float:
        """The number of requests it rests on: of prompts and outputs, the fewer."""
        return min(self.uncached.num, self.output.num)

    def traffic(self, *, uncached_scale: float = 1.0, output_scale: float = 1.0) -> Traffic:
        """The traffic as a plan takes it, with the means multiplied by the scales."""
        lengths = self.uncached.lengths
        return Traffic(
            lengths if uncached_scale == 1 else lengths.scaled(uncached_scale),
            self.output.mean_tokens * output_scale,
            self.input_tokens,
        )


class SliceState(msgspec.Struct, frozen=True, array_like=True):
    """One slice of time: its requests by bin, and the sums of their values."""

    counts: dict[int, int]
    sums: list[float]


class ChannelState(msgspec.Struct, frozen=True, array_like=True):
    """The window of one quantity. `age_s` is the time since its newest slice began, `began_age_s`
    since the first request. `slices` has the newest first.
    """

    age_s: float
    began_age_s: float
    slices: list[SliceState]


class TrafficState(msgspec.Struct, frozen=True, array_like=True):
    """Measured traffic as it is kept and sent; None where nothing has been counted."""

    uncached: ChannelState | None
    output: ChannelState | None
    media: MediaWindowState | None = None


class TrafficMeter:
    """Counts requests as they come and go."""

    def __init__(self) -> None:
        self._uncached = _Channel(num_extra=2)
        self._output = _Channel(num_extra=0)
        self._media = MediaWindow()

    def part(self) -> TrafficMeter:
        """A meter of some of these requests. It counts their prompts, and takes their answers to be
        as long as those of all.
        """
        found = TrafficMeter()
        found._output = self._output
        return found

    @classmethod
    def restored(cls, state: TrafficState, now_s: float) -> TrafficMeter:
        """The meter that `state` was made of, to within a slice of time."""
        found = cls()
        for channel, kept in ((found._uncached, state.uncached), (found._output, state.output)):
            if kept is not None:
                channel.restore(kept, now_s)
        found._media.restore(state.media, now_s)
        return found

    def restore_prompts(self, state: TrafficState, now_s: float) -> None:
        """Take over the prompts of a state, for a `part`: its answers are those of all."""
        if state.uncached is not None:
            self._uncached.restore(state.uncached, now_s)
        self._media.restore(state.media, now_s)

    def state(self, now_s: float) -> TrafficState:
        """The argument of `restored`."""
        return TrafficState(
            self._uncached.state(now_s), self._output.state(now_s), self._media.state(now_s)
        )

    def arrived(
        self, prompt_tokens: int, cached_tokens: int, now_s: float, media_tokens: int = 0
    ) -> None:
        """A request came. At least one token of it is always computed. Media of `media_tokens`
        tokens have to be encoded for it.
        """
        if not 0 <= cached_tokens <= prompt_tokens:
            raise ValueError(
                f"{cached_tokens} of {prompt_tokens} tokens cached; give 0 <= cached <= prompt"
            )
        uncached_tokens = max(1, prompt_tokens - cached_tokens)
        pairs = uncached_tokens * min(cached_tokens, prompt_tokens - 1)
        self._uncached.add(uncached_tokens, now_s, max(1, prompt_tokens), max(0, pairs))
        if media_tokens > 0:
            self._media.add(media_tokens, now_s)

    def finished(self, output_tokens: int, now_s: float) -> None:
        """A request ended with `output_tokens`. One without output says nothing of decode."""
        if output_tokens > 0:
            self._output.add(output_tokens, now_s)

    def measured(self, now_s: float) -> MeasuredTraffic | None:
        """The traffic so far; None until a request has come and one has ended. Changes nothing."""
        prompts, outputs = self._uncached.seen(now_s), self._output.seen(now_s)
        if prompts is None or outputs is None:
            return None
        uncached, (input_tokens, pairs) = prompts.sample, prompts.extra
        return MeasuredTraffic(
            uncached=uncached,
            output=outputs.sample,
            input_tokens=input_tokens,
            hit_ratio=max(0.0, 1 - uncached.mean_tokens / input_tokens),
            rate_rps=prompts.num / uncached.window_s,
            media=self._media.since(now_s - uncached.window_s, prompts.num),
            cached_before=pairs / uncached.mean_tokens,
        )

    def forget_before_change(self, now_s: float) -> None:
        """Drop for good what is older than the clearest change.

        Otherwise a later and smaller change would be hard to see beside this one.
        """
        self._uncached.forget_before_change(now_s)
        self._output.forget_before_change(now_s)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A window: its weighted sample, its number of values, and the means of what came with them."""

    sample: LengthSample
    num: int
    extra: list[float]


class _Channel:
    """Counts of one quantity by slice of time: a ring of rows, the newest at `_newest`."""

    def __init__(self, num_extra: int) -> None:
        self._counts = np.zeros((NUM_SLICES, NUM_BINS), np.int32)
        self._bins = NUM_BINS, 0
        """The first bin that has ever counted, and the one after the last. Most bins are outside of
        them and empty, and the event loop waits for what is computed of these rows.
        """
        self._sums = np.zeros((NUM_SLICES, 2 + num_extra))
        """Sums of the values, of their squares, and of what came with them."""
        self._num_used = 0
        """How many slices, from the newest back, belong to the window."""
        self._newest: int | None = None
        """The number of the newest slice, counted from time 0."""
        self._began_s = 0.0

    def add(self, value: int, now_s: float, *extra: int) -> None:
        self._advance(now_s)
        newest = self._newest or 0
        # Another gateway may tell late. What is older than the window counts for its oldest slice.
        current = min(newest, max(int(now_s // SLICE_S), newest - self._num_used + 1))
        row = current % len(self._sums)
        at = min(int(math.log2(value) * BINS_PER_OCTAVE), NUM_BINS - 1)
        self._counts[row, at] += 1
        self._see(at, at + 1)
        sums = self._sums[row]
        sums[0] += value
        sums[1] += value * value
        sums[2:] += extra

    def state(self, now_s: float) -> ChannelState | None:
        """The argument of `restore`; None if nothing was counted."""
        if self._newest is None:
            return None
        rows = (self._newest - np.arange(self._num_used)) % NUM_SLICES
        counts, first = self._narrow(rows), self._bins[0]
        ago, at = np.nonzero(counts)
        nums, bins = counts[ago, at].tolist(), (at + first).tolist()
        ends = np.searchsorted(ago, np.arange(len(rows) + 1)).tolist()
        slices = [
            SliceState(dict(zip(bins[start:end], nums[start:end], strict=True)), sums)
            for start, end, sums in zip(ends, ends[1:], self._sums[rows].tolist(), strict=False)
        ]
        return ChannelState(now_s - self._newest * SLICE_S, now_s - self._began_s, slices)

    def restore(self, state: ChannelState, now_s: float) -> None:
        """Take over the window of a state. ValueError if it is that of another quantity."""
        newest = self._newest = round((now_s - state.age_s) / SLICE_S)
        self._num_used = min(len(state.slices), NUM_SLICES)
        self._began_s = now_s - state.began_age_s
        for ago, kept in enumerate(state.slices[:NUM_SLICES]):
            row = (newest - ago) % NUM_SLICES
            self._sums[row] = kept.sums
            for at, num in kept.counts.items():
                self._counts[row, at] = num
                self._see(at, at + 1)

    def seen(self, now_s: float) -> _Seen | None:
        """The window since its clearest change; None if it is empty."""
        rows, ages_s = self._window(now_s)
        window = self._narrow(rows)
        if not window.any():
            return None
        weights: Floats = np.exp2(-ages_s / HALF_LIFE_S)
        counts: Floats = np.zeros(NUM_BINS)
        counts[slice(*self._bins)] = weights @ window
        total = counts.sum()
        mean, square, *extra = (float(each) for each in weights @ self._sums[rows] / total)
        # Kish: (sum of weights)^2 / sum of squared weights.
        num = float(total**2 / (weights**2 @ window.sum(axis=1)))
        spread = math.sqrt(max(0.0, square - mean**2))
        oldest_s = ((self._newest or 0) - len(rows) + 1) * SLICE_S
        sample = LengthSample(
            _lengths_of(counts, mean),
            mean,
            num,
            spread / (mean * math.sqrt(num)),
            max(1.0, now_s - max(self._began_s, oldest_s)),
        )
        return _Seen(sample, int(window.sum()), extra)

    def forget_before_change(self, now_s: float) -> None:
        self._num_used = len(self._window(now_s)[0])

    def _window(self, now_s: float) -> tuple[Rows, Floats]:
        """The rows since the clearest change, the newest first, and the age of each."""
        newest = self._newest or 0
        age = max(0, int(now_s // SLICE_S) - newest)
        num = max(0, min(self._num_used, NUM_SLICES - age))
        rows = self._since_change((newest - np.arange(num)) % NUM_SLICES)
        ages_s: Floats = (age + np.arange(len(rows), dtype=np.float64)) * SLICE_S
        return rows, ages_s

    def _see(self, first: int, end: int) -> None:
        self._bins = min(self._bins[0], first), max(self._bins[1], end)

    def _narrow(self, rows: Rows) -> Counts:
        """The counts of these rows, in the bins that have any."""
        return self._counts[rows, slice(*self._bins)]

    def _advance(self, now_s: float) -> None:
        """Open the slice that contains `now_s`. Slices in between stay empty."""
        current = int(now_s // SLICE_S)
        if self._newest is None:
            self._newest, self._num_used, self._began_s = current, 1, now_s
            return
        steps = current - self._newest
        if steps <= 0:
            return
        # A restored window may be as old as it likes: one turn of the ring empties it.
        opened = (current - np.arange(min(steps, NUM_SLICES))) % NUM_SLICES
        self._counts[opened] = 0
        self._sums[opened] = 0
        self._newest = current
        self._num_used = min(NUM_SLICES, self._num_used + steps)

    def _since_change(self, rows: Rows) -> Rows:
        """The part of `rows` that is not older than the clearest change, if there is one."""
        upto = np.cumsum(self._narrow(rows), axis=0)
        newer = upto[:-1].sum(axis=1, dtype=np.float64)
        older = upto[-1:].sum() - newer
        tried = np.flatnonzero((newer >= MIN_RECENT) & (older >= MIN_RECENT))
        if not len(tried):
            return rows
        new = np.cumsum(upto[tried], axis=1)
        old = np.cumsum(upto[-1]) - new
        gap = new / newer[tried, None]
        gap -= old / older[tried, None]
        distance = np.abs(gap, out=gap).max(axis=1)
        chance = _KS_SCALE * np.sqrt(1 / newer[tried] + 1 / older[tried])
        clearest = int(np.argmax(distance / chance))
        is_change = distance[clearest] > chance[clearest]
        return rows[: tried[clearest] + 1] if is_change else rows


def _lengths_of(counts: Floats, mean: float) -> EmpiricalLengths:
    """Bins as lengths spread over them, scaled so that the mean is exact."""
    full = np.flatnonzero(counts)
    inside = (np.arange(POINTS_PER_BIN) + 0.5) / POINTS_PER_BIN
    low, high = _EDGES[full, None], _EDGES[full + 1, None]
    tokens = (low + (high - low) * inside).ravel()
    weights = np.repeat(counts[full], POINTS_PER_BIN)
    return EmpiricalLengths(tokens * (mean / float(np.average(tokens, weights=weights))), weights)
