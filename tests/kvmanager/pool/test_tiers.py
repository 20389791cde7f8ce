"""The prefix pool in arena and SSD: what is copied, promoted, purged and restored."""

from dataclasses import replace

import pytest
from pool_cases import FULL, HYBRID, KV, STATE, Harness, keys_of, last_key

from kvmanager.pool import purge
from kvmanager.pool.purge import MAX_LOST_PER_STEP
from kvmanager.pool.records import PrefixMatch, Tier
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from kvmanager.transfers.blocks import Run

# ---- SSD


def test_what_is_on_ssd_may_leave_the_arena_and_come_back() -> None:
    pool = Harness(3, ssd_bytes=100)
    pool.store("abc")
    assert pool.spill() == keys_of("abc")
    assert pool.pool.ssd.choose(100) == []
    assert pool.pool.make_room(3)
    assert pool.match("abc") == PrefixMatch(3, 3, 0, 0)
    pin = pool.pin("abc", (0, 0), (2, 0))
    assert (pin.slots, pin.absent) == ((), ((0, 0), (2, 0)))
    fill = pool.reserve("abc", pin.absent)
    pool.commit(fill, *pin.absent)
    pool.pool.abort(fill.fill_id)
    now = pool.pool.pinned(pin.pin_id)
    assert [(slot.index, slot.part) for slot in now.slots] == [(0, 0), (2, 0)]
    assert now.absent == ()
    assert pool.match("abc") == PrefixMatch(3, 3, 1, 1)


def test_a_failed_promotion_leaves_the_copy_on_ssd() -> None:
    pool = Harness(3, ssd_bytes=100)
    pool.store("ab")
    pool.spill()
    pool.pool.make_room(3)
    fill = pool.reserve("ab", [(0, 0), (1, 0)])
    assert not pool.pool.discard(last_key("ab"), 0, Tier.SSD), "it is being read"
    pool.pool.abort(fill.fill_id)
    assert pool.match("ab") == PrefixMatch(2, 2, 0, 0)
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
    assert pool.pool.status().evictions == {(Tier.SSD, PartKind.KV): 2}
    pool.hit("ab")
    assert pool.spill() == [last_key("ab")], "used again, so copied again"


def test_what_is_older_than_everything_on_a_full_ssd_stays_off_it() -> None:
    pool = Harness(10, ssd_bytes=1)
    pool.store("a")
    [spill] = pool.pool.ssd.choose(1)
    pool.store("b")
    pool.spill()
    assert not pool.pool.ssd.stored(spill)
    pool.hit("b")
    assert pool.pool.ssd.choose(10) == []


def test_a_state_does_not_take_the_place_of_the_kv_that_it_stands_on() -> None:
    pool = Harness(10, shape=HYBRID, ssd_bytes=3)
    pool.store("a", (0, 1))
    kv, state = pool.pool.ssd.choose(2)
    assert (kv.change.part, state.change.part) == (0, 1)
    assert pool.pool.ssd.stored(kv)
    assert not pool.pool.ssd.stored(state)
    assert pool.pool.status().nbytes[Tier.SSD, PartKind.KV] == 1
    pool.pool.check_invariants()


def test_a_copy_without_its_base_on_ssd_is_not_kept() -> None:
    pool = Harness(10, ssd_bytes=100, shape=HYBRID)
    pool.store("ab", (1, 1))
    first, second, state = pool.pool.ssd.choose(100)
    assert [(each.change.key, each.change.part) for each in (first, second, state)] == [
        (last_key("a"), 0),
        (last_key("ab"), 0),
        (last_key("ab"), 1),
    ]
    assert pool.pool.ssd.stored(state), "its base is on the way"
    pool.pool.ssd.not_stored(second)
    assert pool.pool.changes()[0].tier is not Tier.SSD
    assert not pool.pool.ssd.stored(state)
    assert not pool.pool.ssd.stored(second)
    pool.pool.ssd.not_stored(first)
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
    assert pool.match("ab") == PrefixMatch(2, 2, 2, 2)


def test_a_limited_spill_takes_bases_first_and_goes_on() -> None:
    pool = Harness(10, ssd_bytes=100)
    pool.store("abc")
    assert [spill.change.key for spill in pool.pool.ssd.choose(2)] == keys_of("abc")[:2]
    assert [spill.change.key for spill in pool.pool.ssd.choose(2)] == keys_of("abc")[2:]


def test_what_has_left_the_arena_is_not_to_be_copied_any_more() -> None:
    pool = Harness(10, ssd_bytes=100)
    pool.store("ab")
    pool.leave_arena("ab")
    assert [spill.change.key for spill in pool.pool.ssd.choose(100)] == keys_of("a")


