"""Slabs: any two engines write and read the same bytes, whatever their cuts and memory orders."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fake_cuda import install
from hypothesis import given, settings
from hypothesis import strategies as st
from page_views import PiecewiseSpace, page_view, slab_of_pages
from simple_layouts import paged

from kvmanager.layout import KVGroup, KVKind, KVLayer, KVLayout, KVPart, PartExtent
from kvmanager.pool.shape import CacheShape, part_extents
from kvmanager.vllm_connector.cuda_pages import CudaPageCopier
from kvmanager.vllm_connector.pages import Copy
from kvmanager.vllm_connector.slabs import BlockIds, PartView, Piece, Slab, copy_slab, plain

ORDERS = ("heads", "tokens", "columns", "transposed")
DTYPES = (torch.uint8, torch.bfloat16, torch.float32)
POISON = 0xEE


@dataclass(frozen=True)
class Content:
    """What an item is: a key and a value of so many elements."""

    part: KVPart
    dtype: torch.dtype
    key_size: int
    value_size: int

    @property
    def size(self) -> int:
        return self.key_size + self.value_size


@dataclass(frozen=True)
class Side:
    """How an engine is cut, and the order of its memory."""

    tp_size: int
    items_per_row: int
    rows_per_block: int
    order: str
    padding: int
    is_cuda: bool

    @property
    def block_items(self) -> int:
        return self.items_per_row * self.rows_per_block

    def num_pages(self, items: range) -> int:
        return -(-items.stop // self.block_items) - items.start // self.block_items


def arranged(rows: torch.Tensor, heads: int, content: Content, side: Side) -> list[torch.Tensor]:
    """The elements of `rows` as (rows, heads, items, ...): the keys and values, or both in one."""
    items, size, key_size = side.items_per_row, content.size, content.key_size
    data = rows[:, : heads * items * size]
    match side.order:
        case "heads":
            return [data.unflatten(1, (heads, items, size))]
        case "tokens":
            return [data.unflatten(1, (items, heads, size)).transpose(1, 2)]
        case "columns":
            by_head = data.unflatten(1, (heads, items * size))
            keys = by_head[:, :, : items * key_size].unflatten(2, (key_size, items))
            values = by_head[:, :, items * key_size :].unflatten(2, (items, content.value_size))
            return [keys.transpose(2, 3), values]
        case _:
            return [data.unflatten(1, (heads, items, size // 2, 2)).transpose(3, 4)]


class Rank:
    """One rank of an engine: random memory, and the blocks of one sequence in it."""

    def __init__(self, content: Content, side: Side, tp_rank: int, table: list[int], seed: int):
        self.side, self.part = side, content.part
        self.units = content.part.held_units(side.tp_size, tp_rank)
        sent = content.part.sent_units(side.tp_size, tp_rank)
        num_rows = (max(table, default=0) + 1) * side.rows_per_block
        heads = len(self.units)
        row = heads * side.items_per_row * content.size + side.padding
        generator = torch.Generator().manual_seed(seed)
        nbytes = num_rows * row * content.dtype.itemsize
        self.memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        rows = self.memory.view(content.dtype).view(num_rows, row)
        first, *others = arranged(rows, heads, content, side)
        offset = content.key_size * content.dtype.itemsize
        pieces = (Piece(first), *(Piece(other, offset) for other in others))
        self.view = PartView(content.part, self.units, sent, pieces, side.rows_per_block)
        self.table = table
        # The place in memory of every element of the sequence: (heads, items, elements).
        numbered = torch.arange(num_rows * row).view(num_rows, row)
        whole = torch.cat([x.flatten(3) for x in arranged(numbered, heads, content, side)], 3)
        in_order = [b * side.rows_per_block + i for b in table for i in range(side.rows_per_block)]
        self.places = whole[in_order].transpose(0, 1).flatten(1, 2)

    @property
    def elements(self) -> torch.Tensor:
        return plain(self.memory.view(self.view.pieces[0].memory.dtype))

    def slab(
        self, extent: PartExtent, items: range, pages: range, space: Any, *, is_sent: bool
    ) -> Slab:
        """`items` of these pages, which are numbered from the sequence's first item on."""
        size = self.side.block_items
        first = pages.start - extent.items.start // size
        blocks = self.table[first : first + len(pages)]
        held = range(max(items.start, pages.start * size), min(items.stop, pages.stop * size))
        units = self.view.sent_units if is_sent else self.view.units
        return Slab.of(
            self.view, units, BlockIds.of(blocks), pages.start * size, held, extent, space
        )


