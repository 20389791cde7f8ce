"""Traces against the pool: hits, what is stored where, and books that add up."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_replay import ReplayConfig, ReplayResult, replay

from kvmanager.pool.placement import StatePlacement
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from scheduler.planning.prefix_reuse import TracePrompt, cached_tokens

BLOCK = 4
KV = PartShape(PartKind.KV, 10)
STATE = PartShape(PartKind.STATE, 25)
FULL = CacheShape(BLOCK, (KV,))
HYBRID = CacheShape(BLOCK, (KV, STATE))
WINDOWED = CacheShape(BLOCK, (KV, PartShape(PartKind.WINDOW, 7, window_tokens=6)))
STATE_ONLY = CacheShape(BLOCK, (STATE,))
UNLIMITED = 1 << 30

EVERY_BLOCK = StatePlacement(every_block=True)
ENDS = StatePlacement(ends=True, branches=False)
ENDS_AND_BRANCHES = StatePlacement(ends=True, branches=True)


def trace(*texts: str, tail_tokens: int = 1) -> list[TracePrompt]:
    """Prompts whose blocks are letters, and `tail_tokens` more that fill no block."""
    ids: dict[str, int] = {}
    return [
        TracePrompt(
            float(number),
            len(text) * BLOCK + tail_tokens,
            1,
            [ids.setdefault(text[: end + 1], len(ids)) for end in range(len(text))],
        )
        for number, text in enumerate(texts)
    ]


def run(
    prompts: Sequence[TracePrompt],
    shape: CacheShape,
    placement: StatePlacement = ENDS_AND_BRANCHES,
    *,
    num_arena_blocks: int = UNLIMITED,
    chunk_tokens: int | None = None,
) -> ReplayResult:
    """A replay whose arena blocks have 5 bytes."""
    return replay(
        prompts,
        ReplayConfig(shape, 5, num_arena_blocks, placement, chunk_tokens=chunk_tokens),
    )


def hit_blocks(result: ReplayResult) -> list[int]:
    return [tokens // BLOCK for tokens in result.request_hit_tokens]


texts = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(texts, st.sampled_from([None, 1, 2, 3, 5, 8, 20]), st.sampled_from([0, 1, 3]))
def test_full_attention_under_lru_equals_brute_force(
    words: list[str], capacity: int | None, tail_tokens: int
) -> None:
    prompts = trace(*words, tail_tokens=tail_tokens)
    num_arena_blocks = UNLIMITED if capacity is None else 2 * capacity
    result = run(prompts, FULL, num_arena_blocks=num_arena_blocks)
    assert result.request_hit_tokens == cached_tokens(prompts, BLOCK, capacity)


@settings(max_examples=60, deadline=None)
@given(texts, st.sampled_from([HYBRID, WINDOWED]))
def test_everything_at_every_block_equals_full_attention_without_limit(
    words: list[str], shape: CacheShape
) -> None:
    prompts = trace(*words)
    full, kept = run(prompts, FULL), run(prompts, shape, EVERY_BLOCK)
    assert kept.request_hit_tokens == full.request_hit_tokens
    assert kept.kv_hit_blocks == kept.hit_blocks == full.hit_blocks


@settings(max_examples=100, deadline=None)
@given(texts, st.sampled_from([7, 12, 30]), st.sampled_from([ENDS_AND_BRANCHES, EVERY_BLOCK]))
def test_books_add_up_where_memory_is_short(
    words: list[str], num_arena_blocks: int, placement: StatePlacement
) -> None:
    result = run(trace(*words), HYBRID, placement, num_arena_blocks=num_arena_blocks)
    for part in HYBRID.parts:
        gone = result.evictions[part.kind] * part.nbytes
        assert result.held_bytes[part.kind] == result.stored_bytes[part.kind] - gone
    assert sum(result.held_bytes.values()) <= 5 * num_arena_blocks
    assert result.hit_blocks <= result.kv_hit_blocks <= result.num_blocks
    assert result.hit_tokens == BLOCK * result.hit_blocks


def test_a_next_turn_resumes_at_the_end_of_the_last() -> None:
    assert hit_blocks(run(trace("abc", "abcde", "abcdef"), HYBRID, ENDS)) == [0, 3, 5]


def test_where_prompts_part_a_state_is_kept_for_the_third() -> None:
    prompts = trace("abcd", "abxy", "abz")
    assert hit_blocks(run(prompts, HYBRID, ENDS)) == [0, 0, 0]
    assert hit_blocks(run(prompts, HYBRID, ENDS_AND_BRANCHES)) == [0, 0, 2]
    assert run(prompts, HYBRID).kv_hit_blocks == 4


def test_a_density_needs_steps_that_end_there() -> None:
    prompts = trace("abcd", "abxy")
    placement = StatePlacement(every_tokens=2 * BLOCK, dense_tokens=3 * BLOCK)
    assert hit_blocks(run(prompts, HYBRID, placement)) == [0, 2]
    assert hit_blocks(run(prompts, HYBRID, placement, chunk_tokens=2 * BLOCK)) == [0, 2]
    assert hit_blocks(run(prompts, HYBRID, placement, chunk_tokens=3 * BLOCK)) == [0, 0]


def test_steps_are_counted_from_where_the_prompt_is_resumed() -> None:
    prompts = trace("a", "abcd", "abcx")
    every_step = run(prompts, HYBRID, EVERY_BLOCK, chunk_tokens=2 * BLOCK)
    assert hit_blocks(every_step) == [0, 1, 3]


def test_a_window_is_kept_as_far_as_it_reaches() -> None:
    result = run(trace("abcd", "abcde"), WINDOWED, ENDS)
    assert hit_blocks(result) == [0, 4]
    assert result.stored_bytes[PartKind.WINDOW] == 3 * 7  # of c, d and e


def test_a_state_after_the_whole_prompt_serves_only_longer_ones() -> None:
    prompts = trace("abc", "abc", "abcd", tail_tokens=0)
    assert hit_blocks(run(prompts, HYBRID, ENDS)) == [0, 0, 3]
    assert run(prompts, FULL).request_hit_tokens == [0, 3 * BLOCK - 1, 3 * BLOCK]


def test_a_model_without_kv_keeps_states_alone() -> None:
    result = run(trace("abc", "abcd", "xyz"), STATE_ONLY)
    assert hit_blocks(result) == [0, 3, 0]
    assert result.held_bytes == {PartKind.KV: 0, PartKind.WINDOW: 0, PartKind.STATE: 3 * 25}


@pytest.mark.parametrize("chunk_tokens", [0, -BLOCK, BLOCK + 1])
def test_steps_are_whole_blocks(chunk_tokens: int) -> None:
    with pytest.raises(ValueError, match="whole blocks of 4 tokens"):
        ReplayConfig(HYBRID, 5, 10, chunk_tokens=chunk_tokens)
