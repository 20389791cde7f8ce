"""Counts everything in a pool again and compares: the invariants that tests check.

Changes nothing. It is far too slow for anything but tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kvmanager.pool.fills import Fills
from kvmanager.pool.nodes import Node, Part
from kvmanager.pool.parts import Kinds, PartBooks
from kvmanager.pool.records import BlockPart, Tier
from kvmanager.transfers.blocks import Run


def check_parts(books: PartBooks) -> None:
    """Presence, links, masks, counts and queues."""
    nbytes: Kinds = Counter()
    num_parts: Counter[Tier] = Counter()
    for key, node in books.nodes.items():
        assert node.key == key
        assert any(node.parts), f"block {key.hex()} has no part"
        _check_node(books, node)
        for part in _parts(node):
            for tier in Tier:
                nbytes[tier, part.kind] += part.nbytes * part.is_in(tier)
                num_parts[tier] += part.is_in(tier)
            _check_part(books, part)
    assert +nbytes == +books.nbytes
    assert +num_parts == +books.num_parts
    num_children = sum(1 for node in books.nodes.values() for _ in node.children())
    assert num_children == sum(1 for node in books.nodes.values() if node.up is not None)
    assert books.num_present == sum(1 for node in books.nodes.values() if node.present)
    assert books.num_blocks <= books.max_blocks
    ssd_bytes = sum(size for (tier, _), size in nbytes.items() if tier is Tier.SSD)
    assert ssd_bytes <= books.ssd_bytes
    books.check_queues()
    if not books.to_purge:
        check_condemned(books)


def check_condemned(books: PartBooks) -> None:
    """With nothing left to purge, every copy that must go is condemned, and goes when it can."""
    for part in (part for node in books.nodes.values() for part in _parts(node)):
        base = part.node.base(part.number)
        for tier in Tier:
            if part.is_in(tier) and base is not None and part.goes_with(base, tier):
                assert part.is_condemned(tier)
            if part.is_condemned(tier):
                assert part.is_in(tier)
                assert not books.may_leave(part, tier)


def check_uses(
    books: PartBooks,
    pins: Mapping[int, Sequence[tuple[BlockPart, Part]]],
    fills: Fills,
) -> None:
    """Pins, fills, and the owner of each block of the arena."""
    num_pins = Counter(part for held in pins.values() for _, part in held)
    fillings = [filling for fill in fills.unwritten.values() for filling in fill.values()]
    num_filling = sum(filling.num_blocks for filling in fillings)
    runs = [run for filling in fillings for run in filling.runs]
    for node in books.nodes.values():
        for part in _parts(node):
            assert part.num_pins == num_pins.pop(part, 0)
            runs += part.runs
            if (filling := part.filling) is not None:
                assert filling.part is part
                if filling.is_written:
                    runs += filling.runs
                    num_filling += filling.num_blocks
                    base = node.base(part.number)
                    assert base is not None
                    assert part in fills.waiting[base.node.key]
                    assert not base.is_present
    assert not num_pins, "something is pinned that is not here"
    pinned = {part for held in pins.values() for _, part in held if part.runs}
    assert books.pinned_blocks == sum(part.num_blocks for part in pinned)
    assert books.pinned_bytes == sum(part.nbytes for part in pinned)
    assert fills.num_blocks == num_filling
    owned = [block for run in runs for block in range(run.first, run.end)]
    assert len(owned) == len(set(owned)) == books.num_blocks, "a block is owned twice, or lost"
    free = {block for run in books.allocator.free_runs() for block in _blocks(run)}
    assert free.isdisjoint(owned)


def _check_node(books: PartBooks, node: Node) -> None:
    parts = list(_parts(node))
    assert node.present == sum(1 << part.number for part in parts if part.is_present)
    assert node.in_arena == sum(1 << part.number for part in parts if part.runs)
    if not node.geometry.has_kv:
        return
    assert node.kv is not None, "windows and states need their block's KV"
    following = list(node.children())
    assert all(books.nodes[each.key] is each and each.up is node for each in following)
    others = [part for part in parts if not part.is_kv]
    busy = [part for part in others if part.num_pins]
    filling = [part for part in others if part.filling is not None]
    assert node.num_needs == len(following) + len(busy) + len(filling)
    above = [*others, *(each.kv for each in following)]
    assert node.num_ssd_needs == sum(1 for part in above if part is not None and part.on_ssd)
    if node.index:
        assert node.up is books.nodes[node.parent]
        assert node.up.index == node.index - 1
        assert node.up.last_used >= node.prefix_used


def _check_part(books: PartBooks, part: Part) -> None:
    assert part.is_present or part.filling is not None
    assert not (part.runs and part.filling is not None)
    assert part.num_pins == 0 or part.is_present
    assert sum(run.length for run in part.runs) in (0, part.num_blocks)
    assert part.last_used <= part.node.last_used
    base = part.node.base(part.number)
    if base is not None:
        assert base.is_present or not part.is_present, "a hole in a chain"
        assert base.is_present or base.filling is not None
        is_based = base.on_ssd or base.is_spilling or part.is_condemned(Tier.SSD)
        assert not part.on_ssd or is_based
    if part in books.to_spill:
        assert part.runs
        assert not part.on_ssd


def _parts(node: Node) -> Iterator[Part]:
    return (part for part in node.parts if part is not None)


def _blocks(run: Run) -> range:
    return range(run.first, run.end)
