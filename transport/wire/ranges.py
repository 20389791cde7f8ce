"""A set of half-open byte ranges kept sorted and merged. Knows nothing of frames or transfers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

Range = tuple[int, int]
"""(start, end), end excluded."""


def overlap(ours: list[Range], theirs: list[Range]) -> bool:
    """Whether two ascending lists of disjoint ranges have an integer in common; linear time."""
    mine = other = 0
    while mine < len(ours) and other < len(theirs):
        if ours[mine][1] <= theirs[other][0]:
            mine += 1
        elif theirs[other][1] <= ours[mine][0]:
            other += 1
        else:
            return True
    return False


class IntervalSet:
    """Disjoint, non-adjacent, ascending ranges of non-negative integers.

    `total` is the number of integers covered, `len()` the number of ranges. All arguments are
    `(start, end)` with `start <= end`; an empty range changes nothing.
    """

    __slots__ = ("_ends", "_starts", "total")

    def __init__(self, ranges: list[Range] | None = None) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0
        for start, end in ranges or ():
            self.add(start, end)

    def __len__(self) -> int:
        return len(self._starts)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __iter__(self) -> Iterator[Range]:
        # A copy, so that callers may change the set while they walk through it.
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def __repr__(self) -> str:
        return f"IntervalSet({list(self)})"

    def add(self, start: int, end: int) -> int:
        """Cover [start, end); returns how many integers were not covered before."""
        if start >= end:
            return 0
        # Ranges [low, high) touch or overlap the new one and are merged into it.
        low = bisect_left(self._ends, start)
        high = bisect_right(self._starts, end)
        if low == high:
            self._starts.insert(low, start)
            self._ends.insert(low, end)
            self.total += end - start
            return end - start
        merged_start = min(start, self._starts[low])
        merged_end = max(end, self._ends[high - 1])
        before = sum(self._ends[low:high]) - sum(self._starts[low:high])
        self._starts[low:high] = [merged_start]
        self._ends[low:high] = [merged_end]
        gained = merged_end - merged_start - before
        self.total += gained
        return gained

    def remove(self, start: int, end: int) -> int:
        """Uncover [start, end); returns how many integers were covered before."""
        if start >= end:
            return 0
        low = bisect_right(self._ends, start)
        high = bisect_left(self._starts, end)
        if low >= high:
            return 0
        kept: list[Range] = []
        if self._starts[low] < start:
            kept.append((self._starts[low], start))
        if self._ends[high - 1] > end:
            kept.append((end, self._ends[high - 1]))
        before = sum(self._ends[low:high]) - sum(self._starts[low:high])
        self._starts[low:high] = [first for first, _ in kept]
        self._ends[low:high] = [last for _, last in kept]
        lost = before - sum(last - first for first, last in kept)
        self.total -= lost
        return lost

    def covers(self, start: int, end: int) -> bool:
        """Whether every integer of [start, end) is in the set."""
        if start >= end:
            return True
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and self._ends[index] >= end

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any integer of [start, end) is in the set."""
        if start >= end:
            return False
        return bisect_right(self._ends, start) < bisect_left(self._starts, end)

    def gaps(self, start: int, end: int) -> list[Range]:
        """The parts of [start, end) that are not in the set, ascending."""
        missing: list[Range] = []
        position = start
        index = bisect_right(self._ends, start)
        while position < end and index < len(self._starts) and self._starts[index] < end:
            if self._starts[index] > position:
                missing.append((position, self._starts[index]))
            position = self._ends[index]
            index += 1
        if position < end:
            missing.append((position, end))
        return missing

    def pop_first(self, max_length: int) -> Range | None:
        """Take at most `max_length` integers off the lowest range; None when empty."""
        if not self._starts:
            return None
        start = self._starts[0]
        end = min(self._ends[0], start + max_length)
        if end == self._ends[0]:
            del self._starts[0], self._ends[0]
        else:
            self._starts[0] = end
        self.total -= end - start
        return start, end
