import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.encoding.line import EncodeLine
from scheduler.encoding.times import KEPT_S, MIN_SEEN, EncodeTimes, line_through

KIND = ("m", False)


def test_line_is_found_again_through_noise_and_stalls() -> None:
    rng, true = random.Random(1), EncodeLine(0.05, 1e-4)
    passes = []
    for number in range(30):
        tokens = rng.choice([256, 576, 1152, 2304])
        stall = 3.0 if number % 7 == 0 else 1.0
        passes.append((tokens, true.seconds(tokens) * rng.uniform(0.95, 1.05) * stall))
    found = line_through(passes)
    assert found is not None
    for tokens in (256, 1000, 2304):
        assert found.seconds(tokens) == pytest.approx(true.seconds(tokens), rel=0.15)


def test_one_size_says_nothing_about_the_fixed_part() -> None:
    assert line_through([(500, 0.1), (500, 0.3), (500, 0.2)]) == EncodeLine(0.0, 0.2 / 500)
    assert line_through([]) is None
    assert line_through([(0, 1.0), (5, math.nan)]) is None


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 100)), min_size=1, max_size=32))
def test_no_passes_make_a_line_below_zero(passes: list[tuple[int, float]]) -> None:
    found = line_through(passes)
    assert found is not None
    assert found.seconds(1) >= 0


@given(st.floats(0, 1), st.floats(0, 0.01), st.floats(0, 10))
def test_the_budget_is_the_largest_that_keeps_the_objective(
    fixed_s: float, token_s: float, objective_s: float
) -> None:
    line = EncodeLine(fixed_s, token_s)
    budget = line.tokens_within(objective_s)
    assert budget >= 0
    if budget:
        assert line.seconds(budget) <= objective_s * (1 + 1e-9)
    if 0 < budget < 1 << 30:
        assert line.seconds(budget + 1) > objective_s * (1 - 1e-9)


def test_an_instance_borrows_from_its_kind_until_it_is_known() -> None:
    times = EncodeTimes()
    for number in range(MIN_SEEN):
        assert times.line("a", KIND, 0.0) is None
        times.observe("a", KIND, 100 + number, 1.0, 0.0)
    assert times.line("a", KIND, 0.0) is not None
    assert times.line("b", KIND, 0.0) == times.line("a", KIND, 0.0)
    assert times.line("b", ("m", True), 0.0) is None
    for _ in range(MIN_SEEN):
        times.observe("b", KIND, 100, 4.0, 1.0)
    assert times.line("b", KIND, 1.0) == EncodeLine(0.0, 0.04)
    times.forget("b")
    assert times.line("b", KIND, 1.0) != EncodeLine(0.0, 0.04)


def test_what_is_not_confirmed_is_forgotten() -> None:
    times = EncodeTimes()
    for _ in range(MIN_SEEN):
        times.observe("a", KIND, 100, 60.0, 0.0)
    assert times.line("a", KIND, KEPT_S) is not None
    assert times.line("a", KIND, KEPT_S + 1) is None
    for _ in range(MIN_SEEN):
        times.observe("a", KIND, 100, 0.1, KEPT_S + 2)
    assert times.line("a", KIND, KEPT_S + 2) == EncodeLine(0.0, 0.001)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (1, -1.0), (1, math.nan), (1, math.inf)])
def test_what_cannot_be_is_ignored(tokens: int, seconds: float) -> None:
    times = EncodeTimes()
    for _ in range(MIN_SEEN):
        times.observe("a", KIND, tokens, seconds, 0.0)
    assert times.line("a", KIND, 0.0) is None


@pytest.mark.parametrize("line", [(-1.0, 0.0), (0.0, -1.0), (math.inf, 0.0), (0.0, math.nan)])
def test_a_line_that_cannot_be_is_refused(line: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="seconds must be"):
        EncodeLine(*line)
