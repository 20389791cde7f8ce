"""Which parts of cached blocks a transfer brings, and where their bytes lie in it."""

import random

import pytest
from simple_layouts import paged, state

from kvmanager.agent.cache.promotion import CopyRange, LandedParts, copy_ranges
from kvmanager.layout import KVGroup, KVKind, KVLayout
from kvmanager.pool.shape import CacheShape, part_extents

LAYOUT = KVLayout(
    model_id="hybrid",
    weights="files:0",
    config_digest="0",
    tp_size=2,
    groups=(
        KVGroup(KVKind.FULL, 16, (paged("f0", 48), paged("f1", 16))),
        KVGroup(KVKind.WINDOW, 16, (paged("w0", 32),), window_tokens=33),
        KVGroup(KVKind.RECURRENT, 16, (state("s0", 40), state("s1", 24))),
    ),
)
ATTENTION = KVLayout(
    model_id="attention",
    weights="files:0",
    config_digest="0",
    tp_size=1,
    groups=(KVGroup(KVKind.FULL, 16, (paged("f0", 48),)),),
)
KV, WINDOW, STATE = 0, 1, 2


def page(layer: str, rank: int, number: int, nbytes: int) -> bytes:
    """What the engine has in one page of a layer."""
    return random.Random(f"{layer} {rank} {number}").randbytes(nbytes)


def transfer(layout: KVLayout, num_tokens: int, cached_tokens: int) -> bytes:
    content = bytearray(layout.transfer_bytes(num_tokens, cached_tokens))
    for rank in range(layout.tp_size):
        for extent in layout.extents(num_tokens, rank, cached_tokens):
            at = extent.offset
            for number in extent.pages:
                nbytes = extent.layer.page_bytes
                content[at : at + nbytes] = page(extent.layer.name, rank, number, nbytes)
                at += nbytes
    return bytes(content)


def part_bytes(layout: KVLayout, index: int, part: int) -> bytes:
    """What a worker writes for this part of a block."""
    shape = CacheShape.of(layout)
    content = bytearray(shape.parts[part].nbytes)
    for rank in range(layout.tp_size):
        for extent in part_extents(layout, shape, part, rank):
            group = layout.groups[extent.group_index]
            first = index * shape.block_tokens // group.tokens_per_block
            at, nbytes = extent.offset, extent.layer.page_bytes
            for number in range(first, first + extent.num_pages):
                content[at : at + nbytes] = page(extent.layer.name, rank, number, nbytes)
                at += nbytes
    return bytes(content)


def pieces(content: bytearray, seed: int) -> list[memoryview]:
    """Views that cut the content anywhere."""
    cuts = sorted(random.Random(seed).sample(range(1, len(content)), 5))
    view = memoryview(content)
    return [view[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]


@pytest.mark.parametrize(
    ("layout", "num_tokens", "cached_tokens", "expected"),
    [
        # The window of 33 tokens reaches back over 32, two blocks, in whole pages.
        (LAYOUT, 64, 0, [*((i, KV) for i in range(4)), (2, WINDOW), (3, WINDOW), (3, STATE)]),
        (LAYOUT, 64, 48, [(3, KV), (2, WINDOW), (3, WINDOW), (3, STATE)]),
        (LAYOUT, 70, 32, [(2, KV), (3, KV), (2, WINDOW), (3, WINDOW)]),
        (LAYOUT, 15, 0, []),
        (LAYOUT, 16, 0, [(0, KV), (0, WINDOW), (0, STATE)]),
        (ATTENTION, 200, 64, [(1, KV), (2, KV)]),
        (ATTENTION, 63, 0, []),
    ],
)
def test_whole_parts_come_over_byte_for_byte(
    layout: KVLayout, num_tokens: int, cached_tokens: int, expected: list[tuple[int, int]]
) -> None:
    landed = LandedParts(layout, num_tokens, cached_tokens)
    assert landed.parts() == expected
    landing = pieces(bytearray(transfer(layout, num_tokens, cached_tokens)), num_tokens)
    shape = CacheShape.of(layout)
    for index, part in expected:
        target = bytearray(shape.parts[part].nbytes)
        copy_ranges(landed.ranges(index, part), landing, pieces(target, index))
        assert target == part_bytes(layout, index, part), (index, part)


def test_impossible_counts() -> None:
    with pytest.raises(ValueError, match="not whole pages"):
        LandedParts(LAYOUT, 64, 10)


def test_nothing_beside_the_ranges_is_touched() -> None:
    source, target = bytearray(b"abcdefgh"), bytearray(8)
    copy_ranges([CopyRange(1, 2, 3)], [memoryview(source)], [memoryview(target)])
    assert target == b"\0\0bcd\0\0\0"
