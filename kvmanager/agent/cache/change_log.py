"""A log of keys in the order of their latest change. The cost of a step does not grow with it.

A single list of all changes would collect holes, which would have to be cleaned up all at once. So
the keys lie in pages of bounded size, and sparse neighbours are joined when a key leaves one of
them. It does not know what a change means.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from typing import Final

import msgspec

PAGE_KEYS: Final = 1024


class Latest(msgspec.Struct, frozen=True, gc=False):
    """The latest change of a key: its number and its time.

    A node has one for each cached block, so `gc=False` spares the garbage collector the visit.
    """

    seq: int
    at_s: float


class ChangeLog:
    """The changes in order. The numbers of changes rise from one `add` to the next."""

    def __init__(self) -> None:
        self._pages: list[dict[bytes, Latest]] = []
        self._first_seqs: list[int] = []
        """For each page a number not above its changes, and above those of the page before."""
        self._room = 0
        """Keys that the last page still takes. Removed keys count as well, because a dict keeps
        their places.
        """
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    @property
    def num_pages(self) -> int:
        """Pages, at most one for each quarter of `PAGE_KEYS` keys and one more."""
        return len(self._pages)

    def add(self, key: bytes, latest: Latest) -> None:
        """Enter a key that is not in the log."""
        if not self._room:
            self._pages.append({})
            self._first_seqs.append(latest.seq)
            self._room = PAGE_KEYS
        self._pages[-1][key] = latest
        self._room -= 1
        self._num_keys += 1

    def remove(self, key: bytes, seq: int) -> None:
        """Take out the key whose latest change is `seq`; raises KeyError if it is not here."""
        number = bisect_right(self._first_seqs, seq) - 1
        if number < 0:
            raise KeyError(key)
        del self._pages[number][key]
        self._num_keys -= 1
        for left in (number - 1, number):
            if left >= 0 and self._join(left):
                return

    def pop_first(self) -> tuple[bytes, Latest]:
        """Take out the key that has not changed for longest; there has to be one."""
        key, latest = next(item for page in self._pages for item in page.items())
        self.remove(key, latest.seq)
        return key, latest

    def after(self, seq: int, limit: int) -> list[tuple[bytes, Latest]]:
        """The oldest `limit` changes with a higher number than `seq`, oldest first."""
        number = max(0, bisect_right(self._first_seqs, seq) - 1)
        found: list[tuple[bytes, Latest]] = []
        for page in itertools.islice(self._pages, number, None):
            found += [item for item in page.items() if item[1].seq > seq]
            if len(found) >= limit:
                break
        return found[:limit]

    def _join(self, left: int) -> bool:
        """Join this page and the next if they are sparse. Returns whether they were."""
        pages = self._pages[left : left + 2]
        if len(pages) < 2 or sum(map(len, pages)) > PAGE_KEYS // 2:
            return False
        self._pages[left : left + 2] = [pages[0] | pages[1]]
        del self._first_seqs[left + 1]
        if left == len(self._pages) - 1:
            # The room left was that of the former last page; the next change begins a new one.
            self._room = 0
        return True
