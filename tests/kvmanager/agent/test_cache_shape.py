"""What a block consists of, when a prefix can be resumed, and which boundaries are kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simple_layouts import attention, delta_net, layout, paged, state

from kvmanager.layout import KVGroup, KVKind, KVLayout
from kvmanager.pool.nodes import Geometry
from kvmanager.pool.placement import StatePlacement
from kvmanager.pool.shape import CacheShape, PartKind, PartShape, part_extents

FULL = KVGroup(KVKind.FULL, 16, (paged("a.0", 1000), paged("a.1", 500)))
MLA = KVGroup(KVKind.MLA, 32, (paged("m.0", 64, 32),))
WINDOW = KVGroup(KVKind.WINDOW, 16, (paged("w.0", 300),), window_tokens=128)
LONG_WINDOW = KVGroup(KVKind.WINDOW, 16, (paged("w.1", 300),), window_tokens=1024)
SAME_WINDOW = KVGroup(KVKind.WINDOW, 32, (paged("w.2", 200, 32),), window_tokens=128)
RECURRENT = KVGroup(KVKind.RECURRENT, 1, (state("r.0", 777),))
CONVOLUTION = KVGroup(KVKind.RECURRENT, 1, (state("c.0", 3),))


def test_attention_alone_has_blocks_of_at_least_64_tokens() -> None:
    shape = CacheShape.of(layout(FULL, MLA))
    assert shape.block_tokens == 64
    assert shape.parts == (PartShape(PartKind.KV, 4 * 1500 + 2 * 64, 0, (0, 1)),)
    odd = KVGroup(KVKind.FULL, 21, (paged("a", 1, 21),))
    assert CacheShape.of(layout(odd)).block_tokens == 84, "63 are too few"
    huge = KVGroup(KVKind.FULL, 528, (paged("a", 1, 528),))
    assert CacheShape.of(layout(huge)).block_tokens == 528


def test_recurrent_layers_fix_the_block_at_the_engines_pages() -> None:
    shape = CacheShape.of(layout(RECURRENT, FULL, CONVOLUTION))
    assert shape.block_tokens == 16
    assert shape.parts == (
        PartShape(PartKind.KV, 1500, 0, (1,)),
        PartShape(PartKind.STATE, 780, 0, (0, 2)),
    )
    assert CacheShape.of(layout(RECURRENT)).block_tokens == 512


@pytest.mark.parametrize(
    ("window_tokens", "reach"), [(1, 0), (2, 1), (64, 1), (65, 1), (66, 2), (129, 2), (130, 3)]
)
def test_a_window_reaches_back_from_the_next_token(window_tokens: int, reach: int) -> None:
    """The next token sees itself and `window_tokens` - 1 before it."""
    window = PartShape(PartKind.WINDOW, 1, window_tokens)
    assert CacheShape(64, (window,)).reach(0) == reach


def test_windows_of_one_size_are_one_part() -> None:
    shape = CacheShape.of(layout(LONG_WINDOW, FULL, WINDOW, SAME_WINDOW, tp_size=2))
    assert [(part.kind, part.window_tokens, part.groups) for part in shape.parts] == [
        (PartKind.KV, 0, (1,)),
        (PartKind.WINDOW, 128, (2, 3)),
        (PartKind.WINDOW, 1024, (0,)),
    ]
    assert shape.parts[1].nbytes == 4 * 300 + 2 * 200, "each unit once, whatever ranks there are"
    assert [shape.reach(part) for part in range(3)] == [None, 2, 16]
    assert shape.has_kv
    assert shape.state_part is None


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (PartShape(PartKind.STATE, 1), PartShape(PartKind.KV, 1)),
        (PartShape(PartKind.KV, 1), PartShape(PartKind.KV, 1)),
        (PartShape(PartKind.STATE, 1), PartShape(PartKind.STATE, 1)),
    ],
)
def test_impossible_shapes_are_refused(parts: tuple[PartShape, ...]) -> None:
    with pytest.raises(ValueError, match=r"no cache shape|one part each"):
        CacheShape(64, parts)


def test_a_block_has_at_least_one_token() -> None:
    kv = (PartShape(PartKind.KV, 1),)
    assert CacheShape(1, kv).block_tokens == 1
    for block_tokens in (0, -1):
        with pytest.raises(ValueError, match=f"no cache shape: {block_tokens} tokens a block"):
            CacheShape(block_tokens, kv)


@given(st.permutations([FULL, MLA, WINDOW, LONG_WINDOW, SAME_WINDOW, RECURRENT]), st.integers(1, 4))
def test_extents_tile_every_part(groups: list[KVGroup], tp_size: int) -> None:
    whole = layout(*groups, tp_size=tp_size)
    shape = CacheShape.of(whole)
    for part, part_shape in enumerate(shape.parts):
        offset = 0
        for extent in part_extents(whole, shape, part):
            assert extent.tokens == range(shape.block_tokens)
            for item in extent.parts:
                assert item.offset == offset
                offset += item.nbytes
        assert offset == part_shape.nbytes


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("tp_size", [1, 2, 16])
def test_engines_that_are_cut_otherwise_have_the_same_parts(block: int, tp_size: int) -> None:
    """As long as their blocks are as long. Then one finds what the other has stored."""
    layers = (attention("layers.0"), attention("layers.3", 4))
    window = attention("layers.2", 2)

    def extents(cut: KVLayout, shape: CacheShape) -> list[list[object]]:
        return [
            [(extent.layer.name, extent.parts) for extent in part_extents(cut, shape, part)]
            for part in range(len(shape.parts))
        ]

    plain = layout(
        KVGroup(KVKind.FULL, 16, layers), KVGroup(KVKind.WINDOW, 16, (window,), window_tokens=128)
    )
    cut = layout(
        KVGroup(KVKind.WINDOW, block, (window,), window_tokens=128),
        *(KVGroup(KVKind.FULL, block, (layer,)) for layer in layers),
        tp_size=tp_size,
    )
    shape = CacheShape.of(cut)
    assert shape == CacheShape.of(plain)
    assert hash(shape) == hash(CacheShape.of(plain))
    assert extents(cut, shape) == extents(plain, CacheShape.of(plain))


def test_recurrent_layers_make_the_block_that_of_the_engine() -> None:
    states = KVGroup(KVKind.RECURRENT, 1, (delta_net("layers.1"),))
    blocks = [
        CacheShape.of(layout(KVGroup(KVKind.FULL, block, (attention("layers.0"),)), states))
        for block in (16, 528)
    ]
    assert [shape.block_tokens for shape in blocks] == [16, 528]
    assert blocks[0] != blocks[1]


def test_resuming_needs_kv_of_all_windows_of_the_last_and_the_state_at_the_end() -> None:
    window = PartShape(PartKind.WINDOW, 1, window_tokens=6)
    shape = CacheShape(4, (PartShape(PartKind.KV, 1), window, PartShape(PartKind.STATE, 1)))
    assert list(shape.resume_parts(3)) == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (2, 2)]
    assert list(shape.resume_parts(0)) == []
    whole, bare = [True, True, True], [True, False, False]
    assert shape.num_usable_blocks([bare, whole, whole, bare]) == 3
    assert shape.num_usable_blocks([whole, bare, whole]) == 1
    assert shape.num_usable_blocks([bare, whole]) == 0
    assert shape.num_kv_blocks([whole, [False, True, True], whole]) == 1


@given(
    st.lists(st.integers(0, 15), max_size=12),
    st.lists(st.sampled_from([1, 2, 5, 6, 9, 100]), max_size=2),
    st.booleans(),
    st.booleans(),
)
def test_a_geometry_judges_as_its_shape_does(
    masks: list[int], windows: list[int], has_kv: bool, has_state: bool
) -> None:
    parts = [PartShape(PartKind.KV, 5)] * has_kv
    parts += [PartShape(PartKind.WINDOW, 5, window_tokens=window) for window in windows]
    parts += [PartShape(PartKind.STATE, 5)] * has_state
    if not parts:
        return
    shape = CacheShape(4, tuple(parts))
    masks = [mask | has_kv for mask in masks]
    present = [[bool(mask >> part & 1) for part in range(len(parts))] for mask in masks]
    assert Geometry(shape, 2).num_usable_blocks(masks) == shape.num_usable_blocks(present)
    assert Geometry(shape, 2).num_blocks == (3,) * len(parts)


def test_each_rule_of_a_placement_asks_for_its_boundaries() -> None:
    nothing = StatePlacement(ends=False, branches=False, every_tokens=0)
    assert not nothing.wants(64, is_end=True, branch_tokens=64)
    ends = StatePlacement(ends=True, branches=False, every_tokens=0)
    assert ends.wants(64, is_end=True)
    assert not ends.wants(64, branch_tokens=64)
    branches = StatePlacement(ends=False, branches=True, every_tokens=0)
    assert branches.wants(64, branch_tokens=64)
    assert not branches.wants(64, is_end=True, branch_tokens=128)
    dense = StatePlacement(ends=False, branches=False, every_tokens=128, dense_tokens=256)
    assert [dense.wants(tokens) for tokens in (64, 128, 256, 384)] == [False, True, True, False]
    assert StatePlacement(every_block=True).wants(64)


def test_the_usual_placement_keeps_ends_and_branches_alone() -> None:
    usual = StatePlacement()
    assert usual.wants(64, is_end=True)
    assert usual.wants(64, branch_tokens=64)
    assert not usual.wants(64, branch_tokens=128)
    assert not usual.wants(64)
