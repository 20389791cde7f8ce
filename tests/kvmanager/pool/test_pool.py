"""The prefix pool by example: what is found, how it is filled, and what its listing says."""

import tracemalloc

import pytest
from pool_cases import FULL, HYBRID, KV, ROOT, STATE, Harness, keys_of, last_key

from kvmanager.pool.listing import NODES_PER_STEP
from kvmanager.pool.pool import MAX_EVICTED_PER_STEP, HybridPool
from kvmanager.pool.records import BlockPart, PrefixMatch, Tier
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from kvmanager.transfers.blocks import Run

WINDOWED = CacheShape(4, (KV, PartShape(PartKind.WINDOW, 1, window_tokens=6)))


# ---- matches


def test_a_prefix_is_found_as_far_as_it_goes() -> None:
    pool = Harness(10)
    assert pool.store("abc") == 3
    assert pool.match("abcd") == PrefixMatch(3, 3, 3, 3)
    assert pool.held("ab", "abx", "x") == [2, 2, 0]
    assert pool.store("abx") == 1


def test_a_hybrid_prefix_resumes_only_where_a_state_is() -> None:
    pool = Harness(20, shape=HYBRID)
    pool.store("abcd", (1, 1))
    assert pool.match("abcd") == PrefixMatch(2, 4, 2, 4)


def test_a_window_must_be_there_as_far_as_it_reaches() -> None:
    pool = Harness(20, shape=WINDOWED)
    pool.store("abcd", (1, 1), (3, 1))
    assert pool.match("abcd").num_blocks == 0
    pool.store("abcd", (2, 1))
    assert pool.match("abcd").num_blocks == 4
    assert pool.match("abc").num_blocks == 3
    assert pool.match("ab").num_blocks == 0


def test_another_shape_under_the_same_key_is_nothing() -> None:
    pool = Harness(20)
    pool.store("ab")
    other = pool.pool.match(HYBRID, keys_of("ab"))
    assert other == PrefixMatch(0, 0, 0, 0)
    fill = pool.pool.reserve(HYBRID, last_key("ab"), 2, keys_of("abc")[2:], [(0, 0)], 1.0)
    assert fill.slots == ()


def test_a_part_that_the_shape_does_not_have_is_nowhere() -> None:
    pool = Harness(10)
    pool.store("a")
    assert pool.pool.lookup(last_key("a"), 0) == (Run(0, 1),)
    for part in (-1, 1, 2):
        assert pool.pool.lookup(last_key("a"), part) is None
    assert pool.pool.lookup(last_key("b"), 0) is None


# ---- room


def test_room_is_made_in_steps() -> None:
    num_blocks = 2 * MAX_EVICTED_PER_STEP + 10
    pool = Harness(num_blocks)
    pool.store("a" * num_blocks)
    free = []
    while pool.pool.evict_for(num_blocks - 1):
        free.append(pool.allocator.num_free)
    assert free == [MAX_EVICTED_PER_STEP, 2 * MAX_EVICTED_PER_STEP]
    assert pool.allocator.num_free == num_blocks - 1
    assert not pool.pool.evict_for(num_blocks - 1)


def test_no_step_is_made_towards_room_that_cannot_be() -> None:
    pool = Harness(10)
    pool.store("abc")
    pool.pin("abc", (2, 0))
    pool.store("xyz")
    assert not pool.pool.evict_for(8)
    assert pool.allocator.num_free == 7


# ---- fills


def test_what_is_being_filled_is_neither_found_nor_given_twice() -> None:
    pool = Harness(10)
    fill = pool.reserve("ab", [(0, 0), (1, 0)])
    assert [slot.runs for slot in fill.slots] == [(Run(0, 1),), (Run(1, 1),)]
    assert pool.held("ab") == [0]
    assert pool.reserve("ab", [(0, 0), (1, 0)]).slots == ()
    with pytest.raises(KeyError):
        pool.pin("ab", (0, 0))


