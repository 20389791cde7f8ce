"""What one engine must serve whole, and what decisions say."""

import pytest

from scheduler.routing.decision import (
    ONE_ENGINE,
    Decision,
    Reason,
    RequestShape,
    fall_back,
    one_engine,
    one_engine_reason,
)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_prompts": 2}, Reason.SEVERAL_PROMPTS),
        ({"num_prompts": 0}, Reason.SEVERAL_PROMPTS),
        ({"num_choices": 0}, Reason.SEVERAL_CHOICES),
        ({"has_prompt_logprobs": True}, Reason.PROMPT_LOGPROBS),
        ({"has_echo": True}, Reason.ECHO),
        ({"has_beam_search": True}, Reason.BEAM_SEARCH),
        ({"has_bound_media": True}, Reason.MULTIMODAL),
        ({"has_prompt_embeds": True}, Reason.PROMPT_EMBEDS),
        ({"is_unusual": True}, Reason.UNUSUAL_BODY),
    ],
)
def test_what_one_engine_must_serve_whole(fields: dict[str, bool], reason: Reason) -> None:
    shape = RequestShape(num_prompt_tokens=50_000, **fields)  # type: ignore[arg-type]
    assert one_engine_reason(shape) is reason
    decision = one_engine(shape, reason)
    assert decision == Decision("direct", ONE_ENGINE, reason, {"prompt_tokens": 50_000})
    assert not decision.needs_landing


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_one_token_leaves_nothing_to_hand_over(num_tokens: int) -> None:
    shape = RequestShape(num_prompt_tokens=num_tokens)
    assert one_engine_reason(shape) is Reason.NOTHING_TO_HAND_OVER


def test_several_choices_of_one_prompt_may_be_handed_over() -> None:
    assert one_engine_reason(RequestShape(num_prompt_tokens=9000, num_choices=4)) is None


def test_two_tokens_may_be_handed_over() -> None:
    assert one_engine_reason(RequestShape(num_prompt_tokens=2)) is None


def test_falling_back_keeps_the_numbers_and_says_why() -> None:
    failed = Decision("prefill_cluster", "far", Reason.ABOVE_THRESHOLD, {"prompt_tokens": 9000})
    assert failed.needs_landing
    decision = fall_back(failed, Reason.PREFILL_FAILED)
    assert (decision.route, decision.target) == ("local", ONE_ENGINE)
    assert str(decision) == "prefill_failed; prompt_tokens=9000"


def test_an_upper_bound_is_told_as_one() -> None:
    decision = one_engine(RequestShape(num_prompt_tokens=7, is_exact=False), Reason.ECHO)
    assert decision.numbers == {"prompt_tokens_about": 7}


def test_uncached_is_what_each_side_would_have_to_compute() -> None:
    shape = RequestShape(
        num_prompt_tokens=100, local_cached_tokens=64, prefill_cached_tokens={"far": 32}
    )
    assert shape.local_uncached_tokens == 36
    assert shape.prefill_uncached_tokens("far") == 68
    assert shape.prefill_uncached_tokens("other") == 100


def test_a_prompt_has_no_negative_length() -> None:
    with pytest.raises(ValueError, match="-1"):
        RequestShape(num_prompt_tokens=-1)
