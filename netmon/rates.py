"""One rate out of two kinds of evidence, and sums that fade. Knows no link and no clock.

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
from typing import Final

RISE_S: Final = 1.0
"""Time constant of a rise. Chosen: a sample of a busy link closes a fifth of the difference."""
CONFIRMING: Final = 0.9
"""A floor confirms the rate from this share of it on. Chosen: rates of a steady link vary less."""


class RateFilter:
    """The rate of one link in bytes/s. `is_floor`: it comes from a floor, the real one may be
    higher. `measured_s`: when it was last measured; `confirmed_s`: measured, raised or confirmed.
    """

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self.is_floor = False
        self.measured_s: float | None = None
        self.confirmed_s: float | None = None
        self._recent: deque[float] = deque(maxlen=3)

    def measure(self, bytes_per_s: float, interval_s: float, now_s: float) -> None:
        """Take in a measurement over the last `interval_s`."""
        is_first = not self._recent
        self._recent.append(bytes_per_s)
        middle = sorted(self._recent)[len(self._recent) // 2]
        if is_first or middle <= self.bytes_per_s:
            self.bytes_per_s = middle
        else:
            step = 1 - math.exp(-interval_s / RISE_S)
            self.bytes_per_s += step * (middle - self.bytes_per_s)
        self.is_floor = False
        self.measured_s = self.confirmed_s = now_s

    def replace(self, bytes_per_s: float, now_s: float) -> None:
        """Take in a measurement that is good enough to forget all earlier ones."""
        self._recent.clear()
        self.measure(bytes_per_s, RISE_S, now_s)

    def at_least(self, bytes_per_s: float, now_s: float) -> None:
        """Take in a floor. It confirms the rate only if it comes close to it."""
        for index, earlier in enumerate(self._recent):
            self._recent[index] = max(earlier, bytes_per_s)
        if bytes_per_s > self.bytes_per_s:
            self.bytes_per_s, self.is_floor = bytes_per_s, True
        if bytes_per_s > 0 and bytes_per_s >= CONFIRMING * self.bytes_per_s:
            self.confirmed_s = now_s


class FadingSum:
    """The sum of what was added, of which a share of 1/e is left after `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._sum = self._at_s = 0.0

    def add(self, amount: float, now_s: float) -> None:
        self._sum, self._at_s = self.value(now_s) + amount, now_s

    def value(self, now_s: float) -> float:
        return self._sum * math.exp(-max(0.0, now_s - self._at_s) / self._window_s)
