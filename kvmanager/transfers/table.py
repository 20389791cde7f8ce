"""The life of every landing and outbox of one node agent: a pure state machine.

States. A landing (memory that a remote sender fills) goes

    reserved -> receiving -> landed -> claimed -> released
        any of the first three -> cancelled | expired, of the first two -> failed

and an outbox (memory that a local engine fills and the transport sends)

    open -> complete | failed | cancelled | expired

`MOVES` in `kvmanager.transfers.records` has these moves. Events are method calls, with `now_s`
where time matters. Each returns the effects that the shell has to perform, in order. Nothing here
waits, locks, or touches memory or sockets, and the records stay consistent without any effect.

These rules hold for both ends of a transfer; `landings` and `outboxes` have further ones.

1. Leases. Reserved, receiving and landed landings and open outboxes end with their lease at the
   latest. A claimed landing has no lease, because its engine owns it.
2. Memory. The state says what a transfer is good for; `BlockHolds` says when its blocks are free.
3. One end never waits for the other. Events at the peer arrive through the transport, as
   `landings.failed` or `outboxes.ended`.
4. A message about a transfer that is over or unknown is answered at once and changes nothing.
   Records of ended transfers are kept for `report_keep_s`, for reports.

It may not know message formats, the layout behind a fingerprint, the contents of tokens, or the
arena.
"""

from __future__ import annotations

from collections.abc import Callable

from kvmanager.transfers.blocks import BlockAllocator
from kvmanager.transfers.holds import BlockHolds, Key
from kvmanager.transfers.landings import LandingTable
from kvmanager.transfers.outboxes import OutboxTable
from kvmanager.transfers.records import (
    MOVES,
    Effect,
    EnginePeer,
    GaveUpOnEngine,
    LandingRecord,
    OutboxRecord,
    UnknownTransfer,
)
from kvmanager.transfers.shared import SharedBooks, TableLimits


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
        """`BlockHolds` calls `make_room` and `on_freed`."""
        self.holds = BlockHolds(allocator, make_room=make_room, on_freed=on_freed)
        self.books = SharedBooks(self.holds, block_bytes, limits or TableLimits())
        self.landings = LandingTable(self.books)
        self.outboxes = OutboxTable(self.books)

    # ---- the control plane

    def renew(self, transfer_id: bytes, lease_s: float, now_s: float) -> float:
        """Renew the lease of every live end of the transfer. Returns the granted lease.

        Raises UnknownTransfer when no end is alive, BadRequest for an impossible lease.
        """
        granted_s = self.books.lease_s(lease_s)
        ends = self.landings.records.get(transfer_id), self.outboxes.records.get(transfer_id)
        alive = [end for end in ends if end is not None and end.state in MOVES]
        if not alive:
            raise UnknownTransfer(f"no live transfer {transfer_id.hex()}")
        for end in alive:
            end.lease_until_s = now_s + granted_s
        return granted_s

    def cancel(self, transfer_id: bytes, reason: str, now_s: float) -> list[Effect]:
        """End both ends of the transfer, except a claimed landing. A second call does nothing."""
        return [
            *self.landings.cancel(transfer_id, reason, now_s),
            *self.outboxes.cancel(transfer_id, reason, now_s),
        ]

    # ---- engines

    def connect(self, peer: EnginePeer) -> None:
        """An engine has connected."""
        self.books.peers[peer.conn_id] = peer

    def disconnected(self, conn_id: int, now_s: float) -> list[Effect]:
        """The connection is lost; its process may live on for a while (`process_gone`)."""
        if conn_id not in self.books.peers:
            return []
        self.books.lingering_until_s[conn_id] = now_s + self.books.limits.drain_s
        return [
            *self.outboxes.connection_lost(conn_id, now_s),
            *self.landings.connection_lost(conn_id, now_s),
        ]

    def process_gone(self, conn_id: int) -> None:
        """The process behind a lost connection has ended and touches no memory any more."""
        self.books.lingering_until_s.pop(conn_id, None)
        self.books.peers.pop(conn_id, None)
        self.holds.process_gone(conn_id)

    # ---- time

    def expire(self, now_s: float) -> list[Effect]:
        """End transfers whose lease is over, and forget old ones. Call a few times a second."""
        effects = [*self.landings.expire(now_s), *self.outboxes.expire(now_s)]
        for conn_id, until_s in list(self.books.lingering_until_s.items()):
            if until_s <= now_s:
                self.process_gone(conn_id)
        effects += [GaveUpOnEngine(key) for key in self.holds.expire(now_s)]
        self.landings.forget(now_s)
        self.outboxes.forget(now_s)
        return effects

    def check_invariants(self) -> None:
        """Raises AssertionError when a rule of the module text is broken; for tests."""
        ends: list[LandingRecord | OutboxRecord] = [
            *self.landings.records.values(),
            *self.outboxes.records.values(),
        ]
        self.holds.check_invariants(end.key for end in ends if end.state in MOVES)
        assert self.books.lingering_until_s.keys() <= self.books.peers.keys()
        self.landings.check_invariants()
        self.outboxes.check_invariants()
