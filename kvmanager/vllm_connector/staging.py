"""Where bytes lie in the staging memory of a GPU's copies, and how copies are cut to fit into it.

Knows no streams and moves no bytes. Staging memory is twice the same bytes, on the device and in
pinned host memory: what is gathered into one place of the first is copied to the same place of the
second.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from kvmanager.vllm_connector.slabs import (
    INTEGERS,
    BlockIds,
    BlockTable,
    PartView,
    Piece,
    Slab,
    plain,
)

ALIGNMENT_BYTES = 256
"""Of everything in staging memory: wide integers and whole sectors of the GPU's memory."""

MAX_KEPT_PLACES = 64
"""Views of staging memory that are kept, because making one takes as long as using it."""

_WORD_BYTES = 8


class Ring:
    """Ranges of `nbytes` bytes, which are given back in the order in which they were taken."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> int | None:
        """The place of so many neighbouring bytes; None: not before others are given back. Raises
        ValueError for more than the ring has.
        """
        if not 0 < nbytes <= self.nbytes:
            raise ValueError(f"{nbytes} bytes of a ring of {self.nbytes}")
        start = self._place(nbytes)
        if start is not None:
            self._taken.append((start, start + nbytes))
        return start

    def _place(self, nbytes: int) -> int | None:
        if not self._taken:
            return 0
        oldest, newest = self._taken[0][0], self._taken[-1][1]
        if newest > oldest:
            if self.nbytes - newest >= nbytes:
                return newest
            newest = 0  # the bytes up to the end stay unused in this round
        return newest if oldest - newest >= nbytes else None

    def give_back(self) -> None:
        """The oldest range that was taken is free again."""
        self._taken.popleft()

    def clear(self) -> None:
        """All ranges are free."""
        self._taken.clear()


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """A piece of a view, as the GPU reads and writes it.

    memory: of the units that are copied, as the widest integers that its innermost run allows;
        shape (rows, units, items of a row, *words of the item).
    places: the last results of `place`. Layers of a step often have the same ones.
    """

    piece: Piece
    memory: torch.Tensor
    item_bytes: int
    places: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        return self.memory.shape[1] * self.memory.shape[2] * self.item_bytes

    def place(self, words: torch.Tensor, at: int, num_rows: int) -> torch.Tensor:
        """The rows from byte `at` on, where `words` are staging memory as these integers."""
        found = self.places.get((at, num_rows))
        if found is not None:
            return found
        if len(self.places) >= MAX_KEPT_PLACES:
            self.places.clear()
        shape = (num_rows, *self.memory.shape[1:])
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        place = words.as_strided(shape, strides, at // words.element_size())
        self.places[at, num_rows] = place
        return place


class StagedView:
    """Some units of a view. Staging memory has rows of it: all rows of the first piece, then all
    rows of the next one. Each piece begins at a multiple of `ALIGNMENT_BYTES`.
    """

    def __init__(self, view: PartView, units: range) -> None:
        self.view, self.units = view, units
        first = units.start - view.units.start
        self.pieces = tuple(
            StagedPiece(
                piece,
                wide(piece.memory[:, first : first + len(units)]),
                math.prod(piece.item_shape) * piece.memory.element_size(),
            )
            for piece in view.pieces
        )
        self._row_bytes = [piece.row_bytes for piece in self.pieces]
        self._all_row_bytes = sum(self._row_bytes)

    def nbytes(self, num_rows: int) -> int:
        """The bytes that so many rows take up."""
        return sum(aligned(num_rows * nbytes) for nbytes in self._row_bytes)

    def num_rows(self, nbytes: int) -> int:
        """The number of rows for which so many bytes are enough."""
        whole = nbytes - nbytes % ALIGNMENT_BYTES
        slack = ALIGNMENT_BYTES * (len(self._row_bytes) - 1)
        return max(0, whole - slack) // self._all_row_bytes

    def places(self, at: int, num_rows: int) -> Iterator[tuple[StagedPiece, int]]:
        """Each piece, and where so many rows of it begin if they begin at `at`."""
        for piece, nbytes in zip(self.pieces, self._row_bytes, strict=True):
            yield piece, at
            at += aligned(num_rows * nbytes)


@dataclass(slots=True)
class Span:
    """Neighbouring rows of a table. slabs: what a load brings of them; a store learns it later."""

    staged: StagedView
    table: BlockTable
    first_row: int
    stop_row: int
    slabs: list[Slab] = field(default_factory=list)


@dataclass(slots=True)
class StagedRows:
    """The rows of a span from `first_row` to `stop_row`, `at` bytes into a range of the ring."""

    span: Span
    first_row: int
    stop_row: int
    at: int

    @property
    def num_rows(self) -> int:
        return self.stop_row - self.first_row

    def host_view(self, host: torch.Tensor, base: int) -> PartView:
        """These rows in the host's staging memory `host`, in a range that begins at `base`."""
        staged = self.span.staged
        pieces = []
        for piece, at in staged.places(base + self.at, self.num_rows):
            _, units, items = piece.memory.shape[:3]
            rows = host[at : at + self.num_rows * piece.row_bytes]
            memory = rows.view(self.num_rows, units, items, piece.item_bytes)
            pieces.append(Piece(memory, piece.piece.offset))
        return PartView(staged.view.part, staged.units, staged.units, tuple(pieces))

    def items_of(self, slab: Slab) -> range:
        """What these rows have of a slab, as items counted from the first one of the table."""
        view = slab.view
        per_row = view.items_per_row
        first = slab.block_ids.start * view.rows_per_block * per_row + slab.first_item
        stop = min(first + slab.num_items, self.stop_row * per_row)
        return range(max(first, self.first_row * per_row), stop)

    def share(self, slab: Slab, host_view: PartView, rows: BlockIds) -> Slab | None:
        """What these rows have of a slab, in `host_view`, whose rows are numbered by `rows`."""
        items = self.items_of(slab)
        if not items:
            return None
        per_row, before = slab.view.items_per_row, slab.block_ids.start * slab.view.rows_per_block
        skipped = items.start - before * per_row - slab.first_item
        return Slab(
            host_view,
            slab.units,
            rows,
            items.start - self.first_row * per_row,
            len(items),
            slab.space,
            slab.offset + skipped * slab.view.part.item_bytes,
            slab.unit_stride,
        )

    def whole_and_partial(self) -> tuple[list[range], list[tuple[int, range]]]:
        """Of the span's slabs: the runs of whole rows, and each other row with its items."""
        per_row = self.span.staged.view.items_per_row
        whole: list[range] = []
        partial: list[tuple[int, range]] = []
        for slab in self.span.slabs:
            items = self.items_of(slab)
            if not items:
                continue
            first_row, first_item = divmod(items.start, per_row)
            stop_row, stop_item = divmod(items.stop, per_row)
            if first_row == stop_row:
                partial.append((first_row, range(first_item, stop_item)))
                continue
            if first_item:
                partial.append((first_row, range(first_item, per_row)))
                first_row += 1
            if stop_item:
                partial.append((stop_row, range(stop_item)))
            if whole and whole[-1].stop == first_row:
                whole[-1] = range(whole[-1].start, stop_row)
            elif first_row < stop_row:
                whole.append(range(first_row, stop_row))
        return whole, partial


