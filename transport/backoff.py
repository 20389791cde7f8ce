"""How long to wait before something is tried again: a connection, a call, or a process that ended.

Knows no clock, no socket and no process.
"""

from __future__ import annotations

import random
from collections.abc import Callable


def jittered(delay_s: float, uniform: Callable[[], float] = random.random) -> float:
    """Between half of the delay and all of it: those who lost the same peer together do not all
    come back to it at once. `uniform`: numbers in [0, 1).
    """
    return delay_s * (1 + uniform()) / 2


class Backoff:
    """The delay doubles from `first_s` to `max_s` and is jittered. It starts at `first_s` again
    after a connection or process that lived longer than `max_s`, and after `reset`.
    """

    def __init__(
        self, first_s: float, max_s: float, uniform: Callable[[], float] = random.random
    ) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s
        self._uniform = uniform

    def after(self, lived_s: float) -> float:
        """The delay after one that lived this long, seconds; 0 if it never came up."""
        # A peer that accepts and closes at once must not be dialled at full speed, so only a
        # connection that outlived the longest delay counts as a good one.
        if lived_s > self._max_s:
            self.reset()
        delay_s = self._next_s
        self._next_s = min(self._max_s, max(self._first_s, delay_s * 2))
        return jittered(delay_s, self._uniform)

    def reset(self) -> None:
        """The peer answered."""
        self._next_s = self._first_s
