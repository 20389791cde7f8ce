"""Pages that are rows of bytes, slabs of whole pages, and memory in pieces, for tests of copies."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from kvmanager.layout import KVPart
from kvmanager.vllm_connector.slabs import BlockIds, PartView, Piece, Slab


class PiecewiseSpace:
    """Bytes of a transfer whose memory is cut at `cuts`, as runs of an arena are."""

    def __init__(self, nbytes: int, *cuts: int) -> None:
        self.nbytes = nbytes
        self.memory = bytearray(nbytes)
        self._cuts = sorted(set(cuts))

    def views(self, offset: int, length: int) -> list[memoryview]:
        if offset < 0 or offset + length > self.nbytes:
            raise ValueError(f"{length} bytes at {offset} leave a transfer of {self.nbytes}")
        inside = [cut for cut in self._cuts if offset < cut < offset + length]
        edges = [offset, *inside, offset + length]
        whole = memoryview(self.memory)
        return [whole[a:b] for a, b in itertools.pairwise(edges)]


def page_view(
    part: KVPart, rows: torch.Tensor, tp_size: int = 1, tp_rank: int = 0
) -> tuple[PartView]:
    """The only part of a layer on one rank. `rows` has the shape (blocks, bytes of a page)."""
    memory = rows[:, None, None]
    held, sent = part.held_units(tp_size, tp_rank), part.sent_units(tp_size, tp_rank)
    return (PartView(part, held, sent, (Piece(memory),)),)


def slab_of_pages(view: PartView, block_ids: Sequence[int], space: Any, offset: int) -> Slab:
    """All items of these blocks, one unit behind the other from `offset` on."""
    num_items = len(block_ids) * view.items_per_row * view.rows_per_block
    stride = num_items * view.part.item_bytes
    return Slab(view, view.units, BlockIds.of(block_ids), 0, num_items, space, offset, stride)
