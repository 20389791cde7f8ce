"""When clients that were turned away for want of a place may come back.

Places fall free at the rate at which requests end, by Little's law: what is held over the mean time
it is held. Those turned away are told to come one after another at that rate, so that they do not
all return at once to a single place. Pure; time is an argument. Knows no HTTP.
"""

from __future__ import annotations

import math


class Turnstile:
    """Of one limit or of several that hold the same requests. `min_s` and `max_s` bound a wait."""

    GAIN = 0.05

    def __init__(self, min_s: float, max_s: float) -> None:
        if not 0 < min_s < math.inf:
            raise ValueError(f"min_s is {min_s!r}; it must be above 0")
        self._min_s = min_s
        self._max_s = max(min_s, max_s)
        self._held_s = 0.0
        self._num_ended = 0
        self._last_s = -math.inf

    def ended(self, held_s: float) -> None:
        """A request that was served gave its place back after so long. One that was refused tells
        nothing about when the others end.
        """
        self._num_ended += 1
        gain = max(self.GAIN, 1 / self._num_ended)
        self._held_s += gain * (held_s - self._held_s)

    def turned_away(self, share: float, now_s: float) -> int:
        """After how many whole seconds the next one that is turned away may come back.

        `share`: of all that is held now, what must be given back for it.
        """
        free_s = self._held_s * share
        self._last_s = min(max(self._last_s, now_s) + free_s, now_s + self._max_s)
        return math.ceil(max(self._last_s - now_s, self._min_s))
