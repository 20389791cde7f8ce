"""Backoff of restarts: delays and forgiveness."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.engines.supervision.restart import FIRST_DELAY_S, MAX_DELAY_S, RestartPolicy


def slow_policy() -> RestartPolicy:
    """One whose delays are as long as they can be."""
    return RestartPolicy(uniform=lambda: 1.0)


def test_delays_double_up_to_the_ceiling() -> None:
    policy = slow_policy()
    delays_s = [policy.process_ended(float(i)) for i in range(8)]
    assert delays_s == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert (policy.num_restarts, policy.num_failures) == (8, 8)


def test_a_long_healthy_time_is_forgiven_a_short_one_not() -> None:
    policy = slow_policy()
    policy.process_ended(0.0)
    policy.healthy(10.0)
    assert policy.process_ended(69.9) == 2.0
    assert policy.num_failures == 2
    policy.healthy(80.0)
    policy.healthy(100.0)  # later probes do not restart the healthy time
    assert policy.process_ended(140.1) == 1.0
    assert (policy.num_restarts, policy.num_failures) == (3, 1)


def test_the_healthy_time_ends_with_the_process() -> None:
    policy = slow_policy()
    policy.healthy(0.0)
    assert policy.process_ended(100.0) == 1.0
    assert policy.process_ended(200.0) == 2.0


@given(st.lists(st.floats(0.0, 500.0), min_size=1, max_size=50))
def test_a_delay_is_always_within_bounds(gaps_s: list[float]) -> None:
    policy = slow_policy()
    now_s = 0.0
    for gap_s in gaps_s:
        policy.healthy(now_s)
        now_s += gap_s
        assert FIRST_DELAY_S <= policy.process_ended(now_s) <= MAX_DELAY_S


@given(st.floats(0.0, 1.0, exclude_max=True))
def test_jitter_takes_off_up_to_half(number: float) -> None:
    policy = RestartPolicy(uniform=lambda: number)
    policy.process_ended(0.0)
    assert FIRST_DELAY_S <= policy.process_ended(1.0) <= 2 * FIRST_DELAY_S
