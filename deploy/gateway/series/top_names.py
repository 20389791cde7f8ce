"""Counters by names of which there may be many thousands, with a bounded number of series.

The names that are used most have series of their own, all others share one. Prometheus keeps every
series for hours, so a series for each tenant would fill its memory. This file does not know what a
name stands for. Time is an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

MAX_NAMES: Final = 50
"""Names with series of their own."""
OTHER: Final = "(other)"
"""The label of all other names together."""
PERIOD_S: Final = 300.0
"""How long the choice of names holds, seconds."""
_CANDIDATES: Final = 8
"""For each series so many names are counted, so that a name that is used much is found."""


class TopNames:
    """Which names have labels of their own: those that were used most in the last period.

    It counts by Misra and Gries ("Finding repeated elements", 1982): memory is bounded, and a name
    that is used once in `_CANDIDATES * MAX_NAMES` times or more often is never missed. Until
    `MAX_NAMES` names have come, each has its label at once.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._uses: dict[str, int] = {}
        self._named: dict[str, None] = {}
        self._chosen_s: float | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def used(self, name: str) -> None:
        """Count one use."""
        uses = self._uses
        if name in uses:
            uses[name] += 1
        elif len(uses) < _CANDIDATES * self._max_names:
            uses[name] = 1
        else:
            # Every use was added once and is taken away at most once, so this is cheap on average.
            self._uses = {known: num - 1 for known, num in uses.items() if num > 1}
        if len(self._named) < self._max_names:
            self._named[name] = None

    def choose(self, now_s: float) -> None:
        """Choose again if a period is over. A name must be used twice as much as one that has a
        label to take its place, so that series do not come and go.
        """
        if self._chosen_s is None:
            self._chosen_s = now_s
        if now_s - self._chosen_s < PERIOD_S:
            return
        self._chosen_s = now_s
        weights = dict.fromkeys(self._named, 0) | {
            name: num * (2 if name in self._named else 1) for name, num in self._uses.items()
        }
        ranked = sorted(weights, key=lambda name: (-weights[name], name not in self._named))
        self._named = dict.fromkeys(ranked[: self._max_names])
        self._uses = {}

    def forget(self, names: Iterable[str]) -> None:
        """Free the labels of these names."""
        for name in names:
            self._named.pop(name, None)


class TopCounts:
    """Several counters for each name. What is counted for a name without a label counts for
    `OTHER`. A name that loses its label loses its counts, as at a restart of the process, and
    `rate()` of Prometheus copes with both.
    """

    def __init__(self, num_counters: int, always: Collection[str] = ()) -> None:
        """`always` are names that have labels whatever they do."""
        self.top = TopNames()
        self.always = frozenset(always)
        self._num_counters = num_counters
        self._counts: dict[str, list[int]] = {}

    def label(self, name: str) -> str:
        """The label under which a name is counted now."""
        return name if name in self.always or name in self.top else OTHER

    def add(self, name: str, numbers: Sequence[int]) -> None:
        """Add to the counters of a name, in order."""
        label = self.label(name)
        counts = self._counts.get(label)
        if counts is None:
            counts = self._counts[label] = [0] * self._num_counters
        for index, number in enumerate(numbers):
            counts[index] += number

    def shown(self, now_s: float) -> dict[str, list[int]]:
        """The counters of every label, after a new choice if a period is over."""
        self.top.choose(now_s)
        zeros = [0] * self._num_counters
        labels = dict.fromkeys((*sorted(self.always), *self.top))
        found = {label: self._counts.get(label, zeros) for label in labels}
        if OTHER in self._counts:
            found[OTHER] = self._counts[OTHER]
        # What has no label any more begins at 0 if it gets one again.
        self._counts = {label: self._counts[label] for label in found if label in self._counts}
        return found
