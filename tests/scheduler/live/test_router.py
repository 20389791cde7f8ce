"""Routes on live snapshots: what need not be counted, what is known, what a link allows."""

from __future__ import annotations

from typing import Any

import pytest
from live_region_cases import FAST_LINK, MODEL, Region, instance, job, report, teach
from msgspec.structs import replace

from deploy.gateway.scheduling.scheduler import RegionScheduler
from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.live.ledger import PrefillLeg
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, Reason, RequestShape

LONG = RequestShape(num_prompt_tokens=4000)
SHORT = RequestShape(num_prompt_tokens=900)


def bound(num_tokens: int, likely: int | None = None, **fields: Any) -> RequestShape:
    """A prompt of at most so many tokens that was not counted."""
    return RequestShape(
        num_prompt_tokens=num_tokens // 4 if likely is None else likely,
        is_exact=False,
        bound_tokens=num_tokens,
        **fields,
    )


def busy_home(region: Region) -> RegionScheduler:
    """One prefill instance at home with 20 s of work; both sides are known."""
    region.home = report(
        "home",
        instance("d0", "decode", decode_slots=4),
        instance("p9", "prefill", max_concurrent=8),
        jobs=(job("x", 20_000, instance="p9"),),
    )
    return known(region)


def known(region: Region, **routing: Any) -> RegionScheduler:
    scheduler = region.scheduler(**routing)
    for place in ("far", HAND_OFF, ONE_ENGINE):
        teach(scheduler, place, 1e-3)
    return scheduler


@pytest.mark.parametrize(
    ("shape", "is_early"),
    [
        (bound(1000), True),
        (bound(1001), False),
        (bound(9000, num_choices=0), True),
        (bound(1), True),
    ],
)
def test_only_what_may_move_is_counted(shape: RequestShape, is_early: bool) -> None:
    decision = Region().scheduler().route_early(MODEL, shape)
    assert (decision is not None) is is_early
    if decision is not None:
        assert decision.target == ONE_ENGINE
        assert decision.numbers["prompt_tokens_about"] == shape.num_prompt_tokens


def test_instances_for_the_hand_off_make_shorter_prompts_worth_counting() -> None:
    region = Region()
    region.home = report("home", instance("d0", "decode"), instance("p9", "prefill"))
    scheduler = region.scheduler()
    assert scheduler.route_early(MODEL, bound(256)) is not None
    assert scheduler.route_early(MODEL, bound(257)) is None
    region.home = report("home", instance("d0", "decode"), instance("p9", healthy=False))
    assert scheduler.route_early(MODEL, bound(257)) is not None


def test_a_prompt_without_a_bound_may_move() -> None:
    unbounded = RequestShape(num_prompt_tokens=10, is_exact=False)
    assert Region().scheduler().route_early(MODEL, unbounded) is None


def test_the_bound_decides_whether_to_count_and_the_likely_length_what_is_predicted() -> None:
    region = Region()
    region.prefill_clusters = ()
    scheduler = region.scheduler()
    teach(scheduler, ONE_ENGINE, 2e-4)
    decision = scheduler.route_early(MODEL, bound(50_000, likely=12_000))
    assert decision is not None
    assert decision.local is not None
    assert decision.local.prefill_s == pytest.approx(2.4, rel=0.02)


def test_the_hand_off_takes_them() -> None:
    region = Region()
    region.home = report("home", instance("d0", "decode"), instance("p9", "prefill"))
    decision = region.scheduler().route(MODEL, SHORT)
    assert (decision.route, decision.target) == ("local", HAND_OFF)


def test_without_prefill_clusters_nothing_is_counted() -> None:
    region = Region()
    region.prefill_clusters = ()
    decision = region.scheduler().route_early(MODEL, bound(9000))
    assert decision is not None
    assert decision.reason is Reason.NO_PREFILL_CLUSTER


def test_t_alone_decides_while_nothing_is_known() -> None:
    region = Region()
    region.far = report("far", instance("p0"), jobs=(job("x", 100_000, instance="p0"),))
    scheduler = region.scheduler()
    assert scheduler.route(MODEL, LONG).reason is Reason.ABOVE_THRESHOLD
    assert scheduler.route(MODEL, SHORT).reason is Reason.BELOW_THRESHOLD


def test_a_side_that_is_clearly_sooner_wins_by_prediction_and_only_then() -> None:
    region = Region()
    scheduler = busy_home(region)
    decision = scheduler.route(MODEL, SHORT)
    assert (decision.target, decision.reason) == ("far", Reason.REMOTE_SOONER)
    assert decision.predicted == decision.remote
    assert decision.local is not None
    assert decision.local.queue_s == pytest.approx(20, rel=0.05)
    by_threshold = known(region, policy="threshold").route(MODEL, SHORT)
    assert by_threshold.reason is Reason.BELOW_THRESHOLD


