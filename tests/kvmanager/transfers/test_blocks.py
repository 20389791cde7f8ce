"""The block allocator under random use, and where logical bytes lie in blocks."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvmanager.transfers.blocks import BlockAllocator, BlockExtents, OutOfBlocks, Run

NUM_BLOCKS = 40


class AllocatorMachine(RuleBasedStateMachine):
    """Against a set of block numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.taken: list[list[Run]] = []

    @rule(num_blocks=st.integers(1, NUM_BLOCKS))
    def allocate(self, num_blocks: int) -> None:
        free = self.allocator.num_free
        longest = max((run.length for run in self.allocator.free_runs()), default=0)
        if num_blocks > free:
            with pytest.raises(OutOfBlocks):
                self.allocator.allocate(num_blocks)
            return
        runs = self.allocator.allocate(num_blocks)
        assert sum(run.length for run in runs) == num_blocks
        assert len(runs) == 1 or longest < num_blocks
        self.taken.append(runs)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.taken:
            index = data.draw(st.integers(0, len(self.taken) - 1))
            self.allocator.free(self.taken.pop(index))

    @rule(first=st.integers(-2, NUM_BLOCKS + 2), length=st.integers(-1, 5))
    def free_what_is_not_taken(self, first: int, length: int) -> None:
        blocks = set(range(first, first + length))
        if length > 0 and blocks <= self.taken_blocks():
            return
        with pytest.raises(ValueError, match="cannot free"):
            self.allocator.free([Run(first, length)])

    @rule(runs=st.lists(st.builds(Run, st.integers(-1, NUM_BLOCKS), st.integers(0, 6)), max_size=3))
    def take(self, runs: list[Run]) -> None:
        wanted = [block for run in runs for block in range(run.first, run.end)]
        free = set(range(NUM_BLOCKS)) - self.taken_blocks()
        is_once = len(set(wanted)) == len(wanted) and all(run.length for run in runs)
        if is_once and free.issuperset(wanted):
            self.allocator.take(runs)
            self.taken.append(runs)
            return
        with pytest.raises(ValueError, match="cannot take"):
            self.allocator.take(runs)

    def taken_blocks(self) -> set[int]:
        return {block for runs in self.taken for run in runs for block in range(run.first, run.end)}

    @invariant()
    def books_agree(self) -> None:
        self.allocator.check_invariants()
        free = {block for run in self.allocator.free_runs() for block in range(run.first, run.end)}
        assert free.isdisjoint(self.taken_blocks())
        assert len(free) + len(self.taken_blocks()) == NUM_BLOCKS
        assert self.allocator.num_used == len(self.taken_blocks())


TestAllocator = AllocatorMachine.TestCase


def test_fitting_run_is_the_smallest_that_fits() -> None:
    allocator = BlockAllocator(10)
    first, gap, _ = (allocator.allocate(n) for n in (2, 3, 2))
    allocator.free(gap)
    assert allocator.allocate(3) == [Run(2, 3)]
    allocator.free(first)
    assert allocator.allocate(4) == [Run(0, 1), Run(7, 3)]


def test_take_leaves_what_lies_around() -> None:
    allocator = BlockAllocator(10)
    allocator.take([Run(6, 2), Run(2, 1)])
    assert allocator.free_runs() == [Run(0, 2), Run(3, 3), Run(8, 2)]
    with pytest.raises(ValueError, match="cannot take"):
        allocator.take([Run(0, 1), Run(5, 2)])
    assert allocator.num_free == 7


def test_twice_in_one_call_is_refused_and_changes_nothing() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(4)
    with pytest.raises(ValueError, match="twice"):
        allocator.free([Run(0, 2), Run(1, 2)])
    assert allocator.num_free == 0


@given(
    runs=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 4)), min_size=1, max_size=5),
    block_bytes=st.sampled_from([1, 3, 8]),
    data=st.data(),
)
def test_extents_name_the_bytes_of_the_concatenated_blocks(
    runs: list[tuple[int, int]], block_bytes: int, data: st.DataObject
) -> None:
    every_byte = [
        first * block_bytes + i for first, count in runs for i in range(count * block_bytes)
    ]
    nbytes = data.draw(st.integers(1, len(every_byte)))
    table = BlockExtents(runs, block_bytes, nbytes)
    offset = data.draw(st.integers(0, nbytes))
    length = data.draw(st.integers(0, nbytes - offset))
    found = [base + i for base, size in table.extents(offset, length) for i in range(size)]
    assert found == every_byte[offset : offset + length]
    with pytest.raises(ValueError, match="not inside"):
        list(table.extents(offset, nbytes - offset + 1))


@pytest.mark.parametrize("runs", [[], [(-1, 2)], [(0, 0)], [(0, 1)]])
def test_runs_that_cannot_hold_the_bytes_are_refused(runs: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"block table|bytes in blocks"):
        BlockExtents(runs, 8, 9)


def test_a_block_costs_the_same_however_many_runs_are_free() -> None:
    """Going through all free runs for each block, this takes a minute."""
    allocator = BlockAllocator(200_000)
    allocator.allocate(200_000)
    for first in range(0, 200_000, 2):
        allocator.free([Run(first, 1)])
    begin_s = time.thread_time()
    for _ in range(1000):
        [taken] = allocator.allocate(1)
        allocator.free([taken])
    assert time.thread_time() - begin_s < 2.0


def test_of_runs_of_one_length_the_first_is_used() -> None:
    allocator = BlockAllocator(9)
    allocator.allocate(9)
    allocator.free([Run(0, 2), Run(3, 2), Run(6, 3)])
    assert allocator.allocate(2) == [Run(0, 2)]
    assert allocator.allocate(5) == [Run(3, 2), Run(6, 3)]
