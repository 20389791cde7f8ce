"""Those turned away come back one after another."""

import pytest

from deploy.gateway.intake.limits import RetryAfter


def test_before_anything_ended_the_least_is_said() -> None:
    assert RetryAfter(2, 60).refused(1.0, 0.0) == 2


def test_places_fall_free_at_the_rate_at_which_requests_end() -> None:
    retry_after = RetryAfter(1, 60)
    for _ in range(10):
        retry_after.ended(20.0)
    # Of 4 that take 20 s each one ends every 5 s.
    assert [retry_after.refused(1 / 4, 0.0) for _ in range(3)] == [5, 10, 15]
    # By then the first two have come back.
    assert retry_after.refused(1 / 4, 10.0) == 10
    # Nobody is waiting any more.
    assert retry_after.refused(1 / 4, 100.0) == 5


def test_a_wait_has_bounds() -> None:
    retry_after = RetryAfter(3, 30)
    retry_after.ended(20.0)
    assert retry_after.refused(0.01, 0.0) == 3
    assert [retry_after.refused(0.7, 0.0) for _ in range(4)] == [15, 29, 30, 30]
    assert RetryAfter(90, 60).refused(1.0, 0.0) == 90


def test_the_mean_follows_what_requests_take_now() -> None:
    retry_after = RetryAfter(1, 1000)
    for held_s in [2.0] * 50 + [20.0] * 200:
        retry_after.ended(held_s)
    assert retry_after.refused(1.0, 0.0) == 20


@pytest.mark.parametrize("min_s", [0, -1, float("nan"), float("inf")])
def test_a_wait_of_nothing_is_no_bound(min_s: float) -> None:
    with pytest.raises(ValueError, match="min_s"):
        RetryAfter(min_s, 60)
