"""Blocks and their parts: what they cost to compute again, and which copies of them are sound."""

import pytest
from pool_cases import HYBRID, KV, STATE

from kvmanager.pool.nodes import Geometry, Node, Part
from kvmanager.pool.records import Tier
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from kvmanager.transfers.blocks import Run

SHORT = PartShape(PartKind.WINDOW, 7, window_tokens=5)  # reaches over 1 block of 4 tokens
LONG = PartShape(PartKind.WINDOW, 7, window_tokens=10)  # reaches over 3
EVERYTHING = CacheShape(4, (KV, SHORT, LONG, STATE))
ARENA, SSD = 1 << Tier.ARENA, 1 << Tier.SSD


def blocks(shape: CacheShape, num_blocks: int) -> list[Node]:
    """One prompt, of whose blocks nothing is here."""
    geometry = Geometry(shape, 2)
    nodes: list[Node] = []
    for index in range(num_blocks):
        up = nodes[-1] if nodes and geometry.has_kv else None
        nodes.append(Node(bytes([index]), bytes([index - 1 & 255]), index, geometry, up))
    return nodes


def add(node: Node, number: int) -> Part:
    part = Part(node, number, last_used=0)
    node.put(number, part)
    return part


def copy(*, in_arena: bool = False, on_ssd: bool = False, condemned: int = 0) -> Part:
    part = add(blocks(HYBRID, 1)[0], 0)
    part.runs = (Run(0, 1),) if in_arena else ()
    part.on_ssd, part.condemned = on_ssd, condemned
    return part


# ---- geometry


def test_a_geometry_rounds_parts_up_to_blocks_and_knows_its_masks() -> None:
    geometry = Geometry(EVERYTHING, 2)
    assert geometry.num_blocks == (1, 4, 4, 2)
    assert geometry.state_mask == 0b1000
    assert geometry.windows == ((0b10, 1), (0b100, 3))
    assert geometry.has_kv
    assert Geometry(CacheShape(4, (KV,)), 2).state_mask == 0


# ---- what a part costs to compute again


def test_kv_saves_its_own_block() -> None:
    assert add(blocks(EVERYTHING, 3)[2], 0).recompute_tokens == 4


def test_without_kv_a_state_saves_the_whole_prompt_before_it() -> None:
    assert add(blocks(CacheShape(4, (STATE,)), 3)[2], 0).recompute_tokens == 12


def test_a_state_saves_what_follows_the_last_state_before_it() -> None:
    nodes = blocks(EVERYTHING, 5)
    last = add(nodes[4], 3)
    assert last.recompute_tokens == 20, "there is none"
    add(nodes[0], 3)
    assert last.recompute_tokens == 16
    add(nodes[3], 3)
    assert last.recompute_tokens == 4


def test_a_window_saves_what_follows_the_last_one_before_its_own_reach() -> None:
    """Of the 3 blocks that resuming needs, those before the last are part of the same tail."""
    nodes = blocks(EVERYTHING, 6)
    parts = [add(node, 2) for node in nodes[3:]]
    assert parts[-1].recompute_tokens == 24
    add(nodes[2], 2)
    assert parts[-1].recompute_tokens == 12
    short = add(nodes[5], 1)
    add(nodes[4], 1)
    assert short.recompute_tokens == 4


def test_a_window_that_reaches_over_no_other_token_saves_what_a_state_saves() -> None:
    nodes = blocks(CacheShape(4, (KV, PartShape(PartKind.WINDOW, 7, window_tokens=1))), 3)
    add(nodes[1], 1)
    assert add(nodes[2], 1).recompute_tokens == 4


def test_a_part_knows_its_shape() -> None:
    node = blocks(EVERYTHING, 2)[1]
    state, kv = add(node, 3), add(node, 0)
    assert (state.kind, state.nbytes, state.num_blocks) == (PartKind.STATE, 3, 2)
    assert (state.index, state.block_tokens) == (1, 4)
    assert (kv.is_kv, state.is_kv) == (True, False)
    assert not add(blocks(CacheShape(4, (STATE,)), 1)[0], 0).is_kv


