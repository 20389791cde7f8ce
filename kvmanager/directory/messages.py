"""The requests and answers of a directory, with the structs of service `prfaas.Directory`.

They do not know whether the directory is in this process, behind gRPC, or in Redis.

| method | request -> reply | errors beside UNAVAILABLE, INTERNAL, TIMEOUT |
|---|---|---|
| Match | Match -> MatchReply | INVALID (keys are not whole) |
| Nodes | Nodes -> NodesReply | |
| FindEmbeddings | FindEmbeddings -> FindEmbeddingsReply | INVALID (keys are not whole) |
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
"""The directory identifies blocks by the first bytes of their keys. With ten million blocks, one of
512 keys collides with another block's with a probability of 3e-10, and the node itself compares
whole keys.
"""

FORGET_S: Final = 60.0
"""A node that has not reported for this long counts as holding nothing."""


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
    """The part of a `CacheShape` that decides how much of a prefix can be resumed.

    A prefix needs the KV of all its blocks if `has_kv`, the windows of its last `window_reach`
    blocks, and the state at its end if `has_state`.
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
    """`kv_blocks`: leading blocks with KV. `usable_blocks`: length of the longest prefix that can
    be resumed. For a model without KV parts both are the latter.
    """

    kv_blocks: int = 0
    usable_blocks: int = 0


class NodeCoverage(msgspec.Struct, frozen=True):
    """How much of a prompt one node holds: in all tiers together (`every`), and in some of them.

    `pool`: arena and SSD together, which can be sent and which landings can build on. `engine`: the
    memory of the node's engines. `age_s`: time since the node's last report.
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
    """The state of one node: its number of blocks, its last event, and the age of its last report.

    `lag_s` is the age that the oldest change of its last report with changes had. A node is
    `complete` once its first whole snapshot has arrived. `num_blocks` is -1 if the store does not
    count them.
    """

    cluster: str
    node: str
    num_blocks: int
    epoch: str
    seq: int
    age_s: float
    lag_s: float
    complete: bool
    num_embeddings: int = 0
    """-1 as `num_blocks`."""


class Match(msgspec.Struct, frozen=True):
    """`keys`: the short keys of a prompt's blocks, joined, in order."""

    rule: ResumeRule
    keys: bytes


class MatchReply(msgspec.Struct, frozen=True):
    """The nodes that hold something usable, the longest usable prefix first."""

    nodes: list[NodeCoverage]


class Nodes(msgspec.Struct, frozen=True):
    pass


class NodesReply(msgspec.Struct, frozen=True):
    nodes: list[NodeState]


class FindEmbeddings(msgspec.Struct, frozen=True):
    """`keys`: the short keys of embeddings, joined."""

    keys: bytes


class FindEmbeddingsReply(msgspec.Struct, frozen=True):
    """For each key the nodes that have the embedding."""

    holders: list[list[NodeName]]


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
