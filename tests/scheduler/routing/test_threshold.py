"""The threshold between two plans: up at once, down slowly, never below the plan's."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scheduling_cases import links, untimed

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.routing.threshold import ThresholdConfig, ThresholdController, ThresholdReason

CLEAR = LinkView(available_bytes_per_s=1e9)
HALF = LinkView(available_bytes_per_s=5e8)
DOWN = LinkView(state=LinkCondition.DOWN)
PLANNED = 1e9


def test_a_clear_link_leaves_the_plans_threshold() -> None:
    found = ThresholdController().update(20_000, CLEAR, PLANNED, 0.0)
    assert (found.tokens, found.reason) == (20_000, ThresholdReason.PLAN)
    assert found.numbers["available_bytes_per_s"] == 1e9
    assert str(found).startswith("plan; plan_tokens=20000; factor=1.0")


@pytest.mark.parametrize(
    ("link", "factor", "reason"),
    [
        (HALF, 2.0, ThresholdReason.RATE),
        (replace(CLEAR, state=LinkCondition.RISING), 1.1, ThresholdReason.STATE),
        (replace(CLEAR, state=LinkCondition.CONGESTED), 1.5, ThresholdReason.STATE),
        (replace(HALF, state=LinkCondition.CONGESTED), 2.0, ThresholdReason.RATE),
        (replace(CLEAR, available_bytes_per_s=1e6), 16.0, ThresholdReason.RATE),
        (replace(CLEAR, available_bytes_per_s=None), 1.0, ThresholdReason.PLAN),
        (replace(CLEAR, available_bytes_per_s=1e6, is_floor=True), 1.0, ThresholdReason.PLAN),
        (replace(CLEAR, available_bytes_per_s=0.0), 16.0, ThresholdReason.LINK_DOWN),
        (DOWN, 16.0, ThresholdReason.LINK_DOWN),
    ],
)
def test_trouble_raises_it_at_once(link: LinkView, factor: float, reason: ThresholdReason) -> None:
    controller = ThresholdController()
    controller.update(20_000, CLEAR, PLANNED, 0.0)
    found = controller.update(20_000, link, PLANNED, 0.2)
    assert found.tokens == pytest.approx(20_000 * factor)
    assert found.reason is reason


def test_it_returns_with_its_time_constant() -> None:
    controller = ThresholdController(ThresholdConfig(return_s=10))
    controller.update(20_000, HALF, PLANNED, 0.0)
    found = controller.update(20_000, CLEAR, PLANNED, 10.0)
    assert found.reason is ThresholdReason.RETURNING
    assert found.tokens == pytest.approx(20_000 * 2 ** math.exp(-1))
    assert found.numbers["target_factor"] == 1.0
    last = controller.update(20_000, CLEAR, PLANNED, 200.0)
    assert (last.tokens, last.reason) == (20_000, ThresholdReason.PLAN)


def test_a_new_plan_counts_at_once() -> None:
    controller = ThresholdController()
    controller.update(20_000, HALF, PLANNED, 0.0)
    assert controller.update(8000, HALF, PLANNED, 1.0).tokens == pytest.approx(16_000)


def test_an_old_view_neither_raises_nor_lowers_it() -> None:
    controller = ThresholdController()
    controller.update(20_000, HALF, PLANNED, 0.0)
    old = replace(CLEAR, age_s=6.0)
    found = controller.update(20_000, old, PLANNED, 60.0)
    assert (found.tokens, found.reason) == (40_000, ThresholdReason.LINK_STALE)
    assert controller.factor == 2.0


def test_a_clock_that_goes_back_stands_still() -> None:
    controller = ThresholdController()
    controller.update(20_000, HALF, PLANNED, 100.0)
    assert controller.update(20_000, CLEAR, PLANNED, 50.0).tokens == pytest.approx(40_000)


def test_factors_must_ascend() -> None:
    with pytest.raises(ValueError, match="must ascend from 1"):
        ThresholdConfig(rising_factor=3.0, congested_factor=2.0)
    with pytest.raises(ValueError, match="return_s 0"):
        ThresholdConfig(return_s=0)


ORDER = list(LinkCondition)


@st.composite
def slower(draw: st.DrawFn, link: LinkView) -> LinkView:
    """The same link with less rate and a state no better; a rate unknown stays unknown."""
    worse = draw(st.sampled_from(ORDER[ORDER.index(link.state) :]))
    rate = link.available_bytes_per_s
    share = draw(st.floats(0.01, 1))
    return replace(link, state=worse, available_bytes_per_s=None if rate is None else rate * share)


@st.composite
def two_histories(draw: st.DrawFn) -> list[tuple[float, LinkView, LinkView]]:
    steps = draw(st.lists(st.tuples(st.floats(0, 30), links), min_size=1, max_size=8))
    return [(elapsed_s, link, draw(slower(link))) for elapsed_s, link in steps]


@untimed
@given(two_histories(), st.floats(0, 1e11))
def test_a_slower_link_never_lowers_it(
    history: list[tuple[float, LinkView, LinkView]], planned: float
) -> None:
    config = ThresholdConfig()
    one, other = ThresholdController(config), ThresholdController(config)
    now_s = 0.0
    for elapsed_s, link, worse in history:
        now_s += elapsed_s
        t = one.update(20_000, link, planned, now_s)
        raised = other.update(20_000, worse, planned, now_s)
        # 0.1%: what is left of a return is cut off there.
        assert raised.tokens * 1.0011 >= t.tokens
        for found in (t, raised):
            assert 20_000 <= found.tokens <= 20_000 * config.max_factor * (1 + 1e-9)


@untimed
@given(
    st.lists(links, min_size=1, max_size=3),
    st.lists(
        st.tuples(st.floats(0, 30), st.integers(0, 2), st.sampled_from([0.0, 1e9])), max_size=12
    ),
)
def test_the_same_view_again_is_as_good_as_an_equal_one(
    views: list[LinkView], steps: list[tuple[float, int, float]]
) -> None:
    one, other = ThresholdController(), ThresholdController()
    now_s = 0.0
    for elapsed_s, which, planned in steps:
        now_s += elapsed_s
        view = views[which % len(views)]
        again = one.update(20_000, view, planned, now_s)
        assert again == other.update(20_000, replace(view), planned, now_s)
