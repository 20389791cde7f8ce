"""Keys in the order of their latest change: what is read, and that no step goes through all."""

import random

import pytest

from kvmanager.agent.cache.change_log import PAGE_KEYS, ChangeLog, Latest


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def filled(num_keys: int) -> ChangeLog:
    """Key n changed with number 2 n."""
    log = ChangeLog()
    for number in range(num_keys):
        log.add(key(number), Latest(2 * number, 0.0))
    return log


def seqs(log: ChangeLog, after: int, limit: int) -> list[int]:
    return [latest.seq for _, latest in log.after(after, limit)]


def test_changes_are_read_from_a_number_on() -> None:
    log = filled(10)
    assert seqs(log, -1, 3) == [0, 2, 4]
    assert seqs(log, 4, 3) == [6, 8, 10]
    assert seqs(log, 5, 100) == [6, 8, 10, 12, 14, 16, 18]
    assert seqs(log, 18, 3) == []
    assert seqs(ChangeLog(), 0, 3) == []


def test_reading_goes_on_over_pages() -> None:
    log = filled(3 * PAGE_KEYS)
    last = 2 * (PAGE_KEYS - 1)
    assert seqs(log, last - 2, 3) == [last, last + 2, last + 4]
    assert seqs(log, last, PAGE_KEYS + 1) == list(range(last + 2, last + 2 * PAGE_KEYS + 3, 2))


def test_what_is_taken_out_is_gone() -> None:
    log = filled(3)
    log.remove(key(1), 2)
    assert (len(log), seqs(log, -1, 9)) == (2, [0, 4])
    assert log.pop_first() == (key(0), Latest(0, 0.0))
    with pytest.raises(KeyError):
        log.remove(key(0), 0)
    with pytest.raises(KeyError):
        ChangeLog().remove(key(0), 0)


def test_the_first_is_found_behind_pages_that_have_become_empty() -> None:
    log = filled(3 * PAGE_KEYS)
    for number in range(2 * PAGE_KEYS):
        log.remove(key(number), 2 * number)
    assert log.pop_first()[0] == key(2 * PAGE_KEYS)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_changes_agrees_with_a_plain_list(seed: int) -> None:
    rng = random.Random(seed)
    log, model, seq = ChangeLog(), dict[bytes, int](), 0
    for step in range(20_000):
        seq += 2
        name = key(rng.randrange(6000))
        if name in model:
            log.remove(name, model.pop(name))
        if rng.random() < (0.7 if step < 12_000 else 0.2):
            log.add(name, Latest(seq, 0.0))
            model[name] = seq
        if not step % 500:
            place, limit = rng.randrange(seq + 2), rng.randrange(1, 3000)
            wanted = sorted(value for value in model.values() if value > place)
            assert seqs(log, place, limit) == wanted[:limit]
            assert len(log) == len(model)


def test_sparse_pages_are_joined() -> None:
    """Pages of a few keys each would make a step of many pages."""
    num_keys = 40 * PAGE_KEYS
    log = filled(num_keys)
    for number in range(num_keys):
        if number % 64:
            log.remove(key(number), 2 * number)
    assert len(log) == num_keys // 64
    assert log.num_pages <= 1 + len(log) // (PAGE_KEYS // 4)