def test_a_child_written_before_its_parent_comes_with_it() -> None:
    pool = Harness(10)
    first = pool.reserve("ab", [(0, 0), (1, 0)])
    second = pool.reserve("abc", [(0, 0)], first_block=2)
    assert pool.commit(second, (0, 0)) == [True]
    pool.pool.abort(second.fill_id)
    assert pool.commit(first, (1, 0)) == [True]
    assert pool.held("abc") == [0]
    assert pool.commit(first, (0, 0)) == [True]
    assert pool.held("abc") == [3]
    assert [change.key for change in pool.changes] == keys_of("abc")


def test_a_block_counts_as_used_when_it_is_written() -> None:
    pool = Harness(10)
    fill = pool.reserve("a", [(0, 0)])
    pool.pool.commit(fill.fill_id, 0, 0, 5.0)
    pool.now_s = 9.0
    [prefix], _ = pool.prefixes("recent", 1)
    assert prefix.idle_s == 4.0


def test_a_block_that_was_used_later_than_it_was_written_stays_so() -> None:
    pool = Harness(20, shape=HYBRID)
    pool.store("a")
    fill = pool.reserve("a", [(0, 1)])
    pool.now_s = 20.0
    pool.hit("a")
    pool.pool.commit(fill.fill_id, 0, 1, 5.0)
    [prefix], _ = pool.prefixes("recent", 1)
    assert prefix.idle_s == 0.0


def test_a_state_that_is_not_written_after_all_lets_its_kv_go() -> None:
    pool = Harness(10, shape=HYBRID)
    pool.store("a")
    fill = pool.reserve("a", [(0, 1)])
    assert not pool.pool.discard(last_key("a"), 0, Tier.ARENA)
    pool.pool.abort(fill.fill_id)
    assert pool.pool.discard(last_key("a"), 0, Tier.ARENA)


def test_what_waits_for_an_aborted_parent_is_lost_with_it() -> None:
    pool = Harness(10, shape=HYBRID)
    first = pool.reserve("a", [(0, 0), (0, 1)])
    written = pool.reserve("ab", [(0, 0)], first_block=1)
    open_still = pool.reserve("abc", [(0, 0), (0, 1)], first_block=2)
    pool.commit(written, (0, 0))
    pool.commit(first, (0, 1))
    pool.pool.abort(first.fill_id)
    pool.pool.check_invariants()
    assert pool.pool.status().num_arena_blocks == 1 + 3, "a writer may be at these"
    assert pool.commit(open_still, (0, 0)) == [False]
    pool.pool.abort(open_still.fill_id)
    assert pool.allocator.num_used == 0
    assert pool.changes == []


def test_a_doomed_block_can_be_filled_anew_at_once() -> None:
    pool = Harness(10)
    first = pool.reserve("a", [(0, 0)])
    doomed = pool.reserve("ab", [(0, 0)], first_block=1)
    pool.pool.abort(first.fill_id)
    assert pool.store("ab") == 2
    assert pool.commit(doomed, (0, 0)) == [False]
    assert pool.held("ab") == [2]


def test_nothing_is_given_without_a_parent() -> None:
    pool = Harness(10, shape=HYBRID)
    assert pool.reserve("ab", [(0, 0)], first_block=1).slots == ()
    assert pool.reserve("ab", [(1, 0), (0, 1)]).slots == ()
    assert len(pool.reserve("ab", [(0, 1), (0, 0)]).slots) == 2


def test_a_key_in_another_place_is_refused() -> None:
    pool = Harness(10)
    pool.store("ab")
    wrong = pool.pool.reserve(FULL, ROOT, 0, keys_of("ab")[1:], [(0, 0)], 1.0)
    assert wrong.slots == ()
    twice = pool.pool.reserve(FULL, ROOT, 0, [last_key("x"), last_key("x")], [(0, 0), (1, 0)], 1.0)
    assert len(twice.slots) == 1


