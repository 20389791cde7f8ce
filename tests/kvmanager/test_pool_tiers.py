"""The prefix pool in arena and SSD: what is copied, promoted, purged and restored."""

from pool_cases import FULL, HYBRID, Harness, keys_of, last_key

from kvmanager.pool.pool import Match, Tier

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
