"""The memory of one rank's KVCache, part by part, and copies of it in the order of a transfer.

A `PartView` shows one part of one layer as strided tensors, whatever the engine's memory order is.
A `Slab` is what is copied of it at once: all units and neighbouring items, with their places in the
arena. Knows no requests, no steps and no specs of vLLM.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvmanager.layout import KVPart, PartExtent

if TYPE_CHECKING:
    from transport import ByteSpace

_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of an element's size: copies move bits, and NumPy knows no bfloat16."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements in every item. `memory` has the shape (rows, units, items of a row,
    *elements of the item) and any strides; the elements begin `offset` bytes into the item.
    """

    memory: torch.Tensor
    offset: int = 0

    @property
    def item_shape(self) -> tuple[int, ...]:
        return tuple(self.memory.shape[3:])


@dataclass(frozen=True, slots=True)
class PartView:
    """One part of one layer in the memory of one rank.

    units: those that the memory has, by their numbers in `part`.
    sent_units: those of them that this rank sends.
    rows_per_block: a block of the engine may be several rows of memory (vLLM's kernel blocks).
    """

    part: KVPart
    units: range
    sent_units: range
    pieces: tuple[Piece, ...]
    rows_per_block: int = 1

    def __post_init__(self) -> None:
        item_bytes = sum(
            int(np.prod(piece.item_shape)) * piece.memory.element_size() for piece in self.pieces
        )
        if item_bytes != self.part.item_bytes:
            raise ValueError(f"items of {item_bytes} bytes for part {self.part}")
        if any(piece.memory.shape[1] != len(self.units) for piece in self.pieces):
            raise ValueError(f"{self.pieces[0].memory.shape[1]} units, not {self.units}")

    @property
    def device(self) -> torch.device:
        return self.pieces[0].memory.device

    @property
    def items_per_row(self) -> int:
        return int(self.pieces[0].memory.shape[2])

    def rows(self, block_ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The rows of these blocks."""
        blocks = np.asarray(block_ids, dtype=np.int64)
        if self.rows_per_block == 1:
            return blocks
        spread = blocks[:, None] * self.rows_per_block + np.arange(self.rows_per_block)
        return spread.ravel()


@dataclass(frozen=True, slots=True)
class Slab:
    """Neighbouring items of all `units` of a view, and their places in `space`.

    first_item: of `num_items`, counted from the first item of the first block.
    offset: of the first unit's first item; the next unit's is `unit_stride` bytes behind it.
    """

    view: PartView
    units: range
    block_ids: Sequence[int]
    first_item: int
    num_items: int
    space: ByteSpace
    offset: int
    unit_stride: int

    @classmethod
    def of(
        cls,
        view: PartView,
        units: range,
        block_ids: Sequence[int],
        block_items: int,
        items: range,
        extent: PartExtent,
        space: ByteSpace,
    ) -> Slab:
        """The slab of `items` of an extent in `space`; `block_items` is the number, in the extent,
        of the first item of the first of `block_ids`.
        """
        return cls(
            view,
            units,
            block_ids,
            items.start - block_items,
            len(items),
            space,
            extent.place(units.start, items.start),
            extent.unit_bytes,
        )

    @property
    def unit_bytes(self) -> int:
        return self.num_items * self.view.part.item_bytes

    @property
    def nbytes(self) -> int:
        return len(self.units) * self.unit_bytes

    def ranges(self) -> list[tuple[int, int]]:
        """The (offset, length) ranges of the space, neighbours joined."""
        if self.unit_stride == self.unit_bytes or len(self.units) == 1:
            return [(self.offset, self.nbytes)] if self.nbytes else []
        return [
            (self.offset + number * self.unit_stride, self.unit_bytes)
            for number in range(len(self.units))
            if self.unit_bytes
        ]

    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """Runs of neighbouring rows as (row, number of rows, first item in them, number of items),
        in the order of items.
        """
        per_row = self.view.items_per_row
        rows = self.view.rows(self.block_ids)
        first, last = self.first_item // per_row, -(-(self.first_item + self.num_items) // per_row)
        rows = rows[first:last]
        # A run ends where the next row is not the next one in memory, and around the rows of which
        # only some items are copied.
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        skipped, end = self.first_item - first * per_row, self.first_item + self.num_items
        edges = {0, len(rows), *breaks.tolist()}
        if skipped and len(rows):
            edges.add(1)
        if (last * per_row != end) and len(rows):
            edges.add(len(rows) - 1)
        bounds = sorted(edges)
        for start, stop in itertools.pairwise(bounds):
            from_item = skipped if start == 0 else 0
            to_item = min((stop + first) * per_row, end) - (start + first) * per_row
            yield int(rows[start]), stop - start, from_item, to_item - from_item


def copy_slab(slab: Slab, *, into_space: bool) -> None:
    """Copy a slab of host memory in the caller's thread, out of the engine or into it.

    NumPy does it on one core and releases the GIL; torch would use as many threads as the engine.
    """
    if not slab.num_items or not slab.units:
        return
    memory = _space_memory(slab)
    if memory is not None:
        _copy(slab, memory, slab.unit_stride, into_space=into_space)
        return
    # The arena is fragmented here: the units are put together or taken apart one by one.
    staged = np.empty(slab.nbytes, dtype=np.uint8)
    if into_space:
        _copy(slab, staged, slab.unit_bytes, into_space=True)
    _move(slab, staged, into_space=into_space)
    if not into_space:
        _copy(slab, staged, slab.unit_bytes, into_space=False)


def clear_slab(slab: Slab) -> None:
    """Fill a slab's place in the engine with zeros, on the present stream if that is a device."""
    per_row = slab.view.items_per_row
    first_unit = slab.units.start - slab.view.units.start
    for piece in slab.view.pieces:
        memory = plain(piece.memory)[:, first_unit : first_unit + len(slab.units)]
        for row, num_rows, first_item, num_items in slab.runs():
            per_run_row = num_items if num_rows == 1 else per_row
            memory[row : row + num_rows, :, first_item : first_item + per_run_row].zero_()


_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def _space_memory(slab: Slab) -> _Bytes | None:
    """The memory from the first unit's first byte to the last one's last; None if fragmented."""
    span = (len(slab.units) - 1) * slab.unit_stride + slab.unit_bytes
    views = slab.space.views(slab.offset, span)
    return np.frombuffer(views[0], dtype=np.uint8) if len(views) == 1 else None


def _move(slab: Slab, staged: _Bytes, *, into_space: bool) -> None:
    at = 0
    for offset, nbytes in slab.ranges():
        for view in slab.space.views(offset, nbytes):
            memory = np.frombuffer(view, dtype=np.uint8)
            here = staged[at : at + len(memory)]
            if into_space:
                memory[:] = here
            else:
                here[:] = memory
            at += len(memory)


def _copy(slab: Slab, memory: _Bytes, unit_stride: int, *, into_space: bool) -> None:
    """Between the engine's memory and bytes in which units are `unit_stride` apart."""
    view, item_bytes = slab.view, slab.view.part.item_bytes
    first_unit, per_row = slab.units.start - view.units.start, view.items_per_row
    for piece in view.pieces:
        engine = plain(piece.memory).numpy()[:, first_unit : first_unit + len(slab.units)]
        size, done = engine.itemsize, 0
        inner_strides = tuple(
            size * int(np.prod(piece.item_shape[axis + 1 :]))
            for axis in range(len(piece.item_shape))
        )
        for row, num_rows, first_item, num_items in slab.runs():
            # Only a run of one row has items that are left out.
            per_run_row = num_items if num_rows == 1 else per_row
            ours = engine[row : row + num_rows, :, first_item : first_item + per_run_row]
            theirs = np.ndarray(
                (len(slab.units), num_rows, per_run_row, *piece.item_shape),
                engine.dtype,
                memory.data,
                done * item_bytes + piece.offset,
                (unit_stride, per_run_row * item_bytes, item_bytes, *inner_strides),
            ).swapaxes(0, 1)
            if into_space:
                theirs[...] = ours
            else:
                ours[...] = theirs
            done += num_items


def plain(memory: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return memory.view(_PLAIN[memory.element_size()])
