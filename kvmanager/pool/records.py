"""The prefix pool's results: matches, pins, fills, changes and numbers.

Values only. They know neither how blocks are found nor what is evicted when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from kvmanager.pool.shape import CacheShape, PartKind
from kvmanager.transfers.blocks import Run

BlockPart = tuple[int, int]
"""(index into the keys of a call, part number of the shape)."""

Order = Literal["hits", "size", "recent"]


class Tier(IntEnum):
    """The place of a copy of a part. A lower number is faster."""

    ARENA = 0
    SSD = 1


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one part in the arena. `index` counts the keys of the call that it answers."""

    index: int
    part: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of a prompt is cached, in blocks from its start.

    A prompt can resume after `num_blocks` from all tiers together; `kv_blocks` have their KV in
    some tier. `arena_blocks` and `arena_kv_blocks` are the same for the arena alone. In a shape
    without KV every block counts as having it.
    """

    num_blocks: int
    kv_blocks: int
    arena_blocks: int
    arena_kv_blocks: int


@dataclass(frozen=True, slots=True)
class Pin:
    """Parts that stay until `unpin`: those in the arena at `slots`, and the `absent` ones that are
    only on SSD.
    """

    pin_id: int
    slots: tuple[Slot, ...]
    absent: tuple[BlockPart, ...]


@dataclass(frozen=True, slots=True)
class Fill:
    """Arena memory for the caller to write. Without slots there was nothing to give."""

    fill_id: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class PoolChange:
    """A copy of a part was stored in a tier or dropped from it. `runs` are empty for SSD."""

    stored: bool
    tier: Tier
    key: bytes
    parent: bytes
    index: int
    part: int
    shape: CacheShape
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Spill:
    """One attempt to copy a part from the arena to SSD.

    A part that leaves the arena and comes back may be copied again while the first attempt is still
    under way. `spill_id` tells the attempts apart.
    """

    spill_id: int
    change: PoolChange
    """The part where it lies in the arena."""


Listener = Callable[[PoolChange], None]
"""Called with changes in order, each when the records are consistent. Must not call the pool."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A pool now. Bytes and evictions by tier and kind; bytes are the parts' own."""

    nbytes: dict[tuple[Tier, PartKind], int]
    evictions: dict[tuple[Tier, PartKind], int]
    num_blocks: int
    """Blocks with any part in any tier."""
    num_arena_blocks: int
    """Blocks of the arena that the pool holds, those being filled included."""
    pinned_bytes: int
    """Pinned bytes of the arena."""


@dataclass(frozen=True, slots=True)
class ListedPrefix:
    """A prefix that nothing longer continues; `key` is its last block's.

    `nbytes` are of all its blocks, shared ones included. `branch_tokens`: the deepest boundary
    before its end where others part from it, 0 if there is none.
    """

    key: bytes
    num_tokens: int
    nbytes: dict[tuple[Tier, PartKind], int]
    num_hits: int
    idle_s: float
    branch_tokens: int
    resumable_tokens: int
    is_pinned: bool
