"""A profile of what a region has served: every second of an instance counts once."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.gateway.serving.records import RequestRecord
from deploy.gateway.serving.ttft_parts import TtftParts
from deploy.plan.profile.served import (
    MIN_PROMPTS,
    Span,
    TooFewRequests,
    decode_steps,
    prefill_points,
    served_profile,
    shares_of,
)

spans = st.lists(
    st.builds(
        lambda begin, length, tokens: Span(begin, begin + length, tokens),
        st.integers(0, 1000),
        st.integers(0, 100),
        st.integers(1, 5000),
    ),
    max_size=12,
)


def record(number: int, begin_s: float, prefill_s: float, **fields: Any) -> RequestRecord:
    """A prompt that the instance `p0` began to prefill at `begin_s`; its answer took a second."""
    given: dict[str, Any] = {
        "request_id": f"r{number}",
        "started_s": begin_s - 0.5,
        "endpoint": "completion",
        "model": "tiny",
        "outcome": "ok",
        "is_stream": True,
        "num_prompt_tokens": 1000,
        "cached_tokens": 0,
        "num_prefill_attempts": 1,
        "prefill_instance": "p0",
        "decode_instance": "d0",
        "ttft_s": 0.5 + prefill_s + 0.1,
        "total_s": 0.5 + prefill_s + 1.1,
        "output_tokens": 11,
        "parts": TtftParts(read_s=0.1, queue_s=0.3, engine_queue_s=0.1, prefill_s=prefill_s),
    }
    return RequestRecord(**given | fields)


def one_after_the_other(num: int = MIN_PROMPTS, **fields: Any) -> list[RequestRecord]:
    return [record(number, 100.0 + 2 * number, 2.0, **fields) for number in range(num)]


@given(spans)
def test_every_busy_second_counts_once(given: Sequence[Span]) -> None:
    shares = shares_of(given)
    seconds = {at for span in given for at in range(int(span.begin_s), int(span.end_s))}
    assert sum(share.busy_s for share in shares) == pytest.approx(len(seconds))
    for share in shares:
        length_s = share.span.end_s - share.span.begin_s
        assert 0 <= share.busy_s <= length_s + 1e-9
        assert 1 - 1e-9 <= share.mean_at_once <= len(given) + 1e-9


def test_prompts_that_are_prefilled_at_once_share_the_time() -> None:
    shares = shares_of([Span(0, 4, 100), Span(0, 4, 100), Span(2, 6, 100)])
    assert [share.busy_s for share in shares] == pytest.approx([5 / 3, 5 / 3, 8 / 3])
    assert [share.mean_at_once for share in shares] == pytest.approx([2.5, 2.5, 2.0])


def test_points_have_as_many_prompts_each() -> None:
    draws = random.Random(1)
    prompts = [Span(0, tokens / 1000, tokens) for tokens in draws.sample(range(100, 5000), 80)]
    shares = [shares_of([prompt])[0] for prompt in prompts]
    points = prefill_points(shares)
    assert [point.samples for point in points] == [10] * 8
    for point in points:
        assert point.seconds == pytest.approx(point.tokens / 1000, abs=1e-3)


def test_prompts_of_one_length_make_one_point() -> None:
    (point,) = prefill_points(shares_of([Span(0, 4, 700)] * 40))
    assert (point.tokens, point.seconds) == (700, pytest.approx(0.1))


def test_a_step_has_the_streams_that_ran_beside_it() -> None:
    four = [Span(0, 2, 20)] * 4
    alone = [Span(10 + at, 11 + at, 20) for at in range(5)]
    steps = decode_steps(shares_of([*four, *alone]))
    # Four streams are too few for a number.
    assert steps is not None
    assert [(step.batch_size, step.step_seconds) for step in steps.steps] == [(1, 0.05)]
    assert decode_steps(shares_of(four)) is None


def test_short_answers_say_nothing_about_a_step() -> None:
    assert decode_steps(shares_of([Span(at, at + 1, 3) for at in range(20)])) is None


def test_a_profile_of_served_requests() -> None:
    found = served_profile(one_after_the_other())
    (point,) = found.prefill.points
    assert (point.tokens, point.seconds, point.samples) == (1000, 2.0, 5)
    assert found.busy == {"p0": pytest.approx(1.0)}
    assert found.decode is not None
    assert [step.step_seconds for step in found.decode.steps] == [pytest.approx(0.1)]
    assert found.notes == ()


def test_idle_instances_are_named() -> None:
    idle = [record(number, 100.0 + 10 * number, 2.0) for number in range(MIN_PROMPTS)]
    (note,) = served_profile(idle).notes
    assert note.startswith("p0 prefilled 21% of the time")


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": "failed"},
        {"prefill_instance": ""},
        {"cached_tokens": 900},
        {"num_prefill_attempts": 2},
        {"parts": TtftParts()},
        {"media": {"encoded": 1}},
        {"predictions": {"remote": {"encode_s": 0.2}}},
    ],
)
def test_what_tells_nothing_of_a_prefill_is_left_out(fields: dict[str, Any]) -> None:
    with pytest.raises(TooFewRequests, match="0 prefills"):
        served_profile(one_after_the_other(**fields))


def test_models_and_instances_are_not_mixed() -> None:
    other = one_after_the_other(model="big", prefill_instance="p1")
    both = [*one_after_the_other(), *other]
    with pytest.raises(TooFewRequests, match="big, tiny: choose one with --model"):
        served_profile(both)
    assert served_profile(both, "big").busy.keys() == {"p1"}
    mixed = [*one_after_the_other(), *one_after_the_other(prefill_instance="p1")]
    assert served_profile(mixed).busy.keys() == {"p0", "p1"}
    assert served_profile(mixed, instances=["p1", "d0"]).busy.keys() == {"p1"}
