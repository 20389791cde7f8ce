"""Which parts of cached blocks a transfer brings, and where their bytes lie in it."""

import random

import pytest
from simple_layouts import attention, delta_net, paged, state
from simple_layouts import layout as made_of

from kvmanager.agent.cache.promotion import CopyRange, LandedParts, copy_ranges
from kvmanager.layout import KVGroup, KVKind, KVLayer, KVLayout, PartExtent
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


def item(layer: str, part: str, unit: int, number: int, nbytes: int) -> bytes:
    """What engines have of one KV head and token, or of one head's state."""
    return random.Random(f"{layer} {part} {unit} {number}").randbytes(nbytes)


def fill(content: bytearray, layer: KVLayer, extent: PartExtent, first: int = 0) -> None:
    """Write an extent's items. Item 0 of the extent is `first` of the prompt."""
    for unit in range(extent.part.num_units):
        for number in extent.items:
            at, nbytes = extent.place(unit, number), extent.part.item_bytes
            content[at : at + nbytes] = item(
                layer.name, extent.part.name, unit, first + number, nbytes
            )


def transfer(layout: KVLayout, num_tokens: int, cached_tokens: int, window_step: int) -> bytes:
    """What a sender with this layout writes."""
    content = bytearray(layout.transfer_bytes(num_tokens, cached_tokens, window_step))
    for extent in layout.extents(num_tokens, cached_tokens, window_step):
        for part in extent.parts:
            fill(content, extent.layer, part)
    return bytes(content)


def part_bytes(layout: KVLayout, index: int, part: int) -> bytes:
    """What workers write for this part of a block."""
    shape = CacheShape.of(layout)
    content = bytearray(shape.parts[part].nbytes)
    for extent in part_extents(layout, shape, part):
        for found in extent.parts:
            per_item = found.part.tokens_per_item
            first = index * shape.block_tokens // per_item if per_item else 0
            fill(content, extent.layer, found, first)
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
    check_landed(layout, layout, num_tokens, cached_tokens, expected)


def check_landed(
    sender: KVLayout,
    layout: KVLayout,
    num_tokens: int,
    cached_tokens: int,
    expected: list[tuple[int, int]],
) -> None:
    """What `sender` sent is kept as engines of `layout` write the same parts."""
    shape = CacheShape.of(layout)
    landed = LandedParts(layout, shape, num_tokens, cached_tokens)
    assert landed.parts() == expected
    sent = transfer(sender, num_tokens, cached_tokens, layout.window_step)
    landing = pieces(bytearray(sent), num_tokens)
    for index, part in expected:
        target = bytearray(shape.parts[part].nbytes)
        copy_ranges(landed.ranges(index, part), landing, pieces(target, index))
        assert target == part_bytes(layout, index, part), (index, part)


def cut(block: int, tp_size: int = 1, *, split: bool = False) -> KVLayout:
    """One model in an engine with these blocks and ranks; `split`: every layer is a group."""
    layers = (attention("layers.1", 8), attention("layers.3", 2))
    groups = [KVGroup(KVKind.FULL, block, (layer,)) for layer in layers]
    return made_of(
        KVGroup(KVKind.WINDOW, block, (attention("layers.2", 4),), window_tokens=33),
        *(groups if split else [KVGroup(KVKind.FULL, block, layers)]),
        KVGroup(KVKind.RECURRENT, 1, (delta_net("layers.0", 2, 4),)),
        tp_size=tp_size,
    )


@pytest.mark.parametrize("sender", [cut(64), cut(48, 2), cut(16, 4, split=True), cut(16, 16)])
@pytest.mark.parametrize(
    ("receiver", "num_tokens", "cached_tokens", "expected"),
    [
        (cut(16), 64, 32, [(2, KV), (3, KV), (2, WINDOW), (3, WINDOW), (3, STATE)]),
        # Cached tokens end inside of a block of 64 or 48.
        (
            cut(16, 2, split=True),
            100,
            16,
            [*((i, KV) for i in range(1, 6)), (4, WINDOW), (5, WINDOW)],
        ),
        # The window of 33 tokens begins inside of a block of 64, which is sent whole.
        (cut(64, 2), 128, 0, [(0, KV), (1, KV), (1, WINDOW), (1, STATE)]),
        (cut(64), 160, 64, [(1, KV)]),
        (cut(32, 8), 31, 0, []),
    ],
)
def test_senders_may_have_other_blocks_and_ranks(
    sender: KVLayout,
    receiver: KVLayout,
    num_tokens: int,
    cached_tokens: int,
    expected: list[tuple[int, int]],
) -> None:
    assert sender.fingerprint() == receiver.fingerprint()
    for one in (sender, receiver):
        one.validate()
    check_landed(sender, receiver, num_tokens, cached_tokens, expected)


def test_a_whole_landing_is_one_range_for_each_part_of_a_layer() -> None:
    """Without cached blocks before and tokens behind, unit follows unit as in the block."""
    whole = cut(64)
    landed = LandedParts(whole, CacheShape.of(whole), 64)
    assert len(list(landed.ranges(0, KV))) == 2
    halves = LandedParts(whole, CacheShape.of(whole), 128)
    assert len(list(halves.ranges(0, KV))) == 8 + 2


def test_impossible_counts() -> None:
    with pytest.raises(ValueError, match="not whole items"):
        LandedParts(LAYOUT, CacheShape.of(LAYOUT), 64, 10)


def test_nothing_beside_the_ranges_is_touched() -> None:
    source, target = bytearray(b"abcdefgh"), bytearray(8)
    copy_ranges([CopyRange(1, 2, 3)], [memoryview(source)], [memoryview(target)])
    assert target == b"\0\0bcd\0\0\0"
