"""Copies landed parts into the prefix cache: which parts a transfer brought, and where they lie.

A transfer brings the full-attention pages that the receiver lacked, the pages that the windows
reach back over, and the states after its last token. It does not know the pool, the time or who
asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvmanager.layout import KVKind, KVLayout, LayerExtent
from kvmanager.pool.records import BlockPart
from kvmanager.pool.shape import CacheShape, PartExtent, part_extents


@dataclass(frozen=True, slots=True)
class CopyRange:
    """`nbytes` from `landing_offset` of the transfer to `part_offset` of the part."""

    landing_offset: int
    part_offset: int
    nbytes: int


class LandedParts:
    """The whole parts of full blocks in a transfer of `num_tokens`."""

    def __init__(self, layout: KVLayout, num_tokens: int, cached_tokens: int = 0) -> None:
        """Raises ValueError for impossible counts (`KVLayout.transfer_bytes`)."""
        layout.transfer_bytes(num_tokens, cached_tokens)  # checks the counts
        self._layout = layout
        self._shape = CacheShape.of(layout)
        self._num_tokens = num_tokens
        self._extents: list[dict[str, LayerExtent]] = [
            {e.layer.name: e for e in layout.extents(num_tokens, rank, cached_tokens)}
            for rank in range(layout.tp_size)
        ]

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
        for rank, extents in enumerate(self._extents):
            for wanted in part_extents(self._layout, self._shape, part, rank):
                landed = extents[wanted.layer.name]
                skipped = self._first_page(index, wanted) - landed.pages.start
                page_bytes = wanted.layer.page_bytes
                yield CopyRange(
                    landed.offset + skipped * page_bytes,
                    wanted.offset,
                    wanted.num_pages * page_bytes,
                )

    def _is_whole(self, index: int, part: int) -> bool:
        for wanted in part_extents(self._layout, self._shape, part, 0):
            if self._layout.groups[wanted.group_index].kind is KVKind.RECURRENT:
                # A transfer carries recurrent states after its last token only, so they belong to a
                # block only if the block ends there.
                if self._num_tokens != (index + 1) * self._shape.block_tokens:
                    return False
                continue
            pages = self._extents[0][wanted.layer.name].pages
            first = self._first_page(index, wanted)
            if first < pages.start or first + wanted.num_pages > pages.stop:
                return False
        return True

    def _first_page(self, index: int, wanted: PartExtent) -> int:
        group = self._layout.groups[wanted.group_index]
        if group.kind is KVKind.RECURRENT:
            return self._extents[0][wanted.layer.name].pages.start
        return index * self._shape.block_tokens // group.tokens_per_block


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
