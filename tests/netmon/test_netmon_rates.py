"""The rate filter and the decaying sums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netmon.rates import DecayingRate, DecayingShare, RateFilter, WindowedMin

RATES = st.floats(0, 1e10)


def measured(*rates: float) -> RateFilter:
    filter_ = RateFilter(rise_s=1.0)
    for step, rate in enumerate(rates):
        filter_.measure(rate, 0.2, step * 0.2)
    return filter_


def test_one_odd_measurement_changes_nothing() -> None:
    assert measured(100, 100, 100, 2).bytes_per_s == 100
    assert measured(100, 100, 100, 500).bytes_per_s == 100


def test_a_fall_is_followed_at_once_and_a_rise_slowly() -> None:
    assert measured(100, 100, 100, 2, 2).bytes_per_s == 2
    risen = measured(2, 2, 2, 100, 100).bytes_per_s
    assert 10 < risen < 30
    assert measured(2, 2, 2, *[100.0] * 40).bytes_per_s == pytest.approx(100, rel=0.01)


def test_a_floor_raises_and_never_lowers() -> None:
    filter_ = RateFilter(rise_s=1.0)
    filter_.at_least(10, 0.0)
    assert (filter_.bytes_per_s, filter_.is_floor, filter_.heard_s) == (10, True, 0.0)
    filter_.at_least(5, 1.0)
    assert (filter_.bytes_per_s, filter_.heard_s) == (10, 0.0)  # no news
    filter_.at_least(9.5, 2.0)
    assert (filter_.bytes_per_s, filter_.heard_s, filter_.measured_s) == (10, 2.0, None)
    filter_.measure(40, 0.2, 3.0)
    assert (filter_.bytes_per_s, filter_.is_floor) == (40, False)  # not slowly: 10 was no rate
    assert filter_.measured_s == 3.0


def test_a_floor_disproves_lower_measurements() -> None:
    filter_ = measured(2, 2, 2)
    filter_.at_least(50, 1.0)
    assert filter_.is_floor
    filter_.measure(80, 0.2, 1.2)
    assert filter_.bytes_per_s == 50


def test_a_replacement_needs_no_second_opinion() -> None:
    filter_ = measured(100, 100, 100)
    filter_.replace(3, 9.0)
    assert (filter_.bytes_per_s, filter_.measured_s) == (3, 9.0)


@given(st.lists(st.tuples(st.booleans(), RATES, st.floats(0, 1))))
def test_lower_inputs_never_give_a_higher_rate(steps: list[tuple[bool, float, float]]) -> None:
    high, low = RateFilter(1.0), RateFilter(1.0)
    for number, (is_floor, rate, share) in enumerate(steps):
        for filter_, value in ((high, rate), (low, rate * share)):
            if is_floor:
                filter_.at_least(value, number)
            else:
                filter_.measure(value, 0.2, number)
        if high.measured_s is not None:  # before that a floor and a rate would be compared
            assert low.bytes_per_s <= high.bytes_per_s * (1 + 1e-9)


def test_a_share_is_told_when_enough_lies_in_the_window() -> None:
    share = DecayingShare(window_s=2.0, least_whole=100)
    share.add(1, 50, 0.0)
    assert share.value(0.0) == 0
    share.add(9, 150, 0.0)
    assert share.value(0.5) == pytest.approx(0.05)
    assert share.value(9.0) == 0


def test_a_rate_sinks_while_nobody_adds() -> None:
    rate = DecayingRate(window_s=1.0)
    assert rate.value(5.0) == 0
    for step in range(50):
        rate.add(20, 0.2, step * 0.2)
    assert rate.value(9.8) == pytest.approx(100, rel=0.01)
    assert rate.value(10.8) == pytest.approx(37, rel=0.02)
    assert rate.value(1e6) == 0


def test_the_least_value_is_forgotten_after_two_windows() -> None:
    least = WindowedMin(window_s=10.0)
    assert least.value == 0
    least.add(5, 0.0)
    least.add(0, 1.0)  # not measured
    least.add(9, 11.0)
    assert least.value == 5
    least.add(9, 22.0)
    assert least.value == 9
