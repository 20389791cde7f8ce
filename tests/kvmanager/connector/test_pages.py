"""Pages of an engine's cache to the arena and back, for every geometry the connector accepts."""

from types import SimpleNamespace

import pytest
import torch

from kvmanager.layout import KVLayer, LayoutError
from kvmanager.vllm_connector.pages import CpuPageCopier, LayerPages

NUM_BLOCKS = 6


class PiecewiseSpace:
    """Bytes in two arenas' worth of pieces: every view is cut at `cut`."""

    def __init__(self, nbytes: int, cut: int) -> None:
        self.nbytes = nbytes
        self.cut = cut
        self.memory = bytearray(nbytes)

    def views(self, offset: int, length: int) -> list[memoryview]:
        whole = memoryview(self.memory)[offset : offset + length]
        middle = self.cut - offset
        return [whole[:middle], whole[middle:]] if 0 < middle < length else [whole]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def engine_cache(page_bytes: int, num_layers: int) -> torch.Tensor:
    """A flat allocation of random bytes as vLLM makes one for `num_layers` layers."""
    generator = torch.Generator().manual_seed(1)
    size = (num_layers * NUM_BLOCKS * page_bytes,)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


def layer_view(
    raw: torch.Tensor, layer: int, page_bytes: int, num_layers: int, *, block_outermost: bool
) -> tuple[torch.Tensor, SimpleNamespace]:
    """A 4-dimensional float16 view (blocks, heads, tokens, content) and vLLM's placement."""
    block_stride = page_bytes * num_layers if block_outermost else page_bytes
    layer_stride = page_bytes if block_outermost else page_bytes * NUM_BLOCKS
    view = raw.view(torch.float16).as_strided(
        (NUM_BLOCKS, 2, 4, 8), (block_stride // 2, 32, 8, 1), layer * layer_stride // 2
    )
    names = [f"layer.{index}" for index in range(num_layers)]
    placement = SimpleNamespace(layers=names, block_stride=block_stride)
    return view, SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_tensors=[placement])


@pytest.mark.parametrize("block_outermost", [False, True])
@pytest.mark.parametrize("cut", [0, 100, 128, 300])
def test_pages_go_out_and_come_back_bit_for_bit(block_outermost: bool, cut: int) -> None:
    page_bytes = 2 * 4 * 8 * 2
    raw = engine_cache(page_bytes, 3)
    view, config = layer_view(raw, 1, page_bytes, 3, block_outermost=block_outermost)
    pages = LayerPages.of(KVLayer("layer.1", page_bytes), view, config)
    space = PiecewiseSpace(4 * page_bytes, cut)
    done: list[object] = []
    copier = CpuPageCopier()
    copier.store(pages, [5, 2, 3], space, page_bytes, done.append)
    assert done == [None]
    assert bytes(space.memory[page_bytes:]) == b"".join(bits(view[b]) for b in (5, 2, 3))
    expected = raw.clone()
    old, _ = layer_view(expected, 1, page_bytes, 3, block_outermost=block_outermost)
    old[1], old[4] = view[2], view[3]
    copier.load(pages, [1, 4], space, 2 * page_bytes)
    assert bits(raw) == bits(expected)


def test_padding_of_a_state_page_is_neither_read_nor_written() -> None:
    padded, used = 512, 200
    raw = torch.arange(NUM_BLOCKS * padded, dtype=torch.int64).to(torch.uint8)  # rows are equal
    conv = raw.as_strided((NUM_BLOCKS, used // 2), (padded, 1))
    config = SimpleNamespace(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[SimpleNamespace(layers=["state"], block_stride=padded)],
    )
    pages = LayerPages.of(KVLayer("state", used), [conv], config)
    space = PiecewiseSpace(used, 0)
    copier = CpuPageCopier()
    copier.store(pages, [3], space, 0, lambda error: None)
    space.memory[:] = bytes(used)
    copier.load(pages, [4], space, 0)
    rows = raw.view(NUM_BLOCKS, padded)
    assert not rows[4, :used].any()
    assert torch.equal(rows[4, used:], rows[3, used:])


def test_a_block_in_several_pieces_is_refused_with_the_way_out() -> None:
    cache = torch.zeros(2, NUM_BLOCKS, 4, 8, dtype=torch.float16).transpose(0, 1)
    config = SimpleNamespace(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[SimpleNamespace(layers=["a"], block_stride=64)],
    )
    with pytest.raises(LayoutError, match="VLLM_KV_CACHE_LAYOUT"):
        LayerPages.of(KVLayer("a", 128), cache, config)
