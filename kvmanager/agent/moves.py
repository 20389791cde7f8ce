"""Moves memory of one agent to another's: the part that moves of all contents share.

A move is a transfer outside of the transfer table. Its ends differ in where their memory comes from
and in what becomes of it: parts of cached prefixes (`cache.moves`) or embeddings
(`embeddings.moves`). The source holds what it sends. The destination keeps what has landed when
every byte is there. Each end has a lease, which `status` renews. However an end is over, its memory
goes back only when the transport does not use it any more.

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

from kvmanager.agent.cache.move_messages import CacheMoveStatusReply, MoveRole, MoveState
from kvmanager.agent.move_records import (
    LandingMemory,
    Move,
    MoveContent,
    MoveLanding,
    MoveSend,
    OpenedLanding,
    SentMemory,
)
from kvmanager.agent.sender_admission import AdmittedLanding
from kvmanager.agent.transfer_io import SendListener, TransferIo
from kvmanager.transfers.records import BadRequest, NoArenaRoom, UnknownTransfer
from transport import ByteSpace, Endpoint, OutgoingSpec
from transport.tasks import start_task

logger = logging.getLogger("prfaas.kvmanager.agent")

MAX_MOVES: Final[Mapping[MoveContent, int]] = {"prefix": 8, "embeddings": 64}
"""Moves of one content and role that may run at the same time. A request waits for embeddings."""
MAX_LEASE_S: Final = 300.0
KEEP_S: Final = 30.0
"""Time for which an ended move can still be asked for."""

_ROLES: Final[tuple[MoveRole, ...]] = ("landing", "send")


class Mover:
    """The moves of one agent. It raises the errors of the transfer table."""

    def __init__(
        self,
        io: TransferIo,
        *,
        advertised: Endpoint,
        clock_s: Callable[[], float],
        on_over: Callable[[MoveRole, Move], None] = lambda _role, _move: None,
    ) -> None:
        """`on_over` is told of each end that is over."""
        self._io = io
        self._advertised = advertised
        self._clock_s = clock_s
        self._on_over = on_over
        self._landings: dict[bytes, MoveLanding] = {}
        self._sends: dict[bytes, MoveSend] = {}
        self._closed = False

    def num_open(self, role: MoveRole, content: MoveContent | None = None) -> int:
        """Moves of this role that hold memory; of any content unless one is named."""
        return sum(
            move.memory is not None
            for move in self._of(role).values()
            if content in (None, move.content)
        )

    # ---- the control plane

    def admissible(self, role: MoveRole, content: MoveContent, lease_s: float) -> float:
        """The lease to grant. Raises NoArenaRoom, BadRequest."""
        lease_s = _checked_lease_s(lease_s)
        if self._closed:
            raise NoArenaRoom("this agent is stopping")
        most = MAX_MOVES[content]
        if self.num_open(role, content) >= most:
            raise NoArenaRoom(f"{most} moves run here already; wait until one is over")
        return lease_s

    def open_landing(
        self,
        content: MoveContent,
        memory: LandingMemory,
        space: ByteSpace,
        fingerprint: bytes,
        lease_s: float,
    ) -> OpenedLanding:
        """Admit one sender to `space`, under an `admissible` lease. `fingerprint` is what both ends
        must mean by the bytes.
        """
        transfer_id, token = secrets.token_bytes(16), secrets.token_bytes(32)
        until_s = self._clock_s() + lease_s
        self._landings[transfer_id] = MoveLanding(content, space.nbytes, until_s, memory=memory)
        self._io.admit(transfer_id, AdmittedLanding(token, fingerprint, space))
        at = self._advertised
        return OpenedLanding(
            transfer_id.hex(), token.hex(), space.nbytes, at.host, at.port, lease_s
        )

    async def open_send(
        self, content: MoveContent, memory: SentMemory, wire: OutgoingSpec, lease_s: float
    ) -> float:
        """Begin to send to a landing. Returns the lease in seconds.

        Raises NoArenaRoom, BadRequest, UnknownTransfer (something is not here, or the move ended
        before it began).
        """
        lease_s = self.admissible("send", content, lease_s)
        if wire.transfer_id in self._sends:
            raise BadRequest(f"move {wire.transfer_id.hex()} is being sent already")
        # Entered before its memory is held, which may take a while, so that `end` can end it.
        move = self._sends[wire.transfer_id] = MoveSend(
            content, 0, self._clock_s() + lease_s, endpoint=wire.endpoint, memory=memory
        )
        try:
            space = await memory.hold()
            move.nbytes = space.nbytes
            if move.state != "open":
                raise UnknownTransfer(f"the move has ended already: {move.error}")
            listener = SendListener(self._io, self._send_ended, self._clock_s)
            move.outgoing = self._io.open_probe(wire, space, listener)
        except BaseException:
            self._sends.pop(wire.transfer_id, None)
            self._let_go(move)
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

    # ---- the transport

    def landing_complete(self, transfer_id: bytes) -> None:
        """Every byte has landed, and nothing writes there any more: begin to keep it."""
        move = self._landings.get(transfer_id)
        if move is not None and move.state == "open" and move.memory is not None:
            move.done_bytes = move.nbytes
            move.keeping = start_task(
                self._keep(transfer_id, move, move.memory), "keeping what was moved"
            )

    def landing_failed(self, transfer_id: bytes, reason: str) -> None:
        """The receiver has given the landing up and does not write any more."""
        move = self._landings.get(transfer_id)
        if move is not None and move.state == "open" and move.keeping is None:
            # Without the drop another sender with the token would still be admitted.
            self._io.drop(transfer_id, reason)
            self._over("landing", move, "failed", reason)
            self._let_go(move)

    def landing_dropped(self, transfer_id: bytes) -> None:
        """No transport thread touches the landing's memory any more."""
        move = self._landings.get(transfer_id)
        if move is not None and move.keeping is None:
            self._let_go(move)

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
        """End all moves, and begin no other. Complete landings are kept first."""
        self._closed = True
        keeping = [move.keeping for move in self._landings.values() if move.keeping is not None]
        if keeping:
            await asyncio.wait(keeping)
        for role in _ROLES:
            for transfer_id in list(self._of(role)):
                self._cancel(role, transfer_id, "the agent is stopping")

    # ---- inside

    def _of(self, role: MoveRole) -> Mapping[bytes, MoveLanding | MoveSend]:
        return self._landings if role == "landing" else self._sends

    async def _keep(self, transfer_id: bytes, move: MoveLanding, memory: LandingMemory) -> None:
        error = ""
        try:
            move.num_kept = await memory.keep()
        except Exception as problem:
            # The failure of one move must not end the agent; its memory is given back below.
            logger.exception("cannot keep what move %s has brought", transfer_id.hex())
            error = f"{type(problem).__name__}: {problem}"
        finally:
            self._let_go(move)
            self._io.drop(transfer_id, "the move is over")  # admits no other sender any more
        if move.num_kept and not error:
            self._over("landing", move, "complete", "")
        else:
            reason = error or "what these parts continue is not cached any more"
            self._over("landing", move, "failed", reason)

    def _cancel(self, role: MoveRole, transfer_id: bytes, reason: str) -> bool:
        move = self._of(role).get(transfer_id)
        if move is None or move.state != "open":
            return False
        self._over(role, move, "cancelled", reason)
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
        self._let_go(move)
        if error is None and move.state == "open":
            self._over("send", move, "complete", "")
        else:
            self._over("send", move, "failed", error or "")

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

    def _over(self, role: MoveRole, move: Move, state: MoveState, error: str) -> None:
        """Note the end of a move. Only the first end counts."""
        if move.state != "open":
            return
        move.state, move.error, move.ended_s = state, error, self._clock_s()
        move.over.set()
        self._on_over(role, move)

    def _let_go(self, move: MoveLanding | MoveSend) -> None:
        memory, move.memory = move.memory, None
        if memory is not None:
            memory.let_go()


def _is_of_interest(move: MoveLanding | MoveSend, now_s: float) -> bool:
    if move.state == "open" or move.memory is not None:
        return True
    return now_s < max(move.ended_s + KEEP_S, move.lease_until_s)


def _checked_lease_s(lease_s: float) -> float:
    if not math.isfinite(lease_s) or lease_s <= 0:
        raise BadRequest(f"a lease of {lease_s} s")
    return min(lease_s, MAX_LEASE_S)
