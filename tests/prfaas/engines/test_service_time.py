"""What a prefill took by itself, among others on its instance."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engines.service_time import LEAST_SERVICE_S, Turn, Turns


def test_alone_it_is_all_of_it() -> None:
    turns = Turns()
    turn = turns.start("p0", 10.0)
    turns.end(turn, 13.1)  # the answer comes a little after the pass
    assert turn.service_s(10.0, 3.0) == 3.0
    later = turns.start("p0", 14.0)
    turns.end(later, 15.0)
    assert later.service_s(14.0, 1.0) == 1.0


def test_behind_another_it_begins_when_that_ends() -> None:
    turns = Turns()
    first, second = turns.start("p0", 0.0), turns.start("p0", 1.0)
    elsewhere = turns.start("p1", 1.0)
    turns.end(first, 5.0)
    turns.end(first, 6.0)
    turns.end(second, 7.0)
    turns.end(elsewhere, 7.0)
    assert second.service_s(1.0, 6.0) == 2.0
    assert elsewhere.service_s(1.0, 6.0) == 6.0


def test_one_that_started_later_takes_nothing_from_it() -> None:
    turns = Turns()
    long, short = turns.start("p0", 0.0), turns.start("p0", 1.0)
    turns.end(short, 2.0)
    turns.end(long, 9.0)
    assert long.service_s(0.0, 9.0) == 9.0


def test_what_ends_after_it_is_over_does_not_count() -> None:
    turns = Turns()
    first, second = turns.start("p0", 0.0), turns.start("p0", 0.0)
    turns.end(second, 2.0)
    turns.end(first, 8.0)
    assert second.service_s(0.0, 2.0) == 2.0


def test_ends_in_one_pass_cannot_be_told_apart() -> None:
    turns = Turns()
    first, second = turns.start("p0", 0.0), turns.start("p0", 0.0)
    turns.end(first, 2.01)
    turns.end(second, 2.02)
    assert second.service_s(0.0, 2.0) == LEAST_SERVICE_S
    assert second.service_s(0.0, 0.0) == 0.0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_of_an_engine_that_works_in_order_each_gets_what_it_took(seed: int) -> None:
    rng = random.Random(seed)
    turns, at_s, free_s = Turns(), 0.0, 0.0
    under_way: list[tuple[float, Turn]] = []
    done: list[tuple[Turn, float, float, float]] = []
    for _ in range(20):
        at_s += rng.expovariate(1.0)
        took_s = rng.uniform(0.01, 3.0)
        free_s = max(free_s, at_s) + took_s
        while under_way and under_way[0][0] <= at_s:
            end_s, turn = under_way.pop(0)
            turns.end(turn, end_s)
        under_way.append((free_s, turns.start("p0", at_s)))
        done.append((under_way[-1][1], at_s, free_s, took_s))
    for end_s, turn in under_way:
        turns.end(turn, end_s)
    for turn, start_s, end_s, took_s in done:
        assert turn.service_s(start_s, end_s - start_s) == pytest.approx(took_s)