def test_a_spill_that_its_part_has_outlived_says_nothing_about_a_later_one() -> None:
    pool = Harness(10, ssd_bytes=100)
    pool.store("a")
    [former] = pool.pool.ssd.choose(1)
    pool.leave_arena("a")
    pool.store("a")
    [later] = pool.pool.ssd.choose(1)
    assert later.change == former.change
    pool.pool.ssd.not_stored(former)
    assert not pool.pool.ssd.stored(former), "what was read may have been anything"
    assert pool.pool.ssd.stored(later)
    assert not pool.pool.ssd.stored(later), "it is said once"


def test_a_copy_that_was_being_read_may_make_room_on_ssd_afterwards() -> None:
    pool = Harness(4, ssd_bytes=1)
    pool.store("a")
    pool.spill()
    pool.leave_arena("a")
    fill = pool.reserve("a", [(0, 0)])
    pool.store("b")
    assert pool.spill() == [], "the only copy on SSD is in use"
    pool.pool.abort(fill.fill_id)
    pool.hit("b")
    assert pool.spill() == [last_key("b")]
    assert pool.held("a", "b") == [0, 1]


def test_pinned_bytes_are_those_in_the_arena_each_once() -> None:
    pool = Harness(6, shape=HYBRID, ssd_bytes=100)
    pool.store("a", (0, 1))
    pool.spill()
    assert pool.pool.make_room(6)
    pins = [pool.pin("a", (0, 1)) for _ in range(3)]
    assert pool.pool.status().pinned_bytes == 0
    fill = pool.reserve("a", [(0, 0), (0, 1)])
    pool.commit(fill, (0, 0), (0, 1))
    pool.pool.abort(fill.fill_id)
    assert pool.pool.status().pinned_bytes == 3
    pool.pool.check_invariants()
    for left in (3, 3, 0):
        pool.pool.unpin(pins.pop().pin_id)
        assert pool.pool.status().pinned_bytes == left
    pool.pool.check_invariants()


def test_what_is_restored_on_ssd_need_not_be_copied_there() -> None:
    before = Harness(4, ssd_bytes=4)
    before.store("a")
    before.spill()
    after = Harness(4, ssd_bytes=4)
    after.store("a")
    assert after.pool.restore(before.pool.changes()[0], 1.0)
    after.pool.check_invariants()
    assert after.pool.ssd.choose(10) == []


# ---- purge and restore


def test_a_lost_copy_takes_everything_above_with_it() -> None:
    pool = Harness(12, shape=HYBRID, ssd_bytes=100)
    pool.store("abc", (2, 1))
    pool.store("abx")
    pool.spill()
    pool.leave_arena("ab")
    assert not pool.pool.discard(last_key("ab"), 0, Tier.SSD)
    pool.lose("ab")
    assert pool.held("abc", "abx") == [1, 1]
    assert pool.pool.status().num_blocks == 1
    assert not pool.pool.has_lost


def test_a_lost_copy_on_ssd_leaves_the_arena_alone() -> None:
    pool = Harness(12, ssd_bytes=100)
    pool.store("abc")
    pool.spill()
    assert pool.pool.discard(last_key("abc"), 0, Tier.ARENA)
    pool.lose("a")
    assert pool.match("abc") == PrefixMatch(2, 2, 2, 2)
    assert [change.tier for change in pool.pool.changes()] == [Tier.ARENA] * 2


def test_a_lost_copy_stays_in_the_books_while_something_above_it_is_in_use() -> None:
    pool = Harness(12, ssd_bytes=100)
    pool.store("abc")
    pool.spill()
    pool.leave_arena("a")
    pin = pool.pin("ab", (1, 0))
    pool.lose("a")
    assert pool.held("abc") == [2]
    pool.pool.unpin(pin.pin_id)
    assert pool.held("abc") == [0]


def test_what_is_stored_above_a_lost_copy_goes_with_it() -> None:
    pool = Harness(12, ssd_bytes=100)
    pool.store("ab")
    pool.spill()
    pool.leave_arena("ab")
    fill = pool.reserve("abc", [(2, 0)])
    pool.lose("a")
    assert pool.held("abc") == [2]
    assert pool.commit(fill, (2, 0)) == [True]
    pool.pool.abort(fill.fill_id)
    assert pool.match("abc") == PrefixMatch(1, 1, 1, 1), "the first is in the arena too"
    assert pool.allocator.num_free == 11


def test_a_copy_in_the_arena_that_others_need_stays_when_the_one_on_ssd_is_lost() -> None:
    """Otherwise the KV below them would be nowhere."""
    pool = Harness(3, ssd_bytes=100)
    pool.store("ab")
    pool.spill()
    pool.leave_arena("ab")
    pin = pool.pin("ab", (1, 0))
    pool.lose("a")
    assert pool.match("ab") == PrefixMatch(2, 2, 1, 1)
    assert not pool.pool.discard(last_key("a"), 0, Tier.ARENA)
    assert not pool.pool.make_room(3)
    pool.pool.unpin(pin.pin_id)
    assert pool.match("ab") == PrefixMatch(1, 1, 1, 1)
    assert pool.pool.make_room(3)
    assert pool.pool.status().num_blocks == 0


