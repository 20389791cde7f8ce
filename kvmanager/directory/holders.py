"""Who holds a block and how, as one small number: sets of holders, each kept once. Pure.

Does not know keys. Blocks of one prompt are mostly held by the same nodes in the same tiers, so a
region of millions of blocks has few different sets. A set is a row of flags, one column for each
node; what a set becomes when a node says something else of a block is remembered.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

SetIds = npt.NDArray[np.uint32]

UNUSED: Final = 0
"""The number of no set: where there never was a block."""
NOBODY: Final = 1
"""The number of the empty set."""

_FIRST_CROWD: Final = 4096


class HolderSets:
    """Interned rows of flags. Ids stay until `renumber`, but the two above stay for ever."""

    def __init__(self) -> None:
        self._rows = np.zeros((64, 8), dtype=np.uint16)
        self._num_columns = 0
        self._free_columns: list[int] = []
        self._ids: dict[bytes, int] = {}
        self._steps: dict[tuple[int, int, int], int] = {}
        self._num = 1
        self._crowd = _FIRST_CROWD
        self._intern(self._rows[UNUSED])

    def __len__(self) -> int:
        return self._num

    @property
    def nbytes(self) -> int:
        """About: rows, and 200 bytes of dictionaries for each row and each remembered step."""
        return self._rows.nbytes + 200 * (len(self._ids) + len(self._steps))

    @property
    def is_crowded(self) -> bool:
        """Whether it is time to look for sets that no block has any more."""
        return self._num + len(self._steps) >= self._crowd

    def add_column(self) -> int:
        """A column for one more node."""
        if self._free_columns:
            return self._free_columns.pop()
        if self._num_columns == self._rows.shape[1]:
            self._rows = np.pad(self._rows, ((0, 0), (0, self._num_columns)))
            live = self._rows[NOBODY : self._num]
            self._ids = {row.tobytes(): NOBODY + i for i, row in enumerate(live)}
        self._num_columns += 1
        return self._num_columns - 1

    def rows(self, ids: SetIds) -> npt.NDArray[np.uint16]:
        """The flags of these sets: [len(ids), columns]."""
        return self._rows[ids, : self._num_columns]

    def stepped(self, ids: SetIds, column: int, flags: npt.NDArray[np.uint16]) -> SetIds:
        """The sets after the node of `column` said `flags` of a block with each of these sets."""
        codes = ids.astype(np.uint64) << np.uint64(16) | flags
        if codes.size and (codes == codes[0]).all():
            one = self._step(int(ids[0]), column, int(flags[0]))
            return np.full(len(ids), one, dtype=np.uint32)
        different, inverse = np.unique(codes, return_inverse=True)
        steps = [self._step(code >> 16, column, code & 0xFFFF) for code in different.tolist()]
        return np.array(steps, dtype=np.uint32)[inverse]

    def renumber(self, used: npt.NDArray[np.bool_], without: int | None = None) -> SetIds:
        """Forget sets that are not `used` (by id), and the column `without` in all others.

        What each id is from now on; blocks must be told at once. The column can be given anew.
        """
        rows = self._rows.copy()
        if without is not None:
            rows[:, without] = 0
            self._free_columns.append(without)
        self._ids.clear()
        self._steps.clear()
        self._num = NOBODY
        mapping = np.zeros(len(rows), dtype=np.uint32)
        self._intern(rows[UNUSED])
        mapping[NOBODY] = NOBODY
        for old in (np.flatnonzero(used[NOBODY + 1 :]) + NOBODY + 1).tolist():
            mapping[old] = self._intern(rows[old])
        self._crowd = max(_FIRST_CROWD, 2 * self._num)
        return mapping

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
        if self._num == len(self._rows):
            self._rows = np.pad(self._rows, ((0, len(self._rows)), (0, 0)))
        new, self._num = self._num, self._num + 1
        self._rows[new] = row
        self._ids[name] = new
        return new