@contextlib.contextmanager
def gpu_copier(device: torch.device) -> Iterator[CudaPageCopier]:
    """The GPU's copier on a stand-in for CUDA, with staging memory that nearly everything must be
    cut for.
    """
    with pytest.MonkeyPatch.context() as patch:
        install(patch).is_immediate = True
        copier = CudaPageCopier(device, 16 << 10, lambda waited_s: None)
        yield copier
        copier.close()


def copy(slab: Slab, side: Side, *, into_space: bool) -> None:
    """Copy with the CPU's copier or with the GPU's, whose tensors are the CPU's."""
    if not side.is_cuda:
        copy_slab(slab, into_space=into_space)
        return
    with gpu_copier(torch.device("cpu")) as copier:
        if not into_space:
            copier.load([slab])
            return
        errors: list[BaseException | None] = []
        reads, blocks = [(slab.view, slab.units)], slab.block_ids.table
        copier.store(reads, blocks, lambda: [Copy([slab], errors.append)])
        copier.drain()
        assert errors == [None]


@dataclass
class Exchange:
    """The bytes of one part on their way. `data` has the shape (units, all items, elements)."""

    content: Content
    extent: PartExtent
    space: PiecewiseSpace
    data: torch.Tensor
    first_item: int
    counts: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.space.memory[:] = bytes([POISON]) * self.space.nbytes
        self.counts = torch.zeros(self.space.nbytes, dtype=torch.int64)

    def send(self, side: Side, tables: list[int], cuts: Sequence[int]) -> None:
        """All ranks send, each in steps that end at the pages `cuts`."""
        items = self.extent.items
        start = items.start // side.block_items
        stop = start + side.num_pages(items)
        edges = sorted({start, stop, *(start + cut % (stop - start + 1) for cut in cuts)})
        for tp_rank in range(side.tp_size):
            rank = Rank(self.content, side, tp_rank, tables, tp_rank)
            for unit, places in zip(rank.units, rank.places, strict=True):
                first = start * side.block_items - self.first_item
                rank.elements[places] = self.data[unit, first : first + len(places)]
            for page, next_page in itertools.pairwise(edges):
                slab = rank.slab(
                    self.extent, items, range(page, next_page), self.space, is_sent=True
                )
                copy(slab, side, into_space=True)
                for offset, nbytes in slab.ranges():
                    self.counts[offset : offset + nbytes] += 1

    def check_sent(self) -> None:
        """Every byte of the extent was sent once, and no other byte of the space was touched."""
        begin, end = self.extent.offset, self.extent.offset + self.extent.nbytes
        assert (self.counts[begin:end] == 1).all()
        assert not self.counts[:begin].any()
        assert not self.counts[end:].any()
        first = self.extent.items.start - self.first_item
        sent = self.data[:, first : first + len(self.extent.items)].contiguous()
        memory = self.space.memory
        assert bytes(memory[begin:end]) == sent.view(torch.uint8).numpy().tobytes()
        assert memory[:begin].count(POISON) == begin
        assert memory[end:].count(POISON) == len(memory) - end

    def check_received(self, side: Side, tables: list[int], num_skipped: int) -> None:
        """All ranks load all pages but the first ones, which they have already."""
        items = self.extent.items
        start = items.start // side.block_items
        pages = range(start + num_skipped, start + side.num_pages(items))
        for tp_rank in range(side.tp_size):
            rank = Rank(self.content, side, tp_rank, tables, 100 + tp_rank)
            expected = rank.elements.clone()
            loaded = range(max(items.start, pages.start * side.block_items), items.stop)
            for unit, places in zip(rank.units, rank.places, strict=True):
                for item in loaded:
                    expected[places[item - start * side.block_items]] = self.data[
                        unit, item - self.first_item
                    ]
            slab = rank.slab(self.extent, items, pages, self.space, is_sent=False)
            copy(slab, side, into_space=False)
            assert torch.equal(rank.elements, expected)


