"""The life of every landing and outbox of one node agent: a pure state machine.

States. A landing (memory that a remote sender fills) goes

    reserved -> receiving -> landed -> claimed -> released
        any of the first three -> cancelled | expired, of the first two -> failed

and an outbox (memory that a local engine fills and the transport sends)

    open -> complete | failed | cancelled | expired

`MOVES` in `transfer_records` is that table. Events come in as method calls, with `now_s` where time
matters; each returns the effects that the shell has to perform, in order. Nothing here waits,
locks, or touches memory or sockets, and no effect is needed for the books to stay consistent.

Rules.

1. Leases. Reserved, receiving and landed landings and open outboxes live until their lease ends
   and no longer, whatever else happens. A claimed landing has no lease: its engine owns it.
2. Claim. The first connection that watches a landing gets it when it has landed. It belongs to the
   instance of that connection until any connection of the instance releases it or the watching
   connection is lost. Cancel does not touch a claimed landing: an engine may be reading it, and the
   engine that is told to abort the request releases it.
3. Memory. The state says what a transfer is good for; `BlockHolds` says when its blocks are free. A
   landing's blocks are held by the receiver until `landing_dropped`, an outbox's by the sender
   until `outbox_ended`; besides, an abandoned landing is held by every connection of its instance,
   and an outbox by every worker that may be about to write into it, until it lets go, its process
   is gone, or the drain time is over. Those are all workers with the outbox's layout that were
   connected when it was opened, since an engine writes as soon as it has said `attach`, without
   waiting for an answer; once one instance has attached, the workers of the others are out of it.
   A connection that is made later may not fill the outbox: nobody would tell it of an end that
   came before it, and `last_attempt` tells it which outboxes those are.
4. Engine death. An outbox that is not filled fails at once with any of the engines that fill it.
   One that is filled is sent to its end: nothing of the engine is needed any more.
5. One end never waits for the other: what happens at the peer arrives as `landing_failed` or
   `outbox_ended` through the transport.
6. Whoever asks about a transfer that is over or unknown is told at once, and nothing else happens.
   Records of ended transfers are kept `report_keep_s` for reports.
7. Attempts. An outbox may be opened again for another engine, and what the engine of the first
   opening says may arrive late. So each opening has a number, what engines say of an outbox names
   it, and what names another than the present one changes nothing. Numbers rise, and they are not
   below the time of opening in microseconds: a restarted agent does not use a number again.

It may not know message formats, the layout behind a fingerprint, tokens' contents or the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvmanager.transfers.blocks import BlockAllocator, OutOfBlocks, Run
from kvmanager.transfers.holds import TRANSPORT, BlockHolds, Key, Kind
from kvmanager.transfers.records import (
    MOVES,
    BadRequest,
    CancelOutbox,
    DropLanding,
    Effect,
    EnginePeer,
    ForwardReady,
    GaveUpOnEngine,
    LandingRecord,
    LandingSpec,
    NoArenaRoom,
    OutboxRecord,
    OutboxSpec,
    OutcomeKnown,
    RecordPrefillEnd,
    State,
    TellFailed,
    TellLanded,
    UnknownTransfer,
)


@dataclass(frozen=True, slots=True)
class TableLimits:
    """Bounds of one agent. A cap of None means as much as the arena holds."""

    landing_bytes: int | None = None
    tenant_landing_bytes: int | None = None
    max_lease_s: float = 3600.0
    """Longest lease of a landing or an outbox, seconds."""
    drain_s: float = 30.0
    """How long memory of a failed transfer waits for an engine that still copies, seconds."""
    report_keep_s: float = 60.0


class TransferTable:
    """All landings and outboxes of one agent. One thread only."""

    def __init__(
        self,
        allocator: BlockAllocator,
        block_bytes: int,
        limits: TableLimits | None = None,
        *,
        make_room: Callable[[int], object] | None = None,
        on_freed: Callable[[Key], object] | None = None,
    ) -> None:
        """`make_room`, `on_freed`: see `BlockHolds`."""
        self.limits = limits or TableLimits()
        self.holds = BlockHolds(allocator, make_room=make_room, on_freed=on_freed)
        self.landings: dict[bytes, LandingRecord] = {}
        self.outboxes: dict[bytes, OutboxRecord] = {}
        self._block_bytes = block_bytes
        self._peers: dict[int, EnginePeer] = {}
        self._lingering_until_s: dict[int, float] = {}
        self.last_attempt = 0
        """The number of the opening that came last."""

    # ---- the control plane

    def check_landing(self, spec: LandingSpec) -> float:
        """The lease of a landing that only memory may stand against; raises as `reserve` does."""
        if spec.transfer_id in self.landings:
            raise BadRequest(f"landing {spec.transfer_id.hex()} exists")
        lease_s = self._check(spec.nbytes, spec.lease_s)
        self._check_caps(spec, self._num_blocks(spec.nbytes) * self._block_bytes)
        return lease_s

    def landing_room_blocks(self, num_free: int) -> int:
        """Blocks that one more landing could take if `num_free` can be had."""
        cap = self.limits.landing_bytes
        if cap is None:
            return num_free
        left = cap // self._block_bytes - self.holds.num_blocks(Kind.LANDING)
        return max(0, min(num_free, left))

    def reserve(self, spec: LandingSpec, now_s: float) -> LandingRecord:
        """Hold memory for a transfer to come; raises NoArenaRoom or BadRequest."""
        lease_s = self.check_landing(spec)
        num_blocks = self._num_blocks(spec.nbytes)
        runs = self._take((Kind.LANDING, spec.transfer_id), num_blocks)
        landing = LandingRecord(spec, runs, opened_s=now_s, lease_until_s=now_s + lease_s)
        self.landings[spec.transfer_id] = landing
        return landing

    def open_outbox(self, spec: OutboxSpec, now_s: float) -> OutboxRecord:
        """Hold memory for an engine to fill; raises NoArenaRoom or BadRequest.

        One that is over and has given its memory back may be opened again, for another try.
        """
        before = self.outboxes.get(spec.transfer_id)
        if before is not None and (before.state in MOVES or before.key in self.holds):
            raise BadRequest(f"outbox {spec.transfer_id.hex()} exists")
        lease_s = self._check(spec.nbytes, spec.lease_s)
        runs = self._take((Kind.OUTBOX, spec.transfer_id), self._num_blocks(spec.nbytes))
        attempt = self.last_attempt = max(self.last_attempt + 1, int(now_s * 1e6))
        outbox = OutboxRecord(spec, runs, now_s, lease_until_s=now_s + lease_s, attempt=attempt)
        self.outboxes[spec.transfer_id] = outbox
        for conn_id in self._peers.keys() - self._lingering_until_s.keys():
            peer = self._peers[conn_id]
            if peer.role == "worker" and peer.fingerprint == spec.fingerprint:
                self.holds.hold(outbox.key, conn_id)
        return outbox

    def renew(self, transfer_id: bytes, lease_s: float, now_s: float) -> float:
        """Let every live end of the transfer live `lease_s` from now; the lease granted.

        Raises UnknownTransfer when no end is alive, BadRequest for an impossible lease.
        """
        granted_s = self._check_lease(lease_s)
        alive = [
            end
            for end in (self.landings.get(transfer_id), self.outboxes.get(transfer_id))
            if end is not None and end.state in MOVES
        ]
        if not alive:
            raise UnknownTransfer(f"no live transfer {transfer_id.hex()}")
        for end in alive:
            end.lease_until_s = now_s + granted_s
        return granted_s

    def cancel(self, transfer_id: bytes, reason: str, now_s: float) -> list[Effect]:
        """End every end of the transfer, except a claimed landing. Does nothing a second time."""
        return [
            *self._end_landing(self.landings.get(transfer_id), State.CANCELLED, reason, now_s),
            *self._end_outbox(self.outboxes.get(transfer_id), State.CANCELLED, reason, now_s),
        ]

    # ---- the transport

    def landing_accepted(self, transfer_id: bytes) -> None:
        """A sender with the right token was let in."""
        landing = self.landings.get(transfer_id)
        if landing is not None and landing.state is State.RESERVED:
            landing.state = State.RECEIVING

    def landing_complete(self, transfer_id: bytes, now_s: float) -> list[Effect]:
        """Every byte is in place."""
        landing = self.landings.get(transfer_id)
        if landing is None or State.LANDED not in MOVES.get(landing.state, ()):
            return []
        landing.state = State.LANDED
        landing.ended_s = now_s
        return [OutcomeKnown(landing.key), *self._claim(landing)]

    def landing_failed(self, transfer_id: bytes, reason: str, now_s: float) -> list[Effect]:
        """The receiver gave it up."""
        return self._end_landing(self.landings.get(transfer_id), State.FAILED, reason, now_s)

    def landing_dropped(self, transfer_id: bytes) -> None:
        """No transport thread touches the landing's memory any more."""
        self.holds.release((Kind.LANDING, transfer_id), TRANSPORT)

    def outbox_ended(self, transfer_id: bytes, error: str | None, now_s: float) -> list[Effect]:
        """The sender is done with the outbox's memory; `error` None: the receiver has it all."""
        outbox = self.outboxes.get(transfer_id)
        if outbox is None:
            return []
        effects: list[Effect] = []
        if outbox.state is State.OPEN and error is None:
            outbox.state = State.COMPLETE
            outbox.ended_s = now_s
            self.holds.release_engines(outbox.key)
            self.holds.end_transfer(outbox.key, now_s)
            effects = [OutcomeKnown(outbox.key)]
        elif outbox.state is State.OPEN:
            effects = self._end_outbox(outbox, State.FAILED, error or "", now_s)
            effects = [effect for effect in effects if not isinstance(effect, CancelOutbox)]
        self.holds.release(outbox.key, TRANSPORT)
        return effects

    # ---- engines

    def connect(self, peer: EnginePeer) -> None:
        """An engine connection was welcomed."""
        self._peers[peer.conn_id] = peer

    def attach(self, conn_id: int, transfer_id: bytes, attempt: int) -> list[Effect]:
        """The engine will write into the outbox."""
        outbox = self._opening(transfer_id, attempt)
        if outbox is None or outbox.state is not State.OPEN:
            return [TellFailed(conn_id, transfer_id, _why_not(outbox), attempt)]
        why_not = self._why_it_may_not_fill(conn_id, outbox)
        if why_not:
            return [TellFailed(conn_id, transfer_id, why_not, attempt)]
        outbox.attached.add(conn_id)
        instance = self._peers[conn_id].instance
        for other in self.holds.holders(outbox.key):
            if self._peers[other].instance != instance:
                self.holds.release(outbox.key, other)
        return []

    def ranges_ready(
        self,
        conn_id: int,
        transfer_id: bytes,
        attempt: int,
        ranges: Iterable[tuple[int, int]],
        now_s: float,
    ) -> list[Effect]:
        """The (offset, length) ranges hold their final bytes. Implies `attach`.

        A range outside the transfer fails it: whoever computed it computed others wrongly too.
        """
        outbox = self._opening(transfer_id, attempt)
        is_new = outbox is None or conn_id not in outbox.attached
        effects = self.attach(conn_id, transfer_id, attempt) if is_new else []
        if effects or outbox is None or outbox.state is not State.OPEN:
            return effects
        fresh: list[tuple[int, int]] = []
        for offset, length in ranges:
            if offset < 0 or length < 0 or offset + length > outbox.spec.nbytes:
                reason = f"ready range [{offset}, +{length}) is not in {outbox.spec.nbytes} bytes"
                return self._end_outbox(outbox, State.FAILED, reason, now_s)
            for start, end in outbox.ready.gaps(offset, offset + length):
                outbox.ready.add(start, end)
                fresh.append((start, end - start))
        return [ForwardReady(transfer_id, fresh)] if fresh else []

    def prefill_end(
        self, conn_id: int, transfer_id: bytes, attempt: int, tp_rank: int, now_s: float
    ) -> list[Effect]:
        """The last chunk's forward pass is over on `tp_rank`. Of no interest after the end, nor
        from an engine that does not fill the outbox.
        """
        outbox = self._opening(transfer_id, attempt)
        if outbox is None or outbox.state is not State.OPEN or outbox.prefill_end_s is not None:
            return []
        if conn_id not in outbox.attached:
            return []
        outbox.ended_ranks.add(tp_rank)
        if not outbox.ended_ranks.issuperset(range(self._peers[conn_id].tp_size)):
            return []
        outbox.prefill_end_s = now_s
        return [RecordPrefillEnd(transfer_id)]

    def abort(
        self, conn_id: int, transfer_id: bytes, attempt: int, reason: str, now_s: float
    ) -> list[Effect]:
        """The engine gives the outbox up and does not write into it any more.

        The outbox ends with that, unless another engine fills it.
        """
        outbox = self._opening(transfer_id, attempt)
        if outbox is None:
            return []
        is_others = self._is_filled_by_another(conn_id, outbox)
        self._leave_outbox(conn_id, outbox)
        return [] if is_others else self._end_outbox(outbox, State.FAILED, reason, now_s)

    def release_outbox(self, conn_id: int, transfer_id: bytes, attempt: int) -> None:
        """The engine does not write into the outbox any more."""
        outbox = self._opening(transfer_id, attempt)
        if outbox is not None:
            self._leave_outbox(conn_id, outbox)

    def watch(self, conn_id: int, transfer_id: bytes) -> list[Effect]:
        """Tell this engine how the landing ends; it owns what landed."""
        landing = self.landings.get(transfer_id)
        if landing is None or landing.state not in MOVES:
            return [TellFailed(conn_id, transfer_id, _why_not(landing))]
        if landing.spec.fingerprint != self._peers[conn_id].fingerprint:
            return [TellFailed(conn_id, transfer_id, "the landing has another KV layout")]
        if landing.watcher not in (None, conn_id):
            return [TellFailed(conn_id, transfer_id, "another engine waits for this landing")]
        landing.watcher = conn_id
        if landing.state is State.CLAIMED:
            return [TellLanded(conn_id, transfer_id)]
        return self._claim(landing) if landing.state is State.LANDED else []

    def release_landing(self, conn_id: int, transfer_id: bytes, now_s: float) -> list[Effect]:
        """The engine does not touch the landing's memory any more.

        Its instance's landing is over with that, and a landing that it only watched is cancelled.
        """
        landing = self.landings.get(transfer_id)
        if landing is None or landing.watcher is None:
            return []
        if landing.state is State.CLAIMED:
            owner = self._peers[landing.watcher].instance
            if self._peers[conn_id].instance != owner:
                return []
            return self._end_landing(landing, State.RELEASED, "", now_s)
        if landing.watcher != conn_id:
            return []
        return self._end_landing(landing, State.CANCELLED, "given up by its engine", now_s)

    def disconnected(self, conn_id: int, now_s: float) -> list[Effect]:
        """The connection is lost; its process may live on for a while (`process_gone`)."""
        if conn_id not in self._peers:
            return []
        effects: list[Effect] = []
        self._lingering_until_s[conn_id] = now_s + self.limits.drain_s
        for outbox in self.outboxes.values():
            attached = conn_id in outbox.attached
            outbox.attached.discard(conn_id)
            if attached and outbox.state is State.OPEN and not outbox.is_filled:
                effects += self._end_outbox(outbox, State.FAILED, "its engine is lost", now_s)
        for landing in self.landings.values():
            if landing.watcher != conn_id:
                continue
            if landing.state is State.CLAIMED:
                self._hold_for_instance(landing, self._peers[conn_id].instance)
                effects += self._end_landing(landing, State.RELEASED, "", now_s)
            landing.watcher = None
        return effects

    def process_gone(self, conn_id: int) -> None:
        """The process behind a lost connection has ended and touches no memory any more."""
        self._lingering_until_s.pop(conn_id, None)
        self._peers.pop(conn_id, None)
        self.holds.process_gone(conn_id)

    # ---- time

    def expire(self, now_s: float) -> list[Effect]:
        """End what outlived its lease; forget what is over for long. Call a few times a second."""
        effects: list[Effect] = []
        for landing in list(self.landings.values()):
            if landing.state is not State.CLAIMED and landing.lease_until_s <= now_s:
                effects += self._end_landing(landing, State.EXPIRED, "its lease ended", now_s)
        for outbox in list(self.outboxes.values()):
            if outbox.lease_until_s <= now_s:
                effects += self._end_outbox(outbox, State.EXPIRED, "its lease ended", now_s)
        for conn_id, until_s in list(self._lingering_until_s.items()):
            if until_s <= now_s:
                self.process_gone(conn_id)
        effects += [GaveUpOnEngine(key) for key in self.holds.expire(now_s)]
        self._forget(now_s - self.limits.report_keep_s)
        return effects

    def check_invariants(self) -> None:
        """Raises AssertionError when a rule of the module text is broken; for tests."""
        ends: list[LandingRecord | OutboxRecord] = [
            *self.landings.values(),
            *self.outboxes.values(),
        ]
        self.holds.check_invariants(end.key for end in ends if end.state in MOVES)
        assert self._lingering_until_s.keys() <= self._peers.keys()
        connected = self._peers.keys() - self._lingering_until_s.keys()
        for landing in self.landings.values():
            over = landing.state not in MOVES
            assert landing.watcher is None or landing.watcher in connected
            assert not (over and landing.watcher is not None)
            assert landing.state is not State.CLAIMED or landing.watcher is not None
            assert (landing.ended_s is None) == (landing.state in (State.RESERVED, State.RECEIVING))
        for outbox in self.outboxes.values():
            assert (outbox.ended_s is None) == (outbox.state is State.OPEN)
            assert outbox.ready.total <= outbox.spec.nbytes
            assert outbox.attached <= connected
            if outbox.state is State.OPEN:
                assert outbox.attached <= self.holds.holders(outbox.key)
        cap = self.limits.landing_bytes
        used = self.holds.num_blocks(Kind.LANDING) * self._block_bytes
        assert cap is None or used <= cap

    # ---- inside

    def _claim(self, landing: LandingRecord) -> list[Effect]:
        if landing.watcher is None:
            return []
        landing.state = State.CLAIMED
        return [TellLanded(landing.watcher, landing.spec.transfer_id)]

    def _end_landing(
        self, landing: LandingRecord | None, state: State, reason: str, now_s: float
    ) -> list[Effect]:
        if landing is None or state not in MOVES.get(landing.state, ()):
            return []
        transfer_id = landing.spec.transfer_id
        landing.state = state
        landing.error = reason
        effects: list[Effect] = [DropLanding(transfer_id, reason or str(state))]
        if landing.ended_s is None:
            landing.ended_s = now_s
            effects.append(OutcomeKnown(landing.key))
        if landing.watcher is not None and state is not State.RELEASED:
            effects.append(TellFailed(landing.watcher, transfer_id, reason))
        landing.watcher = None
        self.holds.end_transfer(landing.key, now_s + self.limits.drain_s)
        return effects

    def _end_outbox(
        self, outbox: OutboxRecord | None, state: State, reason: str, now_s: float
    ) -> list[Effect]:
        if outbox is None or state not in MOVES.get(outbox.state, ()):
            return []
        transfer_id = outbox.spec.transfer_id
        outbox.state = state
        outbox.error = reason
        outbox.ended_s = now_s
        tell = sorted(self.holds.holders(outbox.key) - self._lingering_until_s.keys())
        self.holds.end_transfer(outbox.key, now_s + self.limits.drain_s)
        return [
            CancelOutbox(transfer_id, reason),
            OutcomeKnown(outbox.key),
            *(TellFailed(conn_id, transfer_id, reason, outbox.attempt) for conn_id in tell),
        ]

    def _opening(self, transfer_id: bytes, attempt: int) -> OutboxRecord | None:
        """The outbox of this attempt; None when it is not the present one."""
        outbox = self.outboxes.get(transfer_id)
        return outbox if outbox is not None and outbox.attempt == attempt else None

    def _why_it_may_not_fill(self, conn_id: int, outbox: OutboxRecord) -> str:
        if outbox.spec.fingerprint != self._peers[conn_id].fingerprint:
            return "the outbox has another KV layout"
        if self._is_filled_by_another(conn_id, outbox):
            return "another engine fills this outbox"
        is_told_of_the_end = conn_id in self.holds.holders(outbox.key)
        return "" if is_told_of_the_end else "the outbox is older than this connection"

    def _is_filled_by_another(self, conn_id: int, outbox: OutboxRecord) -> bool:
        instance = self._peers[conn_id].instance
        return any(self._peers[other].instance != instance for other in outbox.attached)

    def _leave_outbox(self, conn_id: int, outbox: OutboxRecord) -> None:
        outbox.attached.discard(conn_id)
        self.holds.release(outbox.key, conn_id)

    def _hold_for_instance(self, landing: LandingRecord, instance: str) -> None:
        for peer in self._peers.values():
            if peer.instance == instance:
                self.holds.hold(landing.key, peer.conn_id)

    def _forget(self, before_s: float) -> None:
        def is_old(end: LandingRecord | OutboxRecord) -> bool:
            is_over = end.state not in MOVES and end.key not in self.holds
            return is_over and end.ended_s is not None and end.ended_s <= before_s

        self.landings = {k: end for k, end in self.landings.items() if not is_old(end)}
        self.outboxes = {k: end for k, end in self.outboxes.items() if not is_old(end)}

    def _check(self, nbytes: int, lease_s: float) -> float:
        if nbytes < 1:
            raise BadRequest(f"a transfer of {nbytes} bytes")
        return self._check_lease(lease_s)

    def _check_lease(self, lease_s: float) -> float:
        if not lease_s > 0:
            raise BadRequest(f"a lease of {lease_s} s")
        return min(lease_s, self.limits.max_lease_s)

    def _check_caps(self, spec: LandingSpec, wanted_bytes: int) -> None:
        used = self.holds.num_blocks(Kind.LANDING) * self._block_bytes
        cap = self.limits.landing_bytes
        if cap is not None and used + wanted_bytes > cap:
            raise NoArenaRoom(f"landings hold {used} of {cap} bytes, {wanted_bytes} more wanted")
        cap = self.limits.tenant_landing_bytes
        if cap is None:
            return
        used = sum(
            self._num_blocks(landing.spec.nbytes) * self._block_bytes
            for landing in self.landings.values()
            if landing.spec.tenant == spec.tenant and landing.key in self.holds
        )
        if used + wanted_bytes > cap:
            raise NoArenaRoom(f"tenant {spec.tenant!r} holds {used} of {cap} bytes of landings")

    def _take(self, key: tuple[Kind, bytes], num_blocks: int) -> list[Run]:
        try:
            return self.holds.take(key, num_blocks)
        except OutOfBlocks as error:
            raise NoArenaRoom(f"the arena is full: {error}") from error

    def _num_blocks(self, nbytes: int) -> int:
        return -(-nbytes // self._block_bytes)


def _why_not(end: LandingRecord | OutboxRecord | None) -> str:
    if end is None:
        return "no such transfer at this agent"
    return f"the transfer is over: {end.state}" + (f" ({end.error})" if end.error else "")
