"""Backoff of restarts: delays, forgiveness, giving up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.engines.supervision.restart import RestartConfig, RestartPolicy

CONFIG = RestartConfig(initial_backoff_s=1.0, factor=2.0, max_backoff_s=8.0, forgive_after_s=60.0)


def test_delays_double_up_to_the_ceiling() -> None:
    policy = RestartPolicy(CONFIG)
    assert [policy.process_ended(float(i)).delay_s for i in range(6)] == [
        1.0,
        2.0,
        4.0,
        8.0,
        8.0,
        8.0,
    ]
    assert policy.num_restarts == 6


def test_a_long_healthy_time_is_forgiven_a_short_one_not() -> None:
    policy = RestartPolicy(CONFIG)
    policy.process_ended(0.0)
    policy.healthy(10.0)
    assert policy.process_ended(69.9).delay_s == 2.0
    policy.healthy(80.0)
    policy.healthy(100.0)  # later probes do not restart the healthy time
    assert policy.process_ended(140.0).delay_s == 1.0


def test_the_healthy_time_ends_with_the_process() -> None:
    policy = RestartPolicy(CONFIG)
    policy.healthy(0.0)
    assert policy.process_ended(100.0).delay_s == 1.0
    assert policy.process_ended(200.0).delay_s == 2.0


def test_it_gives_up_after_the_configured_number_of_failures() -> None:
    policy = RestartPolicy(RestartConfig(max_failures=2))
    assert policy.process_ended(0.0).delay_s == 1.0
    decision = policy.process_ended(1.0)
    assert decision.delay_s is None
    assert "2 failures" in decision.reason
    assert policy.num_restarts == 1


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="initial_backoff_s"):
        RestartConfig(initial_backoff_s=0.0)
    with pytest.raises(ValueError, match="max_backoff_s"):
        RestartConfig(initial_backoff_s=5.0, max_backoff_s=1.0)


@given(st.lists(st.floats(0.0, 500.0), min_size=1, max_size=50))
def test_a_delay_is_always_within_bounds(gaps_s: list[float]) -> None:
    policy = RestartPolicy(CONFIG)
    now_s = 0.0
    for gap_s in gaps_s:
        policy.healthy(now_s)
        now_s += gap_s
        delay_s = policy.process_ended(now_s).delay_s
        assert delay_s is not None
        assert 1.0 <= delay_s <= 8.0