@pytest.mark.parametrize("bad", [(2, 0), (-1, 0), (0, 1), (0, -1)])
def test_a_part_that_cannot_be_is_an_error(bad: BlockPart) -> None:
    pool = Harness(10)
    pool.store("ab")
    with pytest.raises(ValueError, match="there are 2 blocks of 1 parts"):
        pool.reserve("ab", [bad])
    with pytest.raises(ValueError, match="there are 2 blocks of 1 parts"):
        pool.pin("ab", bad)


def test_commits_of_what_is_not_open_are_errors_and_aborts_are_not() -> None:
    pool = Harness(10)
    fill = pool.reserve("a", [(0, 0)])
    pool.commit(fill, (0, 0))
    for fill_id, index in ((fill.fill_id, 0), (fill.fill_id, 1), (99, 0)):
        with pytest.raises(KeyError):
            pool.pool.commit(fill_id, index, 0, 1.0)
    pool.pool.abort(fill.fill_id)
    pool.pool.abort(fill.fill_id)
    assert pool.held("a") == [1]


# ---- listing


def test_status_counts_bytes_by_tier_and_kind() -> None:
    pool = Harness(8, shape=HYBRID, ssd_bytes=100)
    pool.store("ab", (1, 1))
    pool.spill()
    pin = pool.pin("ab", (0, 0))
    pool.pool.make_room(7)
    status = pool.pool.status()
    assert status.nbytes[Tier.ARENA, PartKind.KV] == 1
    assert status.nbytes[Tier.SSD, PartKind.KV] == 2
    assert status.nbytes[Tier.SSD, PartKind.STATE] == 3
    assert status.evictions == {
        (Tier.ARENA, PartKind.STATE): 1,
        (Tier.ARENA, PartKind.KV): 1,
    }
    assert (status.num_blocks, status.num_arena_blocks, status.pinned_bytes) == (2, 1, 1)
    pool.pool.unpin(pin.pin_id)
    assert pool.pool.num_hits(last_key("a"), 0) == 1
    assert pool.pool.num_hits(last_key("x"), 0) == 0


def test_prefixes_are_listed_with_where_they_part() -> None:
    pool = Harness(20, shape=HYBRID)
    pool.store("abc", (2, 1))
    pool.store("abxyz")
    pool.store("q")
    pool.hit("abx")
    pin = pool.pin("q", (0, 0))
    pool.now_s = 10.0
    listed, num_prefixes = pool.prefixes("size", 2)
    assert num_prefixes == 3
    longest, shorter = listed
    assert (longest.key, longest.num_tokens) == (last_key("abxyz"), 20)
    assert (longest.num_hits, longest.branch_tokens, longest.resumable_tokens) == (1, 8, 0)
    assert (shorter.key, shorter.branch_tokens, shorter.resumable_tokens) == (
        last_key("abc"),
        8,
        12,
    )
    assert shorter.nbytes == {(Tier.ARENA, PartKind.KV): 3, (Tier.ARENA, PartKind.STATE): 3}
    [recent], _ = pool.prefixes("recent", 1)
    assert (recent.key, recent.idle_s, recent.is_pinned) == (last_key("q"), 5.0, True)
    hits, _ = pool.prefixes("hits", 3)
    assert [prefix.num_hits for prefix in hits] == [1, 1, 0]
    pool.pool.unpin(pin.pin_id)


def test_a_listing_takes_steps_between_which_the_pool_changes() -> None:
    num_blocks = 2 * NODES_PER_STEP
    pool = Harness(num_blocks + 1)
    pool.store("a" * (num_blocks - 1))
    pool.store("b")
    listing = pool.pool.prefixes("recent", 10, pool.now_s)
    next(listing)
    pool.store("c")
    assert pool.pool.discard(last_key("b"), 0, Tier.ARENA)
    steps = 0
    while True:
        try:
            next(listing)
        except StopIteration as done:
            prefixes, num_prefixes = done.value
            break
        steps += 1
    assert steps >= 4
    assert [prefix.num_tokens for prefix in prefixes] == [4 * (num_blocks - 1)]
    assert num_prefixes == 1


