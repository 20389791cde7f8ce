"""The values that a node agent keeps for both ends of a cache move. The rules are in `moves`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvmanager.agent.cache.move_messages import MoveState
from kvmanager.pool.records import BlockPart, Fill
from kvmanager.pool.shape import CacheShape
from kvmanager.transfers.records import BadRequest
from transport import Endpoint, OutgoingTransfer


@dataclass(frozen=True, slots=True)
class MovedParts:
    """The moved parts of one prefix. `keys` are the keys of its blocks, from block 0 on."""

    fingerprint: bytes
    shape: CacheShape
    root: bytes
    keys: tuple[bytes, ...]
    parts: tuple[BlockPart, ...]

    def __post_init__(self) -> None:
        """Raises BadRequest."""
        num_parts = len(self.shape.parts)
        if not self.parts or len(set(self.parts)) < len(self.parts):
            raise BadRequest(f"{len(self.parts)} parts, some of them twice or none at all")
        for index, part in self.parts:
            if not (0 <= index < len(self.keys) and 0 <= part < num_parts):
                raise BadRequest(f"part {part} of block {index}: there are {len(self.keys)} blocks")

    @property
    def nbytes(self) -> int:
        return sum(self.shape.parts[part].nbytes for _, part in self.parts)


@dataclass(slots=True)
class Move:
    """One end of a move, with what both roles share."""

    what: MovedParts
    nbytes: int
    lease_until_s: float
    state: MoveState = "open"
    error: str = ""
    done_bytes: int = 0
    ended_s: float = 0.0
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class MoveLanding(Move):
    """The receiving end. `fill` is None once its memory is given back or committed."""

    fill: Fill | None = None
    keeping: asyncio.Task[None] | None = None
    num_kept: int = 0

    @property
    def holds_memory(self) -> bool:
        return self.fill is not None


@dataclass(slots=True)
class MoveSend(Move):
    """The sending end. `pin_id` is None once the parts are unpinned."""

    endpoint: Endpoint = field(kw_only=True)
    pin_id: int | None = None
    outgoing: OutgoingTransfer | None = None
    transfer_s: float = 0.0

    @property
    def holds_memory(self) -> bool:
        return self.pin_id is not None
