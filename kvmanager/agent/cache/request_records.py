"""What `CacheRequests` asks its shell to do, and what it knows of finds and fills.

Value types of `kvmanager.agent.cache.requests`, where the rules are. No I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmanager.agent.engines.protocol import CacheFound, CacheSlots
from kvmanager.pool.records import BlockPart, Slot, Tier
from kvmanager.pool.shape import CacheShape

ConnHandle = tuple[int, int]
"""Connection id and handle of a find."""
InstanceHandle = tuple[str, int]
"""Instance and handle of a fill."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Say this to an engine."""

    conn_id: int
    message: CacheFound | CacheSlots


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring these parts into the arena if that is quick, then call `fetch_ended` in any case."""

    find: ConnHandle
    shape: CacheShape
    keys: tuple[bytes, ...]
    parts: tuple[BlockPart, ...]


@dataclass(frozen=True, slots=True)
class Seal:
    """These slots are written to the last byte: take their checksums, then call `sealed`."""

    fill: InstanceHandle
    keys: tuple[bytes, ...]
    shape: CacheShape
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class LacksWorkers:
    """Warn: an engine asks for memory to fill while some of its ranks have no worker here. Nothing
    of it is stored as long as that is so.
    """

    instance: str
    num_ranks: int
    tp_size: int


CacheEffect = Tell | Fetch | Seal | LacksWorkers


@dataclass(slots=True)
class CacheUse:
    """Counters of what was asked and found. Tokens by the tier they were served from."""

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    fills: int = 0


@dataclass(slots=True)
class OpenFind:
    """A `CacheFind` that is not freed."""

    shape: CacheShape
    keys: tuple[bytes, ...]
    arena_blocks: int
    """What the arena alone had when it was asked."""
    is_answered: bool = False
    pin_id: int | None = None
    """What it holds; None: nothing was found."""


@dataclass(slots=True)
class Abandoned:
    """Memory that engines may still touch: until all of `conn_ids` are done, or the time is up."""

    conn_ids: set[int]
    until_s: float

    def is_over(self, now_s: float) -> bool:
        return not self.conn_ids or self.until_s <= now_s


@dataclass(slots=True)
class OpenFill:
    """A `CacheReserve` that was given memory. `writers` and `done_ranks` are ranks."""

    fill_id: int
    scheduler: int
    shape: CacheShape
    keys: tuple[bytes, ...]
    first_block: int
    parent: bytes
    replaces: bytes
    slots: dict[BlockPart, Slot]
    tp_size: int
    writers: dict[BlockPart, set[int]] = field(default_factory=dict)
    done_ranks: set[int] = field(default_factory=set)
    num_sealing: int = 0
    new_end: int = 0
    """Blocks of the longest prefix whose state or window was committed."""
    abandoned: Abandoned | None = None
