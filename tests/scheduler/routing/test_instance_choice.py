"""Placement within a cluster: cache against load, and hot prefixes."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_cases import seconds, untimed

from scheduler.routing.instance_choice import (
    MATCH_WEIGHT,
    Choice,
    ChoiceReason,
    InstanceView,
    choose_instance,
)

TOKENS, PREFILL_S = 10_000, 4.0

many_instances = st.lists(
    st.builds(
        InstanceView,
        name=st.sampled_from(["a", "b", "c"]),
        running_s=seconds,
        num_requests=st.integers(0, 9),
    ),
    max_size=4,
).map(tuple)


def instances(*running_s: float) -> tuple[InstanceView, ...]:
    return tuple(
        InstanceView(name=f"engine-{i}", running_s=left_s) for i, left_s in enumerate(running_s)
    )


def test_without_hits_the_least_loaded_takes_it() -> None:
    found = choose_instance(instances(3.0, 1.0, 2.0), TOKENS, PREFILL_S)
    assert (found.instance, found.reason) == ("engine-1", ChoiceReason.LEAST_LOADED)
    assert found.numbers == {"score": -0.25, "cached_tokens": 0, "wait_s": 1.0, "instances": 3}
    assert str(found).startswith("least_loaded; score=-0.25")


def test_the_holder_takes_it_while_its_wait_is_worth_it() -> None:
    found = choose_instance(instances(0.0, 2.0), TOKENS, PREFILL_S, {"engine-1": 6000})
    assert (found.instance, found.reason) == ("engine-1", ChoiceReason.CACHED)
    assert found.cached_tokens == 6000


def test_a_busy_holder_loses() -> None:
    found = choose_instance(instances(0.0, 9.0), TOKENS, PREFILL_S, {"engine-1": 6000})
    assert (found.instance, found.reason) == ("engine-0", ChoiceReason.HOLDER_BUSY)
    assert found.numbers["holder_cached_tokens"] == 6000
    assert found.numbers["holder_wait_s"] == 9.0
    assert found.numbers["holder_score"] == pytest.approx(0.75 - 2.25)


@pytest.mark.parametrize(("wait_s", "name"), [(2.8, "engine-1"), (3.2, "engine-0")])
def test_a_cached_prefix_is_worth_a_little_more_waiting_than_it_saves(
    wait_s: float, name: str
) -> None:
    """It saves 2.4 s of compute."""
    found = choose_instance(instances(0.0, wait_s), TOKENS, PREFILL_S, {"engine-1": 6000})
    assert found.instance == name


def test_prefixes_are_known_by_node_too() -> None:
    views = (InstanceView(name="a", node="n1"), InstanceView(name="b", node="n2"))
    assert choose_instance(views, TOKENS, PREFILL_S, {"n2": 5000}).instance == "b"


def test_ties_go_to_the_fewest_requests_then_by_name() -> None:
    views = (
        InstanceView(name="c", num_requests=1),
        InstanceView(name="b", num_requests=0),
        InstanceView(name="a", num_requests=0),
    )
    assert choose_instance(views, TOKENS, PREFILL_S).instance == "a"


def test_nobody_is_there() -> None:
    assert choose_instance((), TOKENS, PREFILL_S) == Choice(None, ChoiceReason.NO_INSTANCE)


@untimed
@given(
    many_instances,
    st.integers(0, 10**6),
    st.floats(0, 100),
    st.dictionaries(st.sampled_from(["a", "b", "d"]), st.integers(0, 10**6)),
)
def test_no_other_beats_what_is_chosen(
    views: tuple[InstanceView, ...], num_tokens: int, prefill_s: float, hits: dict[str, int]
) -> None:
    found = choose_instance(views, num_tokens, prefill_s, hits)
    assert (found.instance is None) == (not views)
    if found.instance is None:
        return
    for other in views:
        share = min(hits.get(other.name, 0), num_tokens) / max(1, num_tokens)
        score = MATCH_WEIGHT * share - other.running_s / max(prefill_s, 1e-9)
        # The same sum in another order: its last digit may differ.
        assert found.numbers["score"] >= score - 1e-9 * max(1.0, abs(score))


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["running_s", "num_requests"])
def test_a_view_with_a_number_that_cannot_be_is_refused(name: str, value: float) -> None:
    fields: dict[str, Any] = {"num_requests": 5, "running_s": 2.0, name: value}
    with pytest.raises(ValueError, match=f"{name} is .* must be finite and not negative"):
        InstanceView(name="a", **fields)
