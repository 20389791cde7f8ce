"""What the calls of the prefix pool count as used or hit, copy to SSD, restore and refuse."""

from dataclasses import replace

import pytest
from pool_cases import HYBRID, KV, STATE, Harness, keys_of, last_key

from kvmanager.pool.eviction import CheapestFirst
from kvmanager.pool.nodes import Node
from kvmanager.pool.pool import HybridPool
from kvmanager.pool.shape import CacheShape
from kvmanager.transfers.blocks import BlockAllocator

ONLY_STATES = CacheShape(4, (STATE,))


def num_hits(pool: Harness, path: str, part: int = 0) -> list[int]:
    """Of that part of every block."""
    return [pool.pool.num_hits(key, part) for key in keys_of(path)]


def fail_to_copy(pool: Harness) -> None:
    """Everything that is worth a copy on SSD."""
    for spill in reversed(pool.pool.ssd.choose(100)):
        pool.pool.ssd.not_stored(spill)


# ---- uses and hits


def test_a_pin_hits_its_parts_and_the_kv_up_to_the_last() -> None:
    pool = Harness(20, shape=HYBRID)
    pool.store("abcd", (1, 1), (2, 1))
    pool.pool.unpin(pool.pin("abcd", (0, 0), (2, 1)).pin_id)
    assert num_hits(pool, "abcd") == [1, 1, 1, 0]
    assert num_hits(pool, "abcd", 1) == [0, 0, 1, 0]


def test_a_pin_of_no_parts_hits_nothing() -> None:
    pool = Harness(10)
    pool.store("ab")
    pin = pool.pin("ab")
    assert (pin.slots, pin.absent) == ((), ())
    assert num_hits(pool, "ab") == [0, 0]


def test_an_answer_keeps_its_long_prompt_without_a_touch_of_all_of_it_for_each_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = CacheShape(4, (KV,))
    pool = HybridPool(BlockAllocator(2000), KV.nbytes)

    def store(keys: list[bytes], first: int, end: int) -> None:
        parent = keys[first - 1] if first else bytes(16)
        parts = [(index, 0) for index in range(end - first)]
        fill = pool.reserve(shape, parent, first, keys[first:end], parts, 0.0)
        for slot in fill.slots:
            pool.commit(fill.fill_id, slot.index, slot.part, 0.0)
        pool.abort(fill.fill_id)

    ours, theirs = ([bytes([mine]) + n.to_bytes(15, "big") for n in range(1200)] for mine in (1, 2))
    store(ours, 0, 1000)
    store(theirs, 0, 700)
    touches: list[object] = []
    touch = Node.touch
    monkeypatch.setattr(Node, "touch", lambda *said: (touches.append(said), touch(*said)))
    for block in range(1000, 1200):
        store(ours, block, block + 1)
    assert len(touches) < 10 * len(ours), "200 blocks behind 1,000 each"
    assert pool.make_room(700)
    assert (pool.match(shape, theirs).num_blocks, pool.match(shape, ours).num_blocks) == (100, 1200)


def test_a_state_that_was_pinned_later_stays_longer() -> None:
    pool = Harness(8, shape=HYBRID)
    pool.store("a", (0, 1))
    pool.store("b", (0, 1))
    pool.pool.unpin(pool.pin("a", (0, 1)).pin_id)
    assert pool.pool.make_room(1)
    assert pool.pool.lookup(last_key("a"), 1) is not None
    assert pool.pool.lookup(last_key("b"), 1) is None


