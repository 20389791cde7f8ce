"""The blocks that a pool knows, their parts, and the sizes of parts in arena blocks.

A node is one block of a prompt, identified by its key and linked to the block before it. Its parts
are what is cached of it. Knows neither allocators, callers nor recency rules; the records are in
`kvmanager.pool.parts`.

Python's garbage collector visits every object that may hold others. With the objects of half a
million blocks, one full collection stops the process for half a second. So nodes and parts are
structs that the collector does not track (`gc=False`), and tuples of such structs, which it stops
tracking. So code that drops a node or a part must cut its links, or the memory is never freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvmanager.pool.records import Tier
from kvmanager.pool.shape import CacheShape, PartKind
from kvmanager.transfers.blocks import Run


class Geometry:
    """A `CacheShape` in an arena: blocks of each part, and masks with bit p for part p."""

    __slots__ = ("has_kv", "num_blocks", "shape", "state_mask", "windows")

    def __init__(self, shape: CacheShape, block_bytes: int) -> None:
        self.shape = shape
        self.has_kv = shape.has_kv
        self.num_blocks = tuple(-(-part.nbytes // block_bytes) for part in shape.parts)
        state = shape.state_part
        self.state_mask = 0 if state is None else 1 << state
        self.windows = tuple(
            (1 << number, shape.reach(number) or 0)
            for number, part in enumerate(shape.parts)
            if part.kind is PartKind.WINDOW
        )

    def num_usable_blocks(self, masks: Sequence[int]) -> int:
        """`CacheShape.num_usable_blocks` in one pass; `masks[i]` has the parts of block i.

        KV is not checked: all these blocks must have it.
        """
        state = self.state_mask
        if not self.windows and not state:
            return len(masks)
        usable = 0
        streaks = [0] * len(self.windows)
        for count, mask in enumerate(masks, 1):
            is_usable = mask & state == state
            for number, (bit, reach) in enumerate(self.windows):
                streaks[number] = streak = streaks[number] + 1 if mask & bit else 0
                # A prefix shorter than the window needs it in all of its own blocks.
                if streak < reach and streak < count:
                    is_usable = False
            if is_usable:
                usable = count
        return usable


@dataclass(slots=True, eq=False)
class Filling:
    """Arena memory that is being written. `part` None: its prefix is gone, and the memory is freed
    once nobody writes there any more.
    """

    part: Part | None
    runs: tuple[Run, ...]
    is_written: bool = False

    @property
    def num_blocks(self) -> int:
        return sum(run.length for run in self.runs)


class Part(msgspec.Struct, eq=False, gc=False):
    """One part of one block: present in the arena (`runs`), on SSD, or being filled.

    It is never both in the arena and being filled. It is an `EvictionCandidate`. `condemned` has
    bit t if the copy in tier t must go as soon as nobody uses it. `spill_id` identifies the copying
    to SSD that is under way; 0: none.
    """

    node: Node
    number: int
    last_used: int
    num_hits: int = 0
    num_pins: int = 0
    runs: tuple[Run, ...] = ()
    on_ssd: bool = False
    spill_id: int = 0
    filling: Filling | None = None
    condemned: int = 0

    @property
    def is_present(self) -> bool:
        return bool(self.runs) or self.on_ssd

    @property
    def is_spilling(self) -> bool:
        """Whether the part is being copied from the arena to SSD."""
        return self.spill_id != 0

    @property
    def is_kv(self) -> bool:
        return self.number == 0 and self.node.geometry.has_kv

    @property
    def kind(self) -> PartKind:
        return self.node.geometry.shape.parts[self.number].kind

    @property
    def nbytes(self) -> int:
        return self.node.geometry.shape.parts[self.number].nbytes

    @property
    def num_blocks(self) -> int:
        """Arena blocks that a copy takes."""
        return self.node.geometry.num_blocks[self.number]

    @property
    def index(self) -> int:
        return self.node.index

    @property
    def block_tokens(self) -> int:
        return self.node.geometry.shape.block_tokens

    @property
    def recompute_tokens(self) -> int:
        """Tokens to recompute without this part. For KV: the block's. For a window or state: those
        since the last boundary that has one (for a window, before its own reach), or without KV the
        whole prefix.
        """
        if self.is_kv:
            return self.block_tokens
        if not self.node.geometry.has_kv:
            return (self.index + 1) * self.block_tokens
        reach = self.node.geometry.shape.reach(self.number) or 1
        num_blocks, before = 1, self.node.up
        while before is not None and (num_blocks < reach or before.parts[self.number] is None):
            num_blocks, before = num_blocks + 1, before.up
        return num_blocks * self.block_tokens

    @property
    def has_sound_copy(self) -> bool:
        """Whether some tier has a copy that is not condemned."""
        if not self.condemned:
            return self.is_present
        return any(self.is_in(tier) and not self.is_condemned(tier) for tier in Tier)

    def is_in(self, tier: Tier) -> bool:
        return bool(self.runs) if tier is Tier.ARENA else self.on_ssd

    def is_condemned(self, tier: Tier) -> bool:
        return bool(self.condemned >> tier & 1)

    def goes_with(self, base: Part, tier: Tier) -> bool:
        """Whether its copy in `tier` cannot stay because of the state of its base.

        A copy on SSD needs the base's copy on SSD; a copy in the arena needs any copy of the base.
        """
        if tier is Tier.SSD:
            return not (base.on_ssd or base.is_spilling) or base.is_condemned(Tier.SSD)
        return not base.has_sound_copy


class Node(msgspec.Struct, eq=False, gc=False):
    """A block. `up`: the node before it, while the shape has KV and it is not the first.

    `present` and `in_arena` have bit p for each part present in any tier, and in the arena.
    `num_needs` counts the parts that need this block's KV in some tier: KV of next blocks, present
    or being filled, and this block's windows and states that are pinned or being filled.
    `num_ssd_needs` counts the parts on SSD, of both sorts, that need its KV. The blocks before it
    were all used at `prefix_used` or later. The nodes with the
    same `up` are a doubly linked list, since a set for each node would take more memory than the
    node.
    """

    key: bytes
    parent: bytes
    index: int
    geometry: Geometry
    up: Node | None
    parts: tuple[Part | None, ...] = ()
    present: int = 0
    in_arena: int = 0
    num_needs: int = 0
    num_ssd_needs: int = 0
    last_used: int = 0
    last_used_s: float = 0.0
    prefix_used: int = 0
    _first_child: Node | None = None
    _previous: Node | None = None
    _next: Node | None = None

    def __post_init__(self) -> None:
        self.parts = (None,) * len(self.geometry.shape.parts)
        up = self.up
        if up is not None:
            self.prefix_used = up.prefix_used
            first = up._first_child
            self._next, up._first_child = first, self
            if first is not None:
                first._previous = self

    def unlink(self) -> None:
        """Leave the children of `up`. The node cannot be used any more."""
        if self.up is not None and self.up._first_child is self:
            self.up._first_child = self._next
        if self._previous is not None:
            self._previous._next = self._next
        if self._next is not None:
            self._next._previous = self._previous

    def children(self) -> Iterator[Node]:
        """The blocks that continue this one. None of them may be linked or unlinked meanwhile."""
        child = self._first_child
        while child is not None:
            yield child
            child = child._next

    def put(self, number: int, part: Part | None) -> None:
        """Make `part` the part of that number; None: there is none any more."""
        # A tuple again and no list, which the garbage collector would track.
        self.parts = (*self.parts[:number], part, *self.parts[number + 1 :])

    @property
    def kv(self) -> Part | None:
        """Its KV part, if it has one now."""
        return self.parts[0] if self.geometry.has_kv else None

    def base(self, number: int) -> Part | None:
        """The base of part `number`: for KV the KV of the block before, for others the block's own.

        None where no base is needed. Raises KeyError where the base is missing.
        """
        if not self.geometry.has_kv or (number == 0 and self.index == 0):
            return None
        below = self.up if number == 0 else self
        part = below.parts[0] if below is not None else None
        if part is None:
            raise KeyError(f"block {self.key.hex()} stands on nothing")
        return part

    def touch(self, use: int, now_s: float) -> None:
        """Note that use number `use` touches the block and its KV."""
        self.last_used = use
        self.last_used_s = now_s
        if (kv := self.kv) is not None:
            kv.last_used = use


def presence(
    nodes: Mapping[bytes, Node], geometry: Geometry, keys: Sequence[bytes]
) -> tuple[list[int], list[int]]:
    """Masks of what leading blocks have in any tier and in the arena.

    With KV in the shape they end before the first block without KV: nothing above it is usable.
    """
    present: list[int] = []
    in_arena: list[int] = []
    for node in map(nodes.get, keys):
        if node is None or node.geometry is not geometry:
            if geometry.has_kv:
                break
            present.append(0)
            in_arena.append(0)
        elif geometry.has_kv and not node.present & 1:
            break
        else:
            present.append(node.present)
            in_arena.append(node.in_arena)
    return present, in_arena


def continuation(
    nodes: Mapping[bytes, Node],
    geometry: Geometry,
    parent: bytes,
    first_block: int,
    keys: Sequence[bytes],
) -> list[Node | None]:
    """The nodes of `keys`, with None for unknown ones, up to the first that contradicts the
    caller's order. Nothing, if the block before the first must be known and is not.
    """
    if geometry.has_kv and first_block:
        before = nodes.get(parent)
        if before is None or before.geometry is not geometry or before.index != first_block - 1:
            return []
    blocks: dict[bytes, Node | None] = {}
    for index, key in enumerate(keys, first_block):
        node = nodes.get(key)
        # The key before block 0 is a root, which no block needs to name.
        fits = node is None or (node.index == index and (not index or node.parent == parent))
        if key in blocks or not fits or (node is not None and node.geometry is not geometry):
            break
        blocks[key] = node
        parent = key
    return list(blocks.values())