# ---- what stands on what


def test_kv_stands_on_the_block_before_and_the_rest_on_its_own() -> None:
    first, second = blocks(HYBRID, 2)
    assert first.base(0) is None
    with pytest.raises(KeyError, match="01 stands on nothing"):
        second.base(0)
    with pytest.raises(KeyError, match="00 stands on nothing"):
        first.base(1)
    below = add(first, 0)
    assert (second.base(0), first.base(1)) == (below, below)
    assert blocks(CacheShape(4, (STATE,)), 2)[1].base(0) is None


def test_a_node_knows_its_kv() -> None:
    [node] = blocks(HYBRID, 1)
    assert node.kv is None
    kv = add(node, 0)
    assert node.kv is kv
    [bare] = blocks(CacheShape(4, (STATE,)), 1)
    add(bare, 0)
    assert bare.kv is None


def test_a_use_touches_the_block_and_its_kv() -> None:
    [node] = blocks(HYBRID, 1)
    kv, state = add(node, 0), add(node, 1)
    node.touch(7, 3.5)
    assert (node.last_used, node.last_used_s, kv.last_used, state.last_used) == (7, 3.5, 7, 0)
    node.put(0, None)
    node.touch(8, 4.0)
    assert node.last_used == 8


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_any_child_may_leave_the_others(gone: int) -> None:
    [parent] = blocks(HYBRID, 1)
    children = [Node(bytes([9, n]), parent.key, 1, parent.geometry, parent) for n in range(3)]
    assert set(parent.children()) == set(children)
    children[gone].unlink()
    left = [child for n, child in enumerate(children) if n != gone]
    assert set(parent.children()) == set(left)
    for child in left:
        child.unlink()
    assert list(parent.children()) == []
    parent.unlink()


# ---- copies


def test_a_copy_is_where_its_tier_says() -> None:
    nowhere, in_arena, on_ssd = copy(), copy(in_arena=True), copy(on_ssd=True)
    assert [part.is_present for part in (nowhere, in_arena, on_ssd)] == [False, True, True]
    assert [in_arena.is_in(tier) for tier in Tier] == [True, False]
    assert [on_ssd.is_in(tier) for tier in Tier] == [False, True]


def test_a_condemned_copy_is_not_sound() -> None:
    assert copy(in_arena=True).has_sound_copy
    assert not copy().has_sound_copy
    assert not copy(on_ssd=True, condemned=SSD).has_sound_copy
    assert copy(in_arena=True, on_ssd=True, condemned=SSD).has_sound_copy
    assert copy(in_arena=True, on_ssd=True, condemned=ARENA).has_sound_copy
    assert not copy(in_arena=True, on_ssd=True, condemned=ARENA | SSD).has_sound_copy
    condemned = copy(on_ssd=True, condemned=SSD)
    assert [condemned.is_condemned(tier) for tier in Tier] == [False, True]


def test_in_the_arena_a_copy_stays_on_any_sound_copy_below() -> None:
    part = copy(in_arena=True)
    assert not part.goes_with(copy(on_ssd=True), Tier.ARENA)
    assert not part.goes_with(copy(in_arena=True, on_ssd=True, condemned=SSD), Tier.ARENA)
    assert part.goes_with(copy(on_ssd=True, condemned=SSD), Tier.ARENA)
    assert part.goes_with(copy(), Tier.ARENA)


def test_on_ssd_a_copy_stays_on_a_sound_copy_there_or_on_its_way() -> None:
    part, spilling = copy(on_ssd=True), copy(in_arena=True)
    assert part.goes_with(copy(in_arena=True), Tier.SSD)
    assert not part.goes_with(copy(on_ssd=True), Tier.SSD)
    assert part.goes_with(copy(in_arena=True, on_ssd=True, condemned=SSD), Tier.SSD)
    spilling.spill_id = 3
    assert spilling.is_spilling
    assert not part.goes_with(spilling, Tier.SSD)
