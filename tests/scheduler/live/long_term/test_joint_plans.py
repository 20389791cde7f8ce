"""Several PD clusters are planned together, each for the requests whose home it is."""

import math
import random

import msgspec
import pytest

from netmon.region_link import LinkView
from scheduler.live.core import LiveScheduler
from scheduler.live.events import LinkHeard, ReportHeard
from scheduler.live.feedback import RequestArrived
from scheduler.live.long_term.conversion import Conversion, ConversionPhase, ConversionWish
from scheduler.live.long_term.events import (
    ConversionAnswered,
    ConversionEnded,
    PdBusy,
    PeriodOver,
    PlansAsked,
    PlanStep,
)
from scheduler.live.settings import LiveSettings, PdSettings
from scheduler.planning.region_model import Uplink
from scheduler.replay.recording import entry_frame, header_of, scheduler_of
from tests.support.live_plan_cases import (
    FAST,
    KV_FIXED_BYTES,
    KV_TOKEN_BYTES,
    MODEL,
    SLOW,
    STEP_S,
    cluster,
    numbered,
)

NOW_S = 1000.0


def region(
    rates: dict[str, int],
    uplinks: tuple[Uplink, ...] = (),
    cached_tokens: int = 0,
    **links: float,
) -> LiveScheduler:
    """Two PD clusters, `a` and `b`, that share the prefill cluster `far`, after so many requests at
    each home, each behind so many cached tokens. `links` are the rates of the links to them,
    bytes/s.
    """
    pds = tuple(PdSettings(name, ("far",)) for name in "ab")
    live = LiveScheduler(
        LiveSettings(
            pd_clusters=pds,
            threshold_tokens=8000,
            hand_off_tokens=256,
            models=(MODEL,),
            uplinks=uplinks,
        )
    )
    known, rng = live.knowledge(MODEL), random.Random(1)
    homes = [home for home, num in rates.items() for _ in range(num)]
    rng.shuffle(homes)
    for index, home in enumerate(homes):
        at_s = NOW_S - 300.0 + 300.0 * index / len(homes)
        tokens = min(131_072, max(128, round(math.exp(rng.gauss(9.9, 1.0)))))
        live.take(RequestArrived(MODEL, cached_tokens + tokens, cached_tokens, home), at_s)
        known.decoded(1024, STEP_S * 1023, at_s)
        known.reserved(tokens, 0, round(KV_FIXED_BYTES + KV_TOKEN_BYTES * tokens))
        for place, truth in (("hand_off", SLOW), ("hand_off in b", SLOW), ("far", FAST)):
            if index < 30:
                known.learn(place, tokens, 0, truth.prefill_s(tokens))
    for name in "ab":
        own = numbered(f"{name}p", "prefill", 4), numbered(f"{name}d", "decode", 4)
        live.take(ReportHeard(name, cluster(name, *own[0], *own[1]), NOW_S), NOW_S)
        view = LinkView(available_bytes_per_s=links.get(name, 1.25e10), rtt_s=0.02)
        live.take(LinkHeard("far", name, view), NOW_S)
    far = cluster("far", *numbered("f", "prefill", 4))
    live.take(ReportHeard("far", far, NOW_S), NOW_S)
    return live


def planned(live: LiveScheduler, period: PeriodOver | None = None) -> dict[str, PlanStep]:
    live.take(period or PeriodOver(None, False), NOW_S)
    return {step.pd: step for step in live.take(PlansAsked(), NOW_S)}


def test_each_pd_cluster_has_a_plan_for_its_own_requests() -> None:
    live = region({"a": 900, "b": 300})
    steps = planned(live)
    assert {pd: step.unknown for pd, step in steps.items()} == {"a": "", "b": ""}
    assert [steps[pd].numbers["requests"] for pd in "ab"] == pytest.approx([900, 300], rel=0.1)
    for pd, step in steps.items():
        assert step.thresholds.keys() == {"far"}
        assert {wish.cluster for wish in step.conversions} <= {pd}
        assert step.goal is not None
        assert step.goal.num_prefill.keys() == {pd}


def test_what_pd_clusters_share_is_divided_by_their_demand() -> None:
    live = region({"a": 900, "b": 300})
    live.take(PeriodOver(None, False), NOW_S)
    shares = {}
    for pd in "ab":
        question = live.plans[MODEL, pd].question
        assert question is not None
        assert question.joint is not None
        (far,) = question.joint.shares[MODEL, pd].prefill_clusters
        shares[pd] = far.num_instances
    assert sum(shares.values()) == pytest.approx(4)
    assert shares["a"] > 1.5 * shares["b"]


