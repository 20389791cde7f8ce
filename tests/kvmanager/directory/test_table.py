"""The directory's hash table and its interned sets of holders, against a dict."""

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.directory.holders import NOBODY, UNUSED, HolderSets, SetIds
from kvmanager.directory.table import ABSENT, BlockTable, Keys

Flags = npt.NDArray[np.uint16]


def keys_of(numbers: range) -> Keys:
    """Spread over all bits, as digests are; ascending."""
    spread = np.arange(numbers.start, numbers.stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return np.sort(spread)


def ids_of(keys: Keys) -> SetIds:
    return (keys % np.uint64(1000)).astype(np.uint32) + np.uint32(2)


def test_what_was_inserted_is_found_and_nothing_else() -> None:
    table = BlockTable()
    keys, others = keys_of(range(50_000)), keys_of(range(50_000, 60_000))
    table.insert(keys, ids_of(keys))
    assert (table.lookup(keys) == ids_of(keys)).all()
    assert (table.lookup(others) == NOBODY).all()
    assert (table.find(others) == ABSENT).all()
    assert table.num_live == 50_000


def test_growth_in_small_steps_loses_nothing() -> None:
    table = BlockTable()
    all_keys = keys_of(range(20_000))
    for part in np.array_split(np.random.default_rng(1).permutation(all_keys), 97):
        ordered = np.sort(part)
        table.insert(ordered, ids_of(ordered))
    assert (table.lookup(all_keys) == ids_of(all_keys)).all()
    assert table.num_places <= 4 * len(all_keys)


def test_keys_of_one_bucket_spread_to_the_next_ones_and_around_the_end() -> None:
    table = BlockTable()
    # The top bits choose the bucket: all of these belong into the last one.
    keys = np.uint64(2**64 - 1) - np.arange(60, dtype=np.uint64)[::-1]
    table.insert(keys, ids_of(keys))
    assert (table.lookup(keys) == ids_of(keys)).all()
    assert table.lookup(keys - np.uint64(60)).tolist() == [NOBODY] * 60


def test_freed_places_are_used_again_and_a_table_of_them_does_not_grow() -> None:
    table = BlockTable()
    places = table.num_places
    for start in range(0, 50 * places, places // 2):
        keys = keys_of(range(start, start + places // 2))
        table.insert(keys, ids_of(keys))
        table.put(table.find(keys), np.full(len(keys), NOBODY, dtype=np.uint32))
    assert table.num_live == 0
    assert table.num_places == places


def test_key_zero_is_a_key_like_others() -> None:
    table = BlockTable()
    zero = np.zeros(1, dtype=np.uint64)
    assert table.lookup(zero).tolist() == [NOBODY]
    table.insert(zero, np.array([7], dtype=np.uint32))
    assert table.lookup(zero).tolist() == [7]


class Meanings:
    """What values mean: themselves until they are told otherwise. Counts what it is asked."""

    def __init__(self) -> None:
        self.meant = np.arange(2000, dtype=np.uint32)
        self.num_asked = 0

    def __call__(self, ids: SetIds) -> SetIds:
        self.num_asked += len(ids)
        meant: SetIds = self.meant[ids]
        return meant


def test_no_insert_moves_more_than_a_few_places_for_each_key() -> None:
    meanings = Meanings()
    table = BlockTable(meanings)
    all_keys = np.random.default_rng(1).permutation(keys_of(range(300_000)))
    most = 0
    for part in np.array_split(all_keys, 300):
        before = meanings.num_asked
        table.insert(np.sort(part), ids_of(np.sort(part)))
        most = max(most, meanings.num_asked - before)
    assert table.num_places >= 300_000
    assert most <= 20_000
    assert (table.lookup(all_keys) == ids_of(all_keys)).all()


def test_a_large_insert_finds_room_at_once() -> None:
    table = BlockTable()
    few, many = keys_of(range(50_000)), keys_of(range(50_000, 400_000))
    table.insert(few, ids_of(few))
    table.insert(many, ids_of(many))
    assert (table.lookup(few) == ids_of(few)).all()
    assert (table.lookup(many) == ids_of(many)).all()


def test_a_value_reads_as_what_it_means_and_is_rewritten_in_time() -> None:
    meanings = Meanings()
    table = BlockTable(meanings)
    keys = keys_of(range(100_000))
    table.insert(keys, ids_of(keys))
    meanings.meant[2:200] = NOBODY
    meanings.meant[200:1010] = 1010
    gone = ids_of(keys) < 200
    assert (table.lookup(keys) == np.where(gone, NOBODY, 1010)).all()
    assert table.num_live == np.count_nonzero(~gone)
    assert table.counts(1100)[2:1010].sum() == 100_000
    table.rewrite()
    none = keys[:0]
    for _ in range(100):
        table.insert(none, ids_of(none))
    assert not table.is_changing
    assert (table.lookup(keys) == np.where(gone, NOBODY, 1010)).all()
    assert np.flatnonzero(table.counts(1100)).tolist() == [1010]


def test_writes_evictions_and_new_meanings_while_keys_move_equal_an_array() -> None:
    rng = np.random.default_rng(5)
    meanings = Meanings()
    table = BlockTable(meanings)
    keys = keys_of(range(60_000))
    # More and more of them are in use, the earlier ones less and less.
    order_of_use = rng.permutation(len(keys))
    model = np.full(len(keys), NOBODY, dtype=np.uint32)
    num_changing = 0
    for step in range(200):
        start = 250 * step
        chosen = np.sort(rng.choice(order_of_use[start : start + 10_000], 900, replace=False))
        # A value that has come to mean another one is not used again.
        value = NOBODY if step % 3 == 2 else 2 + step
        values = np.full(len(chosen), value, dtype=np.uint32)
        places = table.find(keys[chosen])
        is_new = places == ABSENT
        table.put(places[~is_new], values[~is_new])
        table.insert(keys[chosen][is_new], values[is_new])
        model[chosen] = value
        if step % 20 == 19:
            meanings.meant[meanings.meant == 2 + step - 10] = int(rng.choice([NOBODY, 1999]))
        num_changing += table.is_changing
        if table.is_changing or step % 25 == 0:
            assert (table.lookup(keys) == meanings.meant[model]).all()
    assert num_changing > 10
    assert (table.lookup(keys) == meanings.meant[model]).all()
    live = meanings.meant[model] > NOBODY
    assert table.num_live == np.count_nonzero(live)
    found, ids = table.items()
    order = np.argsort(found)
    assert (found[order] == keys[live]).all()
    assert (ids[order] == meanings.meant[model][live]).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 2**64 - 1), max_size=200))))
