"""Engines of one and of two tensor-parallel ranks, with other block sizes, on both sides of a link.

Every pair of them exchanges KVCache; `test_exact` has the pair of one rank each. Each prompt is
also asked of the decode engine alone: its ranks compute all of it. The engines of a node share its
prefix cache, whichever of them filled it.
"""

import pytest
from conversation import cache_of, next_turn, sends_only_the_new
from engine_region import WINDOW, agent_status, everything_is_given_back, prompt
from served_region import DECODE, DECODE_TWO, PREFILL, PREFILL_TWO, Served, serving

pytestmark = [pytest.mark.asyncio(loop_scope="session"), serving(WINDOW)]

ONE, TWO = (PREFILL, DECODE), (PREFILL_TWO, DECODE_TWO)
PAIRS = [(PREFILL, DECODE_TWO), (PREFILL_TWO, DECODE), TWO]


@pytest.mark.parametrize("length", [256, 3001])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.shows(
    kind="full attention with sliding windows",
    dtype="float32",
    prefill="TP 1 and 2",
    decode="TP 1 and 2",
    more="all four pairs, blocks of 32 and 64 tokens",
)
async def test_any_pair_exchanges_kvcache(
    served: Served, pair: tuple[str, str], length: int
) -> None:
    request = prompt(f"{pair} {length}", length, 60_000 + 10 * length + PAIRS.index(pair))
    answer, _ = await served.gateways.ask(request, *pair)
    assert answer.token_ids == await served.gateways.alone(pair[1], request)


@pytest.mark.parametrize(
    ("before", "after"), [(ONE, TWO), (TWO, (PREFILL_TWO, DECODE))], ids=["one-two", "two-one"]
)
@pytest.mark.shows(
    kind="full attention with sliding windows",
    dtype="float32",
    prefill="TP 1 and 2",
    decode="TP 1 and 2",
    more="one node's cache filled and used by engines of other TP",
)
async def test_a_second_turn_sends_only_what_is_new_to_the_node(
    served: Served, before: tuple[str, str], after: tuple[str, str]
) -> None:
    """The first turn fills the node's cache by one decode engine, the second uses it by another."""
    first = prompt("first", 1500, 61_000 + (before == TWO))
    answer, _ = await served.gateways.ask(first, *before)
    second = next_turn("second", first, answer, 400, 61_100)
    answer, record = await served.gateways.ask(second, *after)
    sends_only_the_new(await cache_of(served.region, after[1]), record, first, second)
    assert answer.token_ids == await served.gateways.alone(after[1], second)


async def test_all_engines_have_one_layout_and_hold_nothing_at_the_end(served: Served) -> None:
    statuses = [await agent_status(served.region, node) for node in ("a1", "b1")]
    engines = [engine for status in statuses for engine in status.engines]
    assert sorted(engine.tp_size for engine in engines) == [1, 1, 2, 2]
    assert len({engine.layout_fingerprint for engine in engines}) == 1
    await everything_is_given_back(served.region)
