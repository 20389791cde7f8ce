"""IntervalSet against a set of integers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.wire.ranges import IntervalSet, Range, overlap

ranges = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: tuple(sorted(pair)))
operations = st.lists(st.tuples(st.sampled_from(["add", "remove", "pop"]), ranges), max_size=40)


def as_set(intervals: IntervalSet) -> set[int]:
    return {number for start, end in intervals for number in range(start, end)}


@given(operations, ranges)
def test_behaves_as_a_set_of_integers(
    steps: list[tuple[str, tuple[int, int]]], probe: tuple[int, int]
) -> None:
    intervals, model = IntervalSet(), set[int]()
    for name, (start, end) in steps:
        wanted = set(range(start, end))
        if name == "add":
            assert intervals.add(start, end) == len(wanted - model)
            model |= wanted
        elif name == "remove":
            assert intervals.remove(start, end) == len(wanted & model)
            model -= wanted
        else:
            taken = intervals.pop_first(start)
            if taken is not None:
                numbers = set(range(*taken))
                assert numbers <= model
                assert not numbers or min(numbers) == min(model)
                model -= numbers
        assert as_set(intervals) == model
        assert intervals.total == len(model)
        ordered = list(intervals)
        assert all(first[1] < second[0] for first, second in pairwise(ordered))
        assert all(first < last for first, last in ordered)
    wanted = set(range(*probe))
    assert intervals.covers(*probe) == (wanted <= model)
    assert intervals.overlaps(*probe) == bool(wanted & model)
    assert {n for start, end in intervals.gaps(*probe) for n in range(start, end)} == wanted - model


def test_adjacent_ranges_merge() -> None:
    intervals = IntervalSet([(0, 10), (20, 30)])
    assert intervals.add(10, 20) == 10
    assert list(intervals) == [(0, 30)]


def test_pop_first_takes_the_lowest() -> None:
    intervals = IntervalSet([(50, 60), (0, 10)])
    assert intervals.pop_first(4) == (0, 4)
    assert intervals.pop_first(100) == (4, 10)
    assert intervals.pop_first(100) == (50, 60)
    assert intervals.pop_first(100) is None


@given(operations, operations)
def test_overlap_is_a_common_integer(
    ours: list[tuple[str, tuple[int, int]]], theirs: list[tuple[str, tuple[int, int]]]
) -> None:
    mine, other = (IntervalSet([ends for _, ends in steps]) for steps in (ours, theirs))
    assert overlap(list(mine), list(other)) == bool(as_set(mine) & as_set(other))


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([], [], False),
        ([(0, 5)], [], False),
        ([(0, 5)], [(5, 9)], False),
        ([(0, 5)], [(4, 9)], True),
        ([(0, 5), (8, 9)], [(5, 8)], False),
        ([(0, 5), (8, 9)], [(5, 8), (8, 9)], True),
        ([(0, 1), (2, 3), (4, 5)], [(1, 2), (3, 4)], False),
        ([(0, 1), (2, 3), (4, 5)], [(1, 2), (4, 5)], True),
        ([(0, 1), (2, 3), (6, 7)], [(3, 6)], False),
        ([(0, 1), (2, 4)], [(3, 6)], True),
    ],
)
def test_overlap_of_ranges_that_touch(
    ours: list[Range], theirs: list[Range], expected: bool
) -> None:
    assert overlap(ours, theirs) is expected
    assert overlap(theirs, ours) is expected


def test_it_shows_its_ranges() -> None:
    assert repr(IntervalSet([(0, 3), (5, 6)])) == "IntervalSet([(0, 3), (5, 6)])"


@pytest.mark.parametrize(
    ("start", "end", "left", "gaps"),
    [
        (0, 10, [(10, 20), (30, 40)], [(0, 10)]),
        (0, 11, [(11, 20), (30, 40)], [(0, 10)]),
        (10, 20, [(30, 40)], []),
        (11, 19, [(10, 11), (19, 20), (30, 40)], []),
        (20, 30, [(10, 20), (30, 40)], [(20, 30)]),
        (19, 31, [(10, 19), (31, 40)], [(20, 30)]),
        (10, 40, [], [(20, 30)]),
        (40, 50, [(10, 20), (30, 40)], [(40, 50)]),
        (15, 15, [(10, 20), (30, 40)], []),
        (25, 25, [(10, 20), (30, 40)], []),
    ],
)
def test_ends_that_touch(start: int, end: int, left: list[Range], gaps: list[Range]) -> None:
    """[start, end) taken out of, and looked for in, 10 to 20 and 30 to 40."""
    intervals = IntervalSet([(10, 20), (30, 40)])
    num_gaps = sum(last - first for first, last in gaps)
    assert intervals.gaps(start, end) == gaps
    assert intervals.covers(start, end) == (num_gaps == 0)
    assert intervals.overlaps(start, end) == (num_gaps < end - start)
    added = IntervalSet([(10, 20), (30, 40)])
    assert added.add(start, end) == num_gaps
    assert added.total == len(as_set(added)) == 20 + num_gaps
    assert intervals.remove(start, end) == end - start - num_gaps
    assert list(intervals) == left
    assert intervals.total == len(as_set(intervals))
    assert (len(intervals), bool(intervals)) == (len(left), bool(left))
