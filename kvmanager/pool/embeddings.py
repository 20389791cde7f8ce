"""The encoder's outputs of images that lie in an arena, one entry for each key, and their eviction.

It knows blocks, keys and numbers of connections. It does not know sockets, processes, images or
what is in the bytes. A transfer of embeddings to or from another agent is a connection of its own,
which ends with `leave`.

- An entry is filled by one connection and can be found when it is whole.
- Whoever finds an entry holds it in its place until they free it.
- An entry that is whole and not held goes when room is wanted, the least recently used one first.
- A lost connection may still write and read for a while. What it was filling cannot be found, and
  its blocks and holds end with `process_gone`, or at the time given to `lost`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmanager.transfers.blocks import BlockAllocator, Run


class NotHeld(Exception):
    """A connection speaks of an entry or a handle that it does not have."""


@dataclass(slots=True)
class Embedding:
    """`nbytes` bytes in the blocks `runs`. `writer`: the connection that fills it; None: whole."""

    runs: Sequence[Run]
    nbytes: int
    writer: int | None
    holds: int = 0

    @property
    def is_evictable(self) -> bool:
        return self.writer is None and not self.holds


@dataclass(slots=True)
class _Connection:
    finds: dict[int, Embedding] = field(default_factory=dict)
    fills: dict[bytes, Embedding] = field(default_factory=dict)
    over_s: float | None = None
    """When a lost connection counts as ended; None: it is connected."""


class EmbeddingCache:
    """At most `max_blocks` blocks of an arena. `make_room` evicts something else until so many
    blocks of the arena are free; False: that is impossible.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_bytes: int,
        max_blocks: int,
        make_room: Callable[[int], bool] | None = None,
        listener: Callable[[bytes, bool], None] = lambda _key, _is_here: None,
    ) -> None:
        """`listener` is told each time that an entry is whole (True), or that a key has no whole
        entry and nobody fills one for it any more (False).
        """
        self._allocator = allocator
        self._block_bytes = block_bytes
        self._max_blocks = max_blocks
        self._make_room = make_room or (lambda num_blocks: False)
        self._listener = listener
        self._entries: OrderedDict[bytes, Embedding] = OrderedDict()
        """By key, the least recently used first."""
        self._connections: dict[int, _Connection] = {}
        self.num_held_blocks = 0
        self.num_queries = 0
        self.num_hits = 0

    def __len__(self) -> int:
        return sum(entry.writer is None for entry in self._entries.values())

    def connect(self, conn_id: int) -> None:
        """Enter a connection, whose number was never used before."""
        self._connections[conn_id] = _Connection()

    def is_connected(self, conn_id: int) -> bool:
        """Whether this connection was entered and is not lost."""
        connection = self._connections.get(conn_id)
        return connection is not None and connection.over_s is None

    def put(self, conn_id: int, key: bytes, nbytes: int) -> Sequence[Run]:
        """Blocks for this connection to fill. No runs if the key is known or there is no room."""
        if key in self._entries:
            return ()
        runs = self._take(-(-nbytes // self._block_bytes))
        if runs:
            entry = self._entries[key] = Embedding(runs, nbytes, writer=conn_id)
            self._connections[conn_id].fills[key] = entry
        return runs

    def written(self, conn_id: int, key: bytes) -> None:
        """The connection has filled this entry. Raises NotHeld."""
        self._end_fill(conn_id, key).writer = None
        self._entries.move_to_end(key)
        self._listener(key, True)

    def cancel(self, conn_id: int, key: bytes) -> None:
        """The connection will not fill this entry. Raises NotHeld."""
        entry = self._end_fill(conn_id, key)
        self._drop(key)
        self._give_back(entry)

    def find(self, conn_id: int, handle: int, key: bytes) -> Embedding | None:
        """`hold` for an engine, whose look-ups are counted. Raises NotHeld."""
        entry = self.hold(conn_id, handle, key)
        self.num_queries += 1
        self.num_hits += entry is not None
        return entry

    def hold(self, conn_id: int, handle: int, key: bytes) -> Embedding | None:
        """The whole entry with this key, held until `free`. Raises NotHeld for a handle in use."""
        finds = self._connections[conn_id].finds
        if handle in finds:
            raise NotHeld(f"handle {handle} is in use")
        if not self.use(key):
            return None
        entry = self._entries[key]
        entry.holds += 1
        finds[handle] = entry
        return entry

    def is_being_filled(self, key: bytes) -> bool:
        """Whether somebody fills an entry with this key, which then can be found soon."""
        entry = self._entries.get(key)
        return entry is not None and entry.writer is not None

    def use(self, key: bytes) -> int:
        """The bytes of the whole entry with this key, which counts as used now; 0: no entry."""
        entry = self._entries.get(key)
        if entry is None or entry.writer is not None:
            return 0
        self._entries.move_to_end(key)
        return entry.nbytes

    def free(self, conn_id: int, handle: int) -> None:
        """End the hold of this `find`. Raises NotHeld."""
        entry = self._connections[conn_id].finds.pop(handle, None)
        if entry is None:
            raise NotHeld(f"nothing is held under handle {handle}")
        entry.holds -= 1

    def lost(self, conn_id: int, over_s: float) -> None:
        """A connection is closed. Its process may touch memory until `over_s`."""
        connection = self._connections[conn_id]
        connection.over_s = over_s
        for key in connection.fills:
            # Another may fill the same key, in other blocks.
            self._drop(key)

    def process_gone(self, conn_id: int) -> None:
        """The process of a lost connection has ended. Nothing for one that is forgotten."""
        connection = self._connections.pop(conn_id, None)
        if connection is None:
            return
        for entry in connection.finds.values():
            entry.holds -= 1
        for entry in connection.fills.values():
            self._give_back(entry)

    def leave(self, conn_id: int) -> None:
        """A connection is over, and nobody touches memory for it any more."""
        self.lost(conn_id, 0.0)
        self.process_gone(conn_id)

    def tick(self, now_s: float) -> None:
        """Forget the lost connections whose time is over."""
        for conn_id, connection in list(self._connections.items()):
            if connection.over_s is not None and connection.over_s <= now_s:
                self.process_gone(conn_id)

    def check_invariants(self) -> None:
        """Raises AssertionError when the books do not add up; for tests."""
        lost = [
            entry
            for connection in self._connections.values()
            if connection.over_s is not None
            for entry in connection.fills.values()
        ]
        held = [run for entry in (*self._entries.values(), *lost) for run in entry.runs]
        assert sum(run.length for run in held) == self.num_held_blocks <= self._max_blocks
        connections = self._connections.values()
        finds = [entry for one in connections for entry in one.finds.values()]
        for entry in self._entries.values():
            assert entry.holds == sum(found is entry for found in finds)

    def _end_fill(self, conn_id: int, key: bytes) -> Embedding:
        entry = self._connections[conn_id].fills.pop(key, None)
        if entry is None:
            raise NotHeld(f"embedding {key.hex()[:16]} was not given to this connection to fill")
        return entry

    def _take(self, num_blocks: int) -> Sequence[Run]:
        # What cannot have room must not cost others theirs.
        if self.num_held_blocks - self._num_evictable_blocks() + num_blocks > self._max_blocks:
            return ()
        while self.num_held_blocks + num_blocks > self._max_blocks:
            self._evict_one()
        if self._allocator.num_free < num_blocks and not self._make_room(num_blocks):
            own = self._num_evictable_blocks()
            if self._allocator.num_free + own < num_blocks and not self._make_room(
                num_blocks - own
            ):
                return ()
            while self._allocator.num_free < num_blocks:
                self._evict_one()
        runs = self._allocator.allocate(num_blocks)
        self.num_held_blocks += num_blocks
        return runs

    def _num_evictable_blocks(self) -> int:
        return sum(
            run.length
            for entry in self._entries.values()
            if entry.is_evictable
            for run in entry.runs
        )

    def _evict_one(self) -> None:
        key = next(key for key, entry in self._entries.items() if entry.is_evictable)
        entry = self._entries[key]
        self._drop(key)
        self._give_back(entry)

    def _drop(self, key: bytes) -> None:
        del self._entries[key]
        self._listener(key, False)

    def _give_back(self, entry: Embedding) -> None:
        self._allocator.free(entry.runs)
        self.num_held_blocks -= sum(run.length for run in entry.runs)