@st.composite
def contents(draw: st.DrawFn, num_units: int, tokens_per_item: int) -> Content:
    dtype = draw(st.sampled_from(DTYPES))
    key_size, value_size = draw(st.sampled_from((2, 4, 6))), draw(st.sampled_from((0, 2, 4)))
    nbytes = (key_size + value_size) * dtype.itemsize
    part = KVPart("kv", num_units, nbytes, str(dtype), tokens_per_item)
    return Content(part, dtype, key_size, value_size)


@st.composite
def sides(draw: st.DrawFn, part: KVPart, block_items: int | None = None) -> Side:
    tp_size = draw(st.sampled_from([size for size in (1, 2, 4, 8) if part.fits(size)]))
    if block_items is None:
        items_per_row, rows_per_block = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    else:
        rows_per_block = draw(st.sampled_from([1, math.gcd(2, block_items)]))
        items_per_row = block_items // rows_per_block
    order, padding = draw(st.sampled_from(ORDERS)), draw(st.sampled_from((0, 3)))
    return Side(tp_size, items_per_row, rows_per_block, order, padding, draw(st.booleans()))


def block_tables(num_pages: int) -> st.SearchStrategy[list[int]]:
    """Distinct blocks in any order, or neighbours."""
    spread = st.permutations(range(1, num_pages + 3)).map(lambda blocks: list(blocks)[:num_pages])
    return st.one_of(spread, st.just(list(range(1, num_pages + 1))))


