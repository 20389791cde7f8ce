"""Moves of cached prefixes: which memory of the pool they send and land in.

The bytes of a move are whole parts of the pool, end to end. The source pins them. The destination
receives them as a fill of its pool, and commits them in order when every byte has landed, so that a
chain of blocks never lacks its beginning. The life of a move is in `kvmanager.agent.moves`.

Use it on the agent's event loop; time is an argument. It does not know why anything is moved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from kvmanager.agent.cache.move_messages import ReserveCacheMoveReply
from kvmanager.agent.cache.moved_parts import MovedParts
from kvmanager.agent.cache.service import PARTS_PER_STEP, AgentCache
from kvmanager.agent.moves import Mover
from kvmanager.arena import Arena
from kvmanager.pool.parts_space import PartsSpace
from kvmanager.pool.records import Fill, Slot, Tier
from kvmanager.pool.shape import CacheShape
from kvmanager.transfers.records import NoArenaRoom, UnknownTransfer
from transport import ByteSpace, OutgoingSpec

FETCH_S: Final = 5.0
"""Time for which a source waits for parts that it has only on SSD."""


class PrefixMoves:
    """The cached prefixes of one agent, as its mover sends and keeps them. It raises the errors of
    the transfer table.
    """

    def __init__(
        self, mover: Mover, arena: Arena, cache: AgentCache, clock_s: Callable[[], float]
    ) -> None:
        self._mover = mover
        self._arena = arena
        self._cache = cache
        self._pool = cache.pool
        self._clock_s = clock_s

    async def open_landing(self, what: MovedParts, lease_s: float) -> ReserveCacheMoveReply:
        """Reserve memory for the parts that this agent lacks, in steps, and admit one sender to it.
        Raises NoArenaRoom, BadRequest.
        """
        self._mover.admissible("landing", "prefix", lease_s)
        memory = _Landing(self._cache, what, [])
        parts = sorted(what.parts)  # bases first, since a step has no more than its own
        try:
            for start in range(0, len(parts), PARTS_PER_STEP):
                some, now_s = parts[start : start + PARTS_PER_STEP], self._clock_s()
                fill = self._pool.reserve(what.shape, what.root, 0, what.keys, some, now_s)
                if fill.slots:
                    memory.fills.append(fill)
                await asyncio.sleep(0)
            slots = [slot for fill in memory.fills for slot in fill.slots]
            if not slots:
                here = self._pool.is_present
                if not all(here(what.keys[index], part) for index, part in parts):
                    raise NoArenaRoom("no room for any of these parts, or others are storing them")
                return ReserveCacheMoveReply(parts=[])
            # Others may have begun between the steps.
            lease_s = self._mover.admissible("landing", "prefix", lease_s)
            space = _space(self._arena, what.shape, slots)
            opened = self._mover.open_landing("prefix", memory, space, what.fingerprint, lease_s)
        except BaseException:  # also when the caller goes away
            memory.let_go()
            raise
        return ReserveCacheMoveReply([(slot.index, slot.part) for slot in slots], *opened)

    async def open_send(self, what: MovedParts, wire: OutgoingSpec, lease_s: float) -> float:
        """Begin to send to a landing. Returns the lease in seconds.

        Raises NoArenaRoom, BadRequest, UnknownTransfer (a part is not cached here, or the move
        ended before it began).
        """
        memory = _Pinned(self._cache, self._arena, what, self._clock_s)
        return await self._mover.open_send("prefix", memory, wire, lease_s)

    async def drop_cached(self, shape: CacheShape, keys: list[bytes], keep_blocks: int) -> int:
        """Drop the parts that nobody uses and nothing continues, from the last block on, in steps.
        Returns how many parts.
        """
        num_parts = 0
        for count, key in enumerate(reversed(keys[max(0, keep_blocks) :]), 1):
            if count % PARTS_PER_STEP == 0:
                await asyncio.sleep(0)
            for part in reversed(range(len(shape.parts))):
                dropped = [self._pool.discard(key, part, tier) for tier in Tier]
                num_parts += any(dropped)
            if shape.has_kv and self._pool.lookup(key, 0) is not None:
                break  # a longer prefix or a user needs this block, and so all blocks before it
        return num_parts


class _Landing:
    """The memory of parts that this agent lacks (a `LandingMemory`). Each of `fills` is as large as
    one turn of the event loop may give, commit or end.
    """

    def __init__(self, cache: AgentCache, what: MovedParts, fills: list[Fill]) -> None:
        self.fills = fills
        self._cache = cache
        self._what = what

    async def keep(self) -> int:
        """Commit the landed parts, in order."""
        what, num_kept = self._what, 0
        for fill in self.fills:
            await self._cache.commit(what.shape, what.keys, fill, fill.slots)
        kept = self._cache.pool.lookup
        for fill in self.fills:
            slots = fill.slots
            num_kept += sum(kept(what.keys[slot.index], slot.part) == slot.runs for slot in slots)
            await asyncio.sleep(0)
        return num_kept

    def let_go(self) -> None:
        self._cache.spawn(self._let_go(), "ending a move")

    async def _let_go(self) -> None:
        # The last first: with a base, all that waits for it would end in the same turn.
        for fill in reversed(self.fills):
            self._cache.end_fill(self._what.keys, fill)
            await asyncio.sleep(0)


class _Pinned:
    """The memory of parts that are sent (a `SentMemory`)."""

    def __init__(
        self, cache: AgentCache, arena: Arena, what: MovedParts, clock_s: Callable[[], float]
    ) -> None:
        self._cache = cache
        self._arena = arena
        self._what = what
        self._clock_s = clock_s
        self._pin_id: int | None = None

    async def hold(self) -> ByteSpace:
        what, pool = self._what, self._cache.pool
        try:
            pin = pool.pin(what.shape, what.keys, what.parts, self._clock_s())
        except KeyError as error:
            raise UnknownTransfer(f"not all of these parts are cached here: {error}") from error
        self._pin_id = pin.pin_id
        if pin.absent:
            await self._cache.fetch(what.shape, what.keys, pin.absent, FETCH_S)
            pin = pool.pinned(pin.pin_id)
        if pin.absent:
            raise NoArenaRoom(f"{len(pin.absent)} parts are on SSD and did not come into the arena")
        by_part = {(slot.index, slot.part): slot for slot in pin.slots}
        return _space(self._arena, what.shape, [by_part[part] for part in what.parts])

    def let_go(self) -> None:
        if self._pin_id is not None:
            self._cache.pool.unpin(self._pin_id)


def _space(arena: Arena, shape: CacheShape, slots: Sequence[Slot]) -> PartsSpace:
    """The slots' memory, in their order."""
    return PartsSpace([arena.view(slot.runs, shape.parts[slot.part].nbytes) for slot in slots])
