"""The parts that make up a KVCache layout: groups of layers, their parts, and the places of bytes.

The order of bytes is described in `kvmanager.layout`. It does not know whole models.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import msgspec


class KVKind(StrEnum):
    """How a layer's cache grows with the sequence."""

    FULL = "full"
    MLA = "mla"
    WINDOW = "window"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class PartExtent:
    """The place of a part's items in a transfer or in a cached block, from `offset` on.

    The items of one unit are neighbours, and so are the units.
    """

    part: "KVPart"
    items: range
    offset: int

    @property
    def unit_bytes(self) -> int:
        return len(self.items) * self.part.item_bytes

    @property
    def nbytes(self) -> int:
        return self.part.num_units * self.unit_bytes

    def place(self, unit: int, item: int) -> int:
        """The offset of one item of one unit."""
        before = (item - self.items.start) * self.part.item_bytes
        return self.offset + unit * self.unit_bytes + before


class KVPart(msgspec.Struct, frozen=True):
    """One sort of what a layer keeps, over all tensor-parallel ranks.

    num_units: what ranks divide among themselves, KV heads or heads of a state.
    item_bytes: bytes of one unit's item.
    tokens_per_item: the tokens that one item is of; 0 for a state, which is of all tokens before.
    encoding: how the bytes of an item are to be read, "bfloat16" for plain numbers.
    """

    name: str
    num_units: int
    item_bytes: int
    encoding: str
    tokens_per_item: int = 1

    def held_units(self, tp_size: int, tp_rank: int) -> range:
        """The units in a rank's memory. Ranks beyond the number of units have copies."""
        if self.num_units >= tp_size:
            share = self.num_units // tp_size
            return range(tp_rank * share, (tp_rank + 1) * share)
        unit = tp_rank // (tp_size // self.num_units)
        return range(unit, unit + 1)

    def sent_units(self, tp_size: int, tp_rank: int) -> range:
        """The units that a rank sends: of those with a copy of a unit, the first one does."""
        held = self.held_units(tp_size, tp_rank)
        copies = max(1, tp_size // self.num_units)
        return held if tp_rank % copies == 0 else range(held.start, held.start)

    def items(self, tokens: range) -> range:
        """The items that these tokens are in."""
        if not self.tokens_per_item:
            return range(1)
        first = tokens.start // self.tokens_per_item
        return range(first, max(first, -(-tokens.stop // self.tokens_per_item)))

    def fits(self, tp_size: int) -> bool:
        """Whether so many ranks can divide the units, or have whole copies of them."""
        return self.num_units % tp_size == 0 or tp_size % self.num_units == 0


class KVLayer(msgspec.Struct, frozen=True):
    """One layer: its name in the engine, and the parts of its cache. `is_draft`: of a drafter."""

    name: str
    parts: tuple[KVPart, ...]
    is_draft: bool = False

    def extents(self, tokens: range, offset: int) -> Iterator[PartExtent]:
        """The parts of these tokens one behind the other, from `offset` on."""
        for part in self.parts:
            extent = PartExtent(part, part.items(tokens), offset)
            offset += extent.nbytes
            yield extent

    def bytes_of(self, tokens: range) -> int:
        """Bytes of these tokens, every unit once."""
        return sum(extent.nbytes for extent in self.extents(tokens, 0))

    def held_bytes(self, tokens: range, tp_size: int) -> int:
        """Bytes of these tokens in the memory of all ranks, copies too."""
        return sum(
            max(part.num_units, tp_size) * len(part.items(tokens)) * part.item_bytes
            for part in self.parts
        )


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that share a KV kind and a block table (vLLM's KV cache group)."""

    kind: KVKind
    tokens_per_block: int
    layers: tuple[KVLayer, ...]
    window_tokens: int = 0

    def tokens(self, num_tokens: int, cached_tokens: int = 0, window_step: int = 0) -> range:
        """The tokens whose KVCache the token after `num_tokens` needs.

        Full attention needs all, without the first `cached_tokens`, which the other side has. A
        window of W tokens reaches back to position `num_tokens - W + 1`, and from there to a
        multiple of `window_step` (0: of this group's pages): an engine keeps whole pages for later
        prompts, so it must get them whole. A recurrent layer needs its state after the last token.
        """
        match self.kind:
            case KVKind.RECURRENT:
                return range(num_tokens - 1, num_tokens)
            case KVKind.WINDOW:
                first = num_tokens - self.window_tokens + 1
                step = window_step or self.tokens_per_block
                return range(max(0, first // step * step), num_tokens)
            case KVKind.FULL | KVKind.MLA:
                return range(cached_tokens, num_tokens)

    def pages(self, num_tokens: int, cached_tokens: int = 0, window_step: int = 0) -> range:
        """Indices into the engine's block table of the pages with `tokens`."""
        tokens = self.tokens(num_tokens, cached_tokens, window_step)
        size = self.tokens_per_block
        return range(tokens.start // size, -(-tokens.stop // size))


@dataclass(frozen=True, slots=True)
class LayerExtent:
    """One layer's bytes in a transfer. `pages` are the engine's pages with `tokens`."""

    group_index: int
    layer: KVLayer
    tokens: range
    pages: range
    parts: tuple[PartExtent, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)
