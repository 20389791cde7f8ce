"""The sharp edges of routing: exactly t, exactly the margin, the reason that a client is told."""

import dataclasses
import math

import pytest
from msgspec.structs import replace
from scheduling_cases import CONFIG, GOOD_LINK, far, near, prompt, region

from netmon.estimate import LinkCondition
from scheduler.routing.candidates import RouteConfig
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, Reason
from scheduler.routing.profiles import KvProfile, PrefillProfile
from scheduler.routing.short_term import RouteDecision, route
from scheduler.routing.views import ClusterView, DecodeView, RegionSnapshot

FULL_QUEUE = far("queue", num_queued=1, max_queued=1)
BUSY = far("busy", link=replace(GOOD_LINK, backlog_bytes=1e12))
STALE = far("stale", link=None)
DOWN = far("down", link=replace(GOOD_LINK, state=LinkCondition.DOWN))
UNHEALTHY = far("unhealthy", is_healthy=False)
FAILED = far("failed")
NO_BYTES = KvProfile(fixed_bytes=0.0, token_bytes=0.0)
NO_STEP = DecodeView(slots_total=1)


def routed(
    num_tokens: int,
    snapshot: RegionSnapshot,
    *,
    config: RouteConfig = CONFIG,
    excluded: frozenset[str] = frozenset({"failed"}),
    **fields: object,
) -> RouteDecision:
    return route(prompt(num_tokens, **fields), snapshot, config, 0.0, excluded=excluded)


def lasting(seconds: float) -> PrefillProfile:
    """Every prefill takes this long."""
    return PrefillProfile((0.0,), ((seconds, 0.0, 0.0),))


@pytest.mark.parametrize(
    ("cluster", "reason"),
    [(far(), Reason.ABOVE_THRESHOLD), (UNHEALTHY, Reason.PREFILL_UNHEALTHY)],
)
def test_a_prompt_of_exactly_t_is_a_short_one(cluster: ClusterView, reason: Reason) -> None:
    assert routed(10_000, region(cluster)).reason is Reason.BELOW_THRESHOLD
    assert routed(10_001, region(cluster)).reason is reason
    assert routed(15_000, region(cluster), local_cached_tokens=5000).reason is (
        Reason.BELOW_THRESHOLD
    )
    assert routed(15_001, region(cluster), local_cached_tokens=5000).reason is reason


@pytest.mark.parametrize(
    ("nearer", "farther", "reason"),
    [
        (FULL_QUEUE, BUSY, Reason.PREFILL_QUEUE_FULL),
        (BUSY, STALE, Reason.LINK_BUSY),
        (STALE, DOWN, Reason.LINK_STALE),
        (DOWN, UNHEALTHY, Reason.LINK_DOWN),
        (UNHEALTHY, FAILED, Reason.PREFILL_UNHEALTHY),
    ],
)
@pytest.mark.parametrize("is_turned", [False, True])
def test_of_several_obstacles_the_client_is_told_the_nearest_to_serving(
    nearer: ClusterView, farther: ClusterView, reason: Reason, is_turned: bool
) -> None:
    clusters = (farther, nearer) if is_turned else (nearer, farther)
    assert routed(20_000, region(*clusters)).reason is reason


def test_a_lack_of_room_to_land_is_nearer_to_serving_than_a_full_queue() -> None:
    view = region(FULL_QUEUE, far(), landing_room_bytes=0)
    assert routed(20_000, view).reason is Reason.NO_LANDING_ROOM


def raised(cluster: ClusterView) -> ClusterView:
    """Its link is congested: t is far above what the plan has."""
    return replace(cluster, threshold_tokens=1e6, plan_threshold_tokens=10_000.0)


def test_a_prompt_that_the_plan_would_send_hears_of_the_congestion_that_keeps_it_home() -> None:
    view = region(raised(far()))
    assert routed(10_000, view).reason is Reason.BELOW_THRESHOLD
    found = routed(10_001, view)
    assert (found.target, found.reason) == (HAND_OFF, Reason.LINK_CONGESTED)
    assert routed(15_000, view, local_cached_tokens=5000).reason is Reason.BELOW_THRESHOLD
    assert routed(15_001, view, local_cached_tokens=5000).reason is Reason.LINK_CONGESTED


def test_where_t_is_the_plans_a_sent_prompt_is_simply_above_it() -> None:
    view = region(far(plan_threshold_tokens=10_000.0))
    assert routed(10_001, view).reason is Reason.ABOVE_THRESHOLD


def test_a_cluster_without_a_plan_of_its_own_keeps_nothing_back() -> None:
    view = region(far(threshold_tokens=1e6))
    assert routed(11_000, view).reason is Reason.BELOW_THRESHOLD


