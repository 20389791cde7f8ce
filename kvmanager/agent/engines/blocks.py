"""Translates vLLM's KV cache events into the blocks that one engine's GPU memory holds.

Pure: it takes batches and returns changes. It does not know sockets, other engines, or who listens.

A block of ours is held when every group holds all engine blocks in it that resuming at its end
needs. `kvmanager.agent.engines.prefixes` knows the prefix that ends with an engine block.

It claims nothing that might not be there. It drops events of other tiers than GPU memory, and drops
all it knew when an event was lost, because the lost event may have been a removal.

The cost of a batch depends on the batch and not on how much is known, since the agent's event loop
waits for it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvmanager.agent.engines.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineHash,
    EventBatch,
)
from kvmanager.agent.engines.prefixes import EnginePrefixes, Prefix
from kvmanager.layout import KVKind, KVLayout
from kvmanager.pool.shape import CacheShape, PartKind

SHORT_KEY_BYTES: Final = 8
MAX_BLOCKS: Final = 1 << 19
"""Most engine blocks that are remembered, at about 400 bytes each."""

BlockBits = tuple[bytes, int]
"""The first 8 bytes of a key of ours, and a bit for each `PartKind` that is held as a whole."""

# Values of `kv_cache_spec_kind` in vLLM's events. A kind that is missing here is never held.
_KINDS: Final = {
    "full_attention": PartKind.KV,
    "mla_attention": PartKind.KV,
    "sink_full_attention": PartKind.KV,
    "sliding_window": PartKind.WINDOW,
    "sliding_window_mla": PartKind.WINDOW,
    "mamba": PartKind.STATE,
}
_LAYOUT_KINDS: Final = {
    KVKind.FULL: PartKind.KV,
    KVKind.MLA: PartKind.KV,
    KVKind.WINDOW: PartKind.WINDOW,
    KVKind.RECURRENT: PartKind.STATE,
}


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of layers as vLLM's events describe it."""

    kind: PartKind
    block_tokens: int
    window_tokens: int

    def num_needed(self) -> int:
        """Blocks before a boundary that resuming there needs from a window or state group."""
        if self.kind is PartKind.STATE:
            return 1
        # The token at the boundary attends to itself and to the window_tokens - 1 before it.
        return -(-(self.window_tokens - 1) // self.block_tokens)


class EngineBlocks:
    """The blocks of one engine. One thread only."""

    def __init__(
        self,
        layout: KVLayout,
        namespace: bytes,
        adapters: Mapping[str, str] = MappingProxyType({}),
        *,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        """`namespace` is the engine's part of its root keys (`kvmanager.hashing`). `adapters` has
        the identities of its LoRA adapters by name.
        """
        self._block_tokens = CacheShape.of(layout).block_tokens
        self._prefixes = EnginePrefixes(self._block_tokens, namespace, max_blocks, adapters)
        self._num_groups = Counter(_LAYOUT_KINDS[group.kind] for group in layout.groups)
        self._groups: dict[int, _Group] = {}
        self._told: dict[Prefix, None] = {}
        """The ends of those blocks of ours of which the engine was said to hold something."""

    @property
    def num_blocks(self) -> int:
        """Engine blocks that are remembered, held or not."""
        return len(self._prefixes)

    def apply(self, batch: EventBatch) -> Iterator[BlockBits]:
        """The changed keys, each with the bits that are held now. A later entry of a key counts."""
        self._prefixes.free_some()
        changes: list[Iterator[BlockBits]] = []
        events: list[BlockStored | BlockRemoved] = []
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                changes.append(self.clear())
                events.clear()
            else:
                events.append(event)
        changes.append(iter(self._applied(events)))
        return itertools.chain.from_iterable(changes)

    def _applied(self, events: Sequence[BlockStored | BlockRemoved]) -> list[BlockBits]:
        stored = [event for event in events if isinstance(event, BlockStored)]
        # All events are learnt first: the event of a group that leaves blocks out may come before
        # the event of the group that names them all.
        repeated = {id(event) for event in stored if self._is_repeated(event)}
        for fresh in stored:
            self._prefixes.learn(fresh)
        touched: set[Prefix] = set()
        for event in events:
            match event:
                case BlockStored():
                    touched |= self._store(event, is_repeated=id(event) in repeated)
                case BlockRemoved():
                    touched |= self._remove(event)
        return self._judge(touched)

    def clear(self) -> Iterator[BlockBits]:
        """Forget everything at once. Yields the keys that were held, with 0.

        There may be many keys, so the caller may take them in steps.
        """
        told, self._told = self._told, {}
        self._prefixes.clear()
        return ((end.key[:SHORT_KEY_BYTES], 0) for end in told)

    # ---- what is held

    def _is_repeated(self, event: BlockStored) -> bool:
        """Whether the event reports a hit, as vLLM does when it is asked for full reports. Such an
        event names all blocks from the first one on, although a window or state group holds only
        the last ones.
        """
        kind = _KINDS.get(event.kv_cache_spec_kind or "")
        is_sparse = kind in (PartKind.WINDOW, PartKind.STATE)
        begins = event.parent_block_hash is None and event.is_complete
        return is_sparse and begins and event.block_hashes[-1] in self._prefixes

    def _store(self, event: BlockStored, *, is_repeated: bool) -> set[Prefix]:
        group = self._group(event)
        # Other tiers (CPU offloading) have their own events, which say nothing about GPU memory.
        if group is None or event.group_idx is None or not event.is_on_gpu:
            return set()
        names: Sequence[EngineHash] = event.block_hashes
        if is_repeated:
            names = names[max(0, len(names) - group.num_needed()) :]
        nodes = set(self._prefixes.known(names))
        for node in nodes:
            node.held |= 1 << event.group_idx
        return nodes

    def _remove(self, event: BlockRemoved) -> set[Prefix]:
        if not event.is_on_gpu:
            return set()
        gone = -1 if event.group_idx is None else 1 << event.group_idx
        nodes = set(self._prefixes.known(event.block_hashes))
        for node in nodes:
            node.held &= ~gone
            self._prefixes.maybe_forget(node)
        return nodes

    def _group(self, event: BlockStored) -> _Group | None:
        kind = _KINDS.get(event.kv_cache_spec_kind or "")
        index = event.group_idx
        if kind is None or index is None or not 0 <= index < 64 or event.block_size < 1:
            return None
        before = self._groups.get(index)
        # vLLM may store the end of a prompt as a shorter block; the longest size is the group's.
        size = max(event.block_size, before.block_tokens if before is not None else 0)
        window_tokens = max(1, event.kv_cache_spec_sliding_window or 1)
        group = self._groups[index] = _Group(kind, size, window_tokens)
        return group

    # ---- our blocks

    def _judge(self, touched: set[Prefix]) -> list[BlockBits]:
        ends = {end for node in touched for end in self._ends(node)}
        changes = []
        for end in ends:
            bits = self._bits(end)
            if bits == end.bits:
                continue
            end.bits = bits
            changes.append((end.key[:SHORT_KEY_BYTES], bits))
            if bits:
                self._told[end] = None
            else:
                del self._told[end]
                self._prefixes.maybe_forget(end)
        return changes

    def _ends(self, node: Prefix) -> Iterator[Prefix]:
        """The ends of the blocks of ours that contain this engine block."""
        size = self._block_tokens
        boundary = -(-node.end // size) * size
        waiting = [node]
        while waiting:
            below = waiting.pop()
            if below.end == boundary:
                yield below
            elif below.end < boundary:
                waiting += below.inside

    def _bits(self, end: Prefix) -> int:
        held = {end.end: end.held}
        above = end.parent
        while above is not None and above.end > end.end - self._block_tokens:
            held[above.end] = above.held
            above = above.parent
        return sum(1 << kind for kind in PartKind if self._has(kind, end.end, held))

    def _has(self, kind: PartKind, end: int, held: dict[int, int]) -> bool:
        groups = {index: group for index, group in self._groups.items() if group.kind is kind}
        num_groups = self._num_groups[kind]
        if not num_groups or len(groups) < num_groups:
            return False
        return all(
            held.get(position, 0) >> index & 1
            for index, group in groups.items()
            for position in self._needed(group, end)
        )

    def _needed(self, group: _Group, end: int) -> range:
        """The ends of this group's blocks that our block needs.

        A window group needs only the blocks that the window reaches back over from the block's end.
        """
        match group.kind:
            case PartKind.KV:
                length = self._block_tokens
            case PartKind.WINDOW:
                length = min(group.window_tokens - 1, self._block_tokens)
            case PartKind.STATE:
                return range(end, end + 1)
        return range(end, end - length, -group.block_tokens)
