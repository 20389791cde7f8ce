"""The values that a node agent keeps for both ends of a move. The rules are in `moves`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from kvmanager.agent.cache.move_messages import MoveState
from transport import ByteSpace, Endpoint, OutgoingTransfer

MoveContent = Literal["prefix", "embeddings"]


class LandingMemory(Protocol):
    """The memory that a move lands in."""

    async def keep(self) -> int:
        """Enter what has landed whole, so that others find it. Returns how many parts of it can be
        found afterwards.
        """

    def let_go(self) -> None:
        """Give back what was not kept. Nothing writes there any more."""


class SentMemory(Protocol):
    """The memory that a move sends from."""

    async def hold(self) -> ByteSpace:
        """Hold everything in its place. Raises UnknownTransfer, NoArenaRoom, and `let_go` must be
        called then as well.
        """

    def let_go(self) -> None:
        """End the hold. Nothing reads there any more."""


class OpenedLanding(NamedTuple):
    """What the sender of a move must know, with hex digits as they travel."""

    transfer_id: str
    token: str
    nbytes: int
    host: str
    port: int
    lease_s: float


@dataclass(slots=True)
class Move:
    """One end of a move, with what both roles share."""

    content: MoveContent
    nbytes: int
    lease_until_s: float
    state: MoveState = "open"
    error: str = ""
    done_bytes: int = 0
    ended_s: float = 0.0
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class MoveLanding(Move):
    """The receiving end. `memory` is None once it is given back or kept."""

    memory: LandingMemory | None = None
    keeping: asyncio.Task[None] | None = None
    num_kept: int = 0


@dataclass(slots=True)
class MoveSend(Move):
    """The sending end. `memory` is None once nothing is held any more."""

    endpoint: Endpoint = field(kw_only=True)
    memory: SentMemory | None = None
    outgoing: OutgoingTransfer | None = None
    transfer_s: float = 0.0
