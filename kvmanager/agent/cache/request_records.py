"""Value types of `kvmanager.agent.cache.requests`: the effects that it returns, and its records of
finds and fills. The rules are in that module.
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
    """Send this message to an engine."""

    conn_id: int
    message: CacheFound | CacheSlots


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring these parts into the arena if that is quick. Call `fetch_ended` in any case."""

    find: ConnHandle
    shape: CacheShape
    keys: tuple[bytes, ...]
    parts: tuple[BlockPart, ...]


@dataclass(frozen=True, slots=True)
class Seal:
    """Take the checksums of these completely written slots, then call `sealed`."""

    fill: InstanceHandle
    keys: tuple[bytes, ...]
    shape: CacheShape
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class LacksWorkers:
    """Warn that an engine asks for memory to fill while some of its ranks have no worker here. Its
    prompts are not stored as long as that is so.
    """

    instance: str
    num_ranks: int
    world_size: int


CacheEffect = Tell | Fetch | Seal | LacksWorkers


@dataclass(slots=True)
class CacheUse:
    """Counters of finds and fills. `hit_tokens` are by the tier that served them."""

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    fills: int = 0


@dataclass(slots=True)
class OpenFind:
    """A `CacheFind` that its engine has not freed."""

    shape: CacheShape
    keys: tuple[bytes, ...]
    arena_blocks: int
    """Leading blocks that the arena alone had when the engine asked."""
    is_answered: bool = False
    pin_id: int | None = None
    """The pin that keeps the found parts; None: nothing was found."""


@dataclass(slots=True)
class Abandoned:
    """Memory that engines may still touch until all of `conn_ids` are done, or until `until_s`."""

    conn_ids: set[int]
    until_s: float

    def is_over(self, now_s: float) -> bool:
        return not self.conn_ids or self.until_s <= now_s


@dataclass(slots=True)
class OpenFill:
    """A `CacheReserve` that was given memory. `writers` and `done_ranks` hold ranks of workers."""

    fill_id: int
    scheduler: int
    shape: CacheShape
    keys: tuple[bytes, ...]
    first_block: int
    parent: bytes
    replaces: bytes
    slots: dict[BlockPart, Slot]
    world_size: int
    writers: dict[BlockPart, set[int]] = field(default_factory=dict)
    done_ranks: set[int] = field(default_factory=set)
    num_sealing: int = 0
    new_end: int = 0
    """Number of blocks of the longest prefix whose state or window was committed."""
    abandoned: Abandoned | None = None