def test_a_long_queue_elsewhere_keeps_a_long_prompt() -> None:
    region = Region()
    region.far = report("far", instance("p0"), jobs=(job("x", 60_000, instance="p0"),))
    decision = known(region).route(MODEL, LONG)
    assert (decision.route, decision.reason) == ("local", Reason.LOCAL_SOONER)


def test_what_is_under_way_counts_before_any_report_has_it() -> None:
    region = Region()
    scheduler = known(region)
    first = scheduler.route(MODEL, LONG)
    assert first.remote is not None
    begin_leg(scheduler, region, 3000)
    second = scheduler.route(MODEL, LONG)
    assert second.remote is not None
    assert second.remote.queue_s - first.remote.queue_s == pytest.approx(3.0, rel=0.02)


def begin_leg(scheduler: RegionScheduler, region: Region, num_tokens: int) -> None:
    leg = PrefillLeg("far", num_tokens, num_tokens, region.now_s, region.now_s + 1)
    scheduler.live.ledger.leg_begun("t", leg)


def test_a_cluster_that_failed_this_request_is_passed_over() -> None:
    decision = known(Region()).route(MODEL, LONG, excluded={"far"})
    assert (decision.route, decision.reason) == ("local", Reason.PREFILL_FAILED)


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        (replace(FAST_LINK, state=LinkCondition.DOWN), Reason.LINK_DOWN),
        (replace(FAST_LINK, available_bytes_per_s=0.0), Reason.LINK_DOWN),
        (replace(FAST_LINK, age_s=6.0), Reason.LINK_STALE),
        (replace(FAST_LINK, backlog_bytes=1e11), Reason.LINK_BUSY),
    ],
)
def test_a_link_that_is_no_use_means_local(link: LinkView, reason: Reason) -> None:
    region = Region()
    scheduler = known(region)
    region.links["far", "home"] = link
    # So long that t, which rises with the link's state, does not keep it by itself.
    decision = scheduler.route(MODEL, RequestShape(num_prompt_tokens=20_000))
    assert (decision.route, decision.reason) == ("local", reason)


def test_t_rises_with_the_link() -> None:
    region = Region()
    scheduler = known(region, policy="threshold", congested_factor=8.0)
    assert scheduler.route(MODEL, LONG).route == "prefill_cluster"
    region.links["far", "home"] = replace(FAST_LINK, state=LinkCondition.CONGESTED)
    assert scheduler.route(MODEL, LONG).reason is Reason.LINK_CONGESTED
    assert scheduler.live.thresholds.overview()[0].tokens == 8000


def test_thresholds_return_without_requests() -> None:
    region = Region()
    scheduler = region.scheduler()
    region.links["far", "home"] = replace(FAST_LINK, state=LinkCondition.CONGESTED)
    assert scheduler.thresholds_now()[0].tokens == 1500
    region.links["far", "home"] = FAST_LINK
    region.now_s += 200
    assert scheduler.thresholds_now()[0].tokens == pytest.approx(1000)


def test_a_cluster_without_a_report_takes_nothing() -> None:
    region = Region()
    region.far = None
    assert known(region).route(MODEL, LONG).reason is Reason.PREFILL_UNHEALTHY


def test_learnt_overhead_is_part_of_what_is_predicted() -> None:
    region = Region()
    scheduler = known(region)
    predicted = scheduler.route(MODEL, LONG).remote
    assert predicted is not None
    for _ in range(9):
        scheduler.knowledge(MODEL).answered("far", predicted, predicted.ttft_s + 0.5, 100.0)
    again = scheduler.route(MODEL, LONG).remote
    assert again is not None
    assert again.ttft_s == pytest.approx(predicted.ttft_s + 0.5, rel=0.05)


def test_models_are_learnt_apart() -> None:
    scheduler = known(Region())
    assert scheduler.knowledge(MODEL).is_known
    assert not scheduler.knowledge("other").is_known
    assert sorted(scheduler.models()) == ["other", MODEL]


def slow_far(region: Region) -> RegionScheduler:
    scheduler = region.scheduler()
    teach(scheduler, "far", 5e-3)
    teach(scheduler, ONE_ENGINE, 1e-3)
    return scheduler


def test_nothing_is_tried_where_waiting_makes_it_late() -> None:
    region = Region()
    region.far = report("far", instance("p0"), jobs=(job("x", 20_000, instance="p0"),))
    assert slow_far(region).route(MODEL, LONG).reason is Reason.LOCAL_SOONER
