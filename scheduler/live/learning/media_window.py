"""How many media tokens recent requests had to have encoded, in bounded memory.

Sums by slice of time, over the same window as the lengths of prompts. Pure; time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import msgspec

from scheduler.encoding.line import EncodeLine

MEMORY_S: Final = 7200.0
"""Older requests are dropped, as those of `measured_traffic`."""
SLICE_S: Final = 60.0


class MediaDemand(msgspec.Struct, frozen=True):
    """The media of a sample of requests."""

    mean_tokens: float
    """Media tokens to encode for each request, those without media included."""
    relative_error: float
    """Standard error of the mean, over the mean."""
    typical_tokens: float
    """The mean size of a request's media, each request weighed by it."""

    def seconds(self, line: EncodeLine | None) -> float:
        """What encoding takes for each request, those without media included; 0 while nobody knows
        how long it takes.
        """
        if line is None:
            return 0.0
        return self.mean_tokens * line.seconds(self.typical_tokens) / self.typical_tokens


class MediaWindowState(msgspec.Struct, frozen=True, array_like=True):
    """A window as it is kept and sent: of each slice its age in seconds, its tokens, and the sum of
    the squares of the requests' tokens; the oldest first.
    """

    slices: list[tuple[float, float, float]]


class MediaWindow:
    """The media of the requests of the last two hours."""

    def __init__(self) -> None:
        self._slices: deque[list[float]] = deque(maxlen=math.ceil(MEMORY_S / SLICE_S))
        """When each slice began, its tokens, and the sum of their squares."""

    def add(self, num_tokens: int, now_s: float) -> None:
        """A request with media of so many tokens came. It counts at the time of the telling."""
        newest = self._slices[-1] if self._slices else None
        if newest is None or now_s - newest[0] >= SLICE_S:
            newest = [now_s, 0.0, 0.0]
            self._slices.append(newest)
        newest[1] += num_tokens
        newest[2] += num_tokens * num_tokens

    def since(self, from_s: float, num_requests: int) -> MediaDemand | None:
        """The media of the `num_requests` requests since then; None without any."""
        found = [kept for kept in self._slices if kept[0] + SLICE_S > from_s]
        tokens = math.fsum(kept[1] for kept in found)
        if not tokens or num_requests <= 0:
            return None
        # Requests come as they like (Poisson), so the variance of their sum is that of the squares.
        squares = math.fsum(kept[2] for kept in found)
        return MediaDemand(tokens / num_requests, math.sqrt(squares) / tokens, squares / tokens)

    def state(self, now_s: float) -> MediaWindowState | None:
        """The argument of `restore`; None if nothing was counted."""
        if not self._slices:
            return None
        kept = [(now_s - at_s, tokens, squares) for at_s, tokens, squares in self._slices]
        return MediaWindowState(kept)

    def restore(self, state: MediaWindowState | None, now_s: float) -> None:
        """Take over the window of a state, if there is one."""
        for age_s, tokens, squares in state.slices if state is not None else ():
            self._slices.append([now_s - age_s, tokens, squares])
