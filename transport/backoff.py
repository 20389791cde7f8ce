"""How long to wait before something that ended is tried again: a connection, or a process.

Knows no clock, no socket and no process.
"""

from __future__ import annotations


class Backoff:
    """The delay doubles from `first_s` to `max_s`. It starts at `first_s` again after a connection
    or process that lived longer than `max_s`.
    """

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s

    def after(self, lived_s: float) -> float:
        """The delay after one that lived this long, seconds; 0 if it never came up."""
        # A peer that accepts and closes at once must not be dialled at full speed, so only a
        # connection that outlived the longest delay counts as a good one.
        if lived_s > self._max_s:
            self._next_s = self._first_s
        delay_s = self._next_s
        self._next_s = min(self._max_s, max(self._first_s, delay_s * 2))
        return delay_s