def test_a_state_that_was_to_be_filled_again_stays_longer() -> None:
    """Another prompt has it too, and would use it."""
    pool = Harness(8, shape=HYBRID)
    pool.store("a", (0, 1))
    pool.store("b", (0, 1))
    assert pool.reserve("a", [(0, 0), (0, 1)]).slots == ()
    assert pool.pool.make_room(1)
    assert pool.pool.lookup(last_key("a"), 1) is not None
    assert pool.pool.lookup(last_key("b"), 1) is None


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_reservation_and_a_pin_are_one_use_each(is_pinned: bool) -> None:
    """Each use that passes a block by halves its worth: one that saves three times as many tokens
    stays if it went unused for one use more than the other.
    """
    pool = Harness(2)
    pool.pool = HybridPool(pool.allocator, 1, policy=CheapestFirst(half_life_uses=1.0))
    small, large = CacheShape(4, (KV,)), CacheShape(12, (KV,))
    for path, shape in ([("s", small)] if is_pinned else []) + [("l", large), ("s", small)]:
        pool.shape = shape
        if pool.held(path) == [1]:
            pool.hit(path)
        else:
            pool.store(path)
    assert pool.pool.make_room(1)
    assert pool.pool.lookup(last_key("l"), 0) is not None


def test_what_was_restored_counts_as_used_one_use_before_the_first() -> None:
    small, large = CacheShape(4, (KV,)), CacheShape(12, (KV,))
    before = Harness(2, shape=large)
    before.store("l")
    after = Harness(2, shape=small)
    after.pool = HybridPool(after.allocator, 1, policy=CheapestFirst(half_life_uses=1.0))
    assert all(after.pool.restore(change, 0.0) for change in before.pool.changes())
    after.store("s")
    assert after.pool.make_room(1)
    assert after.pool.lookup(last_key("l"), 0) is not None


# ---- copies to SSD


def test_a_state_that_was_pinned_again_is_copied_again() -> None:
    pool = Harness(10, shape=ONLY_STATES, ssd_bytes=STATE.nbytes)
    pool.store("a")
    pool.spill()
    pool.store("b")
    assert pool.spill() == [last_key("b")], "in place of the first"
    pool.hit("a")
    assert pool.spill() == [last_key("a")]


def test_kv_is_copied_when_a_state_on_it_was_used_that_is_too_large_for_ssd() -> None:
    pool = Harness(10, shape=HYBRID, ssd_bytes=STATE.nbytes - 1)
    pool.store("a", (0, 1))
    fail_to_copy(pool)
    pool.pool.unpin(pool.pin("a", (0, 1)).pin_id)
    assert pool.spill() == [last_key("a")]


def test_what_is_too_large_for_ssd_does_not_hold_up_others() -> None:
    pool = Harness(10, shape=HYBRID, ssd_bytes=STATE.nbytes - 1)
    pool.store("ab", (0, 1))
    assert pool.spill() == keys_of("ab")


def test_a_limited_spill_goes_on_with_what_stands_on_the_bases_it_named() -> None:
    pool = Harness(10, ssd_bytes=10)
    pool.store("xy")
    fail_to_copy(pool)
    pool.store("a")
    pool.store("xyz")
    assert [spill.change.key for spill in pool.pool.ssd.choose(2)] == [last_key("a"), last_key("x")]
    assert [spill.change.key for spill in pool.pool.ssd.choose(10)] == keys_of("xyz")[1:]


def test_what_could_not_be_copied_is_not_tried_again_before_it_is_used() -> None:
    """Bases of what is tried included, though they wanted to be copied themselves."""
    pool = Harness(10, ssd_bytes=10)
    pool.store("xy")
    fail_to_copy(pool)
    pool.store("xyz")
    pool.hit("x")
    spills = pool.pool.ssd.choose(3)
    assert [spill.change.key for spill in spills] == keys_of("xyz")
    for spill in reversed(spills):
        pool.pool.ssd.not_stored(spill)
    assert pool.pool.ssd.choose(10) == []


# ---- what is restored


def test_a_state_is_not_restored_without_its_kv() -> None:
    before = Harness(8, shape=HYBRID, ssd_bytes=8)
    before.store("a", (0, 1))
    before.spill()
    kv_on_ssd, state_on_ssd, kv, state = before.pool.changes()
    after = Harness(8, shape=HYBRID, ssd_bytes=8)
    assert not after.pool.restore(state, 1.0)
    assert not after.pool.restore(state_on_ssd, 1.0)
    assert after.pool.status().num_blocks == 0
    assert after.pool.restore(kv, 1.0)
    assert after.pool.restore(state, 1.0)
    assert not after.pool.restore(state_on_ssd, 1.0), "it stands on KV on SSD"
    assert after.pool.restore(kv_on_ssd, 1.0)
    assert after.pool.restore(state_on_ssd, 1.0)
    after.pool.check_invariants()


