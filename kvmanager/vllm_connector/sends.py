"""What one engine step sends of its producer requests: planned once, used by every layer.

Requests, pages and blocks are the same for all layers of a group, so a step plans each group once
before its forward pass, and a layer only adds where its bytes belong. Knows no copier and no agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvmanager.arena import ArenaSpace
from kvmanager.layout import KVKind, KVLayout, LayerExtent
from kvmanager.vllm_connector.pages import Copy
from kvmanager.vllm_connector.slabs import BlockIds, BlockTable, PartView, Slab

if TYPE_CHECKING:  # which imports vLLM
    from kvmanager.vllm_connector.metadata import SendStep, TransferRef

Units = Mapping[str, tuple[tuple[PartView, range], ...]]
"""By layer, the views of its parts, each with some of its units."""


def units_sent(views: Mapping[str, Sequence[PartView]]) -> Units:
    """The units that this rank sends."""
    return {name: tuple((v, v.sent_units) for v in found) for name, found in views.items()}


def units_held(views: Mapping[str, Sequence[PartView]]) -> Units:
    """The units that this rank's memory has."""
    return {name: tuple((v, v.units) for v in found) for name, found in views.items()}


@dataclass(slots=True)
class Outgoing:
    """One outbox that this worker fills.

    is_given_up: nothing more may be written into it. Whoever sets it waits for copies under way.
    num_planned_pages: by group, those of the steps so far.
    began_s: when the request's first step began in this worker (CLOCK_MONOTONIC); 0: unknown.
    """

    space: ArenaSpace
    extents: dict[str, LayerExtent]
    began_s: float = 0.0
    is_given_up: bool = False
    num_planned_pages: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Send:
    """One request's share of a step in one group: the pages of `blocks`, the first of which is page
    `first_page` of the transfer.
    """

    ref: TransferRef
    outgoing: Outgoing
    first_page: int
    blocks: BlockIds


@dataclass(frozen=True, slots=True)
class BrokenSend:
    """A copy into an outbox that failed after `store` had returned."""

    ref: TransferRef
    reason: str


Copied = Callable[[Send, Sequence[tuple[int, int]], BaseException | None], None]
"""Gets a share of one layer whose copy has ended, and the (offset, length) ranges that it wrote."""


@dataclass(frozen=True, slots=True)
class GroupSends:
    """All shares in one group. `blocks` are those of all of them, one share behind the other."""

    blocks: BlockTable
    sends: tuple[Send, ...]

    def copies(
        self, layout: KVLayout, layer_name: str, units: Units, copied: Copied
    ) -> Iterator[Copy]:
        """The copies of a layer, when they can be written. Whoever gives up an outbox waits for
        copies under way, so what is not given up here may be written.
        """
        for send in self.sends:
            outgoing = send.outgoing
            # A transfer has a drafter's layers only if both sides have the same drafter.
            if layer_name in outgoing.extents and not outgoing.is_given_up:
                ranges: list[tuple[int, int]] = []
                slabs = _noted_slabs(layout, layer_name, units, send, ranges)
                yield Copy(slabs, partial(copied, send, ranges))


def _noted_slabs(
    layout: KVLayout, layer_name: str, units: Units, send: Send, ranges: list[tuple[int, int]]
) -> Iterator[Slab]:
    """The slabs of one request; their places go to `ranges`."""
    extent, space = send.outgoing.extents[layer_name], send.outgoing.space
    check_blocks(send.blocks, extent)
    views = units[layer_name]
    for slab in slabs_of(layout, extent, views, send.blocks, send.first_page, space):
        ranges += slab.ranges()
        yield slab


def check_blocks(blocks: BlockIds, extent: LayerExtent) -> None:
    """Raise ValueError for block 0, vLLM's null block, which stands for a page that the engine does
    not keep. A producer may lack pages where the receiver's windows begin at a multiple of larger
    pages than its own, and its own cache had the rest.
    """
    if 0 in blocks.rows(1):
        raise ValueError(
            f"the engine gave no block for a page that layer {extent.layer.name} needs"
        )


class StepSends:
    """All groups of one step. Each layer is taken once, by its hook or after the step."""

    def __init__(
        self, layout: KVLayout, units: Units, steps: Sequence[tuple[SendStep, Outgoing]]
    ) -> None:
        """Plan `steps` for the layers of `units`, and count their pages as sent."""
        self._groups: dict[int, GroupSends] = {}
        self._layers: dict[str, int] = {}  # those that nobody has taken
        for index in range(len(layout.groups)) if steps else ():
            planned = _planned(layout, index, steps)
            if planned.sends:
                self._groups[index] = planned
                names = (layer.name for layer in layout.groups[index].layers)
                self._layers |= dict.fromkeys((name for name in names if name in units), index)

    def take(self, layer_name: str) -> GroupSends | None:
        """The shares of a layer, the first time that it is asked for."""
        index = self._layers.pop(layer_name, None)
        return None if index is None else self._groups[index]

    def left(self) -> list[str]:
        """The layers that nobody has taken."""
        return list(self._layers)


def _planned(
    layout: KVLayout, index: int, steps: Sequence[tuple[SendStep, Outgoing]]
) -> GroupSends:
    found: list[tuple[TransferRef, Outgoing, int, int, int]] = []
    ids: list[int] = []
    for step, outgoing in steps:
        ref = step.ref
        pages = layout.groups[index].pages(ref.num_tokens, ref.cached_tokens, ref.window_step)
        first = outgoing.num_planned_pages.get(index, 0)
        stop = _num_final_pages(layout, index, step, pages)
        if stop <= first:
            continue
        outgoing.num_planned_pages[index] = stop
        blocks = step.blocks[index][first:stop]
        found.append((ref, outgoing, first, len(ids), len(ids) + len(blocks)))
        ids += blocks
    table = BlockTable(ids)
    return GroupSends(
        table,
        tuple(
            Send(ref, outgoing, first, table.blocks(start, stop))
            for ref, outgoing, first, start, stop in found
        ),
    )


def _num_final_pages(layout: KVLayout, index: int, step: SendStep, pages: range) -> int:
    """The number of the transfer's pages of a group that no later chunk will change."""
    if step.is_last:
        return len(pages)
    group = layout.groups[index]
    if group.kind is KVKind.RECURRENT:
        return 0
    return max(0, step.computed_tokens // group.tokens_per_block - pages.start)


def slabs_of(
    layout: KVLayout,
    extent: LayerExtent,
    views: Sequence[tuple[PartView, range]],
    blocks: BlockIds,
    first_page: int,
    space: ArenaSpace,
) -> list[Slab]:
    """The tokens of an extent in these blocks, the first of which is page `first_page` of it: the
    units that stand beside each part's view.
    """
    size = layout.groups[extent.group_index].tokens_per_block
    page = extent.pages.start + first_page
    tokens = range(
        max(extent.tokens.start, page * size),
        min(extent.tokens.stop, (page + len(blocks)) * size),
    )
    found = []
    for (view, units), part in zip(views, extent.parts, strict=True):
        before = part.part.items(range(page * size, page * size)).start
        slab = Slab.of(view, units, blocks, before, part.part.items(tokens), part, space)
        if slab.nbytes:
            found.append(slab)
    return found
