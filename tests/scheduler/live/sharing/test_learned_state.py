"""What a scheduler has learnt, kept and restored: the next one goes on as the one before."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netmon.region_link import LinkRate, LinkView, RegionLink
from scheduler.live.core import LiveScheduler
from scheduler.live.events import LinkHeard, RouteAsked, ThresholdPlanned
from scheduler.live.feedback import (
    AnswerDecoded,
    CacheMoveBegun,
    CacheMoveOver,
    FirstToken,
    LegBegun,
    Prefilled,
    PromptCounted,
    RequestArrived,
)
from scheduler.live.learning.prompt_length import Media, PromptContent
from scheduler.live.settings import LiveSettings, PdSettings
from scheduler.live.sharing.learned_state import LearnedState, StateRestored, learned_state
from scheduler.live.tenants import TenantLimit
from scheduler.routing.decision import ONE_ENGINE, RequestShape
from scheduler.routing.prediction import Prediction

MODEL = "tiny"
LIMIT = TenantLimit(tokens_per_s=10.0, burst_tokens=1000.0)
SETTINGS = LiveSettings(
    pd_clusters=(PdSettings("home", ("far",)),),
    threshold_tokens=1000,
    hand_off_tokens=256,
    models=(MODEL,),
    default_tenant=LIMIT,
)


def kept(live: LiveScheduler, now_s: float) -> LearnedState:
    """The state as another process reads it."""
    written = msgspec.msgpack.encode(learned_state(live, now_s))
    return msgspec.msgpack.decode(written, type=LearnedState)


def restarted(live: LiveScheduler, now_s: float, then_s: float, away_s: float) -> LiveScheduler:
    """A new scheduler with another clock, which read the state `away_s` after it was written."""
    after = LiveScheduler(SETTINGS)
    after.take(StateRestored(kept(live, now_s), away_s), then_s)
    return after


def busy_hour(live: LiveScheduler, lengths: list[int], start_s: float) -> float:
    """Requests of these lengths, one every few seconds. Returns the time after them."""
    now_s = start_s
    for number, num_tokens in enumerate(lengths):
        now_s += 7.0
        place = ("far", ONE_ENGINE)[number % 2]
        seconds = 0.05 + 2e-4 * num_tokens + 1e-8 * num_tokens**2
        live.take(PromptCounted(MODEL, PromptContent(4 * num_tokens + 90), num_tokens), now_s)
        live.take(RequestArrived(MODEL, num_tokens, num_tokens // 5), now_s)
        leg = LegBegun(
            f"t{number}", MODEL, "far", num_tokens, num_tokens, 0, 9000 + 512 * num_tokens, 1.0
        )
        live.take(leg, now_s)
        instance = f"i{number % 3}"
        live.take(Prefilled(MODEL, place, instance, num_tokens, 0, 0.1, seconds), now_s + 1)
        told = FirstToken(MODEL, place, Prediction(prefill_s=seconds), seconds * 1.1 + 0.04)
        live.take(told, now_s + 1)
        live.take(AnswerDecoded(MODEL, 50 + number % 9, 2.0), now_s + 3)
    return now_s


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(20, 60_000), min_size=1, max_size=80),
    then_s=st.floats(1.0, 1e6),
    away_s=st.floats(0.0, 100.0),
)
def test_a_restarted_gateway_predicts_as_the_one_before(
    lengths: list[int], then_s: float, away_s: float
) -> None:
    before = LiveScheduler(SETTINGS)
    now_s = busy_hour(before, lengths, 5000.0)
    after = restarted(before, now_s, then_s, away_s)
    old, new = before.knowledge(MODEL), after.knowledge(MODEL)
    for place in ("far", ONE_ENGINE, "elsewhere"):
        for num_tokens in (30, 900, 20_000):
            expected_s = old.prefill(place).prefill_s(num_tokens)
            assert new.prefill(place).prefill_s(num_tokens) == pytest.approx(expected_s, rel=0.05)
        expected = old.service(place, now_s + away_s)
        assert new.service(place, then_s) == pytest.approx(expected, rel=1e-6)
        assert new.error(place) == old.error(place)
    assert new.kv == old.kv
    assert (new.decode_s, new.step_s) == (old.decode_s, old.step_s)
    assert new.lengths.bytes_per_token == old.lengths.bytes_per_token
    assert new.is_known == old.is_known


def test_it_learns_on_as_the_one_before() -> None:
    before = LiveScheduler(SETTINGS)
    now_s = busy_hour(before, [100, 3000, 800, 12_000, 400] * 60, 0.0)
    after = restarted(before, now_s, 90.0, 0.0)
    for live, at_s in ((before, now_s), (after, 90.0)):
        busy_hour(live, [700, 9000] * 20, at_s)
    old, new = before.knowledge(MODEL), after.knowledge(MODEL)
    for num_tokens in (30, 900, 20_000):
        expected_s = old.prefill("far").prefill_s(num_tokens)
        assert new.prefill("far").prefill_s(num_tokens) == pytest.approx(expected_s, rel=1e-9)
    assert new.profile("far").num_seen == old.profile("far").num_seen


def test_measured_traffic_goes_on_and_grows_older() -> None:
    before = LiveScheduler(SETTINGS)
    now_s = busy_hour(before, [100, 3000, 800] * 50, 0.0)
    after = restarted(before, now_s, 400.0, 600.0)
    old = before.knowledge(MODEL).traffic.measured(now_s + 600.0)
    new = after.knowledge(MODEL).traffic.measured(400.0)
    assert old is not None
    assert new is not None
    assert new.uncached.mean_tokens == pytest.approx(old.uncached.mean_tokens, rel=0.02)
    assert new.output.mean_tokens == pytest.approx(old.output.mean_tokens, rel=0.02)
    assert new.num_requests == pytest.approx(old.num_requests, rel=0.02)
    assert new.rate_rps == pytest.approx(old.rate_rps, rel=0.1)
    assert new.hit_ratio == pytest.approx(old.hit_ratio, rel=0.02)


def test_plans_budgets_links_and_moves_are_kept() -> None:
    before = LiveScheduler(SETTINGS)
    before.take(ThresholdPlanned("far", 4321.0, 7e8), 10.0)
    before.plans[MODEL, "home"].changed["home"] = 50.0, -1
    before.tenants.started("a", 900, 60.0)
    before.tenants.ended("a", 900)
    before.take(LinkHeard("far", "home", LinkView(available_bytes_per_s=1e9)), 60.0)
    before.period.see(before.reports.values(), before.links)
    before.period.take()
    move = before.take(CacheMoveBegun("far", "home"), 60.0)
    before.take(CacheMoveOver(move, False, 10**9, 2.0, 0.03), 62.0)
    lost = before.take(CacheMoveBegun("home", "far"), 60.0)
    before.take(CacheMoveOver(lost, True), 62.0)
    after = restarted(before, 70.0, 1000.0, 20.0)
    assert after.thresholds.base_tokens() == {"far": 4321.0}
    assert list(after.thresholds.planned()) == [("far", "home", 4321.0, 7e8)]
    assert after.plans[MODEL, "home"].changed == {"home": (960.0, -1)}
    # 200 tokens were left, and 100 came in the 10 s before and 200 in the 20 s after the state.
    assert after.tenants.refusal("a", 399, 1000.0) is None
    assert after.tenants.refusal("a", 402, 1000.0) is not None
    assert after.period.measured == {("far", "home"): 1e9}
    link = after.moves.completed(LinkView(), ("far", "home"), 1000.0)
    assert link.available_bytes_per_s == pytest.approx(5e8)
    assert after.moves.failed_lately(1000.0) == {("home", "far")}


def test_clusters_that_are_gone_are_left_out() -> None:
    before = LiveScheduler(SETTINGS)
    before.take(ThresholdPlanned("far", 4321.0, 0.0), 10.0)
    after = LiveScheduler(SETTINGS)
    state = kept(before, 20.0)
    state.plan.thresholds[0] = msgspec.structs.replace(state.plan.thresholds[0], cluster="gone")
    after.take(StateRestored(state), 1.0)
    assert after.thresholds.base_tokens() == {"far": 1000}


def test_a_state_that_contradicts_itself_changes_nothing() -> None:
    before = LiveScheduler(SETTINGS)
    now_s = busy_hour(before, [500] * 10, 0.0)
    state = kept(before, now_s)
    channel = state.models[MODEL].traffic.uncached
    assert channel is not None
    channel.slices[0].sums.append(1.0)
    after = LiveScheduler(SETTINGS)
    with pytest.raises(ValueError, match="could not broadcast"):
        after.take(StateRestored(state), 1.0)
    assert not after.models()


def test_a_route_of_the_restarted_gateway_rests_on_what_was_learnt() -> None:
    before = LiveScheduler(SETTINGS)
    now_s = busy_hour(before, [100, 3000, 800] * 10, 0.0)
    after = restarted(before, now_s, 10.0, 0.0)
    shape = RequestShape(num_prompt_tokens=500, local_cached_tokens=0)
    asked = RouteAsked(MODEL, shape)
    assert after.take(asked, 10.0).predicted == before.take(asked, now_s).predicted


def test_media_and_the_rate_of_a_link_are_kept() -> None:
    before = LiveScheduler(SETTINGS)
    lengths = before.knowledge(MODEL).lengths
    lengths.counted(PromptContent(media={Media.IMAGE: 2}), 1500)
    after = restarted(before, 1.0, 2.0, 0.0)
    assert after.knowledge(MODEL).lengths.tokens_per_unit(Media.IMAGE) == pytest.approx(750)
    link = RegionLink("far", "home")
    link.remember(LinkRate("far", "home", 3e8, False, 4.0), 100.0)
    assert link.rate(101.0) == LinkRate("far", "home", 3e8, False, 5.0)
    link.remember(LinkRate("far", "home", 1.0, True, math.inf), 100.0)
    assert link.now(101.0).available_bytes_per_s == 3e8
