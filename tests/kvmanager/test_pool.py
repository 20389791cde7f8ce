"""The prefix pool by example: each rule of its text, the policies, and LRU against a plain one."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.blocks import BlockAllocator, Run
from kvmanager.pool.eviction import EvictionQueue, eviction_policy
from kvmanager.pool.pool import BlockPart, Fill, HybridPool, Match, Pin, PoolChange, Tier
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from scheduler.prefix_reuse import TracePrompt, cached_tokens

ROOT = b"r" * 16
KV = PartShape(PartKind.KV, 1)
STATE = PartShape(PartKind.STATE, 3)
FULL = CacheShape(4, (KV,))
HYBRID = CacheShape(4, (KV, STATE))
WINDOWED = CacheShape(4, (KV, PartShape(PartKind.WINDOW, 1, window_tokens=6)))


def keys_of(path: str) -> list[bytes]:
    """One key for each letter, which names the path up to it."""
    return [path[: end + 1].encode().rjust(16, b".") for end in range(len(path))]


class Harness:
    """A pool in an arena of one-byte blocks, with a clock and an ear."""

    def __init__(
        self,
        num_blocks: int,
        policy: str = "lru",
        *,
        shape: CacheShape = FULL,
        ssd_bytes: int = 0,
        max_blocks: int | None = None,
    ) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.changes: list[PoolChange] = []
        self.shape = shape
        self.now_s = 0.0
        self.pool = HybridPool(
            self.allocator,
            1,
            policy=eviction_policy(policy),
            listener=self.changes.append,
            ssd_bytes=ssd_bytes,
            max_blocks=max_blocks,
        )

    def reserve(self, path: str, parts: Sequence[BlockPart], first_block: int = 0) -> Fill:
        self.now_s += 1
        keys = [ROOT, *keys_of(path)][first_block:]
        return self.pool.reserve(self.shape, keys[0], first_block, keys[1:], parts, self.now_s)

    def commit(self, fill: Fill, *parts: BlockPart) -> list[bool]:
        return [self.pool.commit(fill.fill_id, index, part, self.now_s) for index, part in parts]

    def store(self, path: str, *others: BlockPart) -> int:
        """KV of all blocks and `others`; how many parts got memory."""
        fill = self.reserve(path, [*((i, 0) for i in range(len(path))), *others])
        self.commit(fill, *((slot.index, slot.part) for slot in fill.slots))
        self.pool.abort(fill.fill_id)
        self.pool.check_invariants()
        return len(fill.slots)

    def pin(self, path: str, *parts: BlockPart) -> Pin:
        self.now_s += 1
        return self.pool.pin(self.shape, keys_of(path), parts, self.now_s)

    def hit(self, path: str) -> None:
        self.pool.unpin(self.pin(path, (len(path) - 1, 0)).pin_id)

    def match(self, path: str) -> Match:
        return self.pool.match(self.shape, keys_of(path))

    def held(self, *paths: str) -> list[int]:
        return [self.match(path).kv_blocks for path in paths]

    def spill(self) -> list[bytes]:
        """Copy everything worth it; the keys of what is kept."""
        return [
            change.key
            for change in self.pool.spill(100)
            if self.pool.stored_on_ssd(change.key, change.part)
        ]


def last_key(path: str) -> bytes:
    return keys_of(path)[-1]


# ---- matches


def test_a_prefix_is_found_as_far_as_it_goes() -> None:
    pool = Harness(10)
    assert pool.store("abc") == 3
    assert pool.match("abcd") == Match(3, 3, 3, 3)
    assert pool.held("ab", "abx", "x") == [2, 2, 0]
    assert pool.store("abx") == 1


def test_a_hybrid_prefix_resumes_only_where_a_state_is() -> None:
    pool = Harness(20, shape=HYBRID)
    pool.store("abcd", (1, 1))
    assert pool.match("abcd") == Match(2, 4, 2, 4)


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
    assert other == Match(0, 0, 0, 0)
    fill = pool.pool.reserve(HYBRID, last_key("ab"), 2, keys_of("abc")[2:], [(0, 0)], 1.0)
    assert fill.slots == ()


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
    assert pool.match("ab") == Match(0, 2, 0, 2)


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
    assert pool.match("ab") == Match(0, 1, 0, 1)


def test_pins_hold_parts_and_all_below_them() -> None:
    pool = Harness(6, shape=HYBRID)
    pool.store("abc", (1, 1))
    pin = pool.pin("ab", (1, 1))
    assert not pool.pool.make_room(5)
    assert pool.allocator.num_free == 0, "plainly impossible: nothing was given up for it"
    assert pool.pool.make_room(1)
    assert not pool.pool.make_room(2)
    assert pool.match("abc") == Match(2, 2, 2, 2)
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
    assert pool.match("abcd") == Match(3, 4, 3, 4)
    assert pool.store("abc") == 2
    assert pool.pool.discard(last_key("ab"), 0, Tier.ARENA)
    assert pool.match("ab").num_blocks == 1


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
    assert pool.match("abcd") == Match(0, 3, 0, 3), "the state saves no more than its own block"
    lone = Harness(8, "cost", shape=CacheShape(4, (PartShape(PartKind.KV, 2), STATE)))
    lone.store("ab", (0, 1))
    lone.store("cd")
    lone.pool.make_room(2)
    assert lone.held("ab", "cd") == [2, 1] or lone.match("ab").num_blocks == 0


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
    """`scheduler.prefix_reuse` keeps a dict of block ids and knows no pools."""
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


# ---- SSD


def test_what_is_on_ssd_may_leave_the_arena_and_come_back() -> None:
    pool = Harness(3, ssd_bytes=100)
    pool.store("abc")
    assert pool.spill() == keys_of("abc")
    assert pool.pool.spill(100) == []
    assert pool.pool.make_room(3)
    assert pool.match("abc") == Match(3, 3, 0, 0)
    pin = pool.pin("abc", (0, 0), (2, 0))
    assert (pin.slots, pin.absent) == ((), ((0, 0), (2, 0)))
    fill = pool.reserve("abc", pin.absent)
    pool.commit(fill, *pin.absent)
    pool.pool.abort(fill.fill_id)
    now = pool.pool.pinned(pin.pin_id)
    assert [(slot.index, slot.part) for slot in now.slots] == [(0, 0), (2, 0)]
    assert now.absent == ()
    assert pool.match("abc") == Match(3, 3, 1, 1)


def test_a_failed_promotion_leaves_the_copy_on_ssd() -> None:
    pool = Harness(3, ssd_bytes=100)
    pool.store("ab")
    pool.spill()
    pool.pool.make_room(3)
    fill = pool.reserve("ab", [(0, 0), (1, 0)])
    assert not pool.pool.discard(last_key("ab"), 0, Tier.SSD), "it is being read"
    pool.pool.abort(fill.fill_id)
    assert pool.match("ab") == Match(2, 2, 0, 0)
    assert pool.pool.discard(last_key("ab"), 0, Tier.SSD)


def test_ssd_keeps_what_was_used_last() -> None:
    pool = Harness(10, ssd_bytes=3)
    pool.store("ab")
    pool.store("c")
    assert pool.spill() == [*keys_of("ab"), last_key("c")]
    pool.hit("a")
    pool.store("de")
    assert pool.spill() == keys_of("de")
    on_ssd = {change.key for change in pool.pool.changes() if change.tier is Tier.SSD}
    assert on_ssd == {last_key("a"), *keys_of("de")}
    pool.hit("ab")
    assert pool.spill() == [last_key("ab")], "used again, so copied again"


def test_what_is_older_than_everything_on_a_full_ssd_stays_off_it() -> None:
    pool = Harness(10, ssd_bytes=1)
    pool.store("a")
    [change] = pool.pool.spill(1)
    pool.store("b")
    pool.spill()
    assert not pool.pool.stored_on_ssd(change.key, 0)
    pool.hit("b")
    assert pool.pool.spill(10) == []


def test_a_copy_without_its_base_on_ssd_is_not_kept() -> None:
    pool = Harness(10, ssd_bytes=100, shape=HYBRID)
    pool.store("ab", (1, 1))
    changes = pool.pool.spill(100)
    assert [(change.key, change.part) for change in changes] == [
        (last_key("a"), 0),
        (last_key("ab"), 0),
        (last_key("ab"), 1),
    ]
    assert pool.pool.stored_on_ssd(last_key("ab"), 1), "its base is on the way"
    pool.pool.not_stored_on_ssd(last_key("ab"), 0)
    assert pool.pool.changes()[0].tier is not Tier.SSD
    assert not pool.pool.stored_on_ssd(last_key("ab"), 1)
    assert not pool.pool.stored_on_ssd(last_key("x"), 0)
    pool.pool.not_stored_on_ssd(last_key("a"), 0)
    pool.pool.check_invariants()
    pool.hit("ab")
    assert pool.spill() == keys_of("ab")


def test_an_ssd_copy_stays_while_another_stands_on_it() -> None:
    pool = Harness(10, ssd_bytes=100, shape=HYBRID)
    pool.store("ab", (1, 1))
    pool.spill()
    in_order = [(last_key("ab"), 1), (last_key("ab"), 0), (last_key("a"), 0)]
    for done, at in enumerate(in_order):
        assert not any(pool.pool.discard(*below, Tier.SSD) for below in in_order[done + 1 :])
        assert pool.pool.discard(*at, Tier.SSD)
    assert pool.match("ab") == Match(2, 2, 2, 2)


def test_a_limited_spill_takes_bases_first_and_goes_on() -> None:
    pool = Harness(10, ssd_bytes=100)
    pool.store("abc")
    assert [change.key for change in pool.pool.spill(2)] == keys_of("abc")[:2]
    assert [change.key for change in pool.pool.spill(2)] == keys_of("abc")[2:]


# ---- purge and restore


def test_purge_takes_everything_above() -> None:
    pool = Harness(12, shape=HYBRID, ssd_bytes=100)
    pool.store("abc", (2, 1))
    pool.store("abx")
    assert not pool.pool.discard(last_key("a"), 0, Tier.ARENA)
    assert pool.pool.purge(last_key("ab"), 0, Tier.ARENA)
    assert pool.held("abc", "abx") == [1, 1]
    assert not pool.pool.purge(last_key("ab"), 0, Tier.ARENA)


def test_purge_of_an_ssd_copy_leaves_the_arena_alone() -> None:
    pool = Harness(12, ssd_bytes=100)
    pool.store("abc")
    pool.spill()
    assert pool.pool.discard(last_key("abc"), 0, Tier.ARENA)
    assert pool.pool.purge(last_key("a"), 0, Tier.SSD)
    assert pool.match("abc") == Match(2, 2, 2, 2)
    assert pool.pool.purge(last_key("a"), 0, Tier.ARENA)
    assert pool.pool.status().num_blocks == 0


def test_purge_waits_for_what_is_in_use() -> None:
    pool = Harness(12)
    pool.store("abc")
    pin = pool.pin("ab", (1, 0))
    assert not pool.pool.purge(last_key("a"), 0, Tier.ARENA)
    assert pool.held("abc") == [2]
    pool.pool.unpin(pin.pin_id)
    assert pool.held("abc") == [0]


def test_a_file_found_wrong_while_it_is_read_goes_when_the_fill_ends() -> None:
    pool = Harness(3, ssd_bytes=100)
    pool.store("ab")
    pool.spill()
    pool.pool.make_room(3)
    pin = pool.pin("ab", (1, 0))
    fill = pool.pool.reserve(FULL, bytes(16), 0, keys_of("ab"), [(0, 0), (1, 0)], 1.0)
    assert pool.commit(fill, (0, 0)) == [True]
    assert not pool.pool.purge(last_key("ab"), 0, Tier.SSD)
    pool.pool.abort(fill.fill_id)
    assert pool.match("ab") == Match(2, 2, 1, 1)
    pool.pool.unpin(pin.pin_id)
    assert pool.match("ab") == Match(1, 1, 1, 1)


def test_restore_needs_bases_and_free_blocks() -> None:
    before = Harness(6, shape=HYBRID, ssd_bytes=100)
    before.store("ab", (1, 1))
    before.spill()
    before.pool.discard(last_key("ab"), 0, Tier.ARENA)
    changes = before.pool.changes()
    after = Harness(6, shape=HYBRID, ssd_bytes=100)
    assert not after.pool.restore(changes[-1], 5.0)
    assert all(after.pool.restore(change, 5.0) for change in changes)
    assert not any(after.pool.restore(change, 5.0) for change in changes)
    assert after.pool.changes() == changes == sorted(after.changes, key=changes.index)
    after.pool.check_invariants()
    assert after.match("ab") == before.match("ab")
    taken = Harness(6, shape=HYBRID, ssd_bytes=2)
    taken.allocator.allocate(6)
    assert [taken.pool.restore(change, 5.0) for change in changes].count(True) == 2


def test_restored_parts_are_older_than_new_ones() -> None:
    before = Harness(4)
    before.store("ab")
    after = Harness(4)
    for change in before.pool.changes():
        after.pool.restore(change, 0.0)
    after.store("x")
    after.store("yz")
    assert after.held("ab", "x", "yz") == [1, 1, 2]


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
    listed, num_prefixes = pool.pool.prefixes("size", 2, pool.now_s)
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
    [recent], _ = pool.pool.prefixes("recent", 1, pool.now_s)
    assert (recent.key, recent.idle_s, recent.is_pinned) == (last_key("q"), 5.0, True)
    hits, _ = pool.pool.prefixes("hits", 3, pool.now_s)
    assert [prefix.num_hits for prefix in hits] == [1, 1, 0]
    pool.pool.unpin(pin.pin_id)


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
