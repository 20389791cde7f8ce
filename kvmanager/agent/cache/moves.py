"""Moves cached prefixes from one agent's pool to another's.

A move is a transfer outside of the transfer table. Its bytes are whole parts of the pool, end to
end. The source pins the parts while it sends them. The destination receives them as a fill of its
pool, and commits them in order when every byte has landed, so that a chain of blocks never lacks
its beginning. Each end has a lease, which `status` renews. However an end is over, its memory goes
back only when the transport does not use it any more.

Use it on the agent's event loop; time is an argument. It does not know why anything is moved.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Final

from kvmanager.agent.cache.move_messages import (
    CacheMoveStatusReply,
    MoveRole,
    MoveState,
    ReserveCacheMoveReply,
)
from kvmanager.agent.cache.move_records import Move, MovedParts, MoveLanding, MoveSend
from kvmanager.agent.cache.service import AgentCache
from kvmanager.agent.sender_admission import AdmittedLanding
from kvmanager.agent.transfer_io import SendListener, TransferIo
from kvmanager.arena import Arena
from kvmanager.pool.parts_space import PartsSpace
from kvmanager.pool.records import Fill, Slot, Tier
from kvmanager.pool.shape import CacheShape
from kvmanager.transfers.records import BadRequest, NoArenaRoom, UnknownTransfer
from transport import Endpoint, OutgoingSpec
from transport.tasks import start_task

logger = logging.getLogger("prfaas.kvmanager.agent")

MAX_MOVES: Final = 8
"""Moves of one role that may run at the same time."""
MAX_LEASE_S: Final = 300.0
KEEP_S: Final = 30.0
"""Time for which an ended move can still be asked for."""
FETCH_S: Final = 5.0
"""Time for which a source waits for parts that it has only on SSD."""

_ROLES: Final[tuple[MoveRole, ...]] = ("landing", "send")


class CacheMover:
    """The moves of one agent. It raises the errors of the transfer table."""

    def __init__(
        self,
        io: TransferIo,
        arena: Arena,
        cache: AgentCache,
        *,
        advertised: Endpoint,
        clock_s: Callable[[], float],
    ) -> None:
        self._io = io
        self._arena = arena
        self._cache = cache
        self._pool = cache.pool
        self._advertised = advertised
        self._clock_s = clock_s
        self._landings: dict[bytes, MoveLanding] = {}
        self._sends: dict[bytes, MoveSend] = {}

    def num_open(self, role: MoveRole) -> int:
        """Moves of this role that hold memory."""
        if role == "landing":
            return sum(move.fill is not None for move in self._landings.values())
        return sum(move.pin_id is not None for move in self._sends.values())

    # ---- the control plane

    def open_landing(self, what: MovedParts, lease_s: float) -> ReserveCacheMoveReply:
        """Reserve memory for the parts that this agent lacks, and admit one sender to it. Raises
        NoArenaRoom, BadRequest.
        """
        lease_s = self._admissible("landing", lease_s)
        if not self._cache.may_fill:
            raise NoArenaRoom("this agent is stopping")
        now_s = self._clock_s()
        fill = self._pool.reserve(what.shape, what.root, 0, what.keys, what.parts, now_s)
        if not fill.slots:
            self._pool.abort(fill.fill_id)
            if self._lacks_memory(what):
                raise NoArenaRoom("no room for any of these parts, or others are storing them")
            return ReserveCacheMoveReply(parts=[])
        granted = tuple((slot.index, slot.part) for slot in fill.slots)
        what = MovedParts(what.fingerprint, what.shape, what.root, what.keys, granted)
        transfer_id, token = secrets.token_bytes(16), secrets.token_bytes(32)
        self._landings[transfer_id] = MoveLanding(what, what.nbytes, now_s + lease_s, fill=fill)
        space = self._space(what, fill.slots)
        self._io.admit(transfer_id, AdmittedLanding(token, what.fingerprint, space))
        return ReserveCacheMoveReply(
            parts=list(granted),
            transfer_id=transfer_id.hex(),
            token=token.hex(),
            nbytes=what.nbytes,
            host=self._advertised.host,
            port=self._advertised.port,
            lease_s=lease_s,
        )

    async def open_send(self, what: MovedParts, wire: OutgoingSpec, lease_s: float) -> float:
        """Begin to send to a landing. Returns the lease in seconds.

        Raises NoArenaRoom, BadRequest, UnknownTransfer (a part is not cached here, or the move
        ended before it began).
        """
        lease_s = self._admissible("send", lease_s)
        if wire.transfer_id in self._sends:
            raise BadRequest(f"move {wire.transfer_id.hex()} is being sent already")
        # Entered before the parts are fetched from SSD, so that `end` can end it meanwhile.
        move = self._sends[wire.transfer_id] = MoveSend(
            what, what.nbytes, self._clock_s() + lease_s, endpoint=wire.endpoint
        )
        try:
            slots = await self._pinned(move)
            if move.state != "open":
                raise UnknownTransfer(f"the move has ended already: {move.error}")
            listener = SendListener(self._io, self._send_ended, self._clock_s)
            move.outgoing = self._io.open_probe(wire, self._space(what, slots), listener)
        except BaseException:
            self._sends.pop(wire.transfer_id, None)
            self._unpin(move)
            raise
        move.outgoing.ready(0, move.nbytes)
        return lease_s

    async def status(
        self, transfer_id: bytes, role: MoveRole, lease_s: float, wait_s: float
    ) -> CacheMoveStatusReply:
        """The state of this end, when it has ended or after `wait_s`. Renews its lease. Raises
        UnknownTransfer, BadRequest.
        """
        move = self._of(role).get(transfer_id)
        if move is None:
            raise UnknownTransfer(f"no move {transfer_id.hex()} here; its caller was away too long")
        if not math.isfinite(wait_s) or wait_s < 0:
            raise BadRequest(f"a wait of {wait_s} s")
        granted_s = _checked_lease_s(lease_s)
        move.lease_until_s = max(move.lease_until_s, self._clock_s() + granted_s)
        if wait_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, granted_s)):
                    await move.over.wait()
        self._note_progress(transfer_id, move)
        return CacheMoveStatusReply(
            state=move.state,
            error=move.error,
            nbytes=move.nbytes,
            done_bytes=move.done_bytes,
            kept_parts=move.num_kept if isinstance(move, MoveLanding) else 0,
            transfer_s=move.transfer_s if isinstance(move, MoveSend) else 0.0,
            rtt_s=self._rtt_s(move),
        )

    def end(self, transfer_id: bytes, reason: str) -> bool:
        """End both roles of this move here. Returns whether one was alive."""
        ended = [self._cancel(role, transfer_id, reason) for role in _ROLES]
        return any(ended)

    def drop_cached(self, shape: CacheShape, keys: list[bytes], keep_blocks: int) -> int:
        """Drop the parts that nobody uses and nothing continues, from the last block on. Returns
        how many parts.
        """
        num_parts = 0
        for key in reversed(keys[max(0, keep_blocks) :]):
            for part in reversed(range(len(shape.parts))):
                dropped = [self._pool.discard(key, part, tier) for tier in Tier]
                num_parts += any(dropped)
            if shape.has_kv and self._pool.lookup(key, 0) is not None:
                break  # a longer prefix or a user needs this block, and so all blocks before it
        return num_parts

    # ---- the transport

    def landing_complete(self, transfer_id: bytes) -> None:
        """Every byte has landed, and nothing writes there any more: begin to commit the parts."""
        move = self._landings.get(transfer_id)
        if move is not None and move.state == "open" and move.fill is not None:
            move.done_bytes = move.nbytes
            move.keeping = start_task(
                self._keep(transfer_id, move, move.fill), "keeping a moved prefix"
            )

    def landing_failed(self, transfer_id: bytes, reason: str) -> None:
        """The receiver has given the landing up and does not write any more."""
        move = self._landings.get(transfer_id)
        if move is not None and move.state == "open" and move.keeping is None:
            # Without the drop another sender with the token would still be admitted.
            self._io.drop(transfer_id, reason)
            self._over(move, "failed", reason)
            self._give_back(move)

    def landing_dropped(self, transfer_id: bytes) -> None:
        """No transport thread touches the landing's memory any more."""
        move = self._landings.get(transfer_id)
        if move is not None and move.keeping is None:
            self._give_back(move)

    # ---- time

    def tick(self, now_s: float) -> None:
        """End moves whose lease is over, and forget moves that have ended."""
        for role in _ROLES:
            for transfer_id, move in self._of(role).items():
                if move.state == "open" and now_s >= move.lease_until_s:
                    self._cancel(role, transfer_id, "its caller has gone away")
        self._landings = {i: m for i, m in self._landings.items() if _is_of_interest(m, now_s)}
        self._sends = {i: m for i, m in self._sends.items() if _is_of_interest(m, now_s)}

    async def close(self) -> None:
        """End all moves. Complete landings are committed first."""
        keeping = [move.keeping for move in self._landings.values() if move.keeping is not None]
        if keeping:
            await asyncio.wait(keeping)
        for role in _ROLES:
            for transfer_id in list(self._of(role)):
                self._cancel(role, transfer_id, "the agent is stopping")

    # ---- inside

    def _of(self, role: MoveRole) -> Mapping[bytes, MoveLanding | MoveSend]:
        return self._landings if role == "landing" else self._sends

    def _space(self, what: MovedParts, slots: tuple[Slot, ...]) -> PartsSpace:
        """The slots' memory, in their order."""
        spaces = [self._arena.view(slot.runs, what.shape.parts[slot.part].nbytes) for slot in slots]
        return PartsSpace(spaces)

    def _lacks_memory(self, what: MovedParts) -> bool:
        """Whether a part is not cached at all, so that the pool must have lacked room for it."""
        now_s = self._clock_s()
        try:
            pin = self._pool.pin(what.shape, what.keys, what.parts, now_s)
        except KeyError:
            return True
        self._pool.unpin(pin.pin_id)
        return False

    async def _pinned(self, move: MoveSend) -> tuple[Slot, ...]:
        """The pinned arena slots of all parts of a send, in the order of the transfer."""
        what, pool = move.what, self._pool
        try:
            pin = pool.pin(what.shape, what.keys, what.parts, self._clock_s())
        except KeyError as error:
            raise UnknownTransfer(f"not all of these parts are cached here: {error}") from error
        move.pin_id = pin.pin_id
        if pin.absent:
            await self._cache.fetch(what.shape, what.keys, pin.absent, FETCH_S)
            pin = pool.pinned(pin.pin_id)
        if pin.absent:
            raise NoArenaRoom(f"{len(pin.absent)} parts are on SSD and did not come into the arena")
        by_part = {(slot.index, slot.part): slot for slot in pin.slots}
        return tuple(by_part[part] for part in what.parts)

    async def _keep(self, transfer_id: bytes, move: MoveLanding, fill: Fill) -> None:
        """Commit the landed parts, in order."""
        what, error = move.what, ""
        try:
            await self._cache.commit(what.shape, what.keys, fill, fill.slots)
        except Exception as problem:
            # The failure of one move must not end the agent; the fill is ended below.
            logger.exception("cannot keep the moved parts of %s", transfer_id.hex())
            error = f"{type(problem).__name__}: {problem}"
        finally:
            self._give_back(move)
            self._io.drop(transfer_id, "the move is over")  # admits no other sender any more
        move.num_kept = sum(
            self._pool.lookup(what.keys[slot.index], slot.part) == slot.runs for slot in fill.slots
        )
        if move.num_kept and not error:
            self._over(move, "complete", "")
        else:
            reason = error or "what these parts continue is not cached any more"
            self._over(move, "failed", reason)

    def _cancel(self, role: MoveRole, transfer_id: bytes, reason: str) -> bool:
        move = self._of(role).get(transfer_id)
        if move is None or move.state != "open":
            return False
        self._over(move, "cancelled", reason)
        if isinstance(move, MoveSend):
            if move.outgoing is not None:
                move.outgoing.cancel(reason)  # `_send_ended` follows
        elif move.keeping is None:
            self._io.drop(transfer_id, reason)  # `landing_dropped` follows
        return True

    def _send_ended(self, transfer_id: bytes, error: str | None, now_s: float) -> None:
        move = self._sends.get(transfer_id)
        if move is None:
            return
        self._note_progress(transfer_id, move)
        self._unpin(move)
        if error is None and move.state == "open":
            self._over(move, "complete", "")
        else:
            self._over(move, "failed", error or "")

    def _note_progress(self, transfer_id: bytes, move: Move) -> None:
        if isinstance(move, MoveSend):
            progress = move.outgoing.progress() if move.outgoing is not None else None
            if progress is not None and progress.first_sent_s is not None:
                until_s = progress.completed_s or self._clock_s()
                move.transfer_s = until_s - progress.first_sent_s
        else:
            progress = self._io.landing_progress(transfer_id)
        if progress is not None and move.state == "open":
            move.done_bytes = progress.acked_bytes

    def _rtt_s(self, move: Move) -> float:
        link = self._io.link_state(move.endpoint) if isinstance(move, MoveSend) else None
        samples = [c.info.min_rtt_s for c in link.connections if c.info.min_rtt_s] if link else []
        return min(samples, default=0.0)

    def _over(self, move: Move, state: MoveState, error: str) -> None:
        """Note the end of a move. Only the first end counts."""
        if move.state != "open":
            return
        move.state, move.error, move.ended_s = state, error, self._clock_s()
        move.over.set()

    def _give_back(self, move: MoveLanding) -> None:
        if move.fill is not None:
            self._cache.end_fill(move.what.keys, move.fill)
            move.fill = None

    def _unpin(self, move: MoveSend) -> None:
        if move.pin_id is not None:
            self._pool.unpin(move.pin_id)
            move.pin_id = None

    def _admissible(self, role: MoveRole, lease_s: float) -> float:
        """The lease to grant. Raises NoArenaRoom, BadRequest."""
        lease_s = _checked_lease_s(lease_s)
        if self.num_open(role) >= MAX_MOVES:
            raise NoArenaRoom(f"{MAX_MOVES} moves run here already; wait until one is over")
        return lease_s


def _is_of_interest(move: MoveLanding | MoveSend, now_s: float) -> bool:
    if move.state == "open" or move.holds_memory:
        return True
    return now_s < max(move.ended_s + KEEP_S, move.lease_until_s)


def _checked_lease_s(lease_s: float) -> float:
    if not math.isfinite(lease_s) or lease_s <= 0:
        raise BadRequest(f"a lease of {lease_s} s")
    return min(lease_s, MAX_LEASE_S)
