"""Predicted times: each part by hand, monotonicity over random regions, and learning."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scheduling_cases import (
    FAST,
    GOOD_LINK,
    IDLE_DECODE,
    clusters,
    decode_views,
    far,
    near,
    seconds,
    untimed,
)

from deploy.plan.solve.case_study import H200_PREFILL, KV
from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.planning.curves import interpolate
from scheduler.routing.prediction import (
    Prediction,
    PrefillTask,
    predict,
    queue_wait_s,
    slot_wait_s,
    transfer_tail_s,
)
from scheduler.routing.profiles import KvProfile, PrefillProfile
from scheduler.routing.service import Load, ServiceModel
from scheduler.routing.views import ClusterView, DecodeView, RegionSnapshot

CLOSE = 1 + 1e-9
"""What sums in another order may differ by."""


def test_a_profile_gives_the_curve_and_saves_what_is_cached_but_not_the_fixed_part() -> None:
    profile = PrefillProfile.of(H200_PREFILL)
    assert profile.prefill_s(32_000) == pytest.approx(float(H200_PREFILL(32_000)))
    cached = float(H200_PREFILL(32_000) - H200_PREFILL(24_000) + H200_PREFILL(0))
    assert profile.prefill_s(32_000, 24_000) == pytest.approx(cached)
    assert profile.prefill_s(100, 200) == pytest.approx(float(H200_PREFILL(0)))
    assert profile.corrected(2.0).prefill_s(8000) == pytest.approx(2 * float(H200_PREFILL(8000)))


def test_a_profile_of_measured_points_has_all_their_pieces() -> None:
    curve = interpolate([(1000, 1.0), (2000, 3.0), (4000, 5.0)]).curve
    profile = PrefillProfile.of(curve)
    for tokens in (10, 1000, 1500, 2000, 3999, 9000):
        assert profile.prefill_s(tokens) == pytest.approx(float(curve(tokens)))
    assert profile.corrected(3.0).curve()(1500) == pytest.approx(3 * float(curve(1500)))


def test_profiles_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="pieces"):
        PrefillProfile((0.0,), ())
    with pytest.raises(ValueError, match="factor 0"):
        FAST.corrected(0.0)
    with pytest.raises(ValueError, match="must not be negative"):
        KvProfile(-1.0, 1.0)


def test_kv_bytes_follow_the_planners_curve() -> None:
    kv = KvProfile.of(KV, 32_000)
    assert kv.size_bytes(32_000) == pytest.approx(float(KV.size(32_000)))
    assert kv.token_part_bytes(1000) == pytest.approx(17_280_000)


@pytest.mark.parametrize(
    ("ahead_s", "free_s", "expected_s"),
    [
        ((), (), math.inf),
        ((), (0.0, 5.0), 0.0),
        ((), (2.0, 5.0), 2.0),
        # One that waits takes the first instance, and the second one is next.
        ((9.0,), (0.0, 0.0), 0.0),
        ((3.0,), (2.0, 5.0), 5.0),
        ((3.0, 1.0), (2.0, 4.0), 5.0),
        ((1.0, 2.0, 3.0), (0.0, 0.0, 100.0), 2.0),
        ((4.0,), (1.0,), 5.0),
    ],
)
def test_each_queued_prefill_takes_the_instance_that_is_free_first(
    ahead_s: tuple[float, ...], free_s: tuple[float, ...], expected_s: float
) -> None:
    assert queue_wait_s(ahead_s, free_s) == pytest.approx(expected_s)


def test_a_fast_link_leaves_the_fixed_bytes_and_a_slow_one_most() -> None:
    task = PrefillTask(1000, token_bytes=1e9, fixed_bytes=1e8)
    fast = LinkView(available_bytes_per_s=1e9, rtt_s=0.1)
    assert transfer_tail_s(fast, 0.0, 2.0, task) == pytest.approx(0.1 + 0.05)
    slow = LinkView(available_bytes_per_s=1e8)
    assert transfer_tail_s(slow, 0.0, 2.0, task) == pytest.approx((1e9 - 2e8 + 1e8) / 1e8)


def test_a_backlog_drains_while_the_request_waits() -> None:
    task = PrefillTask(1000, token_bytes=0.0, fixed_bytes=0.0)
    link = LinkView(available_bytes_per_s=1e8, backlog_bytes=5e8)
    assert transfer_tail_s(link, 0.0, 1.0, task) == pytest.approx(4.0)
    assert transfer_tail_s(link, 3.0, 1.0, task) == pytest.approx(1.0)
    assert transfer_tail_s(link, 9.0, 1.0, task) == 0.0
    fed = replace(link, inflow_bytes_per_s=1e8)
    assert transfer_tail_s(fed, 9.0, 1.0, task) == pytest.approx(5.0)


def test_a_backlog_that_was_seen_some_time_ago_has_been_sent_since() -> None:
    task = PrefillTask(1000)
    seen = LinkView(available_bytes_per_s=1e8, backlog_bytes=3e8)
    assert transfer_tail_s(seen, 0.0, 1.0, task) == pytest.approx(2.0)
    assert transfer_tail_s(replace(seen, age_s=1.5), 0.0, 1.0, task) == pytest.approx(0.5)
    assert transfer_tail_s(replace(seen, age_s=4.0), 0.0, 1.0, task) == 0.0
    # What prefills go on to emit comes into it from now on.
    fed = replace(seen, age_s=1.5, inflow_bytes_per_s=1e8)
    assert transfer_tail_s(fed, 0.0, 1.0, task) == pytest.approx(1.5)


def test_an_instance_that_computes_a_prompt_emits_nothing_of_others_meanwhile() -> None:
    task = PrefillTask(1000)
    link = LinkView(available_bytes_per_s=1e8, backlog_bytes=3e8, inflow_bytes_per_s=1e8)
    assert transfer_tail_s(link, 0.0, 1.0, task, beside=0.5) == pytest.approx(2.5)

    def tail_s(*free_s: float) -> float:
        lasting = PrefillProfile((0.0,), ((1.0, 0.0, 0.0),))
        cluster = ClusterView(name="far", prefill=lasting, free_s=free_s, link=link)
        return predict(task, cluster, DecodeView(slots_total=1)).tail_s

    assert tail_s(0.0) == pytest.approx(2.0)
    assert tail_s(0.0, 0.0) == pytest.approx(2.5)
    # All of it comes in while the prompt waits.
    assert tail_s(4.0) == pytest.approx(2.0)


def test_links_without_a_rate() -> None:
    task = PrefillTask(1000, token_bytes=1e9)
    assert transfer_tail_s(LinkView(rtt_s=0.1), 0.0, 1.0, task) == pytest.approx(0.05)
    assert transfer_tail_s(LinkView(available_bytes_per_s=0.0), 0.0, 1.0, task) == math.inf


def test_a_slot_is_waited_for_only_when_all_are_taken_by_then() -> None:
    full = DecodeView(slots_total=2, slots_used=2, decode_s=10.0, landing_s=(1.0,))
    assert slot_wait_s(replace(full, landing_s=()), 0.0) == 5.0
    assert slot_wait_s(replace(full, landing_s=()), 2.0) == 3.0
    assert slot_wait_s(full, 0.5) == 4.5
    assert slot_wait_s(full, 2.0) == 8.0
    assert slot_wait_s(full, 11.0) == 0.0
    assert slot_wait_s(replace(full, num_waiting=1), 2.0) == pytest.approx(15.0 - 2.0)
    assert slot_wait_s(DecodeView(slots_total=0), 1.0) == math.inf


def test_decodes_of_unknown_age_are_spread_evenly() -> None:
    full = DecodeView(slots_total=4, slots_used=4, decode_s=8.0)
    assert slot_wait_s(full, 0.0) == 2.0
    assert slot_wait_s(replace(full, num_waiting=2), 1.0) == 5.0


def test_the_parts_add_up() -> None:
    cluster = far(ahead_s=(3.0 / 2,) * 2, free_s=(1.0, 1.0), link=GOOD_LINK)
    task = PrefillTask(10_000, 2000, token_bytes=1e7, fixed_bytes=1e6, move_s=4.0)
    found = predict(task, cluster, IDLE_DECODE, ServiceModel(overhead_s=0.25))
    assert found == Prediction(2.5, 1.5, pytest.approx(1.3), 0.001, 0.0, 0.025, 0.25)
    assert found.prefill_end_s == pytest.approx(5.3)
    assert found.landed_s == pytest.approx(5.301)
    assert found.ttft_s == pytest.approx(5.576)


tasks = st.builds(
    PrefillTask,
    num_tokens=st.integers(0, 10**6),
    cached_tokens=st.integers(0, 10**6),
    token_bytes=st.floats(0, 1e11),
    fixed_bytes=st.floats(0, 1e9),
    move_s=seconds,
)


def ttft_s(task: PrefillTask, cluster: ClusterView, decode: DecodeView) -> float:
    return predict(task, cluster, decode).ttft_s


@untimed
@given(tasks, clusters("x", is_far=True), decode_views(), st.floats(0.01, 1))
def test_a_slower_link_never_makes_a_prediction_earlier(
    task: PrefillTask, cluster: ClusterView, decode: DecodeView, share: float
) -> None:
    link = cluster.link
    if link is None or link.available_bytes_per_s is None:
        return
    slower = replace(link, available_bytes_per_s=link.available_bytes_per_s * share)
    before_s = ttft_s(task, cluster, decode)
    assert ttft_s(task, replace(cluster, link=slower), decode) * CLOSE >= before_s


@untimed
@given(tasks, clusters("x", is_far=True), decode_views(), seconds, st.integers(0, 5))
def test_more_work_ahead_never_shortens_a_prediction(
    task: PrefillTask, cluster: ClusterView, decode: DecodeView, more_s: float, which: int
) -> None:
    before_s = ttft_s(task, cluster, decode)
    queued = replace(cluster, ahead_s=(*cluster.ahead_s, more_s))
    assert ttft_s(task, queued, decode) * CLOSE >= before_s
    busier = list(cluster.free_s)
    if busier:
        busier[which % len(busier)] += more_s
        later = replace(cluster, free_s=tuple(sorted(busier)))
        assert ttft_s(task, later, decode) * CLOSE >= before_s
    slower = replace(cluster, prefill=cluster.prefill.corrected(1 + more_s / 100))
    assert ttft_s(task, slower, decode) * CLOSE >= before_s
    if cluster.link is not None:
        fuller = replace(cluster.link, backlog_bytes=cluster.link.backlog_bytes + more_s * 1e6)
        assert ttft_s(task, replace(cluster, link=fuller), decode) * CLOSE >= before_s


@untimed
@given(tasks, clusters("x", is_far=True), decode_views(), seconds)
def test_a_fuller_decode_pool_never_shortens_a_prediction(
    task: PrefillTask, cluster: ClusterView, decode: DecodeView, lands_s: float
) -> None:
    before_s = ttft_s(task, cluster, decode)
    waiting = replace(decode, num_waiting=decode.num_waiting + 1)
    landing = replace(decode, landing_s=tuple(sorted((*decode.landing_s, lands_s))))
    running = replace(decode, slots_used=decode.slots_used + 1)
    for fuller in (waiting, landing, running):
        assert ttft_s(task, cluster, fuller) * CLOSE >= before_s


def test_contention_is_what_others_cost() -> None:
    task, load = PrefillTask(10_000), Load(decodes=3.0, busy=0.5)
    service = ServiceModel(0.2, prefill=0.5, decode_s=0.1, busy_s=0.4)
    cluster = far(ahead_s=(3.0 / 2,) * 2, free_s=(1.0, 1.0), link=GOOD_LINK)
    alone = predict(task, cluster, IDLE_DECODE)
    found = predict(task, cluster, IDLE_DECODE, service, load)
    assert found.landed_s == alone.landed_s
    assert (found.overhead_s, found.load) == (0.2, load)
    extra_s = -0.5 * alone.prefill_s + 0.3 + 0.2
    assert found.contention_s == pytest.approx(extra_s)
    assert sum(found.parts().values()) == pytest.approx(found.ttft_s)


def test_a_place_that_cannot_serve_is_infinitely_late_whatever_was_learnt() -> None:
    service = ServiceModel(0.2, prefill=0.0)
    dead = far(link=replace(GOOD_LINK, available_bytes_per_s=0.0))
    for cluster in (dead, far(free_s=())):
        assert predict(PrefillTask(1000), cluster, IDLE_DECODE, service).ttft_s == math.inf


def test_views_refuse_what_cannot_be() -> None:
    for free_s in ((-1.0, 0.0), (0.0, math.inf)):
        with pytest.raises(ValueError, match=r"free_s is (-1\.0|inf)"):
            near(free_s=free_s)
    with pytest.raises(ValueError, match="one name: far, far"):
        RegionSnapshot(taken_s=0, local=near(), decode=IDLE_DECODE, prefill_clusters=(far(), far()))


def test_a_floor_without_backlog_keeps_nothing_away() -> None:
    task = PrefillTask(4000, token_bytes=1e9)
    slow = LinkView(available_bytes_per_s=1e6, rtt_s=0.02)
    assert transfer_tail_s(slow, 0.0, 1.0, task) > 900
    floor = replace(slow, is_floor=True)
    assert transfer_tail_s(floor, 0.0, 1.0, task) == pytest.approx(0.01)
    assert transfer_tail_s(replace(floor, backlog_bytes=1e6), 0.0, 1.0, task) > 900
    congested = replace(floor, state=LinkCondition.CONGESTED)
    assert transfer_tail_s(congested, 0.0, 1.0, task) > 900
    assert transfer_tail_s(replace(floor, available_bytes_per_s=0.0), 0.0, 1.0, task) == math.inf
