"""The free blocks of an arena, and the place of a transfer's logical bytes in its blocks.

It does not know memory, transfers, leases or time. A block is a number; a piece of an arena is an
offset and a length.

Blocks are handed out in as few runs of neighbours as possible, since one run means one long copy
and one long `sendmsg` buffer. A fragmented arena still serves any request that fits into its free
blocks.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple


class Run(NamedTuple):
    """`length` neighbouring blocks, from block `first` on."""

    first: int
    length: int

    @property
    def end(self) -> int:
        return self.first + self.length


class OutOfBlocks(Exception):
    """Fewer free blocks than asked for; nothing was taken."""


class BlockAllocator:
    """The free blocks of an arena of `num_blocks`. Single-threaded; every method is immediate.

    The cost of a call hardly grows with the number of free runs, of which a full arena has many.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"an arena has at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._starts: list[int] = []
        self._counts: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        """(length, start) of the free runs, sorted."""
        self._num_free = 0
        self._give(Run(0, num_blocks))

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._num_free

    def free_runs(self) -> list[Run]:
        """The free blocks in order, neighbours merged."""
        return [Run(start, self._counts[start]) for start in self._starts]

    def allocate(self, num_blocks: int) -> list[Run]:
        """Take `num_blocks` (at least 1); raises OutOfBlocks and takes nothing when too few remain.

        The smallest free run that holds all of them is used; without one, the largest runs are
        used up first, which leaves the fewest pieces.
        """
        if num_blocks < 1:
            raise ValueError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > self._num_free:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self._num_free} free")
        taken: list[Run] = []
        missing = num_blocks
        while missing:
            # Among runs of one length the first is used.
            wanted = min(missing, self._by_length[-1][0])
            length, first = self._by_length[bisect_left(self._by_length, (wanted, 0))]
            taken.append(self._take(Run(first, length), wanted))
            missing -= wanted
        return sorted(taken)

    def take(self, runs: Iterable[Run]) -> None:
        """Take exactly these blocks; raises ValueError and takes nothing if any is not free."""
        wanted = sorted(runs)
        previous_end = 0
        for run in wanted:
            if run.length < 1 or run.first < previous_end or self._free_run_around(run) is None:
                raise ValueError(f"cannot take {run}: some of it is not free, or twice in one call")
            previous_end = run.end
        for run in wanted:
            around = self._free_run_around(run)
            assert around is not None
            self._take(around, around.length)
            if around.first < run.first:
                self._give(Run(around.first, run.first - around.first))
            if run.end < around.end:
                self._give(Run(run.end, around.end - run.end))

    def free(self, runs: Iterable[Run]) -> None:
        """Give blocks back. Raises ValueError for a block that is free already or not ours."""
        wanted = sorted(runs)
        previous_end = 0
        # All are checked before the first is given back, so that a refused call changes nothing.
        for run in wanted:
            if run.length < 1 or run.first < previous_end or run.end > self.num_blocks:
                raise ValueError(f"cannot free {run}: outside the arena or twice in one call")
            if self._overlaps_free(run):
                raise ValueError(f"cannot free {run}: some of it is free already")
            previous_end = run.end
        for run in wanted:
            self._give(run)

    def check_invariants(self) -> None:
        """Raises AssertionError when the books do not add up; for tests."""
        previous_end = -1
        for run in self.free_runs():
            assert run.length > 0, f"empty {run}"
            assert run.first > previous_end, f"{run} touches or overlaps its neighbour"
            previous_end = run.end
        assert previous_end <= self.num_blocks
        assert self._num_free == sum(self._counts.values())
        assert self._starts == sorted(self._counts)
        assert self._by_length == sorted((count, start) for start, count in self._counts.items())

    def _take(self, run: Run, num_blocks: int) -> Run:
        """Take the first blocks of a free run."""
        self._remove(run.first)
        if num_blocks < run.length:
            self._insert(run.first + num_blocks, run.length - num_blocks)
        self._num_free -= num_blocks
        return Run(run.first, num_blocks)

    def _free_run_around(self, run: Run) -> Run | None:
        index = bisect_right(self._starts, run.first) - 1
        if index < 0:
            return None
        start = self._starts[index]
        around = Run(start, self._counts[start])
        return around if run.end <= around.end else None

    def _overlaps_free(self, run: Run) -> bool:
        index = bisect_left(self._starts, run.first)
        if index < len(self._starts) and self._starts[index] < run.end:
            return True
        if index == 0:
            return False
        before = self._starts[index - 1]
        return before + self._counts[before] > run.first

    def _give(self, run: Run) -> None:
        self._num_free += run.length
        first, end = run
        end += first
        if end in self._counts:
            end += self._remove(end)
        index = bisect_left(self._starts, first)
        if index > 0:
            before = self._starts[index - 1]
            if before + self._counts[before] == first:
                self._remove(before)
                first = before
        self._insert(first, end - first)

    def _insert(self, first: int, length: int) -> None:
        self._counts[first] = length
        insort(self._starts, first)
        insort(self._by_length, (length, first))

    def _remove(self, first: int) -> int:
        """Remove the free run that starts there. Returns its length."""
        length = self._counts.pop(first)
        del self._starts[bisect_left(self._starts, first)]
        del self._by_length[bisect_left(self._by_length, (length, first))]
        return length


def split_runs(runs: Iterable[Run], sizes: Iterable[int]) -> list[tuple[Run, ...]]:
    """Divide the blocks of `runs`, in order, into one piece for each size.

    The runs must have as many blocks as the sizes add up to.
    """
    left = iter(runs)
    first, length = next(left, (0, 0))
    pieces = []
    for size in sizes:
        piece = []
        while size:
            if not length:
                first, length = next(left)
            taken = min(size, length)
            piece.append(Run(first, taken))
            first, length, size = first + taken, length - taken, size - taken
        pieces.append(tuple(piece))
    return pieces


class BlockExtents:
    """Maps the logical bytes [0, nbytes) of a transfer to its runs in an arena, end to end."""

    def __init__(self, runs: Sequence[tuple[int, int]], block_bytes: int, nbytes: int) -> None:
        """Raises ValueError for runs that are malformed or hold fewer than `nbytes`."""
        if not runs or block_bytes < 1 or any(first < 0 or count < 1 for first, count in runs):
            raise ValueError(f"not a block table: {list(runs)} of {block_bytes} byte blocks")
        self.runs = tuple(Run(first, count) for first, count in runs)
        self.nbytes = nbytes
        self._ends = list(accumulate(run.length * block_bytes for run in self.runs))
        self._bases = [run.first * block_bytes for run in self.runs]
        if not 0 < nbytes <= self._ends[-1]:
            raise ValueError(f"{nbytes} bytes in blocks that hold {self._ends[-1]}")

    @property
    def end_block(self) -> int:
        """One past the highest block used."""
        return max(run.end for run in self.runs)

    def extents(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """The arena (offset, length) pieces of [offset, offset + length), in logical order.

        Raises ValueError when the range leaves [0, nbytes).
        """
        if offset < 0 or length < 0 or offset + length > self.nbytes:
            raise ValueError(f"[{offset}, {offset + length}) is not inside [0, {self.nbytes})")
        index = bisect_right(self._ends, offset)
        while length > 0:
            run_end = self._ends[index]
            run_begin = self._ends[index - 1] if index else 0
            piece = min(length, run_end - offset)
            yield self._bases[index] + offset - run_begin, piece
            offset += piece
            length -= piece
            index += 1
