"""Which instances run which stages: arrangements and their divisions of a number of instances.

Values only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """A part of a request's life on an instance."""

    ENCODE = "E"
    PREFILL = "P"
    DECODE = "D"


class Arrangement(StrEnum):
    """Which stages share instances. Values are HydraInfer's names."""

    EP_D = "EP+D"
    ED_P = "ED+P"
    E_P_D = "E+P+D"
    EPD = "EPD"  # every instance runs all stages

    @property
    def groups(self) -> tuple[str, ...]:
        """The stages of each group of instances, as letters."""
        return tuple(self.value.split("+"))


DISAGGREGATED = (Arrangement.EP_D, Arrangement.ED_P, Arrangement.E_P_D)


@dataclass(frozen=True, slots=True)
class Division:
    """An arrangement with the number of instances of each of its groups."""

    arrangement: Arrangement
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.arrangement.groups) or min(self.counts) < 1:
            raise ValueError(
                f"{self.counts} instances for {self.arrangement.value}: give at least 1 for each "
                f"of {', '.join(self.arrangement.groups)}"
            )

    def __str__(self) -> str:
        """As HydraInfer writes it: 1E3P4D."""
        return "".join(f"{num}{group}" for group, num in self.groups)

    @property
    def groups(self) -> tuple[tuple[str, int], ...]:
        """The stages of each group, and its instances."""
        return tuple(zip(self.arrangement.groups, self.counts, strict=True))


def divisions(arrangement: Arrangement, num_instances: int) -> Iterator[Division]:
    """All divisions of so many instances; none if there are fewer than groups."""
    for counts in _parts(num_instances, len(arrangement.groups)):
        yield Division(arrangement, counts)


def _parts(total: int, num: int) -> Iterator[tuple[int, ...]]:
    if num == 1:
        if total >= 1:
            yield (total,)
        return
    for first in range(1, total - num + 2):
        for rest in _parts(total - first, num - 1):
            yield (first, *rest)
