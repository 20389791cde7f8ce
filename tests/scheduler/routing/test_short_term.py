"""Routes by threshold and predicted finish: every rule, totality and monotonicity."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scheduling_cases import (
    CONFIG,
    GOOD_LINK,
    far,
    near,
    prompt,
    region,
    shapes,
    snapshots,
    untimed,
)

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, Reason, RequestShape
from scheduler.routing.service import ServiceModel
from scheduler.routing.short_term import RouteDecision, route
from scheduler.routing.views import ClusterView, DecodeView, RegionSnapshot

BUSY = (30.0, 30.0)
SCARCE = replace(GOOD_LINK, available_bytes_per_s=2e7)


def routed(
    num_tokens: int, snapshot: RegionSnapshot, now_s: float = 0.0, **fields: object
) -> RouteDecision:
    return route(prompt(num_tokens, **fields), snapshot, CONFIG, now_s)


def moved_from(num_tokens: int, snapshot: RegionSnapshot, **fields: object) -> str | None:
    """The cluster whose longer cached prefix is moved first."""
    move = route(prompt(num_tokens, **fields), snapshot, CONFIG, 0.0).move
    return move.source if move.pays else None


def test_the_threshold_decides_where_nothing_waits() -> None:
    sent = routed(20_000, region(far()))
    assert (sent.route, sent.target, sent.reason) == (
        "prefill_cluster",
        "far",
        Reason.ABOVE_THRESHOLD,
    )
    kept = routed(10_000, region(far()))
    assert (kept.route, kept.target, kept.reason) == ("local", HAND_OFF, Reason.BELOW_THRESHOLD)


def test_a_decision_carries_both_predictions_and_the_numbers() -> None:
    found = routed(20_000, region(far()))
    assert found.remote is not None
    assert found.local is not None
    assert found.predicted is found.remote
    assert found.remote.prefill_s == pytest.approx(2.5)
    assert found.local.ttft_s == pytest.approx(4.525)
    assert found.numbers["remote_ttft_s"] == round(found.remote.ttft_s, 4)
    assert found.numbers["local_ttft_s"] == 4.525
    assert found.numbers["threshold_tokens"] == 10_000
    assert found.numbers["link_bytes_per_s"] == 1e9
    assert "remote_ttft_s=" in str(found)
    assert routed(100, region(far())).predicted == routed(100, region(far())).local


def test_what_one_engine_must_serve_whole() -> None:
    found = routed(20_000, region(far()), has_echo=True)
    assert (found.route, found.target, found.reason) == ("direct", ONE_ENGINE, Reason.ECHO)
    assert (found.local, found.remote, found.predicted) == (None, None, None)


@pytest.mark.parametrize(
    ("clusters", "reason"),
    [
        ((), Reason.NO_PREFILL_CLUSTER),
        ((far(is_healthy=False),), Reason.PREFILL_UNHEALTHY),
        ((far(free_s=()),), Reason.PREFILL_UNHEALTHY),
        ((far(can_feed=False),), Reason.KVCACHE_UNUSABLE),
        ((far(can_feed=False, is_healthy=False),), Reason.KVCACHE_UNUSABLE),
        ((far("a", can_feed=False), far("b", is_healthy=False)), Reason.PREFILL_UNHEALTHY),
        ((far(num_queued=4, max_queued=4),), Reason.PREFILL_QUEUE_FULL),
        ((far(link=None),), Reason.LINK_STALE),
        ((far(link=replace(GOOD_LINK, age_s=5.1)),), Reason.LINK_STALE),
        ((far(link=replace(GOOD_LINK, state=LinkCondition.DOWN)),), Reason.LINK_DOWN),
        ((far(link=replace(GOOD_LINK, available_bytes_per_s=0.0)),), Reason.LINK_DOWN),
        ((far("a", is_healthy=False), far("b", num_queued=1, max_queued=1)),
         Reason.PREFILL_QUEUE_FULL),
    ],
)  # fmt: skip
def test_a_cluster_that_cannot_be_had(clusters: tuple[ClusterView, ...], reason: Reason) -> None:
    found = routed(20_000, region(*clusters))
    assert (found.route, found.reason) == ("local", reason)
    assert found.remote is None


def test_a_cluster_with_another_adapter_is_passed_over() -> None:
    view = region(far("a"), far("b", num_queued=1))
    assert routed(20_000, view).target == "a"
    assert routed(20_000, view, other_adapter_in=frozenset("a")).target == "b"
    found = routed(20_000, view, other_adapter_in=frozenset("ab"))
    assert (found.route, found.reason) == ("local", Reason.ADAPTER_DIFFERS)
    assert routed(100, view, other_adapter_in=frozenset("ab")).reason is Reason.BELOW_THRESHOLD


def test_a_cluster_that_can_feed_takes_what_another_one_cannot() -> None:
    assert routed(20_000, region(far("a", can_feed=False), far("b"))).target == "b"


@pytest.mark.parametrize("clusters", [(), (far(),)])
def test_no_hand_off_between_instances_that_share_no_kvcache(
    clusters: tuple[ClusterView, ...],
) -> None:
    unlike = region(*clusters, local=near(can_feed=False), engines=near())
    found = routed(5000, unlike)
    assert (found.target, found.reason) == (ONE_ENGINE, Reason.KVCACHE_UNUSABLE)
    assert routed(5000, replace(unlike, local=near())).target == HAND_OFF


def test_a_snapshot_ages_with_its_links() -> None:
    assert routed(20_000, region(far()), now_s=4.9).reason is Reason.ABOVE_THRESHOLD
    assert routed(20_000, region(far()), now_s=5.1).reason is Reason.LINK_STALE


def test_without_landing_room_one_engine_serves_it() -> None:
    found = routed(20_000, region(far(), landing_room_bytes=1000, engines=near()))
    assert (found.target, found.reason) == (ONE_ENGINE, Reason.NO_LANDING_ROOM)
    numbers = found.numbers
    assert (numbers["landing_bytes"], numbers["landing_room_bytes"]) == (21_000_000, 1000)
    served = routed(20_000, region(far(), landing_room_bytes=10**9))
    assert served.target == "far"
    assert not {"landing_bytes", "landing_room_bytes"} & set(served.numbers)


@pytest.mark.parametrize("clusters", [(), (far(),)])
@pytest.mark.parametrize(
    ("local", "reason"),
    [
        (near(), Reason.NO_LANDING_ROOM),
        (near(is_healthy=False), None),
        (near(free_s=()), None),
        (near(num_queued=1, max_queued=1), None),
    ],
)
def test_a_hand_off_needs_landing_room_as_well(
    clusters: tuple[ClusterView, ...], local: ClusterView, reason: Reason | None
) -> None:
    """Where room is not what keeps it from a prefill instance, room is not the reason."""
    otherwise = Reason.BELOW_THRESHOLD if clusters else Reason.NO_PREFILL_CLUSTER
    view = region(*clusters, local=local, landing_room_bytes=1000, engines=near())
    found = routed(5000, view)
    assert (found.target, found.reason) == (ONE_ENGINE, reason or otherwise)
    roomy = routed(5000, replace(view, landing_room_bytes=10**9))
    assert (roomy.target, roomy.reason) == (HAND_OFF if reason else ONE_ENGINE, otherwise)


def test_a_cluster_that_failed_the_request_is_passed_over() -> None:
    view = region(far("a"), far("b"))
    assert route(prompt(20_000), view, CONFIG, 0.0, excluded={"a"}).target == "b"
    last = route(prompt(20_000), view, CONFIG, 0.0, excluded={"a", "b"})
    assert (last.route, last.reason) == ("local", Reason.PREFILL_FAILED)


def test_the_cluster_that_is_predicted_first_takes_it() -> None:
    view = region(far("a", ahead_s=(3.0 / 2,) * 2), far("b"), far("c", free_s=BUSY))
    assert routed(20_000, view).target == "b"
    warm = region(*(replace(c, link=SCARCE) for c in view.prefill_clusters))
    hits = {"c": 19_000, "a": 18_000}
    assert routed(20_000, warm, prefill_cached_tokens=hits).target == "a"


def test_a_long_prompt_comes_home_when_the_prefill_cluster_is_clearly_later() -> None:
    found = routed(20_000, region(far(free_s=BUSY)))
    assert (found.route, found.reason) == ("local", Reason.LOCAL_SOONER)
    assert found.numbers["remote_ttft_s"] > 30
    slightly = routed(20_000, region(far(free_s=(3.0, 3.0))))
    assert slightly.reason is Reason.ABOVE_THRESHOLD


def test_a_short_prompt_leaves_when_home_is_clearly_later() -> None:
    busy = near(free_s=BUSY)
    found = routed(9000, region(far(), local=busy))
    assert (found.route, found.reason) == ("prefill_cluster", Reason.REMOTE_SOONER)
    slightly = routed(9000, region(far(), local=near(free_s=(0.1, 0.1))))
    assert slightly.reason is Reason.BELOW_THRESHOLD


def test_nothing_more_is_pressed_into_a_link_whose_rate_nobody_knows() -> None:
    unknown = replace(GOOD_LINK, available_bytes_per_s=None)
    found = routed(9000, region(far(link=unknown), local=near(free_s=BUSY)))
    assert (found.route, found.reason) == ("local", Reason.BELOW_THRESHOLD)
    assert found.remote is not None


@pytest.mark.parametrize("state", [LinkCondition.RISING, LinkCondition.CONGESTED])
def test_a_busy_link_is_used_as_far_as_its_backlog_lets_it_pay(state: LinkCondition) -> None:
    short = replace(GOOD_LINK, state=state, backlog_bytes=1e8)
    found = routed(9000, region(far(link=short), local=near(free_s=BUSY)))
    assert (found.route, found.reason) == ("prefill_cluster", Reason.REMOTE_SOONER)
    long = replace(GOOD_LINK, state=state, backlog_bytes=1e11)
    found = routed(9000, region(far(link=long), local=near(free_s=BUSY)))
    assert found.route == "local"


def test_what_would_land_far_too_late_is_not_sent() -> None:
    waiting = replace(GOOD_LINK, backlog_bytes=1e11)
    found = routed(20_000, region(far(link=waiting), local=near(free_s=(1e6,))))
    assert (found.route, found.reason) == ("local", Reason.LINK_BUSY)


def test_a_link_that_became_slow_brings_long_prompts_home() -> None:
    slow = replace(GOOD_LINK, available_bytes_per_s=1e6)
    found = routed(20_000, region(far(link=slow)))
    assert (found.route, found.reason) == ("local", Reason.LOCAL_SOONER)


def test_without_prefill_instances_one_engine_serves_it() -> None:
    view = region(local=near(free_s=()), engines=near(free_s=(1.0,)))
    found = routed(5000, view)
    assert found.target == ONE_ENGINE
    assert found.local is not None
    assert found.local.queue_s == 1.0
    nobody = routed(5000, region(local=near(free_s=())))
    assert nobody.local is not None
    assert nobody.local.ttft_s == math.inf


def test_a_place_that_cannot_serve_is_left_for_any_that_can() -> None:
    found = routed(5000, region(far(), local=near(free_s=())))
    assert (found.target, found.reason) == ("far", Reason.REMOTE_SOONER)


def test_what_is_not_worth_a_hand_off_stays_on_its_engine() -> None:
    config = dataclasses.replace(CONFIG, hand_off_tokens=500)
    view = region(engines=near())
    assert route(prompt(500), view, config, 0.0).target == ONE_ENGINE
    assert route(prompt(501), view, config, 0.0).target == HAND_OFF


def test_overheads_belong_to_their_targets() -> None:
    service = {"far": ServiceModel(1.0), HAND_OFF: ServiceModel(0.5)}
    config = dataclasses.replace(CONFIG, service=service)
    found = route(prompt(20_000), region(far()), config, 0.0)
    assert found.reason is Reason.ABOVE_THRESHOLD
    assert found.remote is not None
    assert found.local is not None
    assert (found.remote.overhead_s, found.local.overhead_s) == (1.0, 0.5)


def test_scarce_bandwidth_lets_every_cluster_have_its_own_cache() -> None:
    view = region(far(link=SCARCE))
    found = routed(20_000, view, prefill_cached_tokens={"far": 19_000})
    assert (found.target, found.numbers["move_s"]) == ("far", 0)
    assert found.local is not None
    assert found.local.prefill_s == pytest.approx(4.5)
    near_hit = routed(20_000, view, local_cached_tokens=19_000)
    assert (near_hit.reason, near_hit.numbers["move_s"]) == (Reason.BELOW_THRESHOLD, 0)


def test_abundant_bandwidth_moves_the_best_cache_to_where_it_is_computed() -> None:
    found = routed(20_000, region(far()), prefill_cached_tokens={"far": 19_000})
    assert (found.target, found.reason) == (HAND_OFF, Reason.BELOW_THRESHOLD)
    assert moved_from(20_000, region(far()), prefill_cached_tokens={"far": 19_000}) == "far"
    assert found.numbers["cached_tokens"] == 19_000
    assert found.numbers["move_s"] == pytest.approx(0.02)
    back = far(links_in={"pd": GOOD_LINK})
    sent = routed(40_000, region(back), local_cached_tokens=29_000)
    assert sent.target == "far"
    assert moved_from(40_000, region(back), local_cached_tokens=29_000) == "pd"
    assert sent.numbers["uncached_tokens"] == 11_000


def test_a_move_that_saves_nothing_is_left() -> None:
    slow_back = far(links_in={"pd": replace(GOOD_LINK, available_bytes_per_s=1e7)})
    found = routed(60_000, region(slow_back), local_cached_tokens=29_000)
    assert found.target == "far"
    assert moved_from(60_000, region(slow_back), local_cached_tokens=29_000) is None
    assert moved_from(9000, region(far()), prefill_cached_tokens={"far": 200}) is None


def test_a_full_decode_pool_delays_both_sides_alike() -> None:
    full = DecodeView(slots_total=4, slots_used=4, num_waiting=9, decode_s=10.0)
    found = routed(20_000, region(far(), decode=full))
    assert found.reason is Reason.ABOVE_THRESHOLD
    assert found.numbers["slot_s"] > 10


def test_settings_that_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match="margin_s is -1"):
        dataclasses.replace(CONFIG, margin_s=-1)
    with pytest.raises(ValueError, match="max_link_age_s is 0"):
        dataclasses.replace(CONFIG, max_link_age_s=0)


@untimed
@given(shapes, snapshots(), st.floats(0, 20), st.sets(st.sampled_from(["x", "y", "z"])))
def test_every_request_gets_one_sensible_route(
    shape: RequestShape, snapshot: RegionSnapshot, now_s: float, excluded: set[str]
) -> None:
    found = route(shape, snapshot, CONFIG, now_s, excluded=excluded)
    assert found == route(shape, snapshot, CONFIG, now_s, excluded=excluded)
    if found.route != "prefill_cluster":
        assert found.target in (ONE_ENGINE, HAND_OFF)
        return
    assert found.target not in excluded
    taken = next(c for c in snapshot.prefill_clusters if c.name == found.target)
    assert taken.is_healthy
    assert taken.free_s
    assert taken.link is not None
    assert taken.link.state is not LinkCondition.DOWN
    assert taken.link.age_s + now_s <= CONFIG.max_link_age_s
    assert found.remote is not None
    assert found.remote.landed_s < math.inf
    # Without a slot nobody decodes, wherever it is computed.
    assert found.remote.ttft_s < math.inf or not snapshot.decode.slots_total


@untimed
@given(
    st.integers(2, 200_000), st.floats(0, 60), st.floats(0, 60), st.floats(0, 60), st.floats(0, 1e5)
)
def test_more_waiting_at_a_prefill_cluster_never_draws_a_request_there(
    num_tokens: int, home_s: float, there_s: float, more_s: float, threshold: float
) -> None:
    def is_sent(queued_s: float) -> bool:
        cluster = far(ahead_s=(queued_s / 2,) * 2, threshold_tokens=threshold)
        view = region(cluster, local=near(ahead_s=(home_s / 2,) * 2))
        return routed(num_tokens, view).route == "prefill_cluster"

    assert is_sent(there_s) or not is_sent(there_s + more_s)


@untimed
@given(st.integers(2, 200_000), st.floats(0, 60), st.floats(1e6, 1e10), st.floats(0.01, 1))
def test_a_slower_link_never_draws_a_request(
    num_tokens: int, home_s: float, rate: float, share: float
) -> None:
    def is_sent(bytes_per_s: float) -> bool:
        cluster = far(link=LinkView(available_bytes_per_s=bytes_per_s))
        view = region(cluster, local=near(ahead_s=(home_s / 2,) * 2))
        return routed(num_tokens, view).route == "prefill_cluster"

    assert is_sent(rate) or not is_sent(rate * share)
