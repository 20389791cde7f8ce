"""Filters: one rate out of two kinds of measurements, and decaying sums. Knows no link and no
clock.

A *measurement* was taken while there was always more to send: the rate is what it says. A *floor*
was taken while the sender had pauses: the real rate is that or more. So a floor can raise the rate
and disproves lower measurements, but never lowers the rate.

The filter follows the median of the last three measurements, falls at once and rises slowly. So a
single odd measurement changes nothing; BBR, for one, drains its window for 0.2 s every 10 s. The
filter is monotone: lower inputs at the same times never give a higher rate.
"""

from __future__ import annotations

import math
from collections import deque

_NUM_RECENT = 3


class RateFilter:
    """The rate of one link in bytes/s: it falls at once and rises slowly."""

    def __init__(self, rise_s: float) -> None:
        """`rise_s`: time constant of a rise."""
        self._rise_s = rise_s
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self.bytes_per_s = 0.0
        self.is_floor = False
        """Whether the rate comes from a floor, so that the real one may be higher."""
        self.measured_s: float | None = None
        """When the rate was last measured. Only a measurement shows that it is not higher."""
        self.heard_s: float | None = None
        """When the rate was last measured, raised or confirmed."""

    def measure(self, bytes_per_s: float, interval_s: float, now_s: float) -> None:
        """Take in a measurement over the last `interval_s`."""
        is_first = not self._recent
        self._recent.append(bytes_per_s)
        middle = sorted(self._recent)[len(self._recent) // 2]
        if is_first or middle <= self.bytes_per_s:
            self.bytes_per_s = middle
        else:
            step = 1 - math.exp(-interval_s / self._rise_s)
            self.bytes_per_s += step * (middle - self.bytes_per_s)
        self.is_floor = False
        self.measured_s = self.heard_s = now_s

    def replace(self, bytes_per_s: float, now_s: float) -> None:
        """Take in a measurement that is good enough to forget all earlier ones."""
        self._recent.clear()
        self.measure(bytes_per_s, 1.0, now_s)

    def at_least(self, bytes_per_s: float, now_s: float) -> None:
        """Take in a floor. It confirms the rate only if it comes close to it."""
        for index, earlier in enumerate(self._recent):
            self._recent[index] = max(earlier, bytes_per_s)
        if bytes_per_s > self.bytes_per_s:
            self.bytes_per_s, self.is_floor = bytes_per_s, True
        if bytes_per_s > 0 and bytes_per_s >= 0.9 * self.bytes_per_s:
            self.heard_s = now_s


class DecayingShare:
    """part / whole over about the last `window_s`, 0 while the whole is too small to say."""

    def __init__(self, window_s: float, least_whole: float) -> None:
        self._window_s = window_s
        self._least_whole = least_whole
        self._part = 0.0
        self._whole = 0.0
        self._at_s: float | None = None

    def add(self, part: float, whole: float, now_s: float) -> None:
        fade = self._fade(now_s)
        self._part = self._part * fade + part
        self._whole = self._whole * fade + whole
        self._at_s = now_s

    def value(self, now_s: float) -> float:
        whole = self._whole * self._fade(now_s)
        return self._part / self._whole if whole >= self._least_whole else 0.0

    def _fade(self, now_s: float) -> float:
        if self._at_s is None:
            return 0.0
        return math.exp(-max(0.0, now_s - self._at_s) / self._window_s)


class DecayingRate:
    """Bytes/s over about the last `window_s`; sinks while nobody adds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._bytes_per_s = 0.0
        self._at_s: float | None = None

    def add(self, num_bytes: float, interval_s: float, now_s: float) -> None:
        """`num_bytes` came evenly over the `interval_s` that end now."""
        fade = math.exp(-interval_s / self._window_s)
        started = 0.0 if self._at_s is None else self._bytes_per_s
        self._bytes_per_s = started * fade + (1 - fade) * num_bytes / interval_s
        self._at_s = now_s

    def value(self, now_s: float) -> float:
        if self._at_s is None:
            return 0.0
        return self._bytes_per_s * math.exp(-max(0.0, now_s - self._at_s) / self._window_s)


class WindowedMin:
    """The least positive value of the last one to two windows, in constant memory."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._began_s = -math.inf
        self._previous = math.inf
        self._current = math.inf

    @property
    def value(self) -> float:
        """0 before the first."""
        least = min(self._previous, self._current)
        return least if math.isfinite(least) else 0.0

    def add(self, value: float, now_s: float) -> None:
        if value <= 0:
            return
        if now_s - self._began_s >= self._window_s:
            is_recent = now_s - self._began_s < 2 * self._window_s
            self._previous = self._current if is_recent else math.inf
            self._current = math.inf
            self._began_s = now_s
        self._current = min(self._current, value)
