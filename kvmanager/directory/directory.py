"""The prefix caches of all nodes of the region, and which node can resume a given prompt. Pure.

It also knows which nodes have which embeddings: their keys are in the same table, with a flag.

Does not know sockets, models or clocks, and never guesses: it has what the nodes last reported, and
each answer says how long ago that was. One writer; not safe for threads.

Each node is followed by a sequence of `CacheFeed`s of one epoch. A feed continues the known state,
or begins a snapshot that replaces it. A feed with another epoch or an earlier sequence number is
refused, and a snapshot must be requested (`position` then returns "from the beginning"). The known
state of the node stays until the last feed of the snapshot has arrived. So a directory that has
just started equals one that has seen all events, as soon as it has a snapshot of every node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvmanager.agent.messages import CacheFeed
from kvmanager.directory.coverage import ALL_FLAGS, EMBEDDING_FLAG, Flags, coverages
from kvmanager.directory.errors import FeedError
from kvmanager.directory.holders import NOBODY, HolderSets
from kvmanager.directory.messages import (
    SHORT_KEY_BYTES,
    NodeCoverage,
    NodeName,
    NodeState,
    ResumeRule,
    short_keys,
)
from kvmanager.directory.table import ABSENT, BlockTable, Keys

Position = tuple[str, int]
"""The epoch and the sequence number up to which a node's feed was applied."""

FROM_THE_BEGINNING: Final[Position] = ("", 0)

_SLICE_KEYS: Final = 4096
"""Keys applied in one step of a few milliseconds, after which other tasks may run."""


@dataclass(slots=True)
class _Node:
    """`column` has its known state, `filling` the snapshot of which further feeds are to come."""

    column: int
    filling: int | None = None
    position: Position = FROM_THE_BEGINNING
    heard_s: float = 0.0
    lag_s: float = 0.0
    complete: bool = False