def random_data(content: Content, num_items: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    shape = (content.part.num_units, num_items, content.size * content.dtype.itemsize)
    found = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return plain(found.view(content.dtype))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_any_engine_sends_any_other_one_reads(data: st.DataObject) -> None:
    draw = data.draw
    tokens_per_item = draw(st.sampled_from((1, 1, 4)), "tokens per item")
    content = draw(contents(draw(st.sampled_from((1, 2, 4, 8))), tokens_per_item))
    sender, receiver = draw(sides(content.part)), draw(sides(content.part))
    first_item, num_items = draw(st.integers(0, 12), "cached"), draw(st.integers(1, 20), "items")
    # The last item may be of fewer tokens than it has room for.
    num_tokens = (first_item + num_items) * tokens_per_item - draw(
        st.integers(0, tokens_per_item - 1)
    )
    items = content.part.items(range(first_item * tokens_per_item, num_tokens))
    assert items == range(first_item, first_item + num_items)
    extent = PartExtent(content.part, items, draw(st.integers(0, 40), "offset"))
    nbytes = extent.offset + extent.nbytes + 5
    cuts = draw(st.lists(st.integers(1, nbytes - 1), max_size=4), "arena cuts")
    whole = random_data(content, items.stop + 40)
    exchange = Exchange(content, extent, PiecewiseSpace(nbytes, *cuts), whole, 0)
    sent_at = draw(st.lists(st.integers(0, 20), max_size=3), "steps")
    exchange.send(sender, draw(block_tables(sender.num_pages(items))), sent_at)
    exchange.check_sent()
    num_pages = receiver.num_pages(items)
    skipped = draw(st.integers(0, num_pages - 1), "pages that the receiver has")
    exchange.check_received(receiver, draw(block_tables(num_pages)), skipped)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_any_engine_caches_any_other_one_reads(data: st.DataObject) -> None:
    draw = data.draw
    num_units = draw(st.sampled_from((1, 2, 4)))
    found = [draw(contents(num_units, tokens_per_item)) for tokens_per_item in (1, 4)]
    layers = tuple(
        KVLayer(f"layer.{number}", (content.part,)) for number, content in enumerate(found)
    )
    blocks_of = {16: draw(sides(found[0].part, 16)), 32: draw(sides(found[0].part, 32))}
    spaces = []
    for tokens_per_block, side in blocks_of.items():
        group = KVGroup(KVKind.FULL, tokens_per_block, layers)
        layout = KVLayout("m", "files:0", "digest", side.tp_size, (group,))
        layout.validate()
        spaces.append((layout, CacheShape.of(layout)))
    (layout, shape), (_, other_shape) = spaces
    assert shape == other_shape
    space = PiecewiseSpace(shape.parts[0].nbytes, *draw(st.lists(st.integers(1, 400), max_size=3)))
    found_extents = list(part_extents(layout, shape, 0))
    assert [extent.layer for extent in found_extents] == list(layers)
    for content, block in zip(found, found_extents, strict=True):
        (extent,) = block.parts
        exchange = Exchange(content, extent, space, random_data(content, shape.block_tokens), 0)
        sides_here = [
            draw(sides(content.part, size // content.part.tokens_per_item)) for size in blocks_of
        ]
        sender, receiver = draw(st.permutations(sides_here))
        exchange.send(sender, draw(block_tables(sender.num_pages(extent.items))), [])
        exchange.check_sent()
        exchange.check_received(receiver, draw(block_tables(receiver.num_pages(extent.items))), 0)
    end = found_extents[-1].parts[0]
    assert end.offset + end.nbytes == shape.parts[0].nbytes


def test_runs_of_neighbouring_rows_are_copied_at_once() -> None:
    part = paged("layer", 8, 1).parts[0]
    rows = torch.zeros(40, 8, dtype=torch.uint8)
    (view,) = page_view(part, rows)
    slab = slab_of_pages(view, [3, 4, 5, 9, 8, 20], PiecewiseSpace(48), 0)
    assert list(slab.runs()) == [(3, 3, 0, 3), (9, 1, 0, 1), (8, 1, 0, 1), (20, 1, 0, 1)]


def test_rows_of_which_some_items_are_left_out_are_copied_alone() -> None:
    memory = torch.zeros(20, 1, 4, 2, dtype=torch.uint8)
    part = KVPart("kv", 1, 2, "uint8")
    view = PartView(part, range(1), range(1), (Piece(memory),), rows_per_block=2)
    extent = PartExtent(part, range(10, 30), 0)
    space = PiecewiseSpace(40)
    slab = Slab.of(view, range(1), BlockIds.of([2, 3, 4]), 8, range(10, 30), extent, space)
    assert list(slab.runs()) == [(4, 1, 2, 2), (5, 4, 0, 16), (9, 1, 0, 2)]
    one = Slab.of(view, range(1), BlockIds.of([2, 3, 4]), 8, range(17, 18), extent, space)
    assert list(one.runs()) == [(6, 1, 1, 1)]
    assert one.ranges() == [(14, 2)]


def test_ranges_of_neighbouring_units_are_one_range() -> None:
    part = KVPart("kv", 4, 8, "bfloat16")
    extent = PartExtent(part, range(10), 100)
    memory = torch.zeros(4, 2, 16, 8, dtype=torch.uint8)
    view = PartView(part, range(2, 4), range(2, 4), (Piece(memory),))
    space = PiecewiseSpace(1000)
    whole = Slab.of(view, view.units, BlockIds.of([1]), 0, range(10), extent, space)
    assert whole.ranges() == [(100 + 2 * 80, 2 * 80)]
    half = Slab.of(view, view.units, BlockIds.of([1]), 0, range(5, 10), extent, space)
    assert half.ranges() == [(100 + 2 * 80 + 40, 40), (100 + 3 * 80 + 40, 40)]
    assert (half.nbytes, half.unit_bytes) == (80, 40)
    none = Slab.of(view, range(2, 2), BlockIds.of([1]), 0, range(10), extent, space)
    assert (none.ranges(), none.nbytes) == ([], 0)


def test_a_view_that_does_not_fit_its_part_is_refused() -> None:
    part = KVPart("kv", 4, 8, "bfloat16")
    memory = torch.zeros(4, 2, 16, 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="items of 6 bytes"):
        PartView(part, range(2), range(2), (Piece(memory),))
    memory = torch.zeros(4, 2, 16, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"2 units, not range\(0, 4\)"):
        PartView(part, range(4), range(4), (Piece(memory),))
