"""The parts of one block of a model's prefix cache, and the rule for resuming a prefix.

Does not know keys, memory or eviction. A block is `block_tokens` neighbouring tokens of a prompt,
starting at a multiple of that number. Its KVCache has up to three kinds of parts, each of which is
stored, evicted and moved as a whole:

    KV       the pages of all full-attention and MLA groups
    WINDOW   the pages of the groups with one window size (a part for each size)
    STATE    the states of all recurrent groups after the block's last token

A prefix of L tokens (a multiple of `block_tokens`) can be resumed when the KV of all its blocks,
the windows of its last `reach` blocks, and the state at exactly its end are there: MiMo's
window-safe length, and SGLang's rule for Mamba states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from kvmanager.layout import KVKind, KVLayer, KVLayout, PartExtent

MIN_BLOCK_TOKENS: Final = 64
"""Smaller blocks would cost more for look-ups and records than they save."""

_DEFAULT_STATE_BLOCK_TOKENS: Final = 512
_PART_KINDS: Final = {KVKind.FULL: 0, KVKind.MLA: 0, KVKind.WINDOW: 1, KVKind.RECURRENT: 2}


class PartKind(IntEnum):
    """The parts that every block of a model consists of."""

    KV = 0
    WINDOW = 1
    STATE = 2


@dataclass(frozen=True, slots=True)
class BlockExtent:
    """One layer's bytes of one block in a part of the cache. `tokens` count from the block's first
    one; a recurrent layer has its state after the last.
    """

    group_index: int
    layer: KVLayer
    tokens: range
    parts: tuple[PartExtent, ...]


@dataclass(frozen=True, slots=True)
class PartShape:
    """One part of every block. `groups` are indices into the layout's groups. They do not tell
    shapes apart: engines with other groups read and write the same bytes.
    """

    kind: PartKind
    nbytes: int
    window_tokens: int = 0
    groups: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The parts of one model's blocks, KV first (if there is any), then windows, then the state."""

    block_tokens: int
    parts: tuple[PartShape, ...]

    def __post_init__(self) -> None:
        kinds = [part.kind for part in self.parts]
        if self.block_tokens < 1 or not kinds or kinds != sorted(kinds):
            raise ValueError(f"no cache shape: {self.block_tokens} tokens a block, parts {kinds}")
        if kinds.count(PartKind.KV) > 1 or kinds.count(PartKind.STATE) > 1:
            raise ValueError(f"KV and STATE are one part each: {kinds}")

    @classmethod
    def of(cls, layout: KVLayout) -> CacheShape:
        """The shape of a layout's cache.

        A block is the smallest number of tokens that is whole pages of every attention group. With
        recurrent layers it is exactly that, because an engine has states at its own page
        boundaries; otherwise a multiple of it that is at least `MIN_BLOCK_TOKENS`.
        """
        groups = layout.groups
        paged = [group.tokens_per_block for group in groups if group.kind is not KVKind.RECURRENT]
        block_tokens = math.lcm(*paged) if paged else _DEFAULT_STATE_BLOCK_TOKENS
        if len(paged) == len(groups):
            block_tokens *= -(-MIN_BLOCK_TOKENS // block_tokens)
        members: dict[tuple[int, int], list[int]] = {}
        for index, group in enumerate(groups):
            members.setdefault((_PART_KINDS[group.kind], group.window_tokens), []).append(index)
        parts = []
        for (kind, window_tokens), indices in sorted(members.items()):
            nbytes = sum(
                layer.bytes_of(range(block_tokens))
                for index in indices
                for layer in groups[index].layers
            )
            parts.append(PartShape(PartKind(kind), nbytes, window_tokens, tuple(indices)))
        return cls(block_tokens, tuple(parts))

    @property
    def has_kv(self) -> bool:
        """Whether the model has full attention or MLA, so that a prefix needs all its blocks."""
        return self.parts[0].kind is PartKind.KV

    @property
    def state_part(self) -> int | None:
        """The number of the STATE part, if there are recurrent layers."""
        last = len(self.parts) - 1
        return last if self.parts[last].kind is PartKind.STATE else None

    def reach(self, part: int) -> int | None:
        """The number of last blocks of a prefix that must have this part to resume it; None: all.

        A window of W tokens reaches back from the boundary over W - 1 tokens.
        """
        shape = self.parts[part]
        match shape.kind:
            case PartKind.KV:
                return None
            case PartKind.WINDOW:
                return -(-(shape.window_tokens - 1) // self.block_tokens)
            case PartKind.STATE:
                return 1

    def resume_parts(self, num_blocks: int) -> Iterator[tuple[int, int]]:
        """The (block index, part) pairs that resuming after `num_blocks` blocks needs, in order."""
        for part in range(len(self.parts)):
            reach = self.reach(part)
            first = 0 if reach is None else max(0, num_blocks - reach)
            yield from ((index, part) for index in range(first, num_blocks))

    def num_kv_blocks(self, present: Sequence[Sequence[bool]]) -> int:
        """The number of leading blocks with KV. `present[i][part]`: block i has the part."""
        if not self.has_kv:
            return len(present)
        return next((i for i, parts in enumerate(present) if not parts[0]), len(present))

    def num_usable_blocks(self, present: Sequence[Sequence[bool]]) -> int:
        """The longest prefix, in blocks, that can be resumed from what is `present`."""
        for num_blocks in range(self.num_kv_blocks(present), 0, -1):
            if all(present[index][part] for index, part in self.resume_parts(num_blocks)):
                return num_blocks
        return 0


def part_extents(layout: KVLayout, shape: CacheShape, part: int) -> Iterator[BlockExtent]:
    """The layers of one part of a block, in order; offsets count from the part's byte 0.

    Order of bytes: as in a transfer (`kvmanager.layout`), so that engines that are cut otherwise
    read and write the same parts.
    """
    offset = 0
    tokens = range(shape.block_tokens)
    for index, layer in layout.layers:
        if index in shape.parts[part].groups:
            extent = BlockExtent(index, layer, tokens, tuple(layer.extents(tokens, offset)))
            offset += sum(item.nbytes for item in extent.parts)
            yield extent