class Directory:
    """The prefix caches of all nodes of a region. One writer; not safe for threads."""

    def __init__(self) -> None:
        self._sets = HolderSets()
        self._table = BlockTable(self._sets.current)
        self._nodes: dict[NodeName, _Node] = {}
        self._columns: dict[int, NodeName] = {}

    @property
    def nbytes(self) -> int:
        """Memory of the table and of the sets."""
        return self._table.nbytes + self._sets.nbytes

    @property
    def num_blocks(self) -> int:
        """Blocks and embeddings that at least one node holds."""
        return self._table.num_live

    def position(self, node: NodeName) -> Position:
        """The position to continue from; `FROM_THE_BEGINNING` if a snapshot is needed."""
        known = self._nodes.get(node)
        return FROM_THE_BEGINNING if known is None else known.position

    def apply(self, node: NodeName, feed: CacheFeed, now_s: float) -> bool:
        """Apply a node's feed. False: it does not continue the known state, so request a snapshot.

        Raises `FeedError` for a feed that breaks the rules; then too a snapshot is needed.
        """
        if not self.accepts(node, feed):
            return False
        for _ in self.applying(node, feed, now_s):
            pass
        return True

    def accepts(self, node: NodeName, feed: CacheFeed) -> bool:
        """Whether a feed continues the known state of the node. If not, a snapshot is needed.

        Raises `FeedError` as `apply` does.
        """
        try:
            check_feed(node, feed)
        except FeedError:
            self.reset(node)
            raise
        epoch, seq = self.position(node)
        if feed.is_snapshot or (epoch and feed.epoch == epoch and feed.seq >= seq):
            return True
        self.reset(node)
        return False

    def applying(self, node: NodeName, feed: CacheFeed, now_s: float) -> Iterator[None]:
        """`apply` in short steps, for a feed that `accepts` has passed. If the caller stops in
        between, the node needs a snapshot.
        """
        known = self._nodes.get(node)
        if known is None:
            known = self._nodes[node] = _Node(self._sets.add_column())
            self._columns[known.column] = node
        elif feed.is_snapshot:
            # A snapshot names what the node holds, but not what it has dropped.
            if known.filling is not None:
                self._sets.drop_column(known.filling)
            known.filling = self._sets.add_column()
        column = known.column if known.filling is None else known.filling
        # Until all steps are done, so that a caller that stops in between gets a snapshot.
        known.position = FROM_THE_BEGINNING
        known.heard_s = now_s
        keys, flags = parse_feed(feed)
        for start in range(0, len(keys), _SLICE_KEYS):
            part = slice(start, start + _SLICE_KEYS)
            self._enter(column, keys[part], flags[part])
            yield
        # An answer without changes has no age.
        if len(keys):
            known.lag_s = feed.age_s
        if known.filling is not None and not feed.more:
            old, known.column, known.filling = known.column, known.filling, None
            self._columns[known.column] = self._columns.pop(old)
            self._sets.drop_column(old)
        # With its first whole snapshot: afterwards `more` only means that further changes wait.
        known.complete = known.complete or not feed.more
        known.position = (feed.epoch, feed.seq)

    def reset(self, node: NodeName) -> None:
        """Require a snapshot next. The known state of the node stays until it arrives."""
        if node in self._nodes:
            self._nodes[node].position = FROM_THE_BEGINNING

    def forget(self, node: NodeName) -> None:
        """Forget the node and everything that it holds. Idempotent."""
        known = self._nodes.pop(node, None)
        if known is not None:
            del self._columns[known.column]
            self._sets.drop_column(known.column)
            if known.filling is not None:
                self._sets.drop_column(known.filling)

    def match(self, rule: ResumeRule, keys: Sequence[bytes], now_s: float) -> list[NodeCoverage]:
        """How much of a prompt each node holds. `keys` are the prompt's whole block keys, in order.

        Nodes that hold nothing useful are left out. The longest usable prefix comes first.
        """
        return self.match_short(rule, short_keys(keys), now_s)

    def match_short(self, rule: ResumeRule, keys: Keys, now_s: float) -> list[NodeCoverage]:
        """`match` for keys that are shortened already."""
        ids = self._table.lookup(keys)
        if rule.has_kv:
            # A prefix needs the KV of all its blocks, so it ends before a block that no node has.
            holes = np.flatnonzero(ids == NOBODY)
            ids = ids[: holes[0]] if holes.size else ids
        if not ids.size:
            return []
        # Neighbours that the same nodes hold make a run, whose last block speaks for all.
        ends = np.append(np.flatnonzero(ids[1:] != ids[:-1]), len(ids) - 1) + 1
        flags = self._sets.rows(ids[ends - 1])
        columns = self._known(flags.any(axis=0))
        nodes = []
        for column in columns:
            name = self._columns[column]
            nodes.append((name, now_s - self._nodes[name].heard_s))
        return coverages(rule, flags[:, columns], ends, nodes)

    def embedding_holders(self, keys: Sequence[bytes]) -> list[list[NodeName]]:
        """The nodes that have each of these embeddings, by name."""
        return self.embedding_holders_short(short_keys(keys))

    def embedding_holders_short(self, keys: Keys) -> list[list[NodeName]]:
        """`embedding_holders` for keys that are shortened already."""
        flags = self._sets.rows(self._table.lookup(keys))
        return [
            [self._columns[column] for column in self._known(row & EMBEDDING_FLAG)] for row in flags
        ]

    def nodes(self, now_s: float) -> list[NodeState]:
        """The state of each node, sorted by name."""
        counts = self._table.counts(len(self._sets))
        used = np.flatnonzero(counts).astype(np.uint32)
        rows = self._sets.rows(self._sets.current(used))
        num_blocks = counts[used] @ ((rows & ALL_FLAGS) != 0)
        num_embeddings = counts[used] @ ((rows & EMBEDDING_FLAG) != 0)
        states = []
        for name, known in sorted(self._nodes.items()):
            epoch, seq = known.position
            states.append(
                NodeState(
                    name.cluster,
                    name.node,
                    num_blocks=int(num_blocks[known.column]),
                    epoch=epoch,
                    seq=seq,
                    age_s=now_s - known.heard_s,
                    lag_s=known.lag_s,
                    complete=known.complete,
                    num_embeddings=int(num_embeddings[known.column]),
                )
            )
        return states

    def holders(self, key: bytes) -> dict[NodeName, int]:
        """The flags of one block, by node that holds anything of it."""
        flags = self._sets.rows(self._table.lookup(short_keys([key])))[0]
        return {self._columns[column]: int(flags[column]) for column in self._known(flags)}

    def _known(self, flags: npt.ArrayLike) -> list[int]:
        """The columns with any flag, without those of snapshots that are not whole."""
        return [column for column in np.flatnonzero(flags).tolist() if column in self._columns]

    def _enter(self, column: int, keys: Keys, flags: Flags) -> None:
        keys, flags = _last_of_each(keys, flags)
        places = self._table.find(keys)
        is_new = places == ABSENT
        before = self._table.at(places)
        before[is_new] = NOBODY
        after = self._sets.stepped(before, column, flags)
        changed = ~is_new & (after != before)
        self._table.put(places[changed], after[changed])
        # A key that no node holds needs no place.
        is_new &= after != NOBODY
        self._table.insert(keys[is_new], after[is_new])
        if self._sets.is_crowded:
            self._sets.drop_unused(self._table.counts(len(self._sets)) > 0)
            if self._sets.has_many_equals:
                self._table.rewrite()


