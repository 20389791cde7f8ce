"""Copies landed parts into the prefix cache: which parts a transfer brought, and where they lie.

A transfer brings the full-attention pages that the receiver lacked, the pages that the windows
reach back over, and the states after its last token. It does not know the pool, the time or who
asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvmanager.layout import KVKind, KVLayout, LayerExtent, PartExtent
from kvmanager.pool.records import BlockPart
from kvmanager.pool.shape import CacheShape, part_extents


@dataclass(frozen=True, slots=True)
class CopyRange:
    """`nbytes` from `landing_offset` of the transfer to `part_offset` of the part."""

    landing_offset: int
    part_offset: int
    nbytes: int


class LandedParts:
    """The whole parts of full blocks in a transfer of `num_tokens`."""

    def __init__(
        self,
        layout: KVLayout,
        shape: CacheShape,
        num_tokens: int,
        cached_tokens: int = 0,
        window_step: int = 0,
    ) -> None:
        """Raises ValueError for impossible counts (`KVLayout.transfer_bytes`)."""
        layout.transfer_bytes(num_tokens, cached_tokens, window_step)  # checks the counts
        self._layout = layout
        self._shape = shape
        self._num_tokens = num_tokens
        self._wanted = [list(part_extents(layout, shape, part)) for part in range(len(shape.parts))]
        self._extents: dict[str, LayerExtent] = {
            extent.layer.name: extent
            for extent in layout.extents(num_tokens, cached_tokens, window_step)
        }

    def parts(self) -> list[BlockPart]:
        """The whole parts as (block index, part), sorted by part and block."""
        num_blocks = self._num_tokens // self._shape.block_tokens
        return [
            (index, part)
            for part in range(len(self._shape.parts))
            for index in range(num_blocks)
            if self._is_whole(index, part)
        ]

    def ranges(self, index: int, part: int) -> Iterator[CopyRange]:
        """The ranges to copy for one of `parts`."""
        for wanted in self._wanted[part]:
            landed = self._extents[wanted.layer.name]
            for source, target in zip(landed.parts, wanted.parts, strict=True):
                yield from self._part_ranges(index, source, target)

    def _part_ranges(
        self, index: int, source: PartExtent, target: PartExtent
    ) -> Iterator[CopyRange]:
        first = self._first_item(index, source)
        if source.items == range(first, first + len(target.items)):
            yield CopyRange(source.offset, target.offset, target.nbytes)
            return
        for unit in range(target.part.num_units):
            yield CopyRange(source.place(unit, first), target.place(unit, 0), target.unit_bytes)

    def _is_whole(self, index: int, part: int) -> bool:
        for wanted in self._wanted[part]:
            if self._layout.groups[wanted.group_index].kind is KVKind.RECURRENT:
                # A transfer carries recurrent states after its last token only, so they belong to a
                # block only if the block ends there.
                if self._num_tokens != (index + 1) * self._shape.block_tokens:
                    return False
                continue
            landed = self._extents[wanted.layer.name]
            for source, target in zip(landed.parts, wanted.parts, strict=True):
                first = self._first_item(index, source)
                if first < source.items.start or first + len(target.items) > source.items.stop:
                    return False
            # The last item of a transfer may be of fewer tokens than it has room for.
            if (index + 1) * self._shape.block_tokens > landed.tokens.stop:
                return False
        return True

    def _first_item(self, index: int, source: PartExtent) -> int:
        """The first item of a block."""
        tokens_per_item = source.part.tokens_per_item
        return index * self._shape.block_tokens // tokens_per_item if tokens_per_item else 0


def copy_ranges(
    ranges: Iterable[CopyRange],
    landing: Sequence[memoryview],
    part: Sequence[memoryview],
) -> None:
    """Copy between two lists of views, each of which stands for its bytes end to end.

    NumPy releases the GIL while it copies, so that other threads run meanwhile.
    """
    sources, targets = _Pieces(landing), _Pieces(part)
    for span in ranges:
        source = sources.views(span.landing_offset, span.nbytes)
        target = targets.views(span.part_offset, span.nbytes)
        _copy(source, target)


class _Pieces:
    """Random access to the bytes of views that lie end to end."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._arrays = [np.frombuffer(view, dtype=np.uint8) for view in views]
        self._starts = np.cumsum([0, *(len(array) for array in self._arrays)])

    def views(self, offset: int, nbytes: int) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        number = int(np.searchsorted(self._starts, offset, side="right")) - 1
        found = []
        while nbytes:
            start = offset - int(self._starts[number])
            piece = self._arrays[number][start : start + nbytes]
            found.append(piece)
            offset += len(piece)
            nbytes -= len(piece)
            number += 1
        return found


def _copy(
    sources: list[np.ndarray[tuple[int], np.dtype[np.uint8]]],
    targets: list[np.ndarray[tuple[int], np.dtype[np.uint8]]],
) -> None:
    while sources:
        size = min(len(sources[0]), len(targets[0]))
        np.copyto(targets[0][:size], sources[0][:size])
        for pieces in (sources, targets):
            if len(pieces[0]) == size:
                pieces.pop(0)
            else:
                pieces[0] = pieces[0][size:]
