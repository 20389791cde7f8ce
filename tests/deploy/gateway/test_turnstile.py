"""Those turned away come back one after another."""

import pytest

from deploy.gateway.intake.turnstile import Turnstile


def test_before_anything_ended_the_least_is_said() -> None:
    assert Turnstile(2, 60).turned_away(1.0, 0.0) == 2


def test_places_fall_free_at_the_rate_at_which_requests_end() -> None:
    turnstile = Turnstile(1, 60)
    for _ in range(10):
        turnstile.ended(20.0)
    # Of 4 that take 20 s each one ends every 5 s.
    assert [turnstile.turned_away(1 / 4, 0.0) for _ in range(3)] == [5, 10, 15]
    # By then the first two have come back.
    assert turnstile.turned_away(1 / 4, 10.0) == 10
    # Nobody is waiting any more.
    assert turnstile.turned_away(1 / 4, 100.0) == 5


def test_a_wait_has_bounds() -> None:
    turnstile = Turnstile(3, 30)
    turnstile.ended(20.0)
    assert turnstile.turned_away(0.01, 0.0) == 3
    assert [turnstile.turned_away(0.7, 0.0) for _ in range(4)] == [15, 29, 30, 30]
    assert Turnstile(90, 60).turned_away(1.0, 0.0) == 90


def test_the_mean_follows_what_requests_take_now() -> None:
    turnstile = Turnstile(1, 1000)
    for held_s in [2.0] * 50 + [20.0] * 200:
        turnstile.ended(held_s)
    assert turnstile.turned_away(1.0, 0.0) == 20


@pytest.mark.parametrize("min_s", [0, -1, float("nan"), float("inf")])
def test_a_wait_of_nothing_is_no_bound(min_s: float) -> None:
    with pytest.raises(ValueError, match="min_s"):
        Turnstile(min_s, 60)
