"""The landings of one agent: memory that remote senders fill and local engines then own.

States and the rules for both ends of a transfer are in `kvmanager.transfers.table`. These two rules
are about landings alone.

Claim. The engine whose connection is the first to watch a landing gets it when it has landed. Other
cores of the engine may watch it as well, since vLLM spreads the choices of a request over its
cores. A core gives its share up when any of its connections releases the landing, or when the
watching one is lost. The last one ends the landing.
Cancel does not touch a claimed landing, since an engine may be reading it; the engine releases it
when it is told to abort the request.

Memory. The receiver holds a landing's blocks until `dropped`. When a watching connection is lost,
every connection of its instance holds them as well, since any of them may be reading.

It does not know outboxes, message formats, or what the bytes mean.
"""

from __future__ import annotations

from kvmanager.load_times import LoadTimes
from kvmanager.transfers.holds import TRANSPORT, Kind
from kvmanager.transfers.records import (
    MOVES,
    BadRequest,
    DropLanding,
    Effect,
    LandingRecord,
    LandingSpec,
    NoArenaRoom,
    OutcomeKnown,
    State,
    TellFailed,
    TellLanded,
)
from kvmanager.transfers.shared import SharedBooks, why_over


class LandingTable:
    """All landings of one agent; `records` has them by transfer id."""

    def __init__(self, books: SharedBooks) -> None:
        self.records: dict[bytes, LandingRecord] = {}
        self._books = books

    # ---- the control plane

    def check(self, spec: LandingSpec) -> float:
        """Check a request without taking memory. Returns its lease; raises as `reserve` does."""
        if spec.transfer_id in self.records:
            raise BadRequest(f"landing {spec.transfer_id.hex()} exists")
        wanted_bytes = self._books.whole_blocks(spec.nbytes) * self._books.block_bytes
        lease_s = self._books.lease_s(spec.lease_s)
        self._check_caps(spec.tenant, wanted_bytes)
        return lease_s

    def room_blocks(self, num_free: int) -> int:
        """Blocks that one more landing could take if `num_free` blocks are free."""
        cap = self._books.limits.landing_bytes
        if cap is None:
            return num_free
        left = cap // self._books.block_bytes - self._books.holds.num_blocks(Kind.LANDING)
        return max(0, min(num_free, left))

    def reserve(self, spec: LandingSpec, now_s: float) -> LandingRecord:
        """Reserve memory for a transfer. Raises NoArenaRoom or BadRequest."""
        lease_s = self.check(spec)
        num_blocks = self._books.whole_blocks(spec.nbytes)
        runs = self._books.take((Kind.LANDING, spec.transfer_id), num_blocks)
        landing = LandingRecord(spec, runs, opened_s=now_s, lease_until_s=now_s + lease_s)
        self.records[spec.transfer_id] = landing
        return landing

    def cancel(self, transfer_id: bytes, reason: str, now_s: float) -> list[Effect]:
        """End the landing unless it is claimed. A second call does nothing."""
        return self._end(self.records.get(transfer_id), State.CANCELLED, reason, now_s)

    # ---- the transport

    def accepted(self, transfer_id: bytes) -> None:
        """A sender with the right token was admitted."""
        landing = self.records.get(transfer_id)
        if landing is not None and landing.state is State.RESERVED:
            landing.state = State.RECEIVING

    def complete(self, transfer_id: bytes, now_s: float) -> list[Effect]:
        """Every byte is in place."""
        landing = self.records.get(transfer_id)
        if landing is None or State.LANDED not in MOVES.get(landing.state, ()):
            return []
        landing.state = State.LANDED
        landing.ended_s = now_s
        # The engine first: it waits for this, and a report is for later.
        return [*self._claim(landing), OutcomeKnown(landing.key)]

    def failed(self, transfer_id: bytes, reason: str, now_s: float) -> list[Effect]:
        """The receiver gave it up."""
        return self._end(self.records.get(transfer_id), State.FAILED, reason, now_s)

    def dropped(self, transfer_id: bytes) -> None:
        """No transport thread touches the landing's memory any more."""
        self._books.holds.release((Kind.LANDING, transfer_id), TRANSPORT)

    # ---- engines

    def watch(self, conn_id: int, transfer_id: bytes) -> list[Effect]:
        """Note that this engine must be told how the landing ends, and then owns it."""
        landing = self.records.get(transfer_id)
        if landing is None or landing.state not in MOVES:
            return [TellFailed(conn_id, transfer_id, why_over(landing))]
        if landing.spec.fingerprint != self._books.peers[conn_id].fingerprint:
            return [TellFailed(conn_id, transfer_id, "the landing has another KV layout")]
        peers = self._books.peers
        if any(peers[other].engine != peers[conn_id].engine for other in landing.watchers):
            return [TellFailed(conn_id, transfer_id, "another engine waits for this landing")]
        landing.watchers.add(conn_id)
        if landing.state is State.CLAIMED:
            return [TellLanded(conn_id, transfer_id)]
        return self._claim(landing) if landing.state is State.LANDED else []

    def release(self, conn_id: int, transfer_id: bytes, now_s: float) -> list[Effect]:
        """The engine does not touch the landing's memory any more.

        This ends a landing of its engine, and cancels one that the engine only watched, unless
        another core still watches it.
        """
        landing = self.records.get(transfer_id)
        if landing is None:
            return []
        done = landing.watchers & {conn_id}
        if landing.state is State.CLAIMED:
            peers = self._books.peers
            # The connection that watches may be another process of the same core.
            own = peers[conn_id].instance
            done = {other for other in landing.watchers if peers[other].instance == own}
        if not done or landing.watchers - done:
            landing.watchers -= done
            return []
        if landing.state is State.CLAIMED:
            return self._end(landing, State.RELEASED, "", now_s)
        return self._end(landing, State.CANCELLED, "given up by its engine", now_s)

    def loaded(self, conn_id: int, transfer_id: bytes, times: LoadTimes) -> None:
        """A worker of the engine has taken its first step with the landing's KVCache.

        Changes nothing if another engine, or none, has owned the landing.
        """
        landing = self.records.get(transfer_id)
        if landing is None or self._books.peers[conn_id].engine != landing.owner:
            return
        # Ranks step together, so the one that names the most time is the last to be done.
        if landing.times is None or times.total_s > landing.times.total_s:
            landing.times = times

    def connection_lost(self, conn_id: int, now_s: float) -> list[Effect]:
        """End the landings that the lost connection had claimed, and its watches."""
        effects: list[Effect] = []
        for landing in self.records.values():
            if conn_id not in landing.watchers:
                continue
            landing.watchers.discard(conn_id)
            if landing.state is State.CLAIMED:
                self._hold_for_instance(landing, self._books.peers[conn_id].instance)
                if not landing.watchers:
                    effects += self._end(landing, State.RELEASED, "", now_s)
        return effects

    # ---- time

    def expire(self, now_s: float) -> list[Effect]:
        """End landings whose lease is over. A claimed landing has none: its engine owns it."""
        effects: list[Effect] = []
        for landing in self.records.values():
            if landing.state is not State.CLAIMED and landing.lease_until_s <= now_s:
                effects += self._end(landing, State.EXPIRED, "its lease ended", now_s)
        return effects

    def forget(self, now_s: float) -> None:
        """Forget landings that have been over for long enough."""
        records = self.records.items()
        self.records = {k: v for k, v in records if not self._books.is_forgettable(v, now_s)}

    def check_invariants(self) -> None:
        """Raises AssertionError when a rule of the module text is broken; for tests."""
        for landing in self.records.values():
            over = landing.state not in MOVES
            assert landing.watchers <= set(self._books.connected)
            assert len({self._books.peers[conn_id].engine for conn_id in landing.watchers}) <= 1
            assert not (over and landing.watchers)
            assert landing.state is not State.CLAIMED or landing.watchers
            assert (landing.ended_s is None) == (landing.state in (State.RESERVED, State.RECEIVING))
        cap = self._books.limits.landing_bytes
        assert cap is None or self._books.held_bytes(Kind.LANDING) <= cap

    # ---- inside

    def _claim(self, landing: LandingRecord) -> list[Effect]:
        if not landing.watchers:
            return []
        landing.state = State.CLAIMED
        landing.owner = self._books.peers[min(landing.watchers)].engine
        return [TellLanded(conn_id, landing.spec.transfer_id) for conn_id in landing.watchers]

    def _end(
        self, landing: LandingRecord | None, state: State, reason: str, now_s: float
    ) -> list[Effect]:
        if landing is None or state not in MOVES.get(landing.state, ()):
            return []
        transfer_id = landing.spec.transfer_id
        landing.state = state
        landing.error = reason
        effects: list[Effect] = [DropLanding(transfer_id, reason or str(state))]
        # A landed transfer's outcome was decided and reported when it landed.
        if landing.ended_s is None:
            landing.ended_s = now_s
            effects.append(OutcomeKnown(landing.key))
        if state is not State.RELEASED:
            watchers = landing.watchers
            effects += [TellFailed(conn_id, transfer_id, reason) for conn_id in watchers]
        landing.watchers.clear()
        self._books.holds.end_transfer(landing.key, now_s + self._books.limits.drain_s)
        return effects

    def _hold_for_instance(self, landing: LandingRecord, instance: str) -> None:
        for peer in self._books.peers.values():
            if peer.instance == instance:
                self._books.holds.hold(landing.key, peer.conn_id)

    def _check_caps(self, tenant: str, wanted_bytes: int) -> None:
        books = self._books
        used = books.held_bytes(Kind.LANDING)
        cap = books.limits.landing_bytes
        if cap is not None and used + wanted_bytes > cap:
            raise NoArenaRoom(f"landings hold {used} of {cap} bytes, {wanted_bytes} more wanted")
        cap = books.limits.tenant_landing_bytes
        if cap is None:
            return
        # An ended landing counts as long as its memory is not free.
        used = sum(
            books.whole_blocks(landing.spec.nbytes) * books.block_bytes
            for landing in self.records.values()
            if landing.spec.tenant == tenant and landing.key in books.holds
        )
        if used + wanted_bytes > cap:
            raise NoArenaRoom(f"tenant {tenant!r} holds {used} of {cap} bytes of landings")
