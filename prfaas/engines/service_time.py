"""The engine time of each single prefill, on instances that run several at a time.

An engine computes its prefills in the order in which it got them, so the time until one ends
includes what was left of those before it. A prefill's turn begins when the last of the prefills
that started earlier on its instance has ended, or at its own start if that is later.

Pure: time is an argument. It does not know engines or transfers.
"""

from dataclasses import dataclass
from typing import Final

LEAST_SERVICE_S: Final = 1e-3
"""Prefills that end in the same forward pass end at the same time: all but the first get this."""


@dataclass(slots=True, eq=False)
class Turn:
    """A prefill on `instance`. `since_s` is the earliest time at which its turn can have begun."""

    instance: str
    order: int
    since_s: float

    def service_s(self, started_s: float, prefill_s: float) -> float:
        """The part of the `prefill_s` after `started_s` that fell into its turn."""
        took_s = started_s + prefill_s - self.since_s
        return min(prefill_s, max(LEAST_SERVICE_S, took_s))


class Turns:
    """The prefills under way on all instances of a front. `start` each once, `end` it once."""

    def __init__(self) -> None:
        self._under_way: dict[str, list[Turn]] = {}
        self._num_started = 0

    def start(self, instance: str, now_s: float) -> Turn:
        """A prefill is given to the instance."""
        self._num_started += 1
        turn = Turn(instance, self._num_started, now_s)
        self._under_way.setdefault(instance, []).append(turn)
        return turn

    def end(self, turn: Turn, now_s: float) -> None:
        """The prefill is over or was given up: the turn of those after it may begin.

        Does nothing for one that has ended.
        """
        turns = self._under_way.get(turn.instance, [])
        if turn not in turns:
            return
        turns.remove(turn)
        if not turns:
            del self._under_way[turn.instance]
        for other in turns:
            if other.order > turn.order:
                other.since_s = max(other.since_s, now_s)
