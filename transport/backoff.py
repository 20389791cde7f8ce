"""How long to wait before the next attempt. Knows no clock and no socket."""

from __future__ import annotations

import random
from collections.abc import Callable


def jittered(delay_s: float, uniform: Callable[[], float] = random.random) -> float:
    """Between half of the delay and all of it: those who lost the same peer together do not all
    come back to it at once. `uniform`: numbers in [0, 1).
    """
    return delay_s * (1 + uniform()) / 2


class Backoff:
    """Doubles from `first_s` to `max_s`, jittered; a connection that lived longer than `max_s`
    starts it anew, as does `reset`.
    """

    def __init__(
        self, first_s: float, max_s: float, uniform: Callable[[], float] = random.random
    ) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s
        self._uniform = uniform

    def after(self, lived_s: float) -> float:
        """The delay after a connection that lived this long (0 when it never came up)."""
        if lived_s > self._max_s:
            self.reset()
        delay_s = self._next_s
        self._next_s = min(self._max_s, max(self._first_s, delay_s * 2))
        return jittered(delay_s, self._uniform)

    def reset(self) -> None:
        """The peer answered."""
        self._next_s = self._first_s
