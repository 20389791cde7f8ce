"""What the GPU memory of one engine holds, in our block keys, told from vLLM's KV cache events.

Pure: batches in, changes out. Does not know sockets, other engines, or who wants to know.

vLLM names its cache blocks by hashes of whole prefixes: the hash at a token boundary is the same
in every group of layers. A `BlockStored` event brings the
token ids of a range and the hash of its parent, so that a hash leads to the token ids before it and
these to our keys. Events of sliding windows and recurrent states leave out blocks without saying
which; their hashes mean something once a complete event of another group has named them.

Nothing is claimed that might not be there. What is dropped: children of an unknown parent, blocks
with multimodal inputs or prompt embeddings and all that follow them, prompts with a LoRA adapter
(events bring its name, our keys also depend on its path), events of other tiers than GPU memory,
and everything known before a lost event, since a removal may have been among the lost. Prefixes
beyond `max_blocks` are not learnt while the engine holds all that are known.

What a batch costs depends on the batch, not on how much is known: an agent's event loop waits for
it.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvmanager.agent.engines.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineHash,
    EventBatch,
)
from kvmanager.hashing import block_keys, root_key
from kvmanager.layout import KVKind, KVLayout
from kvmanager.pool.shape import CacheShape, PartKind

SHORT_KEY_BYTES: Final = 8
MAX_BLOCKS: Final = 1 << 19
"""Engine blocks whose place is remembered, about 400 bytes each."""

_FREED_PER_BATCH: Final = 4096

BlockBits = tuple[bytes, int]
"""The first 8 bytes of one of our keys, and bit `PartKind` for each kind that is all there."""

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
    """A group of layers as its events describe it."""

    kind: PartKind
    block_tokens: int
    window_tokens: int

    def num_needed(self) -> int:
        """Blocks before a boundary that resuming there needs, of a group that leaves some out."""
        if self.kind is PartKind.STATE:
            return 1
        return -(-(self.window_tokens - 1) // self.block_tokens)


class _Node:
    """A prefix that the engine has named: the tokens after its parent, and which groups hold it.

    `key` is our key of the last whole block of ours in the prefix, or the root key. `inside` are
    the children, if this prefix ends inside a block of ours. A root has no parent; its name
    is its salt. `is_queued`: it is among those to look at when there is no room.
    """

    __slots__ = (
        "bits",
        "end",
        "held",
        "inside",
        "is_queued",
        "key",
        "name",
        "num_children",
        "parent",
        "tokens",
    )

    def __init__(
        self, name: EngineHash, parent: _Node | None, tokens: bytes, end: int, key: bytes
    ) -> None:
        self.name = name
        self.parent = parent
        self.tokens = tokens
        self.end = end
        self.key = key
        self.held = 0
        self.bits = 0
        self.num_children = 0
        self.inside: dict[_Node, None] = {}
        self.is_queued = False


class EngineBlocks:
    """The blocks of one engine. One thread only."""

    def __init__(self, layout: KVLayout, namespace: bytes, *, max_blocks: int = MAX_BLOCKS) -> None:
        """`namespace` is what the engine's root keys are made of (`kvmanager.hashing`)."""
        self._block_tokens = CacheShape.of(layout).block_tokens
        self._namespace = namespace
        self._max_blocks = max_blocks
        self._num_groups = Counter(_LAYOUT_KINDS[group.kind] for group in layout.groups)
        self._groups: dict[int, _Group] = {}
        self._roots: dict[EngineHash, _Node] = {}
        """Roots by their salts."""
        self._nodes: dict[EngineHash, _Node] = {}
        self._told: dict[_Node, None] = {}
        """The ends of our blocks of which anything is held."""
        self._maybe_idle: deque[_Node] = deque()
        """Nodes that perhaps nobody holds any more, each once, the oldest entry first."""
        self._cleared: list[dict[EngineHash, _Node]] = []
        """What was known before, to be freed little by little."""

    @property
    def num_blocks(self) -> int:
        """Engine blocks whose place is known, held or not."""
        return len(self._nodes)

    def apply(self, batch: EventBatch) -> Iterator[BlockBits]:
        """The keys whose bits changed, each with what is held of it now; later ones count."""
        self._free_some()
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
        # A group that leaves blocks out may come before the one that names them all.
        repeated = {id(event) for event in stored if self._is_repeated(event)}
        for fresh in stored:
            self._learn(fresh)
        touched: set[_Node] = set()
        for event in events:
            match event:
                case BlockStored():
                    touched |= self._store(event, is_repeated=id(event) in repeated)
                case BlockRemoved():
                    touched |= self._remove(event)
        return self._judge(touched)

    def clear(self) -> Iterator[BlockBits]:
        """Forget everything at once; the keys of which something was held, with 0.

        Many, perhaps: the caller may take them in steps.
        """
        told, self._told = self._told, {}
        self._cleared.append(self._nodes)
        self._nodes, self._roots = {}, {}
        self._maybe_idle = deque()
        return ((end.key[:SHORT_KEY_BYTES], 0) for end in told)

    # ---- which prefix a hash names

    def _learn(self, event: BlockStored) -> None:
        if not event.is_complete or not event.is_on_gpu:
            return
        node = self._start(event)
        try:
            tokens = np.array(event.token_ids, dtype="<u4").tobytes()
        except OverflowError:  # placeholders of inputs that are no tokens
            return
        size = 4 * event.block_size
        for index, name in enumerate(event.block_hashes):
            if node is None or not _is_plain(event, index, is_first=node.parent is None):
                return
            node = self._enter(name, node, tokens[index * size : (index + 1) * size])

    def _start(self, event: BlockStored) -> _Node | None:
        """The prefix that the event's first block continues, if it is known."""
        if event.parent_block_hash is not None:
            return self._nodes.get(event.parent_block_hash)
        salt = _salt(event)
        if salt is None or event.lora_name:
            return None
        name = salt.encode()
        if name not in self._roots:
            key = root_key(self._namespace, tenant=salt)
            self._roots[name] = _Node(name, None, b"", 0, key)
        return self._roots[name]

    def _enter(self, name: EngineHash, parent: _Node, tokens: bytes) -> _Node | None:
        node = self._nodes.get(name)
        end = parent.end + len(tokens) // 4
        if node is None:
            parent.num_children += 1  # it must not be forgotten now
            is_room = self._is_room()
            parent.num_children -= 1
            if not is_room:
                self._maybe_forget(parent)
                return None
            key = self._key(parent, tokens)
            node = self._nodes[name] = _Node(name, parent, tokens, end, key)
            self._adopt(parent, node)
            self._maybe_forget(node)
        elif node.end != end:  # two prefixes with one hash: neither can be told from the other
            return None
        elif node.parent is not parent and len(tokens) < len(node.tokens):
            # Smaller steps than those known: the way back shall pass every boundary.
            self._orphan(node)
            node.parent, node.tokens = parent, tokens
            self._adopt(parent, node)
        return node

    def _adopt(self, parent: _Node, node: _Node) -> None:
        parent.num_children += 1
        if parent.end % self._block_tokens:
            parent.inside[node] = None

    def _orphan(self, node: _Node) -> None:
        parent = node.parent
        if parent is not None:
            parent.num_children -= 1
            if parent.end % self._block_tokens:
                del parent.inside[node]
            if not parent.num_children:
                self._maybe_forget(parent)

    def _key(self, parent: _Node, tokens: bytes) -> bytes:
        """Our key of the last whole block of ours in parent + tokens."""
        size = self._block_tokens
        start = parent.end // size * size
        if (parent.end + len(tokens) // 4) // size * size == start:
            return parent.key
        pieces = [tokens]
        above: _Node | None = parent
        while above is not None and above.end > start:
            pieces.append(above.tokens[-4 * (above.end - start) :])
            above = above.parent
        ids = np.frombuffer(b"".join(reversed(pieces)), dtype="<u4").tolist()
        return block_keys(ids, size, parent.key)[-1]

    # ---- what is held

    def _is_repeated(self, event: BlockStored) -> bool:
        """A report of a hit, as vLLM gives when asked for full reports: complete from the start,
        though of a group that leaves blocks out only the last ones are there.
        """
        kind = _KINDS.get(event.kv_cache_spec_kind or "")
        is_sparse = kind in (PartKind.WINDOW, PartKind.STATE)
        begins = event.parent_block_hash is None and event.is_complete
        return is_sparse and begins and event.block_hashes[-1] in self._nodes

    def _store(self, event: BlockStored, *, is_repeated: bool) -> set[_Node]:
        group = self._group(event)
        if group is None or event.group_idx is None or not event.is_on_gpu:
            return set()
        names: Sequence[EngineHash] = event.block_hashes
        if is_repeated:
            names = names[max(0, len(names) - group.num_needed()) :]
        nodes = set(self._known(names))
        for node in nodes:
            node.held |= 1 << event.group_idx
        return nodes

    def _remove(self, event: BlockRemoved) -> set[_Node]:
        if not event.is_on_gpu:
            return set()
        gone = -1 if event.group_idx is None else 1 << event.group_idx
        nodes = set(self._known(event.block_hashes))
        for node in nodes:
            node.held &= ~gone
            self._maybe_forget(node)
        return nodes

    def _known(self, names: Iterable[EngineHash]) -> Iterator[_Node]:
        return (self._nodes[name] for name in names if name in self._nodes)

    def _group(self, event: BlockStored) -> _Group | None:
        kind = _KINDS.get(event.kv_cache_spec_kind or "")
        index = event.group_idx
        if kind is None or index is None or not 0 <= index < 64 or event.block_size < 1:
            return None
        before = self._groups.get(index)
        # The end of a prompt may be stored as a part of a block.
        size = max(event.block_size, before.block_tokens if before is not None else 0)
        window_tokens = max(1, event.kv_cache_spec_sliding_window or 1)
        group = self._groups[index] = _Group(kind, size, window_tokens)
        return group

    # ---- our blocks

    def _judge(self, touched: set[_Node]) -> list[BlockBits]:
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
                self._maybe_forget(end)
        return changes

    def _ends(self, node: _Node) -> Iterator[_Node]:
        """The ends of the blocks of ours that this engine block is in."""
        size = self._block_tokens
        boundary = -(-node.end // size) * size
        waiting = [node]
        while waiting:
            below = waiting.pop()
            if below.end == boundary:
                yield below
            elif below.end < boundary:
                waiting += below.inside

    def _bits(self, end: _Node) -> int:
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

        Of a window only what reaches back from the block's end: nothing else is ever read.
        """
        match group.kind:
            case PartKind.KV:
                length = self._block_tokens
            case PartKind.WINDOW:
                length = min(group.window_tokens - 1, self._block_tokens)
            case PartKind.STATE:
                return range(end, end + 1)
        return range(end, end - length, -group.block_tokens)

    # ---- bounds

    def _is_room(self) -> bool:
        """Whether one more prefix may be remembered, after forgetting one if there are too many."""
        while len(self._nodes) >= self._max_blocks and self._maybe_idle:
            self._forget_if_idle(self._maybe_idle.popleft())
        return len(self._nodes) < self._max_blocks

    def _maybe_forget(self, node: _Node) -> None:
        """Remember to look at the node when there is no room."""
        if not node.is_queued and node.parent is not None:
            node.is_queued = True
            self._maybe_idle.append(node)

    def _forget_if_idle(self, node: _Node) -> None:
        """Forget a prefix that nobody holds and nothing continues."""
        node.is_queued = False
        parent = node.parent
        if node.held or node.bits or node.num_children or parent is None:
            return  # it is queued again when that has changed
        del self._nodes[node.name]
        self._orphan(node)
        node.parent = None
        if parent.parent is None and not parent.num_children:
            del self._roots[parent.name]

    def _free_some(self) -> None:
        """Let some of what was cleared go: to free all of it at once takes a while."""
        left = _FREED_PER_BATCH
        while self._cleared and left:
            nodes = self._cleared[-1]
            num_freed = min(len(nodes), left)
            for _ in range(num_freed):
                nodes.popitem()  # the last comes after those that it continues
            left -= num_freed
            if not nodes:
                self._cleared.pop()


def _extras(event: BlockStored, index: int) -> list[Any]:
    """What a block's hash depends on beside tokens."""
    keys = event.extra_keys
    return list(keys[index] or ()) if keys is not None and index < len(keys) else []


def _salt(event: BlockStored) -> str | None:
    """The tenant of a prompt, from its first block; None when that depends on other things."""
    match _extras(event, 0):
        case []:
            return ""
        case [str(salt)]:
            return salt
    return None


def _is_plain(event: BlockStored, index: int, *, is_first: bool) -> bool:
    """Whether the block's KVCache depends on tokens alone; the first one's salt is in its root."""
    return is_first or not _extras(event, index)