def test_kv_is_not_restored_on_ssd_where_the_block_before_is_in_the_arena_alone() -> None:
    before = Harness(4, ssd_bytes=4)
    before.store("ab")
    before.spill()
    first_on_ssd, second_on_ssd, first, _ = before.pool.changes()
    after = Harness(4, ssd_bytes=4)
    assert after.pool.restore(first, 1.0)
    assert not after.pool.restore(second_on_ssd, 1.0)
    assert after.pool.restore(first_on_ssd, 1.0)
    assert after.pool.restore(second_on_ssd, 1.0)
    after.pool.check_invariants()


def test_without_kv_a_state_is_restored_by_itself_and_as_the_part_that_it_is() -> None:
    before = Harness(8, shape=ONLY_STATES)
    before.store("ab")
    _, second = before.pool.changes()
    after = Harness(8, shape=ONLY_STATES)
    for part in (-1, 1):
        assert not after.pool.restore(replace(second, part=part), 1.0)
    assert after.pool.restore(second, 1.0)
    after.pool.check_invariants()
    assert after.match("ab") == before.match("ab")


def test_what_is_restored_counts_as_used_when_it_is() -> None:
    before = Harness(2)
    before.store("a")
    after = Harness(2)
    [change] = before.pool.changes()
    after.pool.restore(change, 5.0)
    after.now_s = 9.0
    [prefix], _ = after.prefixes("recent", 1)
    assert prefix.idle_s == 4.0


# ---- the first call


def test_what_was_restored_makes_room_for_the_first_that_is_stored() -> None:
    before = Harness(2)
    before.store("a")
    before.store("b")
    after = Harness(2)
    assert all(after.pool.restore(change, 0.0) for change in before.pool.changes())
    assert after.store("x") == 1


def test_what_was_restored_is_copied_to_ssd_once() -> None:
    before = Harness(2)
    before.store("a")
    after = Harness(2, ssd_bytes=2)
    assert all(after.pool.restore(change, 0.0) for change in before.pool.changes())
    [spill] = after.pool.ssd.choose(10)
    assert after.pool.ssd.choose(10) == []
    assert after.pool.ssd.stored(spill)


def test_unless_it_is_told_otherwise_a_pool_has_no_ssd() -> None:
    pool = Harness(2)
    pool.pool = HybridPool(BlockAllocator(2), 1)
    pool.store("a")
    assert pool.pool.ssd.choose(10) == []


# ---- refusals


def test_nothing_is_evicted_for_room_that_a_writer_has() -> None:
    pool = Harness(4)
    pool.store("abc")
    fill = pool.reserve("x", [(0, 0)])
    assert not pool.pool.make_room(4)
    assert pool.held("abc") == [3]
    pool.pool.abort(fill.fill_id)
    assert pool.pool.make_room(4)


def test_what_waited_for_the_arena_is_looked_at_once() -> None:
    pool = Harness(4, shape=HYBRID, ssd_bytes=4)
    pool.store("a", (0, 1))
    base, state = pool.pool.ssd.choose(2)
    assert pool.pool.ssd.stored(base)
    pool.pool.ssd.not_stored(state)
    pool.leave_arena("a")
    pool.pool.keep_arena()
    pool.lose("a")
    for has_waited in (True, False):
        pool.pool.release_arena()
        assert pool.pool.has_lost is has_waited
        pool.pool.drop_lost()
        pool.pool.keep_arena()


def test_a_pool_whose_memory_somebody_else_gave_back_says_that_its_books_are_wrong() -> None:
    pool = Harness(4)
    pool.store("a")
    runs = pool.pool.lookup(last_key("a"), 0)
    assert runs is not None
    pool.allocator.free(runs)
    with pytest.raises(AssertionError):
        pool.pool.check_invariants()
