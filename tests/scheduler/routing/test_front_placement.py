"""Where a front starts a prefill, with tokens for time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_cases import untimed

from scheduler.routing.front_placement import Placement, TokenLoad, place_prefill


def test_without_hits_the_fewest_tokens_ahead_win() -> None:
    loads = [TokenLoad("a", "n1", 900), TokenLoad("b", "n2", 300, num_jobs=3)]
    assert place_prefill(loads, 1000, {}) == Placement(
        "b", 1000, "least_loaded; cached_tokens=0; tokens_ahead=300; instances=2"
    )


def test_what_is_cached_is_worth_a_little_more_than_the_same_number_of_tokens_ahead() -> None:
    loads = [TokenLoad("a", "n1"), TokenLoad("b", "n2", 700)]
    assert place_prefill(loads, 1000, {"n2": 600}).instance == "b"
    assert place_prefill(loads, 1000, {"n2": 600}).uncached_tokens == 400
    busy = [TokenLoad("a", "n1"), TokenLoad("b", "n2", 800)]
    assert place_prefill(busy, 1000, {"n2": 600}) == Placement(
        "a",
        1000,
        "holder_busy; cached_tokens=0; tokens_ahead=0; holder_cached_tokens=600; "
        "holder_tokens_ahead=800; instances=2",
    )


def test_of_those_that_are_alike_the_first_given_is_taken() -> None:
    loads = [TokenLoad("b"), TokenLoad("a"), TokenLoad("c", num_jobs=1)]
    assert place_prefill(loads, 1000, {}).instance == "b"
    assert place_prefill(loads, 1000, {"a": 1}).instance == "a"


def test_somebody_must_have_room() -> None:
    with pytest.raises(ValueError, match="no candidates"):
        place_prefill([], 1000, {})


@untimed
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 4)), min_size=1, max_size=5),
    st.integers(0, 10**6),
    st.dictionaries(st.sampled_from(["i0", "i1", "n2", "n9"]), st.integers(0, 2 * 10**6)),
)
def test_no_other_would_end_the_prompt_sooner_without_having_less_of_it_cached(
    work: list[tuple[int, int]], num_tokens: int, cached: dict[str, int]
) -> None:
    loads = [TokenLoad(f"i{i}", f"n{i}", *item) for i, item in enumerate(work)]
    found = place_prefill(loads, num_tokens, cached)

    def hit(load: TokenLoad) -> int:
        return min(num_tokens, max(cached.get(load.name, 0), cached.get(load.node, 0)))

    chosen = next(load for load in loads if load.name == found.instance)
    assert found.uncached_tokens == num_tokens - hit(chosen)
    for other in loads:
        if hit(other) >= hit(chosen):
            left = num_tokens - hit(other) + other.uncached_tokens
            assert left >= found.uncached_tokens + chosen.uncached_tokens
