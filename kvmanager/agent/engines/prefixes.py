"""Maps the block hashes of one engine to prefixes, and these to the keys of our caches.

vLLM names its cache blocks by hashes of whole prefixes: the hash at a token boundary is the same
in every group of layers. A `BlockStored` event has the token ids of a range and the hash of its
parent. So a hash leads to the token ids before it, and these lead to our keys. Events of sliding
windows and recurrent states leave out blocks without saying which. Their hashes get a meaning once
a complete event of another group has named them.

Some prefixes are not learnt: children of an unknown parent; blocks with multimodal inputs or prompt
embeddings, and all blocks after them; prompts with a LoRA adapter of which the engine has not told
the identity, because events have only its name; and blocks beyond `max_blocks` while the engine
holds all that are known.

It does not know groups of layers, and of a prefix only whether any group holds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from kvmanager.agent.engines.kv_events import BlockStored, EngineHash
from kvmanager.hashing import block_keys, root_key

_FREED_PER_BATCH: Final = 4096


class Prefix:
    """A prefix that the engine has named: the tokens after its parent, and the groups that hold it.

    `key` is our key of the last whole block of ours in the prefix, or the root key. `inside` are
    the children, if this prefix ends inside a block of ours. A root has no parent; its name is its
    key. `held` has a bit for each group that holds the last engine block. `bits` is the last
    reported state of the block of ours that ends here. `is_queued`: it is in the queue of prefixes
    that may be forgotten when there is no room.
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
        self, name: EngineHash, parent: Prefix | None, tokens: bytes, end: int, key: bytes
    ) -> None:
        self.name = name
        self.parent = parent
        self.tokens = tokens
        self.end = end
        self.key = key
        self.held = 0
        self.bits = 0
        self.num_children = 0
        self.inside: dict[Prefix, None] = {}
        self.is_queued = False