def test_while_the_arena_is_kept_what_was_lost_waits() -> None:
    pool = Harness(12, shape=HYBRID, ssd_bytes=4)
    pool.store("a", (0, 1))
    base, state = pool.pool.ssd.choose(2)
    assert pool.pool.ssd.stored(base)
    pool.pool.ssd.not_stored(state)
    pool.leave_arena("a")
    pool.pool.keep_arena()
    assert not pool.pool.discard(last_key("a"), 0, Tier.SSD), "the state would go with it"
    pool.lose("a")
    assert pool.pool.lookup(last_key("a"), 1) is not None
    assert not pool.pool.has_lost
    pool.pool.release_arena()
    pool.pool.drop_lost()
    assert pool.pool.status().num_blocks == 0


def test_while_the_arena_is_kept_a_copy_on_ssd_goes_if_nothing_in_the_arena_goes_with_it() -> None:
    pool = Harness(12, shape=HYBRID, ssd_bytes=100)
    pool.store("ab", (0, 1), (1, 1))
    pool.spill()
    assert pool.pool.discard(last_key("a"), 1, Tier.ARENA)
    pool.pool.keep_arena()
    assert pool.pool.discard(last_key("a"), 1, Tier.SSD), "a state, of which no other copy is"
    assert pool.pool.discard(last_key("ab"), 1, Tier.SSD), "a state that is in the arena too"
    assert pool.pool.discard(last_key("ab"), 0, Tier.SSD), "KV that is in the arena too"
    assert pool.pool.discard(last_key("a"), 0, Tier.SSD)
    assert pool.match("ab") == PrefixMatch(2, 2, 2, 2)


def test_kv_that_leaves_ssd_as_its_last_copy_takes_its_state_from_the_arena() -> None:
    pool = Harness(12, shape=HYBRID, ssd_bytes=1)
    pool.store("a", (0, 1))
    pool.spill()
    pool.leave_arena("a")
    assert pool.pool.lookup(last_key("a"), 1) is not None
    assert pool.pool.discard(last_key("a"), 0, Tier.SSD)
    assert pool.pool.status().num_blocks == 0


def test_while_the_arena_is_kept_a_full_ssd_takes_no_more() -> None:
    pool = Harness(12, ssd_bytes=1)
    pool.store("a")
    pool.spill()
    pool.pool.keep_arena()
    pool.store("b")
    assert pool.spill() == []
    pool.pool.release_arena()
    pool.hit("b")
    assert pool.spill() == [last_key("b")]


