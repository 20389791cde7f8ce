"""Routing decisions: every rule, determinism, and monotonicity over random regions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.routing import (
    HAND_OFF,
    ONE_ENGINE,
    Decision,
    LocalView,
    PrefillClusterView,
    Reason,
    RegionView,
    RequestShape,
    decide,
    decide_early,
    fall_back,
    one_engine,
)

CLUSTER = PrefillClusterView(name="far", is_healthy=True)


def region(
    *clusters: PrefillClusterView, local: LocalView | None = None, threshold_tokens: int = 1000
) -> RegionView:
    return RegionView(
        prefill_clusters=clusters, local=local or LocalView(), threshold_tokens=threshold_tokens
    )


def prompt(num_tokens: int, **fields: object) -> RequestShape:
    return RequestShape(num_prompt_tokens=num_tokens, **fields)  # type: ignore[arg-type]


def test_a_long_prompt_goes_to_the_prefill_cluster() -> None:
    decision = decide(prompt(1001), region(CLUSTER))
    assert (decision.route, decision.target) == ("prefill_cluster", "far")
    assert decision.reason is Reason.ABOVE_THRESHOLD
    assert decision.numbers["prompt_tokens"] == 1001
    assert decision.numbers["threshold_tokens"] == 1000
    assert decision.needs_landing


def test_a_prompt_of_exactly_the_threshold_stays() -> None:
    decision = decide(prompt(1000), region(CLUSTER))
    assert (decision.route, decision.target) == ("local", ONE_ENGINE)
    assert decision.reason is Reason.BELOW_THRESHOLD
    assert not decision.needs_landing


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_prompts": 2}, Reason.SEVERAL_PROMPTS),
        ({"num_prompts": 0}, Reason.SEVERAL_PROMPTS),
        ({"num_choices": 3}, Reason.SEVERAL_CHOICES),
        ({"has_prompt_logprobs": True}, Reason.PROMPT_LOGPROBS),
        ({"has_echo": True}, Reason.ECHO),
        ({"has_beam_search": True}, Reason.BEAM_SEARCH),
        ({"is_multimodal": True}, Reason.MULTIMODAL),
        ({"has_prompt_embeds": True}, Reason.PROMPT_EMBEDS),
        ({"is_unusual": True}, Reason.UNUSUAL_BODY),
    ],
)
def test_what_one_engine_must_serve_whole(fields: dict[str, object], reason: Reason) -> None:
    decision = decide(prompt(50_000, **fields), region(CLUSTER))
    assert decision == Decision("direct", ONE_ENGINE, reason, {"prompt_tokens": 50_000})


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_one_token_leaves_nothing_to_hand_over(num_tokens: int) -> None:
    decision = decide(prompt(num_tokens), region(CLUSTER, threshold_tokens=0))
    assert decision.reason is Reason.NOTHING_TO_HAND_OVER
    assert decision.route == "direct"


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (region(), Reason.NO_PREFILL_CLUSTER),
        (region(PrefillClusterView(name="a", is_healthy=False)), Reason.PREFILL_UNHEALTHY),
        (
            region(
                PrefillClusterView(name="a", is_healthy=True, queue_depth=4, max_queue_depth=4),
                PrefillClusterView(name="b", is_healthy=False),
            ),
            Reason.PREFILL_QUEUE_FULL,
        ),
        (region(CLUSTER, local=LocalView(landing_free_bytes=0)), Reason.NO_LANDING_ROOM),
    ],
)
def test_a_long_prompt_stays_local_with_the_obstacle_named(
    view: RegionView, reason: Reason
) -> None:
    decision = decide(prompt(5000), view)
    assert (decision.route, decision.target, decision.reason) == ("local", ONE_ENGINE, reason)
    assert decision.numbers["prompt_tokens"] == 5000


def test_landing_room_is_compared_with_the_transfer_size_when_known() -> None:
    view = region(CLUSTER, local=LocalView(landing_free_bytes=100))
    assert decide(prompt(5000, transfer_bytes=100), view).route == "prefill_cluster"
    assert decide(prompt(5000, transfer_bytes=101), view).reason is Reason.NO_LANDING_ROOM


def test_the_least_loaded_cluster_wins_and_ties_go_by_name() -> None:
    busy = PrefillClusterView(name="a", is_healthy=True, queue_depth=3, num_running=1)
    wide = PrefillClusterView(
        name="c", is_healthy=True, queue_depth=3, num_running=1, num_instances=4
    )
    assert decide(prompt(5000), region(busy, wide)).target == "c"
    twin = PrefillClusterView(name="b", is_healthy=True)
    assert decide(prompt(5000), region(CLUSTER, twin)).target == "b"


def test_a_cluster_that_failed_the_request_is_passed_over() -> None:
    other = PrefillClusterView(name="other", is_healthy=True, queue_depth=9)
    view = region(CLUSTER, other)
    assert decide(prompt(5000), view, excluded={"far"}).target == "other"
    last = decide(prompt(5000), view, excluded={"far", "other"})
    assert (last.route, last.reason) == ("local", Reason.PREFILL_FAILED)


def test_prefill_instances_of_the_local_cluster_take_what_is_worth_a_hand_off() -> None:
    view = RegionView(
        prefill_clusters=(CLUSTER,),
        local=LocalView(has_prefill_instances=True),
        threshold_tokens=1000,
        hand_off_tokens=64,
    )
    assert decide(prompt(64), view).target == ONE_ENGINE
    assert decide(prompt(65), view).target == HAND_OFF
    assert decide(prompt(65), view).route == "local"
    full = RegionView(
        prefill_clusters=(),
        local=LocalView(has_prefill_instances=True, landing_free_bytes=0),
        threshold_tokens=1000,
    )
    assert decide(prompt(5000), full).target == ONE_ENGINE


def test_what_is_cached_locally_counts_against_the_threshold() -> None:
    kept = decide(prompt(5000, local_cached_tokens=4000), region(CLUSTER))
    assert (kept.route, kept.reason) == ("local", Reason.BELOW_THRESHOLD)
    assert (kept.numbers["cached_tokens"], kept.numbers["uncached_tokens"]) == (4000, 1000)
    sent = decide(prompt(5000, local_cached_tokens=3999), region(CLUSTER))
    assert sent.route == "prefill_cluster"
    assert sent.numbers["uncached_tokens"] == 5000


def test_the_cluster_with_least_to_compute_wins_whatever_its_load() -> None:
    warm = PrefillClusterView(name="warm", is_healthy=True, queue_depth=3, num_running=1)
    shape = prompt(5000, prefill_cached_tokens={"warm": 2048, "gone": 4096})
    decision = decide(shape, region(CLUSTER, warm))
    assert decision.target == "warm"
    assert (decision.numbers["cached_tokens"], decision.numbers["uncached_tokens"]) == (2048, 2952)
    assert decide(shape, region(CLUSTER, warm), excluded={"warm"}).target == "far"


def test_what_is_cached_may_not_be_worth_a_hand_off() -> None:
    view = RegionView(
        prefill_clusters=(CLUSTER,),
        local=LocalView(has_prefill_instances=True),
        threshold_tokens=1000,
        hand_off_tokens=256,
    )
    assert decide(prompt(1500, local_cached_tokens=1244), view).target == ONE_ENGINE
    assert decide(prompt(1500, local_cached_tokens=1243), view).target == HAND_OFF


def test_more_cached_than_there_is_leaves_nothing_to_compute() -> None:
    decision = decide(prompt(100, local_cached_tokens=4096), region(CLUSTER, threshold_tokens=0))
    assert decision.reason is Reason.BELOW_THRESHOLD
    assert (decision.numbers["cached_tokens"], decision.numbers["uncached_tokens"]) == (100, 0)


def test_an_upper_bound_decides_only_when_nothing_could_move() -> None:
    view = region(CLUSTER)
    short = decide_early(prompt(900, is_exact=False), view)
    assert short is not None
    assert short.reason is Reason.BELOW_THRESHOLD
    assert short.numbers["prompt_tokens_at_most"] == 900
    assert decide_early(prompt(1001, is_exact=False), view) is None
    assert decide_early(prompt(1001), view) is not None
    several = decide_early(prompt(9000, is_exact=False, num_choices=2), view)
    assert several is not None
    assert several.route == "direct"


def test_fall_backs_keep_the_numbers_and_name_the_reason() -> None:
    first = decide(prompt(5000), region(CLUSTER))
    second = fall_back(first, Reason.RESERVE_FAILED)
    assert (second.route, second.target) == ("local", ONE_ENGINE)
    assert second.numbers == first.numbers
    refused = one_engine(prompt(7, is_exact=False), Reason.RENDER_REFUSED)
    assert str(refused) == "render_refused; prompt_tokens_at_most=7"


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        prompt(-1)


clusters = st.builds(
    PrefillClusterView,
    name=st.sampled_from("abcdef"),
    is_healthy=st.booleans(),
    queue_depth=st.integers(0, 20),
    num_running=st.integers(0, 20),
    num_instances=st.integers(0, 4),
    max_queue_depth=st.none() | st.integers(0, 20),
)
views = st.builds(
    RegionView,
    prefill_clusters=st.lists(clusters, max_size=5, unique_by=lambda c: c.name).map(tuple),
    local=st.builds(
        LocalView,
        has_prefill_instances=st.booleans(),
        landing_free_bytes=st.none() | st.integers(0, 1 << 40),
    ),
    threshold_tokens=st.integers(0, 10_000),
    hand_off_tokens=st.integers(1, 10_000),
)
shapes = st.builds(
    RequestShape,
    num_prompt_tokens=st.integers(0, 20_000),
    num_choices=st.integers(1, 3),
    has_echo=st.booleans(),
    transfer_bytes=st.none() | st.integers(0, 1 << 40),
)


@given(shape=shapes, view=views)
def test_decisions_are_deterministic_and_complete(shape: RequestShape, view: RegionView) -> None:
    decision = decide(shape, view)
    assert decision == decide(shape, view)
    assert decision.reason in Reason
    assert decision.numbers
    if decision.route == "prefill_cluster":
        chosen = next(c for c in view.prefill_clusters if c.name == decision.target)
        assert chosen.is_healthy
        assert chosen.takes_jobs
        assert shape.num_prompt_tokens > view.threshold_tokens
    else:
        assert decision.target in (ONE_ENGINE, HAND_OFF)
    assert (decision.route != "direct") or decision.target == ONE_ENGINE


@given(view=views, tokens=st.integers(2, 20_000), more=st.integers(0, 20_000))
def test_a_longer_prompt_never_returns_from_the_cluster(
    view: RegionView, tokens: int, more: int
) -> None:
    if decide(prompt(tokens), view).route == "prefill_cluster":
        assert decide(prompt(tokens + more), view).route == "prefill_cluster"


@given(view=views, tokens=st.integers(0, 20_000), lower=st.integers(0, 10_000))
def test_a_lower_threshold_never_takes_a_request_off_the_cluster(
    view: RegionView, tokens: int, lower: int
) -> None:
    if decide(prompt(tokens), view).route != "prefill_cluster":
        return
    lowered = RegionView(
        prefill_clusters=view.prefill_clusters,
        local=view.local,
        threshold_tokens=min(lower, view.threshold_tokens),
    )
    assert decide(prompt(tokens), lowered).route == "prefill_cluster"


@given(
    view=views,
    bound=st.integers(2, 20_000),
    fewer=st.integers(0, 20_000),
    cached=st.integers(0, 20_000),
)
def test_an_early_decision_is_the_one_the_exact_count_would_give(
    view: RegionView, bound: int, fewer: int, cached: int
) -> None:
    early = decide_early(prompt(bound, is_exact=False), view)
    if early is None:
        return
    num_tokens = max(2, bound - fewer)
    exact = decide(prompt(num_tokens, local_cached_tokens=min(cached, num_tokens)), view)
    assert not exact.needs_landing
