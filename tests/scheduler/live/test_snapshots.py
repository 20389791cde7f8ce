"""The region as routing sees it: reports, what came and went since, learnt times. No clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_region_cases import MODEL, Region, instance, job, report, snapshot, teach

from deploy.gateway.scheduling.scheduler import RegionScheduler
from netmon.region_link import LinkView
from scheduler.live.decode_side import UNTOLD_SLOTS
from scheduler.live.ledger import DirectPrompt, PrefillLeg
from scheduler.live.snapshots import PendingRequest
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, RequestShape
from scheduler.routing.prediction import PrefillTask, predict
from scheduler.routing.views import RegionSnapshot

S_PER_TOKEN = 1e-3


def taught(region: Region) -> RegionScheduler:
    scheduler = region.scheduler()
    teach(scheduler, "far", S_PER_TOKEN)
    return scheduler


def leg(begun_s: float, tokens: int = 1000, place: str = "far", **fields: Any) -> PrefillLeg:
    values: dict[str, Any] = {
        "lands_at_s": begun_s + 2.0,
        "uncached_tokens": tokens,
        "model": MODEL,
        "pd": "home",
    }
    return PrefillLeg(place=place, num_tokens=tokens, begun_s=begun_s, **(values | fields))


def seconds(value: float) -> Any:
    """As a prediction from learnt times comes near it."""
    return pytest.approx(value, rel=0.02)


def far_of(scheduler: RegionScheduler) -> Any:
    return snapshot(scheduler, MODEL).prefill_clusters[0]


def test_reported_jobs_are_work_by_the_learnt_profile() -> None:
    region = Region()
    region.far = report(
        "far",
        instance("p0", max_concurrent=1),
        jobs=(job("a", 3000, 1.0, instance="p0"), job("b", 500)),
        max_queued=8,
    )
    far = far_of(taught(region))
    assert far.free_s == (pytest.approx(2.0, rel=0.01),)
    assert (sum(far.ahead_s), far.num_queued) == (pytest.approx(0.5, rel=0.01), 1)


def test_only_uncached_tokens_are_work() -> None:
    region = Region()
    region.far = report("far", instance("p0"), jobs=(job("a", 3000, uncached_tokens=1000),))
    far = far_of(taught(region))
    assert sum(far.ahead_s) == seconds(1.0)


def test_jobs_grow_older_than_their_report() -> None:
    region = Region()
    region.far = report("far", instance("p0"), jobs=(job("a", 3000, 1.0, instance="p0"),))
    scheduler = taught(region)
    region.now_s += 0.5
    assert far_of(scheduler).free_s[0] == pytest.approx(1.5, rel=0.01)


def test_a_job_that_is_late_leaves_the_others_their_time() -> None:
    region = Region()
    jobs = (job("a", 1000, 30.0, instance="p0"), job("b", 2000, 29.0, instance="p0"))
    region.far = report("far", instance("p0"), jobs=jobs)
    assert far_of(taught(region)).free_s[0] == pytest.approx(2.0, rel=0.01)


def test_a_prefill_counts_from_the_end_of_the_one_before() -> None:
    region = Region()
    region.far = report("far", instance("p0"), jobs=(job("a", 3000, 10.0, instance="p0"),))
    scheduler = taught(region)
    scheduler.live.ledger.prefill_ended("far", "far/p0", region.now_s - 1.0)
    assert far_of(scheduler).free_s[0] == pytest.approx(2.0, rel=0.01)


def test_legs_count_once_whether_they_are_reported_or_not() -> None:
    region = Region()
    scheduler = taught(region)
    scheduler.live.ledger.leg_begun("a", leg(region.at_s + 0.1))
    region.now_s += 0.2
    assert sum(far_of(scheduler).ahead_s) == seconds(1.0)
    region.far = report("far", instance("p0"), jobs=(job("a", instance="p0"),), max_queued=8)
    far = far_of(scheduler)
    assert (sum(far.ahead_s), far.free_s[0]) == (0, seconds(1.0 - 0.2))


def test_a_leg_that_a_later_report_does_not_have_any_more_is_over_there() -> None:
    region = Region()
    region.far = report("far", instance("p0"), jobs=(job("a", instance="p0"),))
    scheduler = taught(region)
    scheduler.live.ledger.leg_begun("a", leg(region.at_s - 0.1))
    assert far_of(scheduler).free_s[0] == seconds(1.0)
    region.far = report("far", instance("p0"))
    region.at_s = region.now_s = region.now_s + 0.5
    far = far_of(scheduler)
    assert (sum(far.ahead_s), far.free_s[0]) == (0, 0)


@pytest.mark.parametrize("sent_ago_s", [0.2, 1.0, 1.02])
def test_a_burst_that_is_still_on_the_wire_waits_at_its_cluster(sent_ago_s: float) -> None:
    """Reports are asked for over the same link: one may miss what was sent long before it."""
    region = Region()
    scheduler = taught(region)
    for number in range(6):
        scheduler.live.ledger.leg_begun(str(number), leg(region.at_s - sent_ago_s, 100_000))
    far = far_of(scheduler)
    assert (far.num_queued, sum(far.ahead_s)) == (4, pytest.approx(600, rel=0.01))


def test_a_leg_that_no_report_ever_had_was_quick() -> None:
    region = Region()
    scheduler = taught(region)
    scheduler.live.ledger.leg_begun("a", leg(region.at_s - 1.03))
    assert sum(far_of(scheduler).ahead_s) == 0
    region.links["far", "home"] = LinkView(available_bytes_per_s=1e9, rtt_s=0.04)
    assert sum(far_of(scheduler).ahead_s) == seconds(1.0)


def test_a_hand_off_that_no_report_has_had_counts_without_a_link() -> None:
    region = Region()
    region.home = report("home", instance("d0", "decode"), instance("p9", "prefill"))
    scheduler = taught(region)
    teach(scheduler, HAND_OFF, S_PER_TOKEN)
    scheduler.live.ledger.leg_begun("a", leg(region.at_s - 1.0, place=HAND_OFF))
    scheduler.live.ledger.leg_begun("b", leg(region.at_s - 1.01, place=HAND_OFF))
    assert sum(snapshot(scheduler, MODEL).local.ahead_s) == seconds(1.0)


def test_a_leg_that_ended_since_the_report_is_no_work() -> None:
    region = Region()
    region.far = report("far", instance("p0"), jobs=(job("a", instance="p0"),))
    scheduler = taught(region)
    scheduler.live.ledger.leg_begun("a", leg(region.at_s - 1.0))
    scheduler.live.ledger.leg_over("a", region.now_s)
    assert far_of(scheduler).free_s[0] == 0


def test_legs_of_another_place_are_not_ours() -> None:
    region = Region()
    scheduler = taught(region)
    scheduler.live.ledger.leg_begun("a", leg(region.at_s, place=HAND_OFF))
    assert sum(far_of(scheduler).ahead_s) == 0


def test_only_jobs_without_a_free_place_are_queued() -> None:
    region = Region()
    region.far = report(
        "far", instance("p0"), instance("p1"), jobs=tuple(job(str(n)) for n in range(6))
    )
    assert far_of(taught(region)).num_queued == 2


def test_a_full_queue_takes_no_more() -> None:
    region = Region()
    jobs = tuple(job(str(n)) for n in range(10))
    region.far = report("far", instance("p0"), jobs=jobs, max_queued=8)
    assert not far_of(taught(region)).takes_jobs
    region.far = report("far", instance("p0"), jobs=jobs[1:], max_queued=8)
    assert far_of(taught(region)).takes_jobs


@pytest.mark.parametrize(
    "fields",
    [{"healthy": False}, {"draining": True}, {"model": "other"}, {"role_ready": False}],
)
def test_instances_that_cannot_serve_are_not_usable(fields: dict[str, Any]) -> None:
    region = Region()
    region.far = report("far", instance("p0", **fields))
    far = far_of(taught(region))
    assert far.free_s == ()
    assert not far.is_healthy


def test_without_a_report_a_cluster_is_not_healthy_and_keeps_its_threshold() -> None:
    region = Region()
    region.far = region.home = None
    seen = snapshot(taught(region))
    (far,) = seen.prefill_clusters
    assert (far.is_healthy, far.free_s, far.threshold_tokens) == (False, (), 1000)
    assert not seen.local.is_healthy
    assert seen.decode.slots_total == 0
    assert seen.engines is not None
    assert not seen.engines.is_healthy


def test_links_are_seen_both_ways_with_what_prefills_will_emit() -> None:
    region = Region()
    region.links["home", "far"] = LinkView(available_bytes_per_s=5.0)
    node = instance("p0", node="p0:1")
    region.far = report("far", node, jobs=(job("a", 4000, 1.0, instance="p0"),))
    far = far_of(taught(region))
    assert far.link.available_bytes_per_s == 1e9
    assert far.link.inflow_bytes_per_s == pytest.approx(512 / S_PER_TOKEN, rel=0.01)
    assert far.links_in == {"home": region.links["home", "far"]}


def test_a_link_that_nobody_filled_is_not_filled_by_what_runs() -> None:
    region = Region()
    region.links["far", "home"] = LinkView(available_bytes_per_s=1e5, is_floor=True)
    region.far = report("far", instance("p0"), jobs=(job("a", 4000, 1.0, instance="p0"),))
    assert far_of(taught(region)).link.inflow_bytes_per_s == 0


def test_without_links_nothing_speaks_against_using_one() -> None:
    scheduler = Region().scheduler(follows_links=False)
    assert far_of(scheduler).link == LinkView()


def test_the_hand_off_is_those_instances_that_prefill_for_others() -> None:
    region = Region()
    region.home = report(
        "home",
        instance("d0", "decode", decode_slots=4),
        instance("p9", "prefill", max_concurrent=2),
        jobs=(job("a", 3000, instance="p9"),),
    )
    scheduler = taught(region)
    teach(scheduler, HAND_OFF, S_PER_TOKEN)
    scheduler.live.ledger.leg_begun("b", leg(region.at_s, 500, HAND_OFF))
    local = snapshot(scheduler, MODEL).local
    assert local.free_s == (seconds(3.0),)
    assert (local.num_queued, sum(local.ahead_s)) == (0, seconds(0.5))
    assert local.takes_jobs


def test_engines_have_the_prompts_that_were_given_to_them() -> None:
    region = Region()
    region.home = report("home", instance("d0", "both"), instance("p9", "prefill"))
    scheduler = taught(region)
    for begun_s in (99.0, 99.5):
        scheduler.live.ledger.direct_begun(DirectPrompt("home/d0", 2000, 1500, begun_s))
    engines = snapshot(scheduler, MODEL).engines
    assert engines is not None
    assert engines.free_s == (pytest.approx(2 * 1.5 - 1.0, rel=0.02),)


def test_a_prompt_whose_answer_is_very_late_is_taken_for_computed() -> None:
    region = Region()
    scheduler = taught(region)
    for begun_s in (90.0, 95.0, 99.5):
        scheduler.live.ledger.direct_begun(DirectPrompt("home/d0", 2000, 2000, begun_s))
    engines = snapshot(scheduler, MODEL).engines
    assert engines is not None
    assert engines.free_s[0] == pytest.approx(1.5, rel=0.02)


def test_where_all_prefill_one_of_them_serves_whole_requests() -> None:
    region = Region()
    region.home = report("home", instance("p9", "prefill"))
    scheduler = region.scheduler()
    scheduler.live.ledger.direct_begun(DirectPrompt("home/p9", 2000, 2000, region.now_s))
    engines = snapshot(scheduler, MODEL).engines
    assert engines is not None
    assert len(engines.free_s) == 1
    assert engines.free_s[0] > 0


def test_decode_slots_and_who_will_want_them() -> None:
    region = Region()
    region.home = report(
        "home",
        instance("d0", "decode", decode_slots=2, running=3),
        instance("d1", "decode", decode_slots=2, running=3),
        instance("p9", "prefill", decode_slots=7, running=7),
    )
    scheduler = taught(region)
    scheduler.knowledge(MODEL).decoded(11, 5.0, region.now_s)
    scheduler.live.ledger.leg_begun("old", leg(region.at_s - 1.0, kv_bytes=7.0))
    scheduler.live.ledger.leg_begun("new", leg(region.at_s + 0.5, kv_bytes=5.0))
    scheduler.live.ledger.begun("home/d0", region.at_s - 1.0)
    scheduler.live.ledger.begun("home/d0", region.at_s + 0.5)
    region.now_s += 0.5
    decode = snapshot(scheduler, MODEL).decode
    assert (decode.slots_total, decode.slots_used, decode.num_waiting) == (4, 4, 1)
    assert decode.landing_s == (pytest.approx(0.5), pytest.approx(2.0))
    assert decode.landing_kv_bytes == 12.0
    assert (decode.decode_s, decode.step_s) == (5.0, 0.5)


def test_what_came_and_went_since_the_report_counts_too() -> None:
    region = Region()
    region.home = report("home", instance("d0", "both", decode_slots=4, running=2))
    scheduler = taught(region)
    ledger = scheduler.live.ledger
    for name, begun_s in (
        ("home/d0", 99.0),
        ("home/d0", 100.1),
        ("home/d0", 100.2),
        ("gone", 100.2),
    ):
        ledger.begun(name, begun_s)
    region.now_s += 0.5
    assert snapshot(scheduler, MODEL).decode.slots_used == 4
    for ended_s in (100.3, 100.4, 100.5):
        ledger.ended("home/d0", ended_s)
    assert snapshot(scheduler, MODEL).decode.slots_used == 1
    assert ledger.change_since({"home/d0"}, 100.35) == -2
    assert ledger.change_since({"gone"}, 100.0) == 1
    ledger.ended("gone", 200.0)
    assert ledger.change_since({"home/d0"}, 0.0) == 0


def test_models_share_clusters_but_not_instances() -> None:
    region = Region()
    region.home = report("home", instance("d0", "both", decode_slots=4, running=2))
    region.far = report(
        "far",
        instance("p0"),
        instance("p1", model="other"),
        jobs=tuple(job(name, 500, model=name) for name in ("", MODEL, "other", "adapter")),
    )
    scheduler = taught(region)
    scheduler.live.ledger.leg_begun("a", leg(region.at_s - 1.0, model="other"))
    seen = snapshot(scheduler, MODEL)
    assert sum(seen.prefill_clusters[0].ahead_s) == seconds(3 * 0.5)
    assert (seen.decode.slots_used, seen.decode.landing_s) == (2, ())


def test_engines_that_do_not_tell_their_slots_have_enough() -> None:
    region = Region()
    region.home = report("home", instance("d0", "both", running=1000))
    decode = snapshot(Region.scheduler(region)).decode
    assert (decode.slots_total, decode.slots_used, decode.num_waiting) == (UNTOLD_SLOTS, 1000, 0)


def ttfts(seen: RegionSnapshot) -> list[float]:
    """Of one prompt at every place."""
    assert seen.engines is not None
    places = (seen.prefill_clusters[0], seen.local, seen.engines)
    task = PrefillTask(2000, 0, 2000 * 512.0)
    return [predict(task, place, seen.decode).ttft_s for place in places]


AGES_S = st.floats(-0.4, 5.0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["far", HAND_OFF, ONE_ENGINE]), AGES_S), max_size=12))
def test_more_under_way_never_shortens_a_prediction(more: list[tuple[str, float]]) -> None:
    region = Region()
    region.home = report(
        "home",
        instance("d0", "decode", decode_slots=4, running=4),
        instance("p9", "prefill", max_concurrent=64),
        jobs=(job("x", 3000, 2.0, instance="p9"),),
    )
    region.far = report("far", instance("p0"), jobs=(job("y", 3000, 2.0, instance="p0"),))
    region.now_s += 0.5
    scheduler = taught(region)
    scheduler.knowledge(MODEL).decoded(11, 5.0, region.now_s)
    before = ttfts(snapshot(scheduler, MODEL))
    for number, (place, age_s) in enumerate(more):
        # What began before the reports is in them, unless it has ended there.
        begun_s = max(region.now_s - age_s, region.at_s + 0.01)
        if place == ONE_ENGINE:
            scheduler.live.ledger.direct_begun(
                DirectPrompt("home/d0", 900, 900, region.now_s - age_s)
            )
        else:
            scheduler.live.ledger.leg_begun(str(number), leg(begun_s, 900, place))
        after = ttfts(snapshot(scheduler, MODEL))
        assert all(b >= a - 1e-9 for a, b in zip(before, after, strict=True)), (before, after)
        before = after


def test_what_a_newcomer_will_overtake_is_not_ahead_of_it() -> None:
    region = Region()
    region.far = report(
        "far",
        instance("p0", max_concurrent=1),
        jobs=(
            job("running", 2000, instance="p0"),
            job("long", 50_000),
            job("short", 1000),
            job("urgent", 60_000, priority=-1),
        ),
        max_queued=8,
    )
    scheduler = region.scheduler()
    teach(scheduler, "far", 1e-3)

    def queued_s(num_tokens: int, priority: int = 0) -> float:
        request = PendingRequest(RequestShape(num_prompt_tokens=num_tokens), priority)
        (far,) = snapshot(scheduler, MODEL, request).prefill_clusters
        return sum(far.ahead_s)

    assert queued_s(2000) == seconds(61)
    assert queued_s(55_000) == seconds(111)
    assert queued_s(2000, priority=-5) == 0
    assert queued_s(500, priority=3) == seconds(111)
    (far,) = snapshot(scheduler, MODEL).prefill_clusters
    assert sum(far.ahead_s) == seconds(111)


@pytest.mark.parametrize(
    ("prefill", "decode", "can_feed"),
    [
        (["a"], ["a"], True),
        (["a"], ["b"], False),
        (["a", "c"], ["b", "c"], True),
        (["a", "c"], ["b"], False),
        ([""], ["b"], True),
        (["a", ""], ["b"], True),
        (["a"], ["b", ""], True),
        (["a"], [], True),
    ],
)
def test_whether_a_cluster_can_feed_another_follows_from_their_layouts(
    prefill: list[str], decode: list[str], can_feed: bool
) -> None:
    def named(role: str, layouts: list[str]) -> list[Any]:
        return [
            instance(f"{role}{i}", role, layout_fingerprint=one) for i, one in enumerate(layouts)
        ]

    region = Region()
    region.far = report("far", *named("prefill", prefill))
    region.home = report("home", *named("decode", decode))
    assert far_of(region.scheduler()).can_feed is can_feed
    region.home = report("home", *named("prefill", prefill), *named("decode", decode))
    assert snapshot(region.scheduler()).local.can_feed is can_feed


def test_layouts_are_worked_out_once_of_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    region = Region()
    region.far = report("far", instance("p0", layout_fingerprint="a"))
    scheduler = region.scheduler()
    snapshot(scheduler, MODEL)
    monkeypatch.delattr("scheduler.live.core.ReportDigest")
    assert [scheduler.layouts_at("far", MODEL) for _ in range(2)] == [("a",), ("a",)]


def test_layouts_are_those_of_the_model_and_of_who_serves_it() -> None:
    region = Region()
    region.home = report("home", instance("d0", "both", layout_fingerprint="a"))
    others = [
        instance("p1", layout_fingerprint="a", healthy=False),
        instance("p2", layout_fingerprint="a", draining=True),
        instance("p3", layout_fingerprint="a", model="other"),
    ]
    own = instance("p0", layout_fingerprint="b")
    region.far = report("far", own, *others)
    scheduler = region.scheduler()
    assert not far_of(scheduler).can_feed
    assert scheduler.layouts_at("far", MODEL) == ("b",)
    assert scheduler.layouts_at("far", "other") == ("a",)
    assert scheduler.layouts_at(HAND_OFF, MODEL) == ()
    region.far = report("far", instance("p0", layout_fingerprint="c"))
    snapshot(scheduler, MODEL)
    assert scheduler.layouts_at("far", MODEL) == ("c",)
    # One that nobody in the region can feed is not healthy, and its layout is why.
    own = instance("p0", layout_fingerprint="b", healthy=False, compatible=False)
    region.far = report("far", own, *others)
    assert not far_of(region.scheduler()).can_feed
    region.far = report("far", *others)
    assert far_of(region.scheduler()).can_feed