def test_a_step_looks_at_so_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base twice: it cannot go before what stands on it."""
    monkeypatch.setattr(purge, "MAX_LOST_PER_STEP", 2)
    pool = Harness(2, ssd_bytes=2)
    pool.store("ab")
    pool.spill()
    assert pool.pool.make_room(2)
    pool.lose("a")
    assert pool.held("ab") == [1]
    assert pool.pool.has_lost
    pool.pool.drop_lost()
    assert pool.held("ab") == [0]
    assert not pool.pool.has_lost


def test_what_is_in_use_still_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Harness(12, ssd_bytes=100)
    pool.store("abc")
    pool.store("abd")
    pool.spill()
    for path in ("a", "abc", "abd"):
        pool.leave_arena(path)
    pins = [pool.pin(path, (2, 0)) for path in ("abc", "abd")]
    pool.lose("a")
    assert pool.held("abc", "abd") == [3, 3]
    assert not pool.pool.has_lost
    monkeypatch.setattr(purge, "MAX_LOST_PER_STEP", 1)
    pool.pool.unpin(pins[0].pin_id)
    assert pool.held("abc", "abd") == [2, 3]
    assert not pool.pool.has_lost, "the second stands on the rest"
    pool.pool.unpin(pins[1].pin_id)
    while pool.pool.has_lost:
        pool.pool.drop_lost()
    assert pool.held("abd") == [0]


def test_what_is_written_anew_while_lost_copies_wait_to_go_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(purge, "MAX_LOST_PER_STEP", 2)
    pool = Harness(12, shape=HYBRID, ssd_bytes=100)
    pool.store("ab", (1, 1))
    pool.spill()
    pool.leave_arena("a")
    pool.lose("a")
    assert pool.match("ab") == PrefixMatch(2, 2, 0, 0), (
        "the second has left the arena, the rest waits"
    )
    fill = pool.reserve("ab", [(0, 0), (1, 0)])
    assert pool.commit(fill, (0, 0), (1, 0)) == [True, True]
    pool.pool.abort(fill.fill_id)
    while pool.pool.has_lost:
        pool.pool.drop_lost()
    pool.pool.check_invariants()
    assert pool.match("ab").arena_kv_blocks == 2
    assert pool.pool.status().nbytes[Tier.SSD, PartKind.KV] == 0


def test_a_lost_state_takes_nothing_with_it() -> None:
    shape = CacheShape(4, (KV, PartShape(PartKind.WINDOW, 1, window_tokens=4), STATE))
    pool = Harness(10, shape=shape, ssd_bytes=100)
    pool.store("ab", (0, 1), (0, 2))
    pool.spill()
    assert pool.pool.discard(last_key("a"), 1, Tier.ARENA)
    pin = pool.pin("a", (0, 1))
    pool.pool.ssd.lost([(last_key("a"), 1), (last_key("x"), 0), (last_key("ab"), 2)])
    pool.pool.check_invariants()
    assert pool.pool.status().nbytes[Tier.SSD, PartKind.STATE] == 3
    assert pool.pool.pinned(pin.pin_id).absent == ((0, 1),)
    pool.pool.unpin(pin.pin_id)
    assert pool.pool.status().nbytes[Tier.SSD, PartKind.WINDOW] == 0
    assert pool.held("ab") == [2]


def test_what_was_lost_is_dropped_in_steps() -> None:
    """One lost copy may have any number above it; no call may take long."""
    path = "a" * 1000
    pool = Harness(len(path), ssd_bytes=len(path))
    pool.store(path)
    stored = [pool.pool.ssd.stored(spill) for spill in pool.pool.ssd.choose(len(path))]
    assert stored == [True] * len(path)
    assert pool.pool.make_room(len(path))
    pool.lose("a")
    dropped_in_steps = []
    while pool.pool.has_lost:
        pool.changes.clear()
        pool.pool.drop_lost()
        dropped_in_steps.append(len(pool.changes))
    assert pool.pool.status().num_blocks == 0
    assert max(dropped_in_steps) <= MAX_LOST_PER_STEP
    assert len(dropped_in_steps) > 1


def test_a_file_found_wrong_while_it_is_read_goes_when_the_fill_ends() -> None:
    pool = Harness(3, ssd_bytes=100)
    pool.store("ab")
    pool.spill()
    pool.pool.make_room(3)
    pin = pool.pin("ab", (1, 0))
    fill = pool.pool.reserve(FULL, bytes(16), 0, keys_of("ab"), [(0, 0), (1, 0)], 1.0)
    assert pool.commit(fill, (0, 0)) == [True]
    pool.lose("ab")
    pool.pool.abort(fill.fill_id)
    assert pool.match("ab") == PrefixMatch(2, 2, 1, 1)
    pool.pool.unpin(pin.pin_id)
    assert pool.match("ab") == PrefixMatch(1, 1, 1, 1)


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


def test_a_part_is_restored_where_exactly_it_lay_or_not_at_all() -> None:
    before = Harness(4)
    before.store("ab")
    first, second = before.pool.changes()
    after = Harness(2)
    assert not after.pool.restore(replace(first, runs=(Run(0, 2),)), 1.0), "it has one block"
    assert not after.pool.restore(replace(first, runs=()), 1.0)
    assert not after.pool.restore(replace(first, part=1), 1.0), "there is no such part"
    assert not after.pool.restore(replace(first, part=-1), 1.0)
    assert not after.pool.restore(replace(first, stored=False), 1.0)
    taken = after.allocator.allocate(1)
    assert not after.pool.restore(first, 1.0), "something else is there"
    after.pool.check_invariants()
    after.allocator.free(taken)
    assert after.pool.restore(first, 1.0)
    assert after.pool.restore(second, 1.0), "it fits exactly"
    assert after.pool.lookup(last_key("a"), 0) == first.runs


def test_no_more_is_restored_than_the_pool_may_have() -> None:
    before = Harness(4)
    before.store("ab")
    first, second = before.pool.changes()
    after = Harness(4, max_blocks=1)
    assert after.pool.restore(first, 1.0)
    assert not after.pool.restore(second, 1.0)


def test_restored_parts_make_room_like_others() -> None:
    before = Harness(4)
    before.store("ab")
    after = Harness(4)
    for change in before.pool.changes():
        after.pool.restore(change, 0.0)
    assert after.pool.make_room(4)


def test_restored_parts_are_older_than_new_ones() -> None:
    before = Harness(4)
    before.store("ab")
    after = Harness(4)
    for change in before.pool.changes():
        after.pool.restore(change, 0.0)
    after.store("x")
    after.store("yz")
    assert after.held("ab", "x", "yz") == [1, 1, 2]
