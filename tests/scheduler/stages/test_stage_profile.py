"""How long passes take, and budgets of them."""

import pytest
from stage_cases import profile, sizes

from scheduler.encoding.values import EncodeConfig
from scheduler.stages.batching import LEAST_TOKENS, Batching, budgets_of
from scheduler.stages.profile import StageSlo

CONFIG = EncodeConfig(ttft_s=1.0, tpot_s=0.1)


def test_decodes_and_chunks_share_the_fixed_part_of_a_pass() -> None:
    assert profile().language_s(0, 0, [(0, 100)]) == pytest.approx(0.020)
    assert profile().language_s(2, 0) == pytest.approx(0.012)
    assert profile().language_s(2, 0, [(0, 100)]) == pytest.approx(0.012 + 0.010)


def test_chunks_of_a_prompt_add_up_to_the_whole() -> None:
    whole = profile().language_s(1, 0, [(0, 300)])
    parts = sum(profile().language_s(1, 0, [c]) for c in ((0, 100), (100, 300)))
    assert parts == pytest.approx(whole + profile().language_s(1, 0))


def test_contexts_lengthen_a_step() -> None:
    assert profile(context_token_s=1e-6).step_s(2, 5000) == pytest.approx(0.017)
    assert profile(context_token_s=1e-6).step_s(0, 0) == 0.0


@pytest.mark.parametrize(("overlap", "seconds"), [(0.0, 0.019), (0.5, 0.0155), (1.0, 0.012)])
def test_the_shorter_pass_is_hidden_as_far_as_both_overlap(overlap: float, seconds: float) -> None:
    found = profile(overlap=overlap)
    assert found.pass_s(0.012, 500, in_parallel=True) == pytest.approx(seconds)
    assert found.pass_s(0.012, 500, in_parallel=False) == pytest.approx(0.019)


def test_budgets_keep_a_pass_within_the_objective() -> None:
    found = profile()
    tokens = found.tokens_within(0.1, step_s=0.015)
    assert found.language_s(5, 0, [(0, tokens)]) <= 0.1 < found.language_s(5, 0, [(0, tokens + 1)])
    # Even where nothing fits, one token is computed.
    assert found.tokens_within(0.001) == 1


def test_an_operator_leaves_room_for_the_step_of_a_full_instance() -> None:
    slo = StageSlo(1.0, 0.1)

    def budget(batching: Batching, decodes: bool) -> int:
        return budgets_of(
            profile(), sizes(), slo, batching=batching, decodes=decodes, config=CONFIG
        ).tokens

    assert budget(Batching.STAGE_LEVEL, True) == 900  # 10 ms + 900 tokens
    assert budget(Batching.ENGINE, True) == 820  # beside 18 ms for 8 decodes
    assert budget(Batching.ENGINE, False) == 2400  # a quarter of the TTFT objective
    # Passes are never so short that they are nearly all overhead.
    tight = budgets_of(
        profile(),
        sizes(),
        StageSlo(1.0, 0.011),
        batching=Batching.STAGE_LEVEL,
        decodes=True,
        config=CONFIG,
    )
    assert tight.tokens == LEAST_TOKENS


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap 2 must be"):
        profile(overlap=2)
    with pytest.raises(ValueError, match="no batch of 1"):
        profile(decode_steps=(0.01,))
    with pytest.raises(ValueError, match="above 0"):
        StageSlo(0.0, 0.1)
