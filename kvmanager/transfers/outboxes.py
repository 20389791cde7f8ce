"""The outboxes of one agent: memory that local engines fill and the transport sends.

States and the rules for both ends of a transfer are in `kvmanager.transfers.table`. These rules are
about outboxes alone.

Memory. The sender holds an outbox's blocks until `ended`. Every worker that may be about to write
into the outbox holds them as well, until it releases them, its process has ended, or the drain time
is over. These are all workers with the outbox's layout that were connected when it was opened,
because an engine writes as soon as it has sent `attach`, without waiting for an answer. Once one
instance has attached, the workers of other instances are removed. A connection that is made later
may not fill the outbox: nobody would tell it of an end that came before it. `last_attempt` tells it
which outboxes those are.

Inside an agent. An outbox may fill the landing of the same transfer: it borrows the landing's
blocks, which stay the landing's for as long as any engine may write into the outbox. The caller
that performs the effects ends each of the two ends with the other, as the transport does between
agents.

Engine death. An outbox that is not filled fails as soon as one of the engines that fill it is lost.
An outbox that is filled is sent to its end, since it needs nothing of the engine any more.

Attempts. An outbox may be opened again for another engine, and messages of the first engine may
arrive late. So each opening has a number, which every message about an outbox contains; a message
with another number than the present one changes nothing. Numbers rise, and are not below the time
of opening in microseconds, so that a restarted agent does not use a number again.

It does not know landings, message formats, or what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvmanager.transfers.holds import TRANSPORT, Kind
from kvmanager.transfers.records import (
    MOVES,
    BadRequest,
    CancelOutbox,
    Effect,
    ForwardReady,
    LandingRecord,
    OutboxRecord,
    OutboxSpec,
    OutcomeKnown,
    RecordPrefillEnd,
    State,
    TellFailed,
)
from kvmanager.transfers.shared import SharedBooks, why_over


class OutboxTable:
    """All outboxes of one agent; `records` has them by transfer id."""

    def __init__(self, books: SharedBooks) -> None:
        self.records: dict[bytes, OutboxRecord] = {}
        self.last_attempt = 0
        """The number of the latest opening."""
        self._books = books

    # ---- the control plane

    def check(self, spec: OutboxSpec) -> float:
        """Check a request without taking memory. Returns its lease. Raises BadRequest."""
        before = self.records.get(spec.transfer_id)
        if before is not None and (before.state in MOVES or before.key in self._books.holds):
            raise BadRequest(f"outbox {spec.transfer_id.hex()} exists")
        return self._books.lease_s(spec.lease_s)

    def open(
        self, spec: OutboxSpec, now_s: float, landing: LandingRecord | None = None
    ) -> OutboxRecord:
        """Reserve memory for an engine to fill. Raises NoArenaRoom or BadRequest.

        An outbox that is over and has given its memory back may be opened again, for another try.
        With `landing` the engine fills this landing of the same transfer.
        """
        books = self._books
        num_blocks = books.whole_blocks(spec.nbytes)
        lease_until_s = now_s + self.check(spec)
        key = Kind.OUTBOX, spec.transfer_id
        if landing is not None:
            books.holds.borrow(key, landing.key)
            landing.is_filled_here = True
            runs = landing.runs
        else:
            runs = books.take(key, num_blocks)
        attempt = self.last_attempt = max(self.last_attempt + 1, int(now_s * 1e6))
        outbox = OutboxRecord(
            spec, runs, now_s, lease_until_s, attempt, fills_landing=landing is not None
        )
        self.records[spec.transfer_id] = outbox
        for conn_id in books.connected:
            peer = books.peers[conn_id]
            if peer.role == "worker" and peer.fingerprint == spec.fingerprint:
                books.holds.hold(outbox.key, conn_id)
        return outbox

    def cancel(self, transfer_id: bytes, reason: str, now_s: float) -> list[Effect]:
        """End the outbox. A second call does nothing."""
        return self._end(self.records.get(transfer_id), State.CANCELLED, reason, now_s)

    # ---- the transport

    def ended(self, transfer_id: bytes, error: str | None, now_s: float) -> list[Effect]:
        """The sender is done with the outbox's memory. `error` None: the receiver has all bytes."""
        outbox = self.records.get(transfer_id)
        if outbox is None:
            return []
        effects: list[Effect] = []
        if outbox.state is State.OPEN and error is None:
            outbox.state = State.COMPLETE
            outbox.ended_s = now_s
            # The receiver verified every byte, so every engine has written its last one.
            self._books.holds.release_engines(outbox.key)
            self._books.holds.end_transfer(outbox.key, now_s)
            effects = [OutcomeKnown(outbox.key)]
        elif outbox.state is State.OPEN:
            effects = self._end(outbox, State.FAILED, error or "", now_s)
            # The sender has forgotten the transfer already, so there is nothing to cancel.
            effects = [effect for effect in effects if not isinstance(effect, CancelOutbox)]
        self._books.holds.release(outbox.key, TRANSPORT)
        return effects

    # ---- engines

    def attach(self, conn_id: int, transfer_id: bytes, attempt: int) -> list[Effect]:
        """The engine will write into the outbox."""
        outbox = self._opening(transfer_id, attempt)
        if outbox is None or outbox.state is not State.OPEN:
            return [TellFailed(conn_id, transfer_id, why_over(outbox), attempt)]
        why_not = self._why_it_may_not_fill(conn_id, outbox)
        if why_not:
            return [TellFailed(conn_id, transfer_id, why_not, attempt)]
        outbox.attached.add(conn_id)
        peers, holds = self._books.peers, self._books.holds
        for other in holds.holders(outbox.key):
            if peers[other].instance != peers[conn_id].instance:
                holds.release(outbox.key, other)
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

        A range outside the transfer fails it, since other ranges of that engine must be wrong too.
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
                return self._end(outbox, State.FAILED, reason, now_s)
            for start, end in outbox.ready.gaps(offset, offset + length):
                outbox.ready.add(start, end)
                fresh.append((start, end - start))
        return [ForwardReady(transfer_id, fresh)] if fresh else []

    def prefill_end(
        self,
        conn_id: int,
        transfer_id: bytes,
        attempt: int,
        now_s: float,
        prefill_s: float = 0.0,
    ) -> list[Effect]:
        """The last chunk's forward pass is over in this worker, `prefill_s` after the first one
        began there (0: unknown).

        Changes nothing but `prefill_s` after the end, and nothing at all if the engine does not
        fill the outbox.
        """
        outbox = self._opening(transfer_id, attempt)
        if outbox is None or conn_id not in outbox.attached:
            return []
        # An engine that fills the landing itself has completed it with its last range.
        if outbox.state in (State.OPEN, State.COMPLETE):
            outbox.prefill_s = max(outbox.prefill_s, prefill_s)
        if outbox.state is not State.OPEN or outbox.prefill_end_s is not None:
            return []
        peer = self._books.peers[conn_id]
        outbox.ended_ranks.add(peer.rank)
        if len(outbox.ended_ranks) < peer.world_size:
            return []
        outbox.prefill_end_s = now_s
        return [RecordPrefillEnd(transfer_id)]

    def abort(
        self, conn_id: int, transfer_id: bytes, attempt: int, reason: str, now_s: float
    ) -> list[Effect]:
        """The engine gives the outbox up and does not write into it any more.

        This ends the outbox, unless another engine fills it.
        """
        outbox = self._opening(transfer_id, attempt)
        if outbox is None:
            return []
        is_others = self._is_filled_by_another(conn_id, outbox)
        self._leave(conn_id, outbox)
        return [] if is_others else self._end(outbox, State.FAILED, reason, now_s)

    def release(self, conn_id: int, transfer_id: bytes, attempt: int) -> None:
        """The engine does not write into the outbox any more."""
        outbox = self._opening(transfer_id, attempt)
        if outbox is not None:
            self._leave(conn_id, outbox)

    def connection_lost(self, conn_id: int, now_s: float) -> list[Effect]:
        """Fail the outboxes that the lost connection was still filling."""
        effects: list[Effect] = []
        for outbox in self.records.values():
            attached = conn_id in outbox.attached
            outbox.attached.discard(conn_id)
            if attached and outbox.state is State.OPEN and not outbox.is_filled:
                effects += self._end(outbox, State.FAILED, "its engine is lost", now_s)
        return effects

    # ---- time

    def expire(self, now_s: float) -> list[Effect]:
        """End outboxes whose lease is over."""
        effects: list[Effect] = []
        for outbox in self.records.values():
            if outbox.lease_until_s <= now_s:
                effects += self._end(outbox, State.EXPIRED, "its lease ended", now_s)
        return effects

    def forget(self, now_s: float) -> None:
        """Forget outboxes that have been over for long enough."""
        records = self.records.items()
        self.records = {k: v for k, v in records if not self._books.is_forgettable(v, now_s)}

    def check_invariants(self) -> None:
        """Raises AssertionError when a rule of the module text is broken; for tests."""
        for outbox in self.records.values():
            assert (outbox.ended_s is None) == (outbox.state is State.OPEN)
            assert outbox.ready.total <= outbox.spec.nbytes
            assert outbox.attached <= self._books.connected
            if outbox.state is State.OPEN:
                assert outbox.attached <= self._books.holds.holders(outbox.key)

    # ---- inside

    def _end(
        self, outbox: OutboxRecord | None, state: State, reason: str, now_s: float
    ) -> list[Effect]:
        if outbox is None or state not in MOVES.get(outbox.state, ()):
            return []
        transfer_id = outbox.spec.transfer_id
        outbox.state = state
        outbox.error = reason
        outbox.ended_s = now_s
        # A lost connection cannot be told. Its process's end or the drain time removes its hold.
        tell = sorted(self._books.holds.holders(outbox.key) & self._books.connected)
        self._books.holds.end_transfer(outbox.key, now_s + self._books.limits.drain_s)
        return [
            CancelOutbox(transfer_id, reason),
            OutcomeKnown(outbox.key),
            *(TellFailed(conn_id, transfer_id, reason, outbox.attempt) for conn_id in tell),
        ]

    def _opening(self, transfer_id: bytes, attempt: int) -> OutboxRecord | None:
        """The outbox with this attempt; None when the present attempt is another one."""
        outbox = self.records.get(transfer_id)
        return outbox if outbox is not None and outbox.attempt == attempt else None

    def _why_it_may_not_fill(self, conn_id: int, outbox: OutboxRecord) -> str:
        if outbox.spec.fingerprint != self._books.peers[conn_id].fingerprint:
            return "the outbox has another KV layout"
        if self._is_filled_by_another(conn_id, outbox):
            return "another engine fills this outbox"
        is_told_of_the_end = conn_id in self._books.holds.holders(outbox.key)
        return "" if is_told_of_the_end else "the outbox is older than this connection"

    def _is_filled_by_another(self, conn_id: int, outbox: OutboxRecord) -> bool:
        peers = self._books.peers
        return any(peers[other].instance != peers[conn_id].instance for other in outbox.attached)

    def _leave(self, conn_id: int, outbox: OutboxRecord) -> None:
        outbox.attached.discard(conn_id)
        self._books.holds.release(outbox.key, conn_id)
