"""The GPU's copier, on a stand-in for CUDA, moves the same bytes as the CPU's, however its copies
are cut and put together.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from fake_cuda import install
from hypothesis import given, settings
from hypothesis import strategies as st
from page_views import PiecewiseSpace

from kvmanager.layout import KVPart
from kvmanager.vllm_connector.cuda_pages import CudaPageCopier
from kvmanager.vllm_connector.pages import Copy, CpuPageCopier, PageCopier
from kvmanager.vllm_connector.slabs import BlockTable, PartView, Piece, Slab

NUM_BLOCKS = 12
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """How the memory of a layer is cut, and which of its units are copied."""

    dtype: torch.dtype
    num_units: int
    units: range
    items_per_row: int
    rows_per_block: int
    sizes: tuple[int, ...]
    by_token: bool

    def view(self, seed: int) -> tuple[torch.Tensor, PartView]:
        """Random memory, with the pieces of an item in tensors of their own."""
        generator = torch.Generator().manual_seed(seed)
        rows = NUM_BLOCKS * self.rows_per_block
        shape = rows, self.num_units, self.items_per_row, sum(self.sizes)
        whole = torch.randint(-99, 99, shape, dtype=torch.int16, generator=generator)
        whole = whole.to(self.dtype)
        if self.by_token:
            whole = whole.transpose(1, 2).contiguous().transpose(1, 2)
        pieces, at = [], 0
        for size in self.sizes:
            pieces.append(Piece(whole[..., at : at + size], at * self.dtype.itemsize))
            at += size
        part = KVPart("kv", self.num_units, at * self.dtype.itemsize, str(self.dtype))
        every = range(self.num_units)
        return whole, PartView(part, every, every, tuple(pieces), self.rows_per_block)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    num_units = draw(st.integers(1, 3))
    first = draw(st.integers(0, num_units - 1))
    return Shape(
        draw(st.sampled_from((torch.uint8, torch.int16, torch.float32))),
        num_units,
        range(first, draw(st.integers(first + 1, num_units))),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 3)),
        tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=2))),
        draw(st.booleans()),
    )


@dataclass(frozen=True)
class Request:
    """Some neighbouring blocks of the table, and the items of them that are copied."""

    start: int
    stop: int
    first_item: int
    num_items: int
    gap: int

    def slab(self, shape: Shape, view: PartView, table: BlockTable, space: Any) -> Slab:
        stride = self.num_items * view.part.item_bytes + self.gap
        blocks = table.blocks(self.start, self.stop)
        items, units = (self.first_item, self.num_items), shape.units
        return Slab(view, units, blocks, *items, space, 3, stride)

    def nbytes(self, shape: Shape, item_bytes: int) -> int:
        return 3 + len(shape.units) * (self.num_items * item_bytes + self.gap)


@st.composite
def requests(draw: st.DrawFn, shape: Shape) -> list[Request]:
    """The table's blocks, divided among requests."""
    edges = sorted({0, NUM_BLOCKS, *draw(st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=5))})
    found = []
    for start, stop in itertools.pairwise(edges):
        in_all = (stop - start) * shape.rows_per_block * shape.items_per_row
        first = draw(st.integers(0, in_all - 1))
        count = draw(st.integers(1, in_all - first))
        found.append(Request(start, stop, first, count, draw(st.sampled_from((0, 5)))))
    return found


def spaces_of(
    asked: Sequence[Request], shape: Shape, item_bytes: int, cuts: list[int], *, fill: bool
) -> list[PiecewiseSpace]:
    found = []
    for number, request in enumerate(asked):
        space = PiecewiseSpace(request.nbytes(shape, item_bytes), *cuts)
        if fill:
            space.memory[:] = bytes((number + at) % 253 for at in range(space.nbytes))
        found.append(space)
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_both_copiers_move_the_same_bytes(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(shapes())
    asked = draw(requests(shape))
    ids = list(draw(st.permutations(range(NUM_BLOCKS))))
    cuts = draw(st.lists(st.integers(1, 600), max_size=3), "cuts")
    staging_bytes = 8192 * draw(st.sampled_from((1, 2, 16)), "staging")
    stored, loaded = [], []
    with pytest.MonkeyPatch.context() as patch:
        install(patch).is_immediate = True
        gpu = CudaPageCopier(CPU, staging_bytes, lambda waited_s: None)
        copiers: list[PageCopier] = [CpuPageCopier(), gpu]
        for copier in copiers:
            memory, view = shape.view(1)
            _, other = shape.view(2)
            table, item_bytes = BlockTable(ids), view.part.item_bytes
            spaces = spaces_of(asked, shape, item_bytes, cuts, fill=False)
            errors: list[BaseException | None] = []
            # Parts of one layer are stored in one call.
            others = spaces_of(asked, shape, item_bytes, cuts, fill=False)
            copies = [
                Copy(
                    [
                        request.slab(shape, view, table, space),
                        request.slab(shape, other, table, behind),
                    ],
                    errors.append,
                )
                for request, space, behind in zip(asked, spaces, others, strict=True)
            ]
            reads = [(view, shape.units), (other, shape.units)]
            copier.store(reads, table, partial(iter, copies))
            copier.drain()
            assert errors == [None] * len(asked)
            stored.append([bytes(space.memory) for space in (*spaces, *others)])

            filled = spaces_of(asked, shape, item_bytes, cuts, fill=True)
            table = BlockTable(ids)
            copier.load(
                request.slab(shape, view, table, space)
                for request, space in zip(asked, filled, strict=True)
            )
            loaded.append(memory.contiguous().view(torch.uint8).numpy().tobytes())
            copier.close()
    assert stored[0] == stored[1]
    assert loaded[0] == loaded[1]
    assert any(any(space) for space in stored[0])
