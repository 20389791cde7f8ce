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
    assert table.num_live() == 50_000


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
    assert table.num_live() == 0
    assert table.num_places == places


def test_key_zero_is_a_key_like_others() -> None:
    table = BlockTable()
    zero = np.zeros(1, dtype=np.uint64)
    assert table.lookup(zero).tolist() == [NOBODY]
    table.insert(zero, np.array([7], dtype=np.uint32))
    assert table.lookup(zero).tolist() == [7]


def test_renumbering_reaches_every_place() -> None:
    table = BlockTable()
    keys = keys_of(range(3000))
    table.insert(keys, ids_of(keys))
    mapping = np.arange(1100, dtype=np.uint32)
    mapping[2:] += 5
    table.renumber(mapping)
    assert (table.lookup(keys) == ids_of(keys) + 5).all()
    counts = table.counts(1200)
    assert counts[UNUSED] == table.num_places - 3000
    assert counts[2:].sum() == 3000


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
    assert table.num_live() == sum(value != NOBODY for value in model.values())


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


def test_renumbering_drops_unused_sets_and_a_column() -> None:
    sets = HolderSets()
    first, second = sets.add_column(), sets.add_column()
    kept = sets.stepped(nobodies(3), first, flags_of(1, 2, 3))
    kept = sets.stepped(kept, second, flags_of(7, 7, 7))
    used = np.zeros(len(sets), dtype=np.bool_)
    used[kept[:2]] = True
    mapping = sets.renumber(used, without=second)
    assert mapping[NOBODY] == NOBODY
    assert len(sets) == 4
    assert sets.rows(mapping[kept[:2]])[:, first].tolist() == [1, 2]
    assert sets.add_column() == second
    assert sets.rows(mapping[kept[:2]])[:, second].tolist() == [0, 0]


def test_sets_that_only_one_node_held_become_the_empty_set_without_it() -> None:
    sets = HolderSets()
    only = sets.add_column()
    held = sets.stepped(nobodies(1), only, flags_of(5))
    used = np.ones(len(sets), dtype=np.bool_)
    assert sets.renumber(used, without=only)[held].tolist() == [NOBODY]
