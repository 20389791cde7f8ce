"""What leaves the prefix pool, and what may not: the policies, and LRU against a plain one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_cases import HYBRID, STATE, Harness, last_key

from kvmanager.pool.eviction import EvictionQueue, eviction_policy
from kvmanager.pool.pool import HybridPool
from kvmanager.pool.records import PrefixMatch, Tier
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from kvmanager.transfers.blocks import BlockAllocator
from scheduler.planning.prefix_reuse import TracePrompt, cached_tokens

# ---- eviction


def test_the_leaf_goes_before_its_parent_and_old_before_new() -> None:
    pool = Harness(4)
    pool.store("ab")
    pool.store("cd")
    pool.store("x")
    assert pool.held("ab", "cd", "x") == [1, 2, 1]
    pool.hit("a")
    pool.store("yz")
    assert pool.held("ab", "cd", "x", "yz") == [1, 0, 1, 2]


def test_a_prompt_longer_than_the_arena_keeps_its_beginning() -> None:
    pool = Harness(3)
    pool.store("xy")
    assert pool.store("abcde") == 3
    assert pool.held("abcde", "xy") == [3, 0]


def test_what_is_extended_is_not_evicted_for_the_extension() -> None:
    pool = Harness(3)
    pool.store("abc")
    assert pool.reserve("abcd", [(0, 0)], first_block=3).slots == ()
    assert pool.store("abcd") == 0
    assert pool.held("abcd") == [3]


def test_a_state_goes_alone_and_is_older_than_its_kv() -> None:
    pool = Harness(6, shape=HYBRID)
    pool.store("ab", (1, 1))
    assert pool.pool.make_room(2)
    assert pool.match("ab") == PrefixMatch(0, 2, 0, 2)


def test_states_and_windows_go_with_their_kv() -> None:
    pool = Harness(6, "lfu", shape=HYBRID)
    pool.store("ab", (1, 1))
    pool.pool.unpin(pool.pin("ab", (1, 1)).pin_id)
    for _ in range(3):
        pool.pool.unpin(pool.pin("ab", (0, 0), (1, 1)).pin_id)
    assert pool.pool.discard(last_key("ab"), 0, Tier.ARENA)
    assert [(change.part, change.stored) for change in pool.changes[-2:]] == [
        (1, False),
        (0, False),
    ]
    assert pool.match("ab") == PrefixMatch(0, 1, 0, 1)


def test_pins_hold_parts_and_all_below_them() -> None:
    pool = Harness(6, shape=HYBRID)
    pool.store("abc", (1, 1))
    pin = pool.pin("ab", (1, 1))
    assert not pool.pool.make_room(5)
    assert pool.allocator.num_free == 0, "plainly impossible: nothing was given up for it"
    assert pool.pool.make_room(1)
    assert not pool.pool.make_room(2)
    assert pool.match("abc") == PrefixMatch(2, 2, 2, 2)
    assert not pool.pool.discard(last_key("ab"), 1, Tier.ARENA)
    pool.pool.unpin(pin.pin_id)
    pool.pool.unpin(pin.pin_id)
    with pytest.raises(KeyError):
        pool.pool.pinned(pin.pin_id)
    assert pool.pool.make_room(6)


def test_a_pending_child_holds_its_parents() -> None:
    pool = Harness(4)
    pool.store("ab")
    fill = pool.reserve("abc", [(0, 0)], first_block=2)
    assert not pool.pool.make_room(2)
    pool.pool.abort(fill.fill_id)
    assert pool.pool.make_room(4)


def test_other_owners_of_the_arena_are_left_alone() -> None:
    pool = Harness(4)
    transfer = pool.allocator.allocate(3)
    assert pool.store("abc") == 1
    assert not pool.pool.make_room(2)
    pool.allocator.free(transfer)
    assert pool.store("abc") == 2


def test_the_pool_takes_no_more_than_its_share() -> None:
    pool = Harness(10, max_blocks=3)
    pool.store("abcd")
    pool.store("x")
    assert pool.held("abcd", "x") == [2, 1]
    assert pool.allocator.num_free == 7
    assert Harness(10, shape=HYBRID, max_blocks=2).store("a", (0, 1)) == 1


def test_a_model_without_kv_has_no_chains() -> None:
    pool = Harness(9, shape=CacheShape(4, (STATE,)))
    fill = pool.reserve("abc", [(0, 0)], first_block=2)
    pool.commit(fill, (0, 0))
    assert pool.match("abcd") == PrefixMatch(3, 4, 3, 4)
    assert pool.store("abc") == 2
    assert pool.pool.discard(last_key("ab"), 0, Tier.ARENA)
    assert pool.match("ab").num_blocks == 1


def test_while_the_arena_is_kept_only_free_memory_is_filled() -> None:
    allocator = BlockAllocator(4)
    pool = HybridPool(allocator, 4096)
    shape = CacheShape(16, (PartShape(PartKind.KV, 4096),))
    old, new = [bytes([1, n]) + bytes(14) for n in range(3)], bytes([2]) + bytes(15)
    fill = pool.reserve(shape, bytes(16), 0, old, [(n, 0) for n in range(3)], 0.0)
    for n in range(3):
        assert pool.commit(fill.fill_id, n, 0, 0.0)
    pool.abort(fill.fill_id)
    pool.keep_arena()
    assert not pool.make_room(2)
    assert not pool.discard(old[2], 0, Tier.ARENA)
    assert pool.match(shape, old).num_blocks == 3
    fill = pool.reserve(shape, bytes(16), 0, [new], [(0, 0)], 1.0)
    assert [slot.index for slot in fill.slots] == [0]
    pool.abort(fill.fill_id)
    pool.release_arena()
    assert pool.make_room(2)
    pool.check_invariants()


# ---- policies


def test_lfu_keeps_what_served_most() -> None:
    pool = Harness(3, "lfu")
    for path in "abc":
        pool.store(path)
    for path in ("a", "a", "b"):
        pool.hit(path)
    pool.store("d")
    assert pool.held("a", "b", "c", "d") == [1, 1, 0, 1]


def test_length_keeps_the_beginnings() -> None:
    pool = Harness(6, "length")
    pool.store("x")
    pool.store("y")
    pool.store("abcd")
    pool.store("pq")
    assert pool.held("abcd", "x", "y", "pq") == [2, 1, 1, 2]


def test_cost_gives_up_cheap_bytes_first() -> None:
    pool = Harness(8, "cost", shape=HYBRID)
    pool.store("abcd", (3, 1))
    assert pool.allocator.num_free == 1
    pool.pool.make_room(2)
    assert pool.match("abcd") == PrefixMatch(0, 3, 0, 3), (
        "the state saves no more than its own block"
    )
    lone = Harness(8, "cost", shape=CacheShape(4, (PartShape(PartKind.KV, 2), STATE)))
    lone.store("ab", (0, 1))
    lone.store("cd")
    lone.pool.make_room(2)
    assert lone.held("ab", "cd") == [1, 2]
    assert lone.match("ab").num_blocks == 0, "the state of the first block is still there"


def test_cost_forgets_what_nobody_uses() -> None:
    pool = Harness(2, "cost")
    pool.pool = HybridPool(
        pool.allocator, 1, policy=type(eviction_policy("cost"))(half_life_uses=1.0)
    )
    pool.store("ab")
    for path in "xyz":
        pool.store(path)
    assert pool.held("ab", "y", "z") == [0, 1, 1]


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'fifo': choose one of lru, lfu, length, cost"):
        eviction_policy("fifo")


def test_a_queue_forgets_what_may_not_go_any_more() -> None:
    class Item:
        last_used = 1

    allowed = {Item() for _ in range(3000)}
    queue = EvictionQueue(lambda item: (item.last_used,), allowed.__contains__)  # type: ignore[type-var]
    for item in list(allowed):
        queue.offer(item)
        queue.offer(item)
    kept = next(iter(allowed))
    allowed.intersection_update([kept])
    queue.prune(900)
    assert len(queue) == 1
    assert queue.head() == ((1,), kept)


ALPHABET = "abc"
paths = st.text(st.sampled_from(ALPHABET), min_size=1, max_size=6)


@given(st.lists(paths, max_size=30), st.integers(1, 12))
@settings(max_examples=150)
def test_lru_hits_equal_a_plain_lru(prompts: list[str], capacity: int) -> None:
    """`scheduler.planning.prefix_reuse` keeps a dict of block ids and knows no pools."""
    ids: dict[str, int] = {}
    trace = []
    for path in prompts:
        prefixes = [path[: end + 1] for end in range(len(path))]
        block_ids = [ids.setdefault(prefix, len(ids)) for prefix in prefixes]
        trace.append(TracePrompt(0.0, 4 * len(path) + 1, 1, block_ids))
    pool = Harness(capacity)
    found = []
    for path in prompts:
        num_hit = pool.match(path).num_blocks
        found.append(4 * num_hit)
        pin = pool.pin(path, *((index, 0) for index in range(num_hit)))
        pool.store(path)
        pool.pool.unpin(pin.pin_id)
    assert found == cached_tokens(trace, 4, capacity)


# ---- what is told of it


def test_only_what_made_room_counts_as_evicted() -> None:
    pool = Harness(4, shape=HYBRID)
    pool.store("a", (0, 1))
    kv = pool.pool.lookup(last_key("a"), 0)
    assert pool.pool.discard(last_key("a"), 0, Tier.ARENA)
    assert pool.pool.status().evictions == {}
    assert (pool.changes[-1].runs, pool.changes[-1].stored) == (kv, False)
    pool.store("b", (0, 1))
    assert pool.pool.make_room(4)
    evictions = pool.pool.status().evictions
    assert evictions == {(Tier.ARENA, PartKind.KV): 1, (Tier.ARENA, PartKind.STATE): 1}


def test_what_leaves_with_its_kv_counts_as_evicted_too() -> None:
    pool = Harness(4, "lfu", shape=HYBRID)
    pool.store("a", (0, 1))
    pool.pool.unpin(pool.pin("a", (0, 1)).pin_id)
    pool.pool.unpin(pool.pin("a", (0, 1)).pin_id)
    assert pool.pool.make_room(4)
    assert sum(pool.pool.status().evictions.values()) == 2