@pytest.mark.parametrize(
    ("clusters", "reason"),
    [
        ((UNHEALTHY,), Reason.PREFILL_UNHEALTHY),
        ((UNHEALTHY, FULL_QUEUE), Reason.PREFILL_QUEUE_FULL),
        ((UNHEALTHY, far()), Reason.LINK_CONGESTED),
        ((FAILED,), Reason.PREFILL_FAILED),
    ],
)
def test_an_obstacle_counts_before_the_congestion_when_it_is_every_clusters(
    clusters: tuple[ClusterView, ...], reason: Reason
) -> None:
    assert routed(11_000, region(*map(raised, clusters))).reason is reason


def timed(remote_s: float, local_s: float, threshold_tokens: float) -> RegionSnapshot:
    """TTFTs are what the prefills take."""
    cluster = far(prefill=lasting(remote_s), threshold_tokens=threshold_tokens)
    return region(cluster, local=near(prefill=lasting(local_s)), decode=NO_STEP)


def test_exactly_the_margin_does_not_pay_for_leaving_a_side() -> None:
    config = dataclasses.replace(
        CONFIG,
        kv=NO_BYTES,
        margin_s=1.0,  # with the share, 5 s of 8 s
        margin_share=0.5,
        home_margin_s=1.0,
        home_margin_share=0.5,
    )
    kept = routed(1000, timed(8.0, 3.0, 0.0), config=config)
    assert (kept.target, kept.reason) == ("far", Reason.ABOVE_THRESHOLD)
    left = routed(1000, timed(8.0, 2.9375, 0.0), config=config)
    assert (left.target, left.reason) == (HAND_OFF, Reason.LOCAL_SOONER)
    kept = routed(1000, timed(3.0, 8.0, 1000.0), config=config)
    assert (kept.target, kept.reason) == (HAND_OFF, Reason.BELOW_THRESHOLD)
    left = routed(1000, timed(2.9375, 8.0, 1000.0), config=config)
    assert (left.target, left.reason) == ("far", Reason.REMOTE_SOONER)


def test_a_long_queue_is_left_for_a_free_engine_of_the_other_side() -> None:
    """With the default margin, and times of tenths of a second."""
    queued = far(prefill=lasting(0.2), free_s=(1.0,), threshold_tokens=0.0)
    view = region(queued, engines=near(prefill=lasting(0.25)), decode=NO_STEP)
    config = dataclasses.replace(CONFIG, kv=NO_BYTES, hand_off_tokens=10_000)
    found = routed(1000, view, config=config)
    assert (found.target, found.reason) == (ONE_ENGINE, Reason.LOCAL_SOONER)
    short = region(replace(queued, free_s=(0.1,)), engines=view.engines, decode=NO_STEP)
    assert routed(1000, short, config=config).target == "far"


def test_what_a_prefill_takes_from_running_answers_is_part_of_what_a_side_costs() -> None:
    queued = far(prefill=lasting(0.2), free_s=(1.0,), threshold_tokens=0.0)
    engines = near(prefill=lasting(0.4))
    config = dataclasses.replace(
        CONFIG,
        kv=NO_BYTES,
        hand_off_tokens=10_000,
        home_margin_s=0.0,
        home_margin_share=0.0,
        stream_weight=0.25,
    )

    def at(decodes: int) -> RouteDecision:
        decode = DecodeView(slots_total=16, slots_used=decodes, num_instances=2)
        return routed(1000, region(queued, engines=engines, decode=decode), config=config)

    # 0.4 s + 0.25 * 0.4 s for each of the 8 answers that an engine decodes, against 1.2 s.
    assert (at(14).target, at(14).numbers["local_harm_s"]) == (ONE_ENGINE, 0.7)
    assert (at(16).target, at(16).numbers["local_harm_s"]) == ("far", 0.8)
    assert "local_harm_s" not in at(0).numbers


def test_a_prefill_on_an_instance_that_decodes_nothing_harms_no_answer() -> None:
    decode = DecodeView(slots_total=20, slots_used=20)
    found = routed(5000, region(far(), decode=decode))
    assert found.target == HAND_OFF
    assert "local_harm_s" not in found.numbers


def test_a_prompt_stays_in_the_pd_cluster_for_less_than_it_leaves_it_for() -> None:
    """With the default margins: 0.1 s and 30% against 1 s and 45%."""
    config = dataclasses.replace(CONFIG, kv=NO_BYTES)
    assert routed(1000, timed(2.0, 1.2, 0.0), config=config).reason is Reason.LOCAL_SOONER
    assert routed(1000, timed(1.2, 2.0, 1000.0), config=config).reason is Reason.BELOW_THRESHOLD
    assert routed(1000, timed(0.05, 2.0, 1000.0), config=config).reason is Reason.REMOTE_SOONER


