"""The time of an encoder pass, learnt from the passes of each instance.

    seconds(n) = fixed + per_token n        fixed, per_token >= 0

n counts the tokens that the media of one pass have in their prompts. The line through the latest
passes is Theil and Sen's: the slope is the median of the slopes between any two of them, so a pass
that took much longer than it should moves it little. Where all passes had one size nothing says
which part is fixed, and all of it counts as per token.

An instance that was not observed enough borrows the line of all instances of its kind. A line that
no pass has confirmed for a while is forgotten, because a slow moment would otherwise keep media
away from an instance for ever.

Pure; time is an argument. This file does not know queues or requests.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Final

from scheduler.encoding.line import EncodeLine

MIN_SEEN: Final = 3
"""The passes after which a line is believed."""
KEPT_S: Final = 300.0
"""How long a line is believed after its last pass, seconds."""
_NUM_PASSES: Final = 32
"""The passes that are remembered. All pairs of them are compared after each pass."""


def line_through(passes: list[tuple[int, float]]) -> EncodeLine | None:
    """The line through passes of (media tokens, seconds); None without any."""
    usable = [(n, s) for n, s in passes if n > 0 and 0 <= s < math.inf]
    if not usable:
        return None
    slopes = [
        (s_b - s_a) / (n_b - n_a)
        for (n_a, s_a), (n_b, s_b) in combinations(usable, 2)
        if n_a != n_b
    ]
    per_token = median(s / n for n, s in usable)
    if not slopes:
        return EncodeLine(0.0, per_token)
    # The fixed part may not be negative: then the line goes through the origin.
    token_s = max(0.0, median(slopes))
    fixed_s = median(s - token_s * n for n, s in usable)
    return EncodeLine(fixed_s, token_s) if fixed_s >= 0 else EncodeLine(0.0, per_token)


@dataclass(slots=True)
class _Passes:
    """The latest passes of one instance, or of all of one kind."""

    seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_NUM_PASSES))
    at_s: float = -math.inf
    line: EncodeLine | None = None

    def add(self, num_tokens: int, seconds: float, now_s: float) -> None:
        if now_s - self.at_s > KEPT_S:
            self.seen.clear()
        self.seen.append((num_tokens, seconds))
        self.at_s = now_s
        self.line = line_through(list(self.seen))

    def believed(self, now_s: float) -> EncodeLine | None:
        is_known = len(self.seen) >= MIN_SEEN and now_s - self.at_s <= KEPT_S
        return self.line if is_known else None


class EncodeTimes:
    """The times of all instances of a cluster. A kind is what the instances of it have in common:
    the model, and whether they decode as well.
    """

    def __init__(self) -> None:
        self._instances: dict[str, _Passes] = {}
        self._kinds: dict[tuple[str, bool], _Passes] = {}

    def observe(
        self, instance: str, kind: tuple[str, bool], num_tokens: int, seconds: float, now_s: float
    ) -> None:
        """A pass over media of `num_tokens` took so long. Values that cannot be are ignored."""
        if num_tokens <= 0 or not 0 <= seconds < math.inf:
            return
        for passes in (
            self._instances.setdefault(instance, _Passes()),
            self._kinds.setdefault(kind, _Passes()),
        ):
            passes.add(num_tokens, seconds, now_s)

    def line(self, instance: str, kind: tuple[str, bool], now_s: float) -> EncodeLine | None:
        """The line of an instance, or else of its kind; None: too little is known."""
        own = self._instances.get(instance)
        found = None if own is None else own.believed(now_s)
        if found is None and (like := self._kinds.get(kind)) is not None:
            found = like.believed(now_s)
        return found

    def forget(self, instance: str) -> None:
        """The instance has left. What it taught about its kind stays."""
        self._instances.pop(instance, None)


class KnownTimes(EncodeTimes):
    """The times that live instances teach in their first passes, known from the start."""

    def __init__(self, line: EncodeLine) -> None:
        super().__init__()
        self._line = line

    def observe(
        self, instance: str, kind: tuple[str, bool], num_tokens: int, seconds: float, now_s: float
    ) -> None:
        pass

    def line(self, instance: str, kind: tuple[str, bool], now_s: float) -> EncodeLine | None:
        return self._line