def test_a_long_prompt_costs_little_memory() -> None:
    """Bounds what a block costs the pool itself, so that a large arena stays cheap to keep."""
    num_blocks = 2000
    pool = Harness(num_blocks)
    pool.pool = HybridPool(pool.allocator, 1)
    keys = [index.to_bytes(16, "little") for index in range(num_blocks)]
    tracemalloc.start()
    fill = pool.pool.reserve(FULL, ROOT, 0, keys, [(i, 0) for i in range(num_blocks)], 1.0)
    for slot in fill.slots:
        pool.pool.commit(fill.fill_id, slot.index, 0, 1.0)
    pool.pool.abort(fill.fill_id)
    del fill, slot
    per_block = tracemalloc.get_traced_memory()[0] / num_blocks
    tracemalloc.stop()
    assert per_block < 800
    assert pool.pool.match(FULL, keys).num_blocks == num_blocks


# ---- callers that say what cannot be


def test_keys_that_do_not_follow_each_other_are_not_found_behind_what_is_missing() -> None:
    pool = Harness(10)
    pool.store("a")
    pool.reserve("z", [(0, 0)])
    for missing in ("x", "z"):
        keys = [last_key(missing), last_key("a")]
        assert pool.pool.match(FULL, keys) == PrefixMatch(0, 0, 0, 0)


@pytest.mark.parametrize("path", ["ab", "abc"])
def test_a_block_is_not_extended_under_another_parent(path: str) -> None:
    """Neither it nor what is said to follow it gets memory."""
    pool = Harness(10)
    pool.store("abc")
    pool.store("xyz")
    parent = keys_of("xyz")[len(path) - 2]
    keys = [last_key(path), last_key("new")]
    wanted = [(0, 0), (1, 0)]
    fill = pool.pool.reserve(FULL, parent, len(path) - 1, keys, wanted, 9.0)
    assert fill.slots == ()


def test_a_block_is_not_found_at_another_place_of_a_prompt() -> None:
    pool = Harness(20, shape=CacheShape(4, (STATE,)))
    pool.store("ab")
    keys = [last_key("ab"), last_key("new")]
    fill = pool.pool.reserve(pool.shape, last_key("a"), 2, keys, [(0, 0), (1, 0)], 9.0)
    assert fill.slots == ()


def test_a_key_counts_once_in_a_prompt() -> None:
    pool = Harness(10)
    twice = [last_key("z")] * 2
    fill = pool.pool.reserve(FULL, ROOT, 0, twice, [(0, 0), (1, 0)], 9.0)
    assert [slot.index for slot in fill.slots] == [0]


def test_a_parent_of_another_shape_or_place_is_none() -> None:
    pool = Harness(20)
    pool.store("ab")
    wanted = [(0, 0)]
    new = [last_key("new")]
    for shape, parent, first in (
        (HYBRID, "ab", 2),
        (FULL, "ab", 1),
        (FULL, "ab", 3),
        (FULL, "x", 1),
    ):
        assert pool.pool.reserve(shape, last_key(parent), first, new, wanted, 9.0).slots == ()
    assert len(pool.pool.reserve(FULL, last_key("ab"), 2, new, wanted, 9.0).slots) == 1


def test_without_kv_only_the_block_before_stays_for_the_next() -> None:
    pool = Harness(6, shape=CacheShape(4, (STATE,)))
    pool.store("ab")
    assert len(pool.reserve("abc", [(0, 0)], first_block=2).slots) == 1
    assert [pool.pool.lookup(key, 0) is None for key in keys_of("ab")] == [True, False]