def test_an_uplink_is_divided_among_the_links_that_share_it() -> None:
    narrow = Uplink("far", "egress", 4e7)
    live = region({"a": 900, "b": 300}, (narrow,))
    live.take(PeriodOver(None, False), NOW_S)
    rates = {}
    for pd in "ab":
        question = live.plans[MODEL, pd].question
        assert question is not None
        assert question.joint is not None
        (link,) = question.joint.shares[MODEL, pd].links
        rates[pd] = link.bytes_per_s
    assert sum(rates.values()) == pytest.approx(narrow.bytes_per_s, rel=0.01)
    assert rates["a"] > rates["b"]


def test_the_slower_of_two_links_has_the_higher_threshold() -> None:
    live = region({"a": 600, "b": 600}, a=1.25e10, b=2e7)
    steps = planned(live)
    after = {pd: step.thresholds_after["far"] for pd, step in steps.items()}
    assert after["b"] > after["a"]
    for pd, step in steps.items():
        answered = [live.take(ConversionAnswered(wish, ""), NOW_S) for wish in step.conversions]
        changes = [change for found in (answered or [step.changes]) for change in found]
        assert {change.pd for change in changes} <= {pd}


def test_conversions_of_pd_clusters_run_side_by_side() -> None:
    live = region({"a": 600, "b": 600})
    wishes = {pd: ConversionWish(pd, "prefill", "decode", MODEL) for pd in "ab"}
    running = Conversion("bp-0", wishes["b"], 1, ConversionPhase.DRAINING, NOW_S)
    live.take(PeriodOver(None, False, {"b": PdBusy(running, True)}), NOW_S)
    questions = {pd: live.plans[MODEL, pd].question for pd in "ab"}
    found = {pd: question.current for pd, question in questions.items() if question is not None}
    assert {pd: current.converting for pd, current in found.items()} == {
        "a": frozenset(),
        "b": frozenset({"b"}),
    }
    assert found["a"].num_prefill == {"a": 4}
    assert found["b"].num_prefill == {"b": 3}
    live.take(ConversionEnded(wishes["b"], "bp-0", True), NOW_S)
    assert live.plans[MODEL, "b"].changed == {"b": (NOW_S, -1)}
    assert live.plans[MODEL, "a"].changed == {}


def test_a_pd_cluster_of_which_nothing_is_known_does_not_stop_the_others() -> None:
    live = region({"a": 600})
    steps = planned(live)
    assert steps["a"].unknown == ""
    assert steps["b"].unknown == "no request has ended yet"


def test_a_question_that_is_open_can_be_recorded() -> None:
    live = region({"a": 600, "b": 600})
    live.take(PeriodOver(None, False), NOW_S)
    again = scheduler_of(header_of(live, "1.0", 0.0).packed())
    answers = [each.take(PlansAsked(), NOW_S) for each in (live, again)]
    assert entry_frame(PlansAsked(), answers[0], NOW_S) == entry_frame(
        PlansAsked(), answers[1], NOW_S
    )


def test_the_traffic_of_each_home_outlives_a_restart() -> None:
    live = region({"a": 900, "b": 300})
    known = live.knowledge(MODEL)
    state = msgspec.msgpack.decode(
        msgspec.msgpack.encode(known.state(NOW_S)), type=type(known.state(NOW_S))
    )
    again = type(known).restored(state, NOW_S)
    for home in "ab":
        before, after = (each.traffic_of(home).measured(NOW_S) for each in (known, again))
        assert before is not None
        assert after is not None
        assert after.rate_rps == pytest.approx(before.rate_rps, rel=0.05)
        assert after.output.mean_tokens == pytest.approx(1024)


def test_what_is_cached_before_a_prompt_makes_its_prefill_longer_in_a_plan_too() -> None:
    """As the router predicts it: attention reads the cached tokens."""
    cached_tokens = 95_000
    live = region({"a": 900, "b": 300}, cached_tokens=cached_tokens)
    live.take(PeriodOver(None, False), NOW_S)
    question = live.plans[MODEL, "a"].question
    assert question is not None
    (far,), (pd,) = question.region.prefill_clusters, question.region.pd_clusters
    known = live.knowledge(MODEL)
    for place, curve in (("far", far.prefill), ("hand_off", pd.prefill)):
        profile = known.profile(place).profile
        for tokens in (1000, 5000, 30_000):
            expected_s = profile.prefill_s(cached_tokens + tokens, cached_tokens)
            assert float(curve(tokens)) == pytest.approx(expected_s, rel=1e-3)
            assert expected_s > 1.02 * profile.prefill_s(tokens)


def test_a_plan_sends_over_a_link_what_the_present_traffic_needs() -> None:
    """At little load, a link that is too slow for all of it changes no threshold."""
    sends = []
    for num in (300, 600):
        live = region({"a": num, "b": num})
        for step in planned(live).values():
            for wish in step.conversions:
                live.take(ConversionAnswered(wish, ""), NOW_S)
        sends.append({pd: nbytes for _, pd, _, nbytes in live.thresholds.planned()})
    little, more = sends
    for pd in "ab":
        assert 0 < little[pd] == pytest.approx(more[pd] / 2, rel=0.15)
