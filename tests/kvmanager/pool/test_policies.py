"""Scores of cached parts, and the queues that find the lowest: no pool."""

import math
from dataclasses import dataclass

import pytest

from kvmanager.pool.eviction import CheapestFirst, EvictionQueue, Lfu, LongestFirst, Lru


@dataclass(eq=False)
class Entry:
    last_used: int = 0
    num_hits: int = 0
    index: int = 0
    nbytes: int = 64
    block_tokens: int = 4
    recompute_tokens: int = 4
    may_go: bool = True


def queue_of(*entries: Entry) -> EvictionQueue[Entry]:
    queue: EvictionQueue[Entry] = EvictionQueue(Lru().score, lambda entry: entry.may_go)
    for entry in entries:
        queue.offer(entry)
    return queue


# ---- policies


def test_lru_gives_up_what_was_used_longest_ago_and_of_one_use_the_end() -> None:
    score = Lru().score
    assert score(Entry(last_used=1, index=0)) < score(Entry(last_used=2, index=9))
    assert score(Entry(last_used=1, index=5)) < score(Entry(last_used=1, index=4))


def test_lfu_gives_up_what_served_least_then_goes_by_use_and_place() -> None:
    score = Lfu().score
    assert score(Entry(num_hits=1, last_used=9)) < score(Entry(num_hits=2, last_used=1))
    assert score(Entry(num_hits=1, last_used=1)) < score(Entry(num_hits=1, last_used=2))
    assert score(Entry(index=5)) < score(Entry(index=4))


def test_length_gives_up_the_farthest_from_the_beginning_then_the_oldest() -> None:
    score = LongestFirst().score
    assert score(Entry(index=5, last_used=9)) < score(Entry(index=4, last_used=1))
    assert score(Entry(index=5, last_used=1)) < score(Entry(index=5, last_used=2))


def test_cost_is_the_time_saved_by_a_byte() -> None:
    """64 tokens after 128 others, where attention is as large as the rest after 128."""
    policy = CheapestFirst(quadratic_tokens=128.0, half_life_uses=10.0)
    entry = Entry(index=2, block_tokens=64, recompute_tokens=64, nbytes=32)
    assert policy.score(entry) == (math.log2(64 * 2 / 32), -2)
    assert policy.score(Entry(recompute_tokens=64, nbytes=32)) == (1.0, 0)


def test_cost_is_worth_half_after_its_half_life() -> None:
    policy = CheapestFirst(half_life_uses=10.0)
    now, later = policy.score(Entry(last_used=5)), policy.score(Entry(last_used=15))
    assert later[0] - now[0] == pytest.approx(1.0)


def test_the_usual_cost_doubles_after_64k_tokens_and_halves_in_1000_uses() -> None:
    policy = CheapestFirst()
    first = policy.score(Entry())[0]
    assert policy.score(Entry(index=65536 // 4))[0] - first == pytest.approx(1.0)
    assert policy.score(Entry(last_used=1000))[0] - first == pytest.approx(1.0)


# ---- the queue


def test_the_head_is_the_lowest_and_stays_until_it_is_taken() -> None:
    old, new = Entry(last_used=1), Entry(last_used=2)
    queue = queue_of(new, old)
    assert queue.head() == ((1, 0), old)
    assert queue.head() == ((1, 0), old)
    queue.pop()
    assert old not in queue
    assert queue.head() == ((2, 0), new)
    queue.pop()
    assert queue.head() is None


def test_an_entry_that_was_used_meanwhile_is_judged_anew() -> None:
    used, other = Entry(last_used=1), Entry(last_used=2)
    queue = queue_of(used, other)
    used.last_used = 3
    assert queue.head() == ((2, 0), other)
    assert used in queue
    queue.pop()
    assert queue.head() == ((3, 0), used)


def test_what_may_not_go_is_dropped_and_can_be_offered_again() -> None:
    held, other = Entry(last_used=1), Entry(last_used=2)
    queue = queue_of(held, other)
    held.may_go = False
    assert queue.head() == ((2, 0), other)
    assert held not in queue
    held.may_go = True
    queue.offer(held)
    assert queue.head() == ((1, 0), held)


def test_an_entry_is_queued_once() -> None:
    entry = Entry()
    queue = queue_of(entry, entry)
    assert len(queue) == 1


def test_of_equal_scores_the_first_offered_goes_first() -> None:
    """Entries themselves have no order."""
    first, second = Entry(), Entry()
    queue = queue_of(first, second)
    assert queue.head() == ((0, 0), first)


@pytest.mark.parametrize(("num_queued", "is_pruned"), [(1024 + 20, False), (1024 + 21, True)])
def test_a_queue_is_pruned_when_most_of_it_cannot_be_there(
    num_queued: int, is_pruned: bool
) -> None:
    """Twice as many as exist, and a thousand more."""
    entries = [Entry(last_used=number) for number in range(num_queued)]
    queue = queue_of(*entries)
    for entry in entries[:-5]:
        entry.may_go = False
    queue.prune(10)
    assert len(queue) == (5 if is_pruned else num_queued)
    assert (entries[0] in queue) is not is_pruned
    assert entries[-1] in queue
    assert queue.head() == ((num_queued - 5, 0), entries[-5])
