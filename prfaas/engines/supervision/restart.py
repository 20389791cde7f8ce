"""When a process that ended is started again: jittered exponential backoff that remembers failures.

Pure: time is an argument, nothing is started here, and what the process does is not known.
"""

import random
from collections.abc import Callable
from typing import Final

from transport.backoff import Backoff

FIRST_DELAY_S: Final = 1.0
MAX_DELAY_S: Final = 60.0
"""Delays double up to this. After a longer healthy time they begin with the first one again.
Jitter then takes off up to half.
"""


class RestartPolicy:
    """The record of one process, which gives the delay before each restart."""

    def __init__(self, uniform: Callable[[], float] = random.random) -> None:
        """`uniform`: numbers in [0, 1) for the jitter."""
        self._healthy_since_s: float | None = None
        self._backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S, uniform)
        self.num_failures = 0
        """Failures in a row, with no healthy time of more than `MAX_DELAY_S` between them."""
        self.num_restarts = 0

    def healthy(self, now_s: float) -> None:
        """A probe succeeded; the first success after a start begins the healthy time."""
        if self._healthy_since_s is None:
            self._healthy_since_s = now_s

    def process_ended(self, now_s: float) -> float:
        """The process ended without being asked to, or had to be killed. Returns the delay until
        its next start, seconds.
        """
        since_s, self._healthy_since_s = self._healthy_since_s, None
        healthy_s = 0.0 if since_s is None else now_s - since_s
        self.num_failures = 1 if healthy_s > MAX_DELAY_S else self.num_failures + 1
        self.num_restarts += 1
        return self._backoff.after(healthy_s)
