"""Cached tokens of a trace: by hand, and against a cache that is looked at block by block."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.planning.prefix_reuse import TracePrompt, cached_tokens


def prompt(tokens: int, *blocks: int) -> TracePrompt:
    return TracePrompt(0.0, tokens, 1, blocks)


def test_by_hand() -> None:
    prompts = [prompt(25, 1, 2, 3), prompt(25, 1, 2, 4), prompt(20, 1, 2), prompt(30, 9, 2, 3)]
    assert cached_tokens(prompts, 10, None) == [0, 20, 19, 0]
    assert cached_tokens(prompts, 10, 0) == [0, 0, 0, 0]


def test_a_small_cache_forgets_the_oldest_and_tails_before_heads() -> None:
    prompts = [prompt(30, 1, 2, 3), prompt(10, 7), prompt(30, 1, 2, 3)]
    assert cached_tokens(prompts, 10, 4)[2] == 29
    assert cached_tokens(prompts, 10, 3)[2] == 20, "block 3 went first, the prefix stayed"


@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), max_size=25),
    st.integers(0, 8),
)
def test_like_an_ordered_dict(chains: list[list[int]], size: int) -> None:
    prompts = [
        prompt(10 * len(c) + 1, *(hash(tuple(c[: i + 1])) for i in range(len(c)))) for c in chains
    ]
    cache: OrderedDict[int, None] = OrderedDict()
    expected = []
    for p in prompts:
        hit = next((i for i, b in enumerate(p.block_ids) if b not in cache), len(p.block_ids))
        expected.append(10 * hit)
        for block in reversed(p.block_ids):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > size:
            cache.popitem(last=False)
    assert cached_tokens(prompts, 10, size) == expected


@pytest.mark.parametrize("size", [0, 1, 5])
def test_more_cache_never_hits_less(size: int) -> None:
    prompts = [prompt(31, 1, 2, 3), prompt(31, 1, 5, 6), prompt(31, 1, 2, 3), prompt(21, 8, 9)] * 3
    less, more = (sum(cached_tokens(prompts, 10, n)) for n in (size, size + 3))
    assert less <= more