def test_a_side_that_never_ends_is_not_left_for_another_that_never_ends() -> None:
    view = region(far(), decode=DecodeView(slots_total=0))
    assert routed(20_000, view).reason is Reason.ABOVE_THRESHOLD
    found = routed(9000, view)
    assert found.reason is Reason.BELOW_THRESHOLD
    assert found.local is not None
    assert found.local.ttft_s == math.inf


def test_any_time_at_all_is_sooner_than_never() -> None:
    config = dataclasses.replace(CONFIG, kv=NO_BYTES, margin_s=0.0, margin_share=0.0)
    away = region(far(prefill=lasting(1e9)), local=near(free_s=()))
    assert routed(5000, away, config=config).reason is Reason.REMOTE_SOONER


def test_kvcache_may_land_exactly_as_late_as_is_allowed() -> None:
    config = dataclasses.replace(
        CONFIG, kv=KvProfile(fixed_bytes=2e7, token_bytes=0.0), max_tail_s=20.0
    )
    busy_home = near(free_s=(1000.0,))
    in_time = region(far(link=replace(GOOD_LINK, available_bytes_per_s=1e6)), local=busy_home)
    found = routed(20_000, in_time, config=config)
    assert found.numbers["tail_s"] == 20.0
    assert found.reason is Reason.ABOVE_THRESHOLD
    late = region(far(link=replace(GOOD_LINK, available_bytes_per_s=0.999e6)), local=busy_home)
    assert routed(20_000, late, config=config).reason is Reason.LINK_BUSY


def test_equal_clusters_are_taken_by_name() -> None:
    assert routed(20_000, region(far("b"), far("a"))).target == "a"
    assert routed(20_000, region(far("b"), far("a", ahead_s=(1.0 / 2,) * 2))).target == "b"


def test_a_decision_tells_every_part_of_its_prediction_to_a_tenth_of_a_millisecond() -> None:
    link = replace(GOOD_LINK, available_bytes_per_s=3e8, backlog_bytes=2e8, rtt_s=0.0123456)
    back = replace(link, backlog_bytes=3e8)
    odd = PrefillProfile((0.0,), ((0.5, 1.23456789e-4, 0.0),))
    cluster = far(prefill=odd, ahead_s=(1.2345678 / 2,) * 2, link=link, links_in={"pd": back})
    full = DecodeView(
        slots_total=3, slots_used=3, num_waiting=2, decode_s=7.6543219, step_s=0.0254321
    )
    home = near(ahead_s=(98.7654321 / 2,) * 2)
    found = routed(
        70_000,
        region(replace(cluster, threshold_tokens=10_000.6), local=home, decode=full),
        local_cached_tokens=30_000,
    )
    assert found.predicted is found.remote
    assert dict(found.numbers) == {
        "prompt_tokens": 70_000,
        "cached_tokens": 30_000,
        "uncached_tokens": 40_000,
        "local_uncached_tokens": 40_000,
        "queue_s": 0.6173,  # half of 1.2345678: two instances
        "move_s": 0.5354,  # what the move takes longer than the queue
        "prefill_s": 5.4383,
        "tail_s": 0.0095,
        "slot_s": 1.0538,
        "local_ttft_s": 57.9463,
        "threshold_tokens": 10_001,
        "remote_ttft_s": 7.7179,
        "link_bytes_per_s": 3e8,
        "link_backlog_bytes": 2e8,
        "moved_tokens": 30_000,
        "moved_bytes": 31_000_000,
    }


def test_a_decision_over_an_unmeasured_link_tells_nothing_of_the_link() -> None:
    view = region(far(link=replace(GOOD_LINK, available_bytes_per_s=None)))
    found = routed(20_000, view, is_exact=False, prefill_cached_tokens={"far": 4000})
    assert dict(found.numbers) == {
        "prompt_tokens_about": 20_000,
        "cached_tokens": 4000,
        "uncached_tokens": 16_000,
        "local_uncached_tokens": 20_000,
        "queue_s": 0.0,
        "move_s": 0.0,
        "prefill_s": 2.1,
        "tail_s": 0.0,
        "slot_s": 0.0,
        "local_ttft_s": 4.525,
        "threshold_tokens": 10_000,
        "remote_ttft_s": 2.125,
    }


def test_a_decision_without_a_prefill_cluster_tells_of_the_local_side_only() -> None:
    found = routed(10_000, region(), local_cached_tokens=4000)
    assert found.reason is Reason.NO_PREFILL_CLUSTER
    assert found.remote is None
    assert dict(found.numbers) == {
        "prompt_tokens": 10_000,
        "cached_tokens": 4000,
        "uncached_tokens": 6000,
        "local_uncached_tokens": 6000,
        "queue_s": 0.0,
        "move_s": 0.0,
        "prefill_s": 1.7,
        "tail_s": 0.0,
        "slot_s": 0.0,
        "local_ttft_s": 1.725,
    }