def test_any_sequence_of_writes_equals_a_dict(steps: list[tuple[bool, set[int]]]) -> None:
    table = BlockTable()
    model: dict[int, int] = {}
    for number, (stores, chosen) in enumerate(steps):
        keys = np.array(sorted(chosen), dtype=np.uint64)
        value = number + 2 if stores else NOBODY
        places = table.find(keys)
        known = places != ABSENT
        table.put(places[known], np.full(int(known.sum()), value, dtype=np.uint32))
        table.insert(keys[~known], np.full(int((~known).sum()), value, dtype=np.uint32))
        model |= dict.fromkeys(chosen, value)
    keys = np.array(sorted(model), dtype=np.uint64)
    assert table.lookup(keys).tolist() == [model[int(key)] for key in keys]
    assert table.num_live == sum(value != NOBODY for value in model.values())


def flags_of(*flags: int) -> Flags:
    return np.array(flags, dtype=np.uint16)


def nobodies(count: int) -> SetIds:
    return np.full(count, NOBODY, dtype=np.uint32)


def test_equal_holders_are_one_set_however_they_came_about() -> None:
    sets = HolderSets()
    first, second = sets.add_column(), sets.add_column()
    one = sets.stepped(sets.stepped(nobodies(1), first, flags_of(1)), second, flags_of(4))
    two = sets.stepped(sets.stepped(nobodies(1), second, flags_of(4)), first, flags_of(1))
    assert one.tolist() == two.tolist()
    assert sets.rows(one).tolist() == [[1, 4]]
    gone = sets.stepped(sets.stepped(one, first, flags_of(0)), second, flags_of(0))
    assert gone.tolist() == [NOBODY]


def test_sets_stay_what_they_are_when_columns_are_added() -> None:
    sets = HolderSets()
    columns = [sets.add_column() for _ in range(8)]
    ids = sets.stepped(nobodies(3), columns[7], flags_of(1, 2, 3))
    more = [sets.add_column() for _ in range(40)]
    again = sets.stepped(nobodies(3), columns[7], flags_of(1, 2, 3))
    assert again.tolist() == ids.tolist()
    wide = sets.stepped(ids, more[-1], flags_of(9, 9, 9))
    assert sets.rows(wide)[:, [7, more[-1]]].tolist() == [[1, 9], [2, 9], [3, 9]]


def used(sets: HolderSets, *ids: SetIds) -> npt.NDArray[np.bool_]:
    """Which numbers blocks have, if these are all of them."""
    found = np.zeros(len(sets), dtype=np.bool_)
    for some in ids:
        found[some] = True
    return found


def test_a_column_that_is_dropped_leaves_nothing_and_serves_another_node() -> None:
    sets = HolderSets()
    first, second = sets.add_column(), sets.add_column()
    kept = sets.stepped(nobodies(3), first, flags_of(1, 2, 3))
    both = sets.stepped(kept, second, flags_of(7, 7, 7))
    only = sets.stepped(nobodies(1), second, flags_of(5))
    sets.drop_column(second)
    assert sets.current(both).tolist() == kept.tolist()
    assert sets.current(only).tolist() == [NOBODY]
    assert sets.current(np.array([UNUSED, NOBODY], dtype=np.uint32)).tolist() == [UNUSED, NOBODY]
    assert sets.add_column() == second
    assert sets.rows(sets.current(both))[:, second].tolist() == [0, 0, 0]
    again = sets.stepped(sets.current(both), second, flags_of(4, 4, 4))
    assert sets.rows(again).tolist() == [[1, 4], [2, 4], [3, 4]]


def test_a_number_is_given_anew_when_no_block_has_it() -> None:
    sets = HolderSets()
    first, second = sets.add_column(), sets.add_column()
    ids = sets.stepped(nobodies(3), first, flags_of(1, 2, 3))
    both = sets.stepped(ids, second, flags_of(7, 7, 7))
    sets.drop_column(second)
    # Blocks have the first number only by another one that means it.
    sets.drop_unused(used(sets, both[:1], ids[1:2]))
    assert sets.current(both[:1]).tolist() == ids[:1].tolist()
    assert sets.rows(ids[:2]).tolist() == [[1, 0], [2, 0]]
    num_numbers = len(sets)
    fresh = sets.stepped(nobodies(3), second, flags_of(1, 2, 3))
    assert sorted(fresh.tolist()) == sorted([ids[2], both[1], both[2]])
    assert sets.rows(sets.current(fresh)).tolist() == [[0, 1], [0, 2], [0, 3]]
    assert len(sets) == num_numbers
