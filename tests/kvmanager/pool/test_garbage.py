"""The garbage collector neither visits a pool's blocks nor is needed to free them."""

import gc
import sys
from collections.abc import Iterator

import pytest
from pool_cases import FULL, HYBRID, ROOT, Harness, keys_of

from kvmanager.agent.cache.feed import FeedLog
from kvmanager.pool.nodes import Node, Part
from kvmanager.pool.records import PoolChange, Tier
from kvmanager.pool.shape import CacheShape
from kvmanager.pool.ssd import SsdEntry

NUM_BLOCKS = 2000


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_visited() -> int:
    """How many objects a full collection would visit. A collection forgets a tuple of nothing that
    it visits, and only the next one a tuple of such tuples.
    """
    gc.collect()
    gc.collect()
    return len(gc.get_objects())


def test_blocks_on_ssd_cost_collections_nothing() -> None:
    pool, feed = Harness(10, shape=HYBRID, ssd_bytes=1 << 30), FeedLog()
    changes = []
    parent = ROOT
    for index in range(NUM_BLOCKS):
        key = index.to_bytes(16, "little")
        for part in (0, 1):
            changes.append(PoolChange(True, Tier.SSD, key, parent, index, part, HYBRID, ()))
        parent = key
    before = num_visited()
    for change in changes:
        assert pool.pool.restore(change, 0.0)
        feed.part_changed(change, 0.0)
    pool.changes.clear()  # what the test itself has heard
    assert num_visited() - before < NUM_BLOCKS / 10


def test_what_is_known_of_files_costs_collections_nothing() -> None:
    entry = SsdEntry(key=ROOT, parent=ROOT, index=0, part=0, nbytes=1, checksum=0, shape=HYBRID)
    assert not gc.is_tracked(entry)


def nodes_and_parts(pool: Harness, path: str) -> tuple[list[Node], list[Part]]:
    nodes = [pool.pool._books.nodes[key] for key in keys_of(path)]
    return nodes, [part for node in nodes for part in node.parts if part is not None]


def are_held_by_nobody(items: list[Node] | list[Part]) -> bool:
    """Whether each is freed once `items` lets go of it, the last one first."""
    while items:
        if sys.getrefcount(items[-1]) > 2:  # that of `items`, and that of the argument
            return False
        items.pop()
    return True


def test_what_is_evicted_holds_itself_no_more() -> None:
    pool = Harness(11, shape=HYBRID)
    pool.store("abcde", (1, 1), (4, 1))
    nodes, parts = nodes_and_parts(pool, "abcde")
    pool.store("uvwxy", (4, 1), (2, 1))
    assert pool.held("abcde") == [0]
    assert are_held_by_nobody(parts)
    assert are_held_by_nobody(nodes)


def test_what_was_not_filled_holds_itself_no_more() -> None:
    pool = Harness(10)
    fill = pool.reserve("abc", [(0, 0), (1, 0), (2, 0)])
    nodes, parts = nodes_and_parts(pool, "abc")
    pool.pool.abort(fill.fill_id)
    assert are_held_by_nobody(parts)
    assert are_held_by_nobody(nodes)


@pytest.mark.parametrize(
    ("shape", "number", "tiers"),
    [(FULL, 0, [Tier.ARENA]), (HYBRID, 1, [Tier.ARENA]), (FULL, 0, [Tier.ARENA, Tier.SSD])],
    ids=["KV", "state", "KV on SSD"],
)
def test_of_what_was_discarded_the_queues_hold_a_bounded_number(
    shape: CacheShape, number: int, tiers: list[Tier]
) -> None:
    pool = Harness(10, shape=shape, ssd_bytes=1 if Tier.SSD in tiers else 0)
    parts = []
    for _ in range(3000):
        pool.store("a", *([(0, number)] if number else []))
        pool.spill()
        parts.append(nodes_and_parts(pool, "a")[1][number])
        for tier in tiers:
            assert pool.pool.discard(keys_of("a")[0], number, tier)
    num_held = sum(sys.getrefcount(part) > 3 for part in parts)  # `parts`, `part`, the argument
    assert num_held < 1100
