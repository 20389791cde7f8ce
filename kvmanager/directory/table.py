"""A hash table from block keys to numbers of holder sets, for many keys at a time. Pure.

Of holder sets it knows only two numbers: 0 marks a place that was never used, 1 (held by nobody) a
place that is free again.

Keys are digests, so their top bits serve as the hash. They choose a bucket of 8 places, which is
one cache line of keys. A key whose bucket is full goes to the next bucket. A place never becomes
"never used" again, so a search may stop at the first bucket that has such a place.

The time of a call does not grow with the table. When most places are used, a new table is
allocated, as large as the held keys need, and then the old table is emptied into it. The calls that
insert do both, a little at a time. While keys move, the old table is searched after the new one. A
value may come to mean another one (`reads_as`); places are rewritten only when their keys move.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Final

import numpy as np
import numpy.typing as npt

from kvmanager.directory.holders import NOBODY, UNUSED, SetIds

Keys = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]

ABSENT: Final = -1

_WIDTH: Final = 8
_MIN_BUCKETS: Final = 128
_MAX_LOAD: Final = 0.8
_PREPARE_LOAD: Final = 0.72
"""Load from which on the next table is prepared. It is ready half way from here to `_MAX_LOAD`."""
_NEW_LOAD: Final = 0.6
"""Most load of a new table when all keys that were held at its preparation are in it."""
_MOVE_LOAD: Final = 0.1
"""Share of the new places that insertions may take while the old table is being emptied."""
_LEAST_PLACES: Final = 1 << 13
"""Places that each call that inserts prepares or moves at least: 100 KB."""
_STRIDE: Final = 1 << 15
"""Keys processed at a time, so that intermediate arrays stay in the processor's cache."""


class _Buckets:
    """A fixed number of places, which may be used when all are prepared."""

    def __init__(self, num_buckets: int) -> None:
        self.keys: Keys = np.empty((num_buckets, _WIDTH), dtype=np.uint64)
        self.ids: SetIds = np.empty((num_buckets, _WIDTH), dtype=np.uint32)
        self.num_used = 0
        self._num_prepared = 0
        self._mask = num_buckets - 1
        self._shift = np.uint64(64 - self._mask.bit_length())

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.ids.nbytes

    @property
    def num_places(self) -> int:
        return self.ids.size

    def prepare(self, num_places: int) -> bool:
        """Clear this many more places. Their first touch allocates the memory, which takes the
        time. Returns whether all are prepared.
        """
        end = self._num_prepared + num_places
        self.keys.reshape(-1)[self._num_prepared : end] = 0
        self.ids.reshape(-1)[self._num_prepared : end] = UNUSED
        self._num_prepared = end
        return end >= self.num_places

    def find(self, keys: Keys) -> Places:
        places: Places = np.full(len(keys), ABSENT, dtype=np.int64)
        pending = np.arange(len(keys))
        buckets = self._home(keys)
        while pending.size:
            ids = self.ids[buckets]
            hits = (self.keys[buckets] == keys[pending, None]) & (ids != UNUSED)
            columns = hits.argmax(axis=1)
            found = hits[np.arange(len(hits)), columns]
            places[pending[found]] = (buckets * _WIDTH + columns)[found]
            further = ~found & (ids != UNUSED).all(axis=1)
            pending = pending[further]
            buckets = (buckets[further] + 1) & self._mask
        return places

    def enter(self, keys: Keys, ids: SetIds) -> None:
        """Enter ascending keys that are not in the table. Each round fills free places of the
        buckets; keys that found none go to the next bucket.
        """
        flat_keys, flat_ids = self.keys.reshape(-1), self.ids.reshape(-1)
        buckets = self._home(keys)
        while keys.size:
            present = self.ids[buckets]
            num_free = np.cumsum(present <= NOBODY, axis=1)
            rank = _rank_in_group(buckets)
            fits = rank < num_free[:, -1]
            columns = (num_free == rank[:, None] + 1).argmax(axis=1)
            places = (buckets * _WIDTH + columns)[fits]
            self.num_used += int(np.count_nonzero(flat_ids[places] == UNUSED))
            flat_keys[places], flat_ids[places] = keys[fits], ids[fits]
            rest = np.flatnonzero(~fits)
            following = (buckets[rest] + 1) & self._mask
            # In order again: the bucket after the last one is the first.
            order = np.argsort(following, kind="stable")
            buckets, rest = following[order], rest[order]
            keys, ids = keys[rest], ids[rest]

    def _home(self, keys: Keys) -> Places:
        return (keys >> self._shift).astype(np.int64)