class EnginePrefixes:
    """The named prefixes of one engine. One thread only."""

    def __init__(
        self,
        block_tokens: int,
        namespace: bytes,
        max_blocks: int,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`block_tokens` is our block size; `namespace` is the engine's part of its root keys, and
        `adapters` has the identities of its LoRA adapters by name.
        """
        self._block_tokens = block_tokens
        self._namespace = namespace
        self._adapters = adapters
        self._max_blocks = max_blocks
        self._roots: dict[EngineHash, Prefix] = {}
        """Roots by their keys."""
        self._nodes: dict[EngineHash, Prefix] = {}
        self._maybe_idle: deque[Prefix] = deque()
        """Prefixes that perhaps no group holds any more, each once, the oldest entry first."""
        self._cleared: list[dict[EngineHash, Prefix]] = []
        """Prefixes of before a `clear`, which `free_some` frees in steps."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, name: EngineHash) -> bool:
        return name in self._nodes

    def known(self, names: Iterable[EngineHash]) -> Iterator[Prefix]:
        """The prefixes with these names, without the unknown ones."""
        return (self._nodes[name] for name in names if name in self._nodes)

    def clear(self) -> None:
        """Forget everything at once."""
        self._cleared.append(self._nodes)
        self._nodes, self._roots = {}, {}
        self._maybe_idle = deque()

    def learn(self, event: BlockStored) -> None:
        """Enter the prefixes that a complete event names."""
        if not event.is_complete or not event.is_on_gpu:
            return
        node = self._start(event)
        try:
            tokens = np.array(event.token_ids, dtype="<u4").tobytes()
        except OverflowError:  # negative ids are placeholders of inputs that are no tokens
            return
        size = 4 * event.block_size
        for index, name in enumerate(event.block_hashes):
            if node is None or not _is_plain(event, index, is_first=node.parent is None):
                return
            node = self._enter(name, node, tokens[index * size : (index + 1) * size])

    def _start(self, event: BlockStored) -> Prefix | None:
        """The prefix that the event's first block continues; None if it is unknown."""
        if event.parent_block_hash is not None:
            return self._nodes.get(event.parent_block_hash)
        salt = _salt(event)
        adapter = self._adapters.get(event.lora_name, "") if event.lora_name else ""
        if salt is None or (event.lora_name and not adapter):
            return None
        key = root_key(self._namespace, tenant=salt, lora=adapter)
        if key not in self._roots:
            self._roots[key] = Prefix(key, None, b"", 0, key)
        return self._roots[key]

    def _enter(self, name: EngineHash, parent: Prefix, tokens: bytes) -> Prefix | None:
        node = self._nodes.get(name)
        end = parent.end + len(tokens) // 4
        if node is None:
            # The count keeps `_is_room` from forgetting the parent.
            parent.num_children += 1
            is_room = self._is_room()
            parent.num_children -= 1
            if not is_room:
                self.maybe_forget(parent)
                return None
            key = self._key(parent, tokens)
            node = self._nodes[name] = Prefix(name, parent, tokens, end, key)
            self._adopt(parent, node)
            self.maybe_forget(node)
        # Two prefixes with one hash cannot be told from each other, so nothing is learnt here.
        elif node.end != end:
            return None
        elif node.parent is not parent and len(tokens) < len(node.tokens):
            # The event has smaller blocks than the known one. The chain of parents must pass every
            # boundary, so the node gets the nearer parent.
            self._orphan(node)
            node.parent, node.tokens = parent, tokens
            self._adopt(parent, node)
        return node

    def _adopt(self, parent: Prefix, node: Prefix) -> None:
        parent.num_children += 1
        if parent.end % self._block_tokens:
            parent.inside[node] = None

    def _orphan(self, node: Prefix) -> None:
        parent = node.parent
        if parent is not None:
            parent.num_children -= 1
            if parent.end % self._block_tokens:
                del parent.inside[node]
            if not parent.num_children:
                self.maybe_forget(parent)

    def _key(self, parent: Prefix, tokens: bytes) -> bytes:
        """Our key of the last whole block of ours in the parent's prefix and these tokens."""
        size = self._block_tokens
        start = parent.end // size * size
        if (parent.end + len(tokens) // 4) // size * size == start:
            return parent.key
        pieces = [tokens]
        above: Prefix | None = parent
        while above is not None and above.end > start:
            pieces.append(above.tokens[-4 * (above.end - start) :])
            above = above.parent
        ids = np.frombuffer(b"".join(reversed(pieces)), dtype="<u4").tolist()
        return block_keys(ids, size, parent.key)[-1]

    # ---- bounds

    def _is_room(self) -> bool:
        """Whether one more prefix may be remembered. Forgets an idle one if there are too many."""
        while len(self._nodes) >= self._max_blocks and self._maybe_idle:
            self._forget_if_idle(self._maybe_idle.popleft())
        return len(self._nodes) < self._max_blocks

    def maybe_forget(self, node: Prefix) -> None:
        """Queue the node, so that it may be forgotten when there is no room."""
        if not node.is_queued and node.parent is not None:
            node.is_queued = True
            self._maybe_idle.append(node)

    def _forget_if_idle(self, node: Prefix) -> None:
        """Forget the prefix if no group holds it and nothing continues it."""
        node.is_queued = False
        parent = node.parent
        if node.held or node.bits or node.num_children or parent is None:
            return  # it is queued again when that has changed
        del self._nodes[node.name]
        self._orphan(node)
        node.parent = None
        if parent.parent is None and not parent.num_children:
            del self._roots[parent.name]

    def free_some(self) -> None:
        """Free some of the cleared prefixes. To free all at once would hold up the event loop."""
        left = _FREED_PER_BATCH
        while self._cleared and left:
            nodes = self._cleared[-1]
            num_freed = min(len(nodes), left)
            for _ in range(num_freed):
                nodes.popitem()  # children were added after their parents, so they go first
            left -= num_freed
            if not nodes:
                self._cleared.pop()


def _extras(event: BlockStored, index: int) -> list[Any]:
    """The inputs of a block's hash other than tokens and LoRA adapter (vLLM's
    `generate_block_hash_extra_keys`).
    """
    keys = event.extra_keys
    found = list(keys[index] or ()) if keys is not None and index < len(keys) else []
    # The adapter's name comes first, in every block.
    return found[1:] if event.lora_name and found[:1] == [event.lora_name] else found


def _salt(event: BlockStored) -> str | None:
    """The `cache_salt` of a prompt, from its first block; None when the block depends on more."""
    match _extras(event, 0):
        case []:
            return ""
        case [str(salt)]:
            return salt
    return None


def _is_plain(event: BlockStored, index: int, *, is_first: bool) -> bool:
    """Whether the block's KVCache depends on tokens alone. The root holds the first one's salt, and
    the adapter.
    """
    return is_first or not _extras(event, index)
