"""Parts of the cache, end to end, as one range of bytes for a transfer between two pools.

It joins pieces of memory, each with its exact size and without padding. Knows neither pools nor
transfers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from transport import ByteSpace


class PartsSpace:
    """`spaces` one after the other (implements `transport.ByteSpace`). Immutable: any thread."""

    def __init__(self, spaces: Sequence[ByteSpace]) -> None:
        """Raises ValueError when there is nothing in it."""
        self._spaces = tuple(spaces)
        self._ends = list(accumulate(space.nbytes for space in self._spaces))
        self.nbytes = self._ends[-1] if self._ends else 0
        if not self.nbytes:
            raise ValueError("a transfer of no parts")

    def views(self, offset: int, length: int) -> list[memoryview]:
        """The memory of a logical range; ValueError outside [0, nbytes)."""
        if offset < 0 or length < 0 or offset + length > self.nbytes:
            raise ValueError(f"[{offset}, {offset + length}) is outside of {self.nbytes} bytes")
        views: list[memoryview] = []
        # To the right: an offset at the end of one space is the first byte of the next.
        index = bisect_right(self._ends, offset)
        while length:
            space = self._spaces[index]
            start = offset - (self._ends[index] - space.nbytes)
            count = min(length, space.nbytes - start)
            views += space.views(start, count)
            offset += count
            length -= count
            index += 1
        return views
