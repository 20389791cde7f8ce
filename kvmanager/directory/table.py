"""A hash table from block keys to numbers of holder sets, for many keys at a time. Pure.

Does not know what a holder set is, but for two numbers: 0 marks a place that was never used, 1
(held by nobody) one that is free again.

Keys are digests, so their top bits are the hash. They choose a bucket of 8 places, one cache line
of keys; a key whose bucket is full goes to the next. A place never becomes "never used" again, so a
search may stop at the first bucket that has such a place. When four fifths of the places are used,
all are put into a new table, twice as large if that many keys are alive.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvmanager.directory.holders import NOBODY, UNUSED, SetIds

Keys = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

ABSENT: Final = -1

_WIDTH: Final = 8
_MIN_BUCKETS: Final = 128
_MAX_LOAD: Final = 0.8
_NEW_LOAD: Final = 0.6
_STRIDE: Final = 1 << 15
"""Keys handled at a time, so that what lies between stays in the processor's cache."""


class BlockTable:
    """uint64 keys, uint32 values of at least `NOBODY`."""

    def __init__(self) -> None:
        self._allocate(_MIN_BUCKETS)

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._ids.nbytes

    @property
    def num_places(self) -> int:
        return self._ids.size

    def num_live(self) -> int:
        """Keys that somebody holds; counted anew each time."""
        return int(np.count_nonzero(self._ids > NOBODY))

    def find(self, keys: Keys) -> Places:
        """The place of each key, `ABSENT` where there is none; good until the next `insert`."""
        places: Places = np.full(len(keys), ABSENT, dtype=np.int64)
        pending = np.arange(len(keys))
        buckets = self._home(keys)
        while pending.size:
            ids = self._ids[buckets]
            hits = (self._keys[buckets] == keys[pending, None]) & (ids != UNUSED)
            columns = hits.argmax(axis=1)
            found = hits[np.arange(len(hits)), columns]
            places[pending[found]] = (buckets * _WIDTH + columns)[found]
            further = ~found & (ids != UNUSED).all(axis=1)
            pending = pending[further]
            buckets = (buckets[further] + 1) & self._mask
        return places

    def lookup(self, keys: Keys) -> SetIds:
        """The value of each key, `NOBODY` where there is none."""
        places = self.find(keys)
        ids = self._ids.reshape(-1)[places]
        ids[places == ABSENT] = NOBODY
        return ids

    def at(self, places: Places) -> SetIds:
        """The values at places that `find` named."""
        values: SetIds = self._ids.reshape(-1)[places]
        return values

    def put(self, places: Places, ids: SetIds) -> None:
        """Set the values at places that `find` named."""
        self._ids.reshape(-1)[places] = ids

    def insert(self, keys: Keys, ids: SetIds) -> None:
        """Enter keys that are not in the table, each once and in ascending order."""
        if self._num_used + len(keys) > _MAX_LOAD * self.num_places:
            self._rebuild(len(keys))
        for start in range(0, len(keys), _STRIDE):
            self._enter(keys[start : start + _STRIDE], ids[start : start + _STRIDE])

    def counts(self, num_ids: int) -> npt.NDArray[np.int64]:
        """How many places have each value below `num_ids`."""
        counts: npt.NDArray[np.int64] = np.zeros(num_ids, dtype=np.int64)
        flat = self._ids.reshape(-1)
        for start in range(0, len(flat), 8 * _STRIDE):
            counts += np.bincount(flat[start : start + 8 * _STRIDE], minlength=num_ids)
        return counts

    def renumber(self, mapping: SetIds) -> None:
        """Replace every value `id` by `mapping[id]`. 0 and 1 must stay what they are."""
        flat = self._ids.reshape(-1)
        for start in range(0, len(flat), 8 * _STRIDE):
            part = flat[start : start + 8 * _STRIDE]
            np.take(mapping, part, out=part, mode="clip")

    def items(self) -> tuple[Keys, SetIds]:
        """Keys that somebody holds, and their values, in no order."""
        live = self._ids > NOBODY
        return self._keys[live], self._ids[live]

    def _allocate(self, num_buckets: int) -> None:
        self._keys = np.zeros((num_buckets, _WIDTH), dtype=np.uint64)
        self._ids = np.zeros((num_buckets, _WIDTH), dtype=np.uint32)
        self._mask = num_buckets - 1
        self._shift = np.uint64(64 - self._mask.bit_length())
        self._num_used = 0

    def _home(self, keys: Keys) -> Places:
        return (keys >> self._shift).astype(np.int64)

    def _rebuild(self, num_more: int) -> None:
        keys, ids = self.items()
        order = np.argsort(keys)
        needed = (len(keys) + num_more) / (_NEW_LOAD * _WIDTH)
        self._allocate(max(_MIN_BUCKETS, 1 << max(0, int(np.ceil(needed)) - 1).bit_length()))
        for start in range(0, len(order), _STRIDE):
            chosen = order[start : start + _STRIDE]
            self._enter_first(keys[chosen], ids[chosen])

    def _enter_first(self, keys: Keys, ids: SetIds) -> None:
        """`_enter` while a table is filled in ascending order: home buckets are mostly empty."""
        buckets = self._home(keys)
        rank = _rank_in_group(buckets)
        fits = (rank < _WIDTH) & ~self._ids[buckets].any(axis=1)
        places = (buckets * _WIDTH + rank)[fits]
        self._keys.reshape(-1)[places], self._ids.reshape(-1)[places] = keys[fits], ids[fits]
        self._num_used += len(places)
        self._enter(keys[~fits], ids[~fits])

    def _enter(self, keys: Keys, ids: SetIds) -> None:
        """Each round takes the free places of the buckets; what found none goes one further."""
        flat_keys, flat_ids = self._keys.reshape(-1), self._ids.reshape(-1)
        buckets = self._home(keys)
        while keys.size:
            present = self._ids[buckets]
            num_free = np.cumsum(present <= NOBODY, axis=1)
            rank = _rank_in_group(buckets)
            fits = rank < num_free[:, -1]
            columns = (num_free == rank[:, None] + 1).argmax(axis=1)
            places = (buckets * _WIDTH + columns)[fits]
            self._num_used += int(np.count_nonzero(flat_ids[places] == UNUSED))
            flat_keys[places], flat_ids[places] = keys[fits], ids[fits]
            rest = np.flatnonzero(~fits)
            following = (buckets[rest] + 1) & self._mask
            order = np.argsort(following, kind="stable")
            buckets, rest = following[order], rest[order]
            keys, ids = keys[rest], ids[rest]


def _rank_in_group(values: Places) -> Places:
    """How many equal neighbours each value has before it."""
    index = np.arange(len(values))
    is_first = np.ones(len(values), dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    ranks: Places = index - np.maximum.accumulate(np.where(is_first, index, 0))
    return ranks
