"""IntervalSet against a set of integers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from transport.ranges import IntervalSet

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