def check_feed(node: NodeName, feed: CacheFeed) -> None:
    """Raise `FeedError` for a feed that breaks the rules of its message."""
    num_keys, rest = divmod(len(feed.keys), SHORT_KEY_BYTES)
    if rest or len(feed.flags) != 2 * num_keys:
        raise FeedError(
            f"{node}: {len(feed.keys)} bytes of keys and {len(feed.flags)} bytes of flags do not "
            f"belong together; {SHORT_KEY_BYTES} and 2 for each block are wanted"
        )
    if not feed.epoch or feed.seq < 0:
        raise FeedError(f"{node}: epoch {feed.epoch!r}, seq {feed.seq} name no position")
    if len(feed.embeddings) % SHORT_KEY_BYTES:
        raise FeedError(f"{node}: {len(feed.embeddings)} bytes are no keys of embeddings")
    flags = np.frombuffer(feed.flags, dtype="<u2")
    if flags.size and int(flags.max()) > ALL_FLAGS:
        raise FeedError(
            f"{node}: flags {int(flags.max()):#x} have bits beyond {ALL_FLAGS:#x}; "
            "is the agent newer than the directory?"
        )


def parse_feed(feed: CacheFeed) -> tuple[Keys, Flags]:
    """The short keys and flags of a feed, its embeddings last."""
    keys: npt.NDArray[Any] = np.frombuffer(feed.keys + feed.embeddings, dtype="<u8")
    flags: npt.NDArray[Any] = np.frombuffer(joined_flags(feed), dtype="<u2")
    return keys.astype(np.uint64, copy=False), flags.astype(np.uint16, copy=False)


def joined_flags(feed: CacheFeed) -> bytes:
    """The flags of the keys of a feed and of its embeddings."""
    num_embeddings = len(feed.embeddings) // SHORT_KEY_BYTES
    return feed.flags + num_embeddings * EMBEDDING_FLAG.to_bytes(2, "little")


def _last_of_each(keys: Keys, flags: Flags) -> tuple[Keys, Flags]:
    """Each key once, ascending, with its last flags."""
    order = np.argsort(keys, kind="stable")
    keys, flags = keys[order], flags[order]
    is_last = np.ones(len(keys), dtype=np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=is_last[:-1])
    return keys[is_last], flags[is_last]