def cut(spans: Iterable[Span], limit_bytes: int) -> Iterator[tuple[list[StagedRows], int]]:
    """The spans in chunks of at most `limit_bytes`, or of one row that is larger; each with its
    number of bytes.
    """
    chunk: list[StagedRows] = []
    used = 0
    for span in spans:
        row, staged = span.first_row, span.staged
        while row < span.stop_row:
            num_rows = min(span.stop_row - row, staged.num_rows(limit_bytes - used))
            if not num_rows:
                if chunk:
                    yield chunk, used
                    chunk, used = [], 0
                    continue
                num_rows = 1
            chunk.append(StagedRows(span, row, row + num_rows, used))
            used += staged.nbytes(num_rows)
            row += num_rows
    if chunk:
        yield chunk, used


def spans_of(slabs: Iterable[Slab], staged: dict[tuple[int, range], StagedView]) -> Iterator[Span]:
    """The rows of these slabs in order. Slabs whose rows are neighbours in a table share a span.
    `staged` keeps the views that were seen.
    """
    span: Span | None = None
    for slab in slabs:
        if not slab.nbytes:
            continue
        view, table = slab.view, slab.block_ids.table
        per_row, before = view.items_per_row, slab.block_ids.start * view.rows_per_block
        first_row = before + slab.first_item // per_row
        stop_row = before - (-(slab.first_item + slab.num_items) // per_row)
        here = staged_view(staged, view, slab.units)
        is_next = span is not None and span.staged is here and span.table is table
        if span is not None and is_next and span.stop_row == first_row:
            span.stop_row = stop_row
            span.slabs.append(slab)
            continue
        if span is not None:
            yield span
        span = Span(here, table, first_row, stop_row, [slab])
    if span is not None:
        yield span


def staged_view(
    staged: dict[tuple[int, range], StagedView], view: PartView, units: range
) -> StagedView:
    """The staged form of a view, made once. The values keep the views, so ids name them."""
    found = staged.get((id(view), units))
    if found is None:
        found = staged[id(view), units] = StagedView(view, units)
    return found


def largest_row_bytes(views: Sequence[PartView]) -> int:
    """The bytes of the largest row of all units of a view in staging memory."""
    return max(StagedView(view, view.units).nbytes(1) for view in views)


def wide(memory: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of up to 8 bytes: the widest that its innermost run allows."""
    memory = plain(memory)
    size = memory.element_size()
    # Without dimensions of its own an item is one element.
    if memory.dim() < 4 or memory.stride(-1) != 1:
        return memory
    numbers = [memory.storage_offset(), memory.shape[-1], *memory.stride()[:-1]]
    run = math.gcd(_WORD_BYTES, *(number * size for number in numbers))
    return memory.view(INTEGERS[run]) if run > size else memory


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
