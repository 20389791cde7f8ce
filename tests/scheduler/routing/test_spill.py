"""Which PD cluster decodes a request."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.routing.spill import PdOffer, PdReason, Spill, SpillRule, choose_pd

HOME = PdOffer("home", 4.0)
NEAR = PdOffer("near", 0.5, rtt_s=0.02)
FAR = PdOffer("far", 0.4, rtt_s=0.2)

times = st.one_of(st.just(math.inf), st.floats(0, 100))
offers = st.lists(
    st.builds(
        PdOffer,
        pd=st.text("abc", min_size=1, max_size=3),
        ttft_s=times,
        is_refused=st.booleans(),
        is_full=st.booleans(),
        rtt_s=st.floats(0, 1),
    ),
    max_size=4,
    unique_by=lambda offer: offer.pd,
)


def rule(spill: Spill, margin_s: float = 1.0, margin_share: float = 0.45) -> SpillRule:
    return SpillRule(spill, margin_s, margin_share)


@pytest.mark.parametrize("home", [HOME, PdOffer("home", math.inf), PdOffer("home", 4.0, True)])
def test_never_means_never(home: PdOffer) -> None:
    assert not rule("never").may_leave(home)
    assert choose_pd(home, [NEAR, FAR], rule("never")) == (home, PdReason.HOME)


@pytest.mark.parametrize(
    ("home", "reason"),
    [
        (PdOffer("home", math.inf), PdReason.HOME_UNABLE),
        (PdOffer("home", 0.1, is_refused=True), PdReason.HOME_REFUSES),
        (PdOffer("home", 0.6, is_full=True), PdReason.HOME_FULL),
        (HOME, PdReason.SOONER),
    ],
)
def test_a_request_leaves_a_home_that_is_worse_off(home: PdOffer, reason: PdReason) -> None:
    assert choose_pd(home, [NEAR, FAR], rule("overflow")) == (NEAR, reason)


def test_a_home_within_the_margin_keeps_its_request() -> None:
    home = PdOffer("home", 2.5)
    assert choose_pd(home, [NEAR], rule("overflow")) == (home, PdReason.HOME)
    assert choose_pd(home, [NEAR], rule("nearest")) == (NEAR, PdReason.SOONER)
    assert choose_pd(PdOffer("home", 1.4), [NEAR], rule("nearest"))[1] == PdReason.HOME


def test_a_full_home_keeps_what_would_be_later_elsewhere() -> None:
    home = PdOffer("home", 0.45, is_full=True)
    assert choose_pd(home, [NEAR], rule("overflow")) == (home, PdReason.HOME)


def test_the_round_trip_counts() -> None:
    home = PdOffer("home", math.inf)
    late = FAR._replace(rtt_s=0.05)
    assert choose_pd(home, [NEAR, FAR], rule("overflow"))[0] == NEAR
    assert choose_pd(home, [NEAR, late], rule("overflow"))[0] == late
    assert choose_pd(home, [NEAR, late], rule("nearest"))[0] == NEAR


def test_only_clusters_that_would_serve_it_are_taken() -> None:
    home = PdOffer("home", math.inf)
    others = [PdOffer("a", math.inf), PdOffer("b", 0.1, is_refused=True)]
    assert choose_pd(home, others, rule("overflow")) == (home, PdReason.HOME)


def test_a_margin_that_is_not_known_lets_only_full_homes_spill() -> None:
    guess = rule("overflow", margin_s=math.inf)
    assert not guess.may_leave(HOME)
    assert choose_pd(HOME, [NEAR], guess)[0] is HOME
    assert choose_pd(HOME._replace(is_full=True), [NEAR], guess)[0] is NEAR


@given(times, st.booleans(), st.booleans(), offers, st.sampled_from(["never", "overflow"]))
def test_a_choice_is_an_offer_and_others_are_asked_whenever_one_could_be_taken(
    ttft_s: float, is_refused: bool, is_full: bool, others: list[PdOffer], spill: Spill
) -> None:
    home, by = PdOffer("home", ttft_s, is_refused, is_full), rule(spill)
    chosen, reason = choose_pd(home, others, by)
    assert chosen is home or (chosen in others and chosen.is_able)
    assert (chosen is home) == (reason is PdReason.HOME)
    # What is not asked is not lost.
    assert chosen is home or by.may_leave(home)
    # An able home is left only for a cluster that is sooner.
    if chosen is not home and home.is_able:
        assert chosen.total_s < home.ttft_s


@given(offers, st.sampled_from(["overflow", "nearest"]))
def test_the_order_of_offers_does_not_matter(others: list[PdOffer], spill: Spill) -> None:
    by = rule(spill)
    assert choose_pd(HOME, others, by) == choose_pd(HOME, others[::-1], by)