class BlockTable:
    """uint64 keys, uint32 values of at least `NOBODY`.

    `reads_as` says what each value means now; 0 and 1 always mean themselves. A value that means
    another one must not get its own meaning back while `counts` has places of it.
    """

    def __init__(self, reads_as: Callable[[SetIds], SetIds] = lambda ids: ids) -> None:
        self._reads_as = reads_as
        self._new = _Buckets(_MIN_BUCKETS)
        self._new.prepare(self._new.num_places)
        self._next: _Buckets | None = None
        self._old: _Buckets | None = None
        self._num_moved = 0
        """Buckets of the old table that were emptied."""
        self._counts: Counts = np.zeros(64, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        tables = (self._next, self._new, self._old)
        return sum(buckets.nbytes for buckets in tables if buckets is not None)

    @property
    def num_places(self) -> int:
        """The places of the table that keys are entered into."""
        return self._new.num_places

    @property
    def is_changing(self) -> bool:
        """Whether another table is being prepared or emptied."""
        return self._next is not None or self._old is not None

    @property
    def num_live(self) -> int:
        """Keys that at least one node holds."""
        used = np.flatnonzero(self._counts).astype(np.uint32)
        return int(self._counts[used[self._reads_as(used) > NOBODY]].sum())

    def counts(self, num_ids: int) -> Counts:
        """The number of places with each value below `num_ids`, whatever it means now."""
        counts: Counts = np.zeros(num_ids, dtype=np.int64)
        known = self._counts[:num_ids]
        counts[: len(known)] = known
        return counts

    def find(self, keys: Keys) -> Places:
        """The place of each key, `ABSENT` if there is none. Valid until the next `insert`."""
        places = self._new.find(keys)
        if self._old is not None:
            others = np.flatnonzero(places == ABSENT)
            older = self._old.find(keys[others])
            # A place that is free in the old table must stay so: it may have been moved already.
            held = (older != ABSENT) & (self._old.ids.reshape(-1)[older] > NOBODY)
            places[others[held]] = older[held] + self._new.num_places
        return places

    def lookup(self, keys: Keys) -> SetIds:
        """The meaning of each key's value; `NOBODY` if there is none."""
        places = self.find(keys)
        ids = self.at(places)
        ids[places == ABSENT] = NOBODY
        return ids

    def at(self, places: Places) -> SetIds:
        """The meaning of the values at places from `find`; undefined for `ABSENT`."""
        return self._reads_as(self._values(places))

    def put(self, places: Places, ids: SetIds) -> None:
        """Set the values at places from `find`."""
        self._count(self._values(places), -1)
        self._count(ids, 1)
        if self._old is None:
            self._new.ids.reshape(-1)[places] = ids
            return
        is_old = places >= self._new.num_places
        self._new.ids.reshape(-1)[places[~is_old]] = ids[~is_old]
        self._old.ids.reshape(-1)[places[is_old] - self._new.num_places] = ids[is_old]

    def insert(self, keys: Keys, ids: SetIds) -> None:
        """Enter keys that `find` does not find, each once and in ascending order."""
        self._go_on(len(keys))
        if self._new.num_used + len(keys) > _MAX_LOAD * self._new.num_places:
            # An insertion larger than the preparation in small steps allows for.
            self._finish_change()
            self._prepare_next(len(keys))
            self._finish_change()
        for start in range(0, len(keys), _STRIDE):
            self._new.enter(keys[start : start + _STRIDE], ids[start : start + _STRIDE])
        self._count(ids, 1)

    def rewrite(self) -> None:
        """Begin to replace each place's value by its meaning. The calls that insert continue.

        Does nothing while keys are moving already.
        """
        if not self.is_changing:
            self._prepare_next(0)

    def items(self) -> tuple[Keys, SetIds]:
        """The held keys with the meanings of their values, in no order. Takes long."""
        keys, ids = [], []
        for buckets in (self._new, self._old):
            if buckets is not None:
                meant = self._reads_as(buckets.ids.reshape(-1))
                keys.append(buckets.keys.reshape(-1)[meant > NOBODY])
                ids.append(meant[meant > NOBODY])
        return np.concatenate(keys), np.concatenate(ids)

    def _values(self, places: Places) -> SetIds:
        if self._old is None:
            return self._new.ids.reshape(-1)[places]
        is_old = places >= self._new.num_places
        ids: SetIds = self._new.ids.reshape(-1)[np.where(is_old, 0, places)]
        ids[is_old] = self._old.ids.reshape(-1)[places[is_old] - self._new.num_places]
        return ids

    def _count(self, ids: SetIds, sign: int) -> None:
        if not ids.size:
            return
        found = np.bincount(ids)
        if len(found) > len(self._counts):
            # Doubled, so that many new values one by one do not copy the counts each time.
            self._counts = np.pad(self._counts, (0, 2 * len(found) - len(self._counts)))
        self._counts[: len(found)] += sign * found
        # Free places are not counted, whether they were ever used or not.
        self._counts[: NOBODY + 1] = 0

    def _go_on(self, num_keys: int) -> None:
        """Prepare or move as much as `num_keys` insertions must for the change to end in time."""
        if self._old is not None:
            rate = self._old.num_places / (_MOVE_LOAD * self._new.num_places)
            self._move(max(_LEAST_PLACES, ceil(rate * num_keys)))
        elif self._next is not None:
            room = (_MAX_LOAD - _PREPARE_LOAD) / 2 * self._new.num_places
            rate = self._next.num_places / room
            self._prepare(max(_LEAST_PLACES, ceil(rate * num_keys)))
        elif self._new.num_used > _PREPARE_LOAD * self._new.num_places:
            self._prepare_next(num_keys)

    def _prepare_next(self, num_more: int) -> None:
        num_more = max(num_more, int((_MAX_LOAD - _PREPARE_LOAD) * self._new.num_places))
        needed = ceil((self.num_live + num_more) / (_NEW_LOAD * _WIDTH))
        # A power of two, since the top bits of a key choose its bucket.
        self._next = _Buckets(max(_MIN_BUCKETS, 1 << (needed - 1).bit_length()))
        self._prepare(_LEAST_PLACES)

    def _prepare(self, num_places: int) -> None:
        assert self._next is not None
        if self._next.prepare(num_places):
            self._old, self._new, self._next = self._new, self._next, None
            self._num_moved = 0

    def _finish_change(self) -> None:
        if self._next is not None:
            self._prepare(self._next.num_places)
        if self._old is not None:
            self._move(self._old.num_places)

    def _move(self, num_places: int) -> None:
        """Move this many places of the old table into the new one."""
        assert self._old is not None
        moved = slice(self._num_moved, self._num_moved + ceil(num_places / _WIDTH))
        ids, keys = self._old.ids[moved].reshape(-1), self._old.keys[moved].reshape(-1)
        live = np.flatnonzero(ids > NOBODY)
        meant = self._reads_as(ids[live])
        self._count(ids[live], -1)
        # Not UNUSED, because a search that passes this bucket must not stop here.
        ids[live] = NOBODY
        live, meant = live[meant > NOBODY], meant[meant > NOBODY]
        self._count(meant, 1)
        order = np.argsort(keys[live])
        for start in range(0, len(order), _STRIDE):
            chosen = order[start : start + _STRIDE]
            self._new.enter(keys[live[chosen]], meant[chosen])
        self._num_moved = moved.stop
        if _WIDTH * self._num_moved >= self._old.num_places:
            self._old = None


def _rank_in_group(values: Places) -> Places:
    """The number of equal neighbours before each value."""
    index = np.arange(len(values))
    is_first = np.ones(len(values), dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    ranks: Places = index - np.maximum.accumulate(np.where(is_first, index, 0))
    return ranks
