"""What can be had for one request: exact room, ages and rates, and when moving a cache pays."""

import dataclasses

import pytest
from msgspec.structs import replace
from scheduling_cases import CONFIG, GOOD_LINK, far, near, prompt, region

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.routing.candidates import (
    Candidate,
    RouteConfig,
    has_landing_room,
    is_abundant,
    local_candidate,
    obstacle,
    remote_candidate,
    wire_bytes,
)
from scheduler.routing.decision import (
    HAND_OFF,
    NO_MOVE,
    ONE_ENGINE,
    MoveReason,
    Reason,
    RequestShape,
)
from scheduler.routing.profiles import KvProfile, PrefillProfile
from scheduler.routing.views import ClusterView, DecodeView, RegionSnapshot

KV = KvProfile(fixed_bytes=1000.0, token_bytes=100.0)
BY_TOKEN = PrefillProfile((0.0,), ((0.0, 0.0078125, 0.0),))  # 128 tokens/s, exact in binary
NO_STEP = DecodeView(slots_total=1)


def config(**fields: object) -> RouteConfig:
    return dataclasses.replace(CONFIG, **{"kv": KV, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(("age_s", "taken_s", "now_s"), [(5.0, 0.0, 0.0), (2.0, 7.0, 10.0)])
def test_a_link_is_stale_when_it_was_looked_at_longer_ago_than_allowed(
    age_s: float, taken_s: float, now_s: float
) -> None:
    cluster = far(link=replace(GOOD_LINK, age_s=age_s))
    view = replace(region(cluster), taken_s=taken_s)
    assert obstacle(prompt(100), cluster, view, CONFIG, now_s) is None
    assert obstacle(prompt(100), cluster, view, CONFIG, now_s + 0.01) is Reason.LINK_STALE


def test_room_is_enough_when_exactly_what_is_sent_fits() -> None:
    size = 1000 + 100 * 50

    def fits(room_bytes: int | None) -> bool:
        return has_landing_room(prompt(50), region(landing_room_bytes=room_bytes), KV)

    assert (fits(size), fits(size - 1), fits(None)) == (True, False, True)


def test_a_host_without_room_takes_not_even_nothing() -> None:
    nothing = KvProfile(fixed_bytes=0.0, token_bytes=0.0)
    assert not has_landing_room(prompt(50), region(landing_room_bytes=0), nothing)
    assert has_landing_room(prompt(50), region(landing_room_bytes=1), nothing)


def test_what_is_sent_is_what_the_landing_node_lacks() -> None:
    assert wire_bytes(prompt(50), KV) == (5000.0, 1000.0)
    assert wire_bytes(prompt(50, landing_cached_tokens=20), KV) == (3000.0, 1000.0)
    assert wire_bytes(prompt(50, landing_cached_tokens=50), KV) == (0.0, 1000.0)
    assert wire_bytes(prompt(50, landing_cached_tokens=60), KV) == (0.0, 1000.0)


@pytest.mark.parametrize(
    "name", ["margin_s", "margin_share", "home_margin_s", "stream_weight", "hand_off_tokens"]
)
def test_a_margin_may_be_nothing_but_not_negative(name: str) -> None:
    assert getattr(config(**{name: 0}), name) == 0
    with pytest.raises(ValueError, match=f"{name} is -0.5; it must not be negative"):
        config(**{name: -0.5})


@pytest.mark.parametrize("name", ["max_link_age_s", "max_tail_s"])
def test_a_limit_may_be_small_but_not_nothing(name: str) -> None:
    assert getattr(config(**{name: 0.5}), name) == 0.5
    with pytest.raises(ValueError, match=f"{name} is 0; it must be above 0"):
        config(**{name: 0})


# ---- abundance: 2 instances emit 2 * (1000 + 100 * 128) bytes in 1 s; 1.25 times that is 34,500.


def abundant(link: LinkView | None, **fields: object) -> bool:
    return is_abundant(prompt(128, **fields), far(link=link, prefill=BY_TOKEN), config())


def test_a_link_is_abundant_from_a_quarter_more_than_its_cluster_emits() -> None:
    assert abundant(LinkView(available_bytes_per_s=34_500.0))
    assert not abundant(LinkView(available_bytes_per_s=34_499.0))


def test_a_prompt_that_is_computed_sooner_needs_a_faster_link() -> None:
    """64 of 128 tokens are cached: the same bytes are emitted in half a second."""
    half = {"prefill_cached_tokens": {"far": 64}}
    assert abundant(LinkView(available_bytes_per_s=69_000.0), **half)
    assert not abundant(LinkView(available_bytes_per_s=68_999.0), **half)


@pytest.mark.parametrize(
    "link",
    [
        None,
        LinkView(available_bytes_per_s=0.0),
        LinkView(available_bytes_per_s=1e9, state=LinkCondition.RISING),
        LinkView(state=LinkCondition.RISING),
        LinkView(backlog_bytes=1.0),
        LinkView(available_bytes_per_s=1.0, is_floor=True, backlog_bytes=1.0),
    ],
)
def test_a_link_that_is_not_clear_or_too_slow_is_not_abundant(link: LinkView | None) -> None:
    assert not abundant(link)


def test_a_quiet_link_that_nobody_has_filled_is_abundant() -> None:
    assert abundant(LinkView())
    assert abundant(LinkView(available_bytes_per_s=1.0, is_floor=True))


# ---- moves: prefill 1 s per 128 tokens, the move of 64 tokens 7400 bytes.

SECONDS_FOR_64 = 7400 / 1e6
WIDE = LinkView(available_bytes_per_s=1e6)


def locally(request: RequestShape, view: RegionSnapshot, **fields: object) -> Candidate:
    return local_candidate(request, view, config(**fields))


def source(found: Candidate) -> str | None:
    """The cluster whose cached prefix is moved there first."""
    return found.move.source if found.move.pays else None


def home(*clusters: ClusterView) -> RegionSnapshot:
    return region(*clusters, local=near(prefill=BY_TOKEN), decode=NO_STEP)


def wide(name: str = "far", **fields: object) -> ClusterView:
    return far(name, **({"link": WIDE, "prefill": BY_TOKEN} | fields))  # type: ignore[arg-type]


def test_a_longer_prefix_comes_home_and_the_prefill_waits_for_it() -> None:
    shape = prompt(256, local_cached_tokens=64, prefill_cached_tokens={"far": 128})
    found = locally(shape, home(wide()))
    assert (found.target, source(found), found.cached_tokens) == (HAND_OFF, "far", 128)
    assert found.prediction.move_s == pytest.approx(SECONDS_FOR_64)
    assert found.prediction.prefill_s == 1.0
    distant = locally(shape, home(wide(link=replace(WIDE, rtt_s=0.01, backlog_bytes=1e4))))
    assert distant.prediction.move_s == pytest.approx(SECONDS_FOR_64 + 0.01 + 4 * 0.01)


def test_the_best_prefix_of_any_cluster_is_moved() -> None:
    shape = prompt(512, prefill_cached_tokens={"b": 128, "c": 384, "d": 256})
    found = locally(shape, home(wide("a"), wide("b"), wide("c"), wide("d")))
    assert (source(found), found.cached_tokens) == ("c", 384)
    worse_link = LinkView(available_bytes_per_s=1e6, state=LinkCondition.RISING)
    found = locally(shape, home(wide("b"), wide("c", link=worse_link), wide("d")))
    assert (source(found), found.cached_tokens) == ("d", 256)


def test_a_prefix_no_longer_than_the_own_one_is_left() -> None:
    shape = prompt(512, local_cached_tokens=128, prefill_cached_tokens={"far": 128})
    found = locally(shape, home(wide()))
    assert (source(found), found.cached_tokens) == (None, 128)


def test_a_cluster_of_which_no_cache_is_known_has_none() -> None:
    free = KvProfile(fixed_bytes=0.0, token_bytes=0.0)
    view = home(wide())
    settings = config(kv=free)
    found = local_candidate(prompt(512), view, settings)
    assert (source(found), found.cached_tokens) == (None, 0)


@pytest.mark.parametrize(("least_s", "moves"), [(0.5, True), (0.5001, False)])
@pytest.mark.parametrize("is_local", [True, False])
def test_a_move_is_made_when_it_saves_exactly_the_least_that_it_must(
    monkeypatch: pytest.MonkeyPatch, is_local: bool, least_s: float, moves: bool
) -> None:
    """128 of 256 tokens come from elsewhere: the move takes exactly 0.5 s and saves 1 s."""
    monkeypatch.setattr("scheduler.routing.candidates.MIN_MOVE_SAVING_S", least_s)
    settings = config(kv=KvProfile(fixed_bytes=0.0, token_bytes=1e6))
    way, wide_enough = LinkView(available_bytes_per_s=2.56e8), replace(WIDE, is_floor=True)
    if is_local:
        view = home(wide(link=wide_enough))
        view = replace(view, local=replace(view.local, links_in={"far": way}))
        found = local_candidate(prompt(256, prefill_cached_tokens={"far": 128}), view, settings)
    else:
        cluster = wide(link=wide_enough, links_in={"pd": way})
        shape = prompt(256, local_cached_tokens=128, landing_cached_tokens=256)
        found = remote_candidate(shape, cluster, home(cluster), settings)
    assert found.move.pays == moves


def away(shape: RequestShape, cluster: ClusterView, **fields: object) -> Candidate:
    return remote_candidate(shape, cluster, home(cluster), config(**fields))


def test_a_longer_prefix_goes_to_the_prefill_cluster_over_the_way_back() -> None:
    shape = prompt(256, local_cached_tokens=128, prefill_cached_tokens={"far": 64})
    found = away(shape, wide(links_in={"pd": WIDE}))
    assert (found.target, source(found), found.cached_tokens) == ("far", "pd", 128)
    assert found.prediction.move_s == pytest.approx(SECONDS_FOR_64)
    assert found.prediction.prefill_s == 1.0


SCARCE = LinkView(available_bytes_per_s=1000.0)
RISING = replace(WIDE, state=LinkCondition.RISING)


@pytest.mark.parametrize(
    ("way", "link", "reason"),
    [
        (None, WIDE, MoveReason.NO_AGENT),
        (RISING, WIDE, MoveReason.LINK_NOT_CLEAR),
        (replace(WIDE, age_s=5.1), WIDE, MoveReason.LINK_NOT_CLEAR),
        (WIDE, SCARCE, MoveReason.BANDWIDTH_SCARCE),
        (WIDE, replace(WIDE, state=LinkCondition.CONGESTED), MoveReason.BANDWIDTH_SCARCE),
        (LinkView(), WIDE, MoveReason.LINK_RATE_UNKNOWN),
        (LinkView(available_bytes_per_s=10.0, is_floor=True), WIDE, MoveReason.LINK_RATE_UNKNOWN),
        (LinkView(available_bytes_per_s=7400 / 0.95), WIDE, MoveReason.TOO_SLOW),
        (LinkView(available_bytes_per_s=7400 / 10.1), WIDE, MoveReason.TOO_LONG),
        (replace(WIDE, rtt_s=0.13), WIDE, MoveReason.TOO_SLOW),
        (LinkView(available_bytes_per_s=7400 / 0.39), WIDE, MoveReason.PAYS),
        (LinkView(available_bytes_per_s=7400 / 0.39, is_floor=True), WIDE, MoveReason.PAYS),
    ],
)
@pytest.mark.parametrize("is_local", [False, True])
def test_one_rule_holds_in_both_directions(
    is_local: bool, way: LinkView | None, link: LinkView, reason: MoveReason
) -> None:
    """64 tokens more elsewhere save 0.5 s of prefill; a move must save 0.1 s."""
    cluster = wide(link=link)
    if is_local:
        shape = prompt(256, local_cached_tokens=64, prefill_cached_tokens={"far": 128})
        view = home(cluster)
        local = replace(view.local, links_in={} if way is None else {"far": way})
        found = locally(shape, replace(view, local=local))
    else:
        shape = prompt(256, local_cached_tokens=128, prefill_cached_tokens={"far": 64})
        found = away(shape, replace(cluster, links_in={} if way is None else {"pd": way}))
    assert found.move.reason is reason
    assert found.move.source == ("far" if is_local else "pd")
    assert (found.move.num_tokens, found.move.saved_tokens, found.move.nbytes) == (128, 64, 7400)
    assert found.cached_tokens == (128 if reason is MoveReason.PAYS else 64)
    assert found.move.begins == (reason in (MoveReason.PAYS, MoveReason.LINK_RATE_UNKNOWN))
    if way is not None and way.available_bytes_per_s:
        seconds = 7400 / way.available_bytes_per_s + 4 * way.rtt_s
        assert found.move.seconds == pytest.approx(seconds)


def test_what_nobody_has_measured_is_no_reason_to_move() -> None:
    shape = prompt(256, prefill_cached_tokens={"far": 128})
    found = locally(shape, home(wide()), is_known=False)
    assert found.move.reason is MoveReason.PREFILL_RATE_UNKNOWN


def test_one_move_at_a_time_measures_a_link_and_one_that_failed_bars_it() -> None:
    shape = prompt(256, prefill_cached_tokens={"far": 128})
    unknown = home(wide(link=LinkView()))
    assert locally(shape, unknown).move.reason is MoveReason.LINK_RATE_UNKNOWN
    moving = replace(unknown, moving={("far", "pd")})
    assert locally(shape, moving).move.reason is MoveReason.LINK_BEING_MEASURED
    failed = replace(home(wide()), failed_moves={("far", "pd")})
    assert locally(shape, failed).move.reason is MoveReason.FAILED_LATELY


def test_no_cache_comes_from_a_cluster_that_failed_the_request() -> None:
    shape = prompt(256, prefill_cached_tokens={"far": 128})
    found = local_candidate(shape, home(wide()), config(), frozenset({"far"}))
    assert found.move == NO_MOVE


def test_a_cache_may_move_between_prefill_clusters_with_abundant_links() -> None:
    shape = prompt(256, prefill_cached_tokens={"other": 128})
    cluster = wide(links_in={"other": WIDE})
    for link, reason in ((WIDE, MoveReason.PAYS), (SCARCE, MoveReason.BANDWIDTH_SCARCE)):
        view = home(cluster, wide("other", link=link))
        assert remote_candidate(shape, cluster, view, config()).move.reason is reason


def test_equal_prefixes_stay_where_they_are() -> None:
    shape = prompt(256, local_cached_tokens=64, prefill_cached_tokens={"far": 64})
    for queued_s in (0.0, 9.0):  # behind a queue the move would take no time of its own
        cluster = wide(links_in={"pd": WIDE}, ahead_s=(queued_s / 2,) * 2)
        found = away(shape, cluster)
        assert (source(found), found.cached_tokens) == (None, 64)


def test_a_cluster_without_a_prefix_computes_everything() -> None:
    found = away(prompt(256), wide())
    assert (found.cached_tokens, found.prediction.prefill_s) == (0, 2.0)


def test_cached_tokens_beyond_the_prompt_do_not_count() -> None:
    assert away(prompt(100, prefill_cached_tokens={"far": 900}), wide()).cached_tokens == 100
    assert locally(prompt(100, local_cached_tokens=900), home()).cached_tokens == 100


# ---- the PD cluster's own place


@pytest.mark.parametrize(
    "fields",
    [
        {"is_healthy": False},
        {"num_queued": 1, "max_queued": 1},
        {"free_s": ()},
    ],
)
def test_prefill_instances_that_cannot_be_used_leave_it_to_one_engine(
    fields: dict[str, object],
) -> None:
    view = region(local=near(**fields), engines=near())
    assert locally(prompt(100), view).target == ONE_ENGINE
    assert locally(prompt(100), region(local=near(), engines=near())).target == HAND_OFF
