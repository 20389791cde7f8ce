"""Pages of an engine's cache to the arena and back, for every geometry the connector accepts."""

from collections.abc import Iterable, Iterator

import pytest
import torch
from page_views import PiecewiseSpace, page_view, slab_of_pages
from simple_layouts import state

from kvmanager.layout import KVPart
from kvmanager.vllm_connector.pages import NO_BLOCKS, Copy, CpuPageCopier, Done
from kvmanager.vllm_connector.slabs import PartView, Piece, Slab

NUM_BLOCKS = 6
HEADS = KVPart("kv", 2, 16, "float16")
PAGE_BYTES = 2 * 4 * HEADS.item_bytes
"""Two heads, four tokens."""


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def engine_cache(num_layers: int) -> torch.Tensor:
    """A flat allocation of random bytes as vLLM makes one for `num_layers` layers."""
    generator = torch.Generator().manual_seed(1)
    size = (num_layers * NUM_BLOCKS * PAGE_BYTES,)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


def layer_cache(
    raw: torch.Tensor, layer: int, num_layers: int, *, block_outermost: bool
) -> torch.Tensor:
    """A float16 view of the shape (blocks, heads, tokens, content)."""
    block_stride = PAGE_BYTES * num_layers if block_outermost else PAGE_BYTES
    layer_stride = PAGE_BYTES if block_outermost else PAGE_BYTES * NUM_BLOCKS
    return raw.view(torch.float16).as_strided(
        (NUM_BLOCKS, 2, 4, 8), (block_stride // 2, 32, 8, 1), layer * layer_stride // 2
    )


def stored(copier: CpuPageCopier, slabs: Iterable[Slab], done: Done) -> None:
    copier.store((), NO_BLOCKS, lambda: [Copy(slabs, done)])


def part_view(cache: torch.Tensor) -> PartView:
    return PartView(HEADS, range(2), range(2), (Piece(cache),))


@pytest.mark.parametrize("block_outermost", [False, True])
@pytest.mark.parametrize("cut", [0, 100, 256, 300])
def test_pages_go_out_and_come_back_bit_for_bit(block_outermost: bool, cut: int) -> None:
    raw = engine_cache(3)
    cache = layer_cache(raw, 1, 3, block_outermost=block_outermost)
    view, copier = part_view(cache), CpuPageCopier()
    space = PiecewiseSpace(4 * PAGE_BYTES, cut)
    done: list[object] = []
    stored(copier, [slab_of_pages(view, [5, 2, 3], space, PAGE_BYTES)], done.append)
    assert done == [None]
    by_head = (cache[block, head] for head in range(2) for block in (5, 2, 3))
    assert bytes(space.memory[PAGE_BYTES:]) == b"".join(bits(tokens) for tokens in by_head)
    expected = raw.clone()
    changed = layer_cache(expected, 1, 3, block_outermost=block_outermost)
    changed[[1, 4, 0]] = cache[[5, 2, 3]]
    copier.load([slab_of_pages(view, [1, 4, 0], space, PAGE_BYTES)])
    assert bits(raw) == bits(expected)


def test_slabs_of_one_copy_go_to_their_own_places() -> None:
    cache = layer_cache(engine_cache(1), 0, 1, block_outermost=False)
    view, copier = part_view(cache), CpuPageCopier()
    space = PiecewiseSpace(3 * PAGE_BYTES)
    slabs = [slab_of_pages(view, [block], space, block * PAGE_BYTES) for block in (2, 0)]
    stored(copier, slabs, lambda error: None)
    assert bytes(space.memory) == bits(cache[0]) + bytes(PAGE_BYTES) + bits(cache[2])


def test_padding_of_a_state_page_is_neither_read_nor_written() -> None:
    padded, used = 512, 200
    raw = torch.arange(NUM_BLOCKS * padded, dtype=torch.int64).to(torch.uint8)  # rows are equal
    rows = raw.view(NUM_BLOCKS, padded)
    (view,) = page_view(state("state", used).parts[0], rows[:, :used])
    space = PiecewiseSpace(used)
    copier = CpuPageCopier()
    stored(copier, [slab_of_pages(view, [3], space, 0)], lambda error: None)
    assert bytes(space.memory) == bytes(range(used))
    space.memory[:] = bytes(used)
    copier.load([slab_of_pages(view, [4], space, 0)])
    assert not rows[4, :used].any()
    assert torch.equal(rows[4, used:], rows[3, used:])


def test_one_broken_copy_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    cache = layer_cache(engine_cache(1), 0, 1, block_outermost=False)
    view, copier = part_view(cache), CpuPageCopier()
    space = PiecewiseSpace(2 * PAGE_BYTES)
    seen: list[tuple[str, BaseException | None]] = []

    def broken() -> Iterator[Slab]:
        yield slab_of_pages(view, [1], space, 0)
        raise KeyError("no such layer")

    def fails(error: BaseException | None) -> None:
        seen.append(("fails", error))
        raise OSError("the agent is gone")

    def note(error: BaseException | None) -> None:
        seen.append(("good", error))

    good = [slab_of_pages(view, [2], space, PAGE_BYTES)]
    copier.store((), NO_BLOCKS, lambda: [Copy(broken(), fails), Copy((), fails), Copy(good, note)])
    copier.drain()
    assert [(name, type(error)) for name, error in seen] == [
        ("fails", KeyError),
        ("fails", type(None)),
        ("good", type(None)),
    ]
    assert bytes(space.memory[PAGE_BYTES:]) == bits(cache[2])
    assert "the callback at the end of a copy raised" in caplog.text
