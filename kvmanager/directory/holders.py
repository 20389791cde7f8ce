"""Represents the holders of a block by one small number: each set of holders exists once. Pure.

Does not know keys. The blocks of one prompt are mostly held by the same nodes in the same tiers, so
a region of millions of blocks has few different sets. A set is a row of flags with one column for
each node. The result of changing one node's flags in a set is remembered.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

SetIds = npt.NDArray[np.uint32]

UNUSED: Final = 0
"""Not the number of a set: it marks a place that never had a block."""
NOBODY: Final = 1
"""The number of the empty set."""

_FIRST_CROWD: Final = 4096


class HolderSets:
    """Interned rows of flags. The two numbers above never change their meaning.

    Sets that become equal when a node is dropped keep their numbers, and `current` says which of
    these counts. A number is reused only when `drop_unused` was told that no block has it.
    """

    def __init__(self) -> None:
        self._rows = np.zeros((64, 8), dtype=np.uint16)
        self._current: SetIds = np.arange(64, dtype=np.uint32)
        """For each number the number of the set that counts; `UNUSED`: it has no set."""
        self._num_columns = 0
        self._free_columns: list[int] = []
        self._ids: dict[bytes, int] = {}
        self._steps: dict[tuple[int, int, int], int] = {}
        self._num = 1
        self._free: list[int] = []
        self._crowd = _FIRST_CROWD
        self._intern(self._rows[UNUSED])

    def __len__(self) -> int:
        """Numbers that were ever used."""
        return self._num

    @property
    def nbytes(self) -> int:
        """About: the rows, and 200 bytes of dictionaries for each row and each remembered step."""
        return self._rows.nbytes + 200 * (len(self._ids) + len(self._steps))

    @property
    def is_crowded(self) -> bool:
        """Whether it is time to look for sets that no block has any more."""
        return self._num - len(self._free) + len(self._steps) >= self._crowd

    def add_column(self) -> int:
        """A column for one more node."""
        if self._free_columns:
            return self._free_columns.pop()
        if self._num_columns == self._rows.shape[1]:
            self._rows = np.pad(self._rows, ((0, 0), (0, self._num_columns)))
            # A row is known by its bytes, which are more now.
            live = np.flatnonzero(self._is_current())
            self._ids = {self._rows[number].tobytes(): number for number in live.tolist()}
        self._num_columns += 1
        return self._num_columns - 1

    def drop_column(self, column: int) -> None:
        """The node of this column holds nothing any more, so the column can be reused."""
        self._free_columns.append(column)
        self._steps.clear()
        changed = np.flatnonzero(self._is_current() & (self._rows[: self._num, column] != 0))
        for number in changed.tolist():
            del self._ids[self._rows[number].tobytes()]
        self._rows[: self._num, column] = 0
        # Rows that differed in this column only are equal now, and one number stands for all.
        for number in changed.tolist():
            self._current[number] = self._ids.setdefault(self._rows[number].tobytes(), number)
        # Numbers that stood for a row that has just been merged must follow it.
        self._current = self._current[self._current]

    def drop_unused(self, used: npt.NDArray[np.bool_]) -> None:
        """Forget the sets that no block has. `used[number]`: some block has this number."""
        self._steps.clear()
        needed = used.copy()
        # A block with an outdated number still means the row that counts for it.
        needed[self._current[np.flatnonzero(used)]] = True
        needed[: NOBODY + 1] = True
        for number in np.flatnonzero(~needed & (self._current[: self._num] != UNUSED)).tolist():
            if self._current[number] == number:
                del self._ids[self._rows[number].tobytes()]
            self._current[number] = UNUSED
            self._free.append(number)
        self._crowd = max(_FIRST_CROWD, 2 * (self._num - len(self._free)))

    @property
    def has_many_equals(self) -> bool:
        """Whether so many numbers are outdated that blocks should get their current ones."""
        known = self._current[: self._num]
        num_equal = np.count_nonzero((known != UNUSED) & (known != np.arange(self._num)))
        return bool(4 * num_equal > self._crowd)

    def current(self, ids: SetIds) -> SetIds:
        """The numbers that these sets have now."""
        return self._current[ids]

    def rows(self, ids: SetIds) -> npt.NDArray[np.uint16]:
        """The flags of these sets: [len(ids), columns]."""
        return self._rows[ids, : self._num_columns]

    def stepped(self, ids: SetIds, column: int, flags: npt.NDArray[np.uint16]) -> SetIds:
        """The sets that result from each of these when the node of `column` has `flags`."""
        codes = ids.astype(np.uint64) << np.uint64(16) | flags
        # The blocks of one prompt are mostly held alike, and then need no sorting.
        if codes.size and (codes == codes[0]).all():
            one = self._step(int(ids[0]), column, int(flags[0]))
            return np.full(len(ids), one, dtype=np.uint32)
        different, inverse = np.unique(codes, return_inverse=True)
        steps = [self._step(code >> 16, column, code & 0xFFFF) for code in different.tolist()]
        return np.array(steps, dtype=np.uint32)[inverse]

    def _step(self, old: int, column: int, flags: int) -> int:
        key = (old, column, flags)
        new = self._steps.get(key)
        if new is None:
            row = self._rows[old].copy()
            row[column] = flags
            new = self._steps[key] = self._intern(row)
        return new

    def _intern(self, row: npt.NDArray[np.uint16]) -> int:
        name = row.tobytes()
        found = self._ids.get(name)
        if found is not None:
            return found
        if self._free:
            new = self._free.pop()
        else:
            if self._num == len(self._rows):
                self._rows = np.pad(self._rows, ((0, len(self._rows)), (0, 0)))
                self._current = np.pad(self._current, (0, len(self._current)))
            new, self._num = self._num, self._num + 1
        self._rows[new] = row
        self._current[new] = self._ids[name] = new
        return new

    def _is_current(self) -> npt.NDArray[np.bool_]:
        """Whether each number from `NOBODY` on is that of a set."""
        is_current: npt.NDArray[np.bool_] = self._current[: self._num] == np.arange(self._num)
        is_current[UNUSED] = False
        return is_current
