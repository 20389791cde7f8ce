"""What is asked of a directory and what it answers; also the structs of service `prfaas.Directory`.

They do not know where the knowledge lies: in this process, behind gRPC, or in Redis.

| method | request -> reply | errors beside UNAVAILABLE, INTERNAL, TIMEOUT |
|---|---|---|
| Match | Match -> MatchReply | INVALID (keys are not whole) |
| Nodes | Nodes -> NodesReply | |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvmanager.agent.messages import CacheModel
from kvmanager.pool.shape import CacheShape, PartKind, PartShape

SERVICE: Final = "prfaas.Directory"

SHORT_KEY_BYTES: Final = 8
"""The directory knows blocks by the first bytes of their keys. With ten million blocks the chance
that one of 512 keys meets a stranger's is 3e-10, and the node that is asked compares whole keys.
"""

FORGET_S: Final = 60.0
"""A node that nobody has heard of for so long is taken to hold nothing."""


class NodeName(NamedTuple):
    """A node agent of the region. Cluster names are unique, node names within their cluster."""

    cluster: str
    node: str

    def __str__(self) -> str:
        return f"{self.cluster}/{self.node}"


def shape_of(model: CacheModel) -> CacheShape:
    """The parts of a model's blocks. Raises ValueError if they are no cache shape."""
    parts = tuple(
        PartShape(PartKind(kind), nbytes, window_tokens)
        for kind, nbytes, window_tokens in model.parts
    )
    return CacheShape(model.block_tokens, parts)


class ResumeRule(msgspec.Struct, frozen=True):
    """What of `CacheShape` decides how much of a prefix can be resumed.

    KV of all its blocks if `has_kv`, the windows of its last `window_reach` blocks, and the state
    at its end if `has_state`.
    """

    has_kv: bool
    window_reach: int
    has_state: bool

    @classmethod
    def of(cls, shape: CacheShape) -> ResumeRule:
        windows = [i for i, part in enumerate(shape.parts) if part.kind is PartKind.WINDOW]
        reach = max((shape.reach(part) or 0 for part in windows), default=0)
        return cls(shape.has_kv, reach, shape.state_part is not None)

    @classmethod
    def of_model(cls, model: CacheModel) -> ResumeRule:
        """Raises ValueError for parts that are no cache shape."""
        return cls.of(shape_of(model))


class Hit(msgspec.Struct, frozen=True):
    """`kv_blocks`: leading blocks whose KV is there. `usable_blocks`: the longest prefix that can
    be resumed. For a model without KV parts both are the latter.
    """

    kv_blocks: int = 0
    usable_blocks: int = 0


class NodeCoverage(msgspec.Struct, frozen=True):
    """What one node holds of a prompt: from anywhere, and from parts of it alone.

    `pool`: arena and SSD together, which is what can be sent and what a landing can build on.
    `engine`: memory of the node's engines. `age_s`: how long ago the node last said so.
    """

    cluster: str
    node: str
    every: Hit
    pool: Hit
    arena: Hit
    ssd: Hit
    engine: Hit
    age_s: float

    @property
    def kv_blocks(self) -> int:
        """Leading blocks whose KV is in any tier."""
        return self.every.kv_blocks

    @property
    def usable_blocks(self) -> int:
        """The longest prefix that can be resumed from all tiers together."""
        return self.every.usable_blocks


class NodeState(msgspec.Struct, frozen=True):
    """What is known of one node: how many blocks, up to which event, heard how long ago.

    `lag_s` is how old the oldest change of its last message with changes was when it was asked for.
    A node is not `complete` before its first whole snapshot is here. `num_blocks` is -1 where the
    store does not count them.
    """

    cluster: str
    node: str
    num_blocks: int
    epoch: str
    seq: int
    age_s: float
    lag_s: float
    complete: bool


class Match(msgspec.Struct, frozen=True):
    """`keys`: the short keys of a prompt's blocks, joined, in order."""

    rule: ResumeRule
    keys: bytes


class MatchReply(msgspec.Struct, frozen=True):
    """Nodes that hold anything usable, the longest usable prefix first."""

    nodes: list[NodeCoverage]


class Nodes(msgspec.Struct, frozen=True):
    pass


class NodesReply(msgspec.Struct, frozen=True):
    nodes: list[NodeState]


def short_keys(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """The numbers by which the directory knows whole block keys (`kvmanager.hashing`)."""
    return short_keys_of(short_key_bytes(keys))


def short_key_bytes(keys: Sequence[bytes]) -> bytes:
    """The short keys of whole block keys, joined."""
    return b"".join(key[:SHORT_KEY_BYTES] for key in keys)


def short_keys_of(joined: bytes) -> npt.NDArray[np.uint64]:
    """The same from short keys that are joined. Raises ValueError for a part of a key."""
    if len(joined) % SHORT_KEY_BYTES:
        raise ValueError(f"{len(joined)} bytes are no sequence of {SHORT_KEY_BYTES} byte keys")
    numbers: npt.NDArray[Any] = np.frombuffer(joined, dtype="<u8")
    return numbers.astype(np.uint64)
