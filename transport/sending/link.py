"""All transfers to one endpoint over all connections to it: what each connection sends next, and
which transfers and connections must end.

A connection whose socket has room asks `take`. It gets a cancel, an OPEN, a digest, or the next
chunk of the transfer whose turn it is (`dispatch`), as far as pacing and budgets allow. Nothing is
assigned to a connection before it asks (work stealing), so a slow path delays only the one frame
that it has. An OPEN precedes the first frame of a transfer on each connection. Only the `width`
oldest connections carry DATA; the others stand by.

Events are method calls under the owner's lock. `pop_effects` returns what must be done outside of
the lock. Time is an argument. This file knows no socket, no thread and no ByteSpace.
"""

from __future__ import annotations

import logging
import math

from transport.codec.codecs import Codec
from transport.config import TransportConfig
from transport.errors import LinkError, LocalError, PeerError, TransportError
from transport.interfaces import OutgoingSpec, TransferState
from transport.sending.connections import LinkConnections
from transport.sending.dispatch import Dispatch
from transport.sending.link_state import Backlog
from transport.sending.link_work import AbortConnection, Effect, TransferEnded, Work
from transport.sending.outgoing import RAW_CODED, Coded, OutgoingState
from transport.wire.handshake import Hello
from transport.wire.ranges import Range
from transport.wire.sender_session import (
    Acked,
    CancelAcked,
    Completed,
    Event,
    Opened,
    TransferFailed,
    Welcomed,
)

logger = logging.getLogger("prfaas.transport")


class LinkCore:
    """The state of a link's transfers and connections. It decides what lanes send next."""

    def __init__(self, config: TransportConfig, name: str) -> None:
        self._config = config
        self._name = name
        self.dispatch = Dispatch(config)
        self.acked_bytes = 0
        self.trouble = ""
        """Why no connection stands, after one was lost or could not be made."""
        self._acked_s = -math.inf  # when the receiver last acknowledged anything
        self._transfers: dict[bytes, OutgoingState] = {}
        self._connections = LinkConnections(config.ack_timeout_s)
        self._effects: list[Effect] = []
        self._last_error: TransportError | None = None

    @property
    def has_transfers(self) -> bool:
        return bool(self._transfers)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def connections(self) -> list[int]:
        return list(self._connections)

    def backlog(self, now_s: float) -> Backlog:
        return Backlog.of(self._transfers.values(), now_s)

    @property
    def has_effects(self) -> bool:
        return bool(self._effects)

    def pop_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def add(self, spec: OutgoingSpec, nbytes: int, now_s: float) -> OutgoingState:
        """A new transfer; ValueError when its id is in use on this link."""
        if spec.transfer_id in self._transfers:
            raise ValueError(f"transfer {spec.transfer_id.hex()} is already open")
        transfer = OutgoingState(spec, nbytes, now_s)
        self._transfers[spec.transfer_id] = transfer
        self.dispatch.note(transfer)
        return transfer

    def ready(self, transfer: OutgoingState, start: int, end: int, now_s: float) -> int:
        """[start, end) may be sent from now on; returns how many bytes are new."""
        gained = transfer.ready(start, end, now_s)
        if gained:
            self.dispatch.note(transfer)
        return gained

    def cancel(self, transfer: OutgoingState, error: LocalError, now_s: float) -> None:
        """Ask the receiver to end the transfer. It ends with `error` when the receiver answers, or
        after ack_timeout_s.
        """
        if transfer.state is not TransferState.OPEN:
            return
        # The receiver has never heard of the transfer, so it need not be asked.
        if not transfer.announced and not transfer.opened:
            self._end(transfer, TransferState.CANCELLED, error, now_s)
            return
        transfer.turn(TransferState.CANCELLING, error, now_s)
        transfer.needs_cancel = True
        transfer.progress_s = now_s
        self.dispatch.note(transfer)

    def connected(self, connection: int, peer: Hello, now_s: float) -> None:
        """The handshake is done. Transfers that the receiver held before it restarted fail."""
        self._connections.add(connection, peer, now_s)
        self.trouble = ""
        for transfer in list(self._transfers.values()):
            known = transfer.receiver_instance
            # Another instance is another process: what the first one had received is gone.
            if known is None or known == peer.instance:
                continue
            # An OPEN that was not answered yet may just as well go to the new process.
            if not transfer.opened:
                transfer.receiver_instance = None
            else:
                message = "the receiver restarted and lost what it had received"
                self.fail(transfer, PeerError("receiver_restarted", message), now_s)

    def disconnected(self, connection: int, error: TransportError) -> None:
        """The connection has ended, or never came up. Its thread holds no view of a ByteSpace."""
        self._last_error = error
        self._connections.remove(connection)
        if not self._connections:
            self.trouble = error.message
        for transfer in list(self._transfers.values()):
            transfer.lost(connection)
            self.dispatch.note(transfer)

    def broken(self, error: TransportError, now_s: float, *, since_s: float = math.inf) -> None:
        """No connection can work until an operator changes something: fail open transfers at once.

        `since_s`: when the connection that showed this was begun. The receiver may have been
        replaced since then, so a transfer that was opened later waits for a later connection.
        """
        for transfer in list(self._transfers.values()):
            if transfer.opened_s <= since_s:
                self._leave(transfer)
                self.fail(transfer, error, now_s)

    def fail(self, transfer: OutgoingState, error: TransportError, now_s: float) -> None:
        if not transfer.ended:
            self._end(transfer, TransferState.FAILED, error, now_s)

    def take(self, connection: int, now_s: float) -> Work | None:
        """The next work of this connection; None when there is none now (`dispatch.delay_s` bounds
        for how long). The caller must end DATA and digests with `sent`.
        """
        if not self._connections.may_send(connection):
            return None
        work = self._take_control(connection, now_s)
        if work is None and self.carries_data(connection):
            work = self._take_data(connection, now_s)
        return work

    def _take_control(self, connection: int, now_s: float) -> Work | None:
        for transfer in self.dispatch.with_control():
            if transfer.needs_cancel:
                # A lane may still be sending a frame of it, and CANCEL must come after that.
                if not transfer.pinned:
                    transfer.needs_cancel = False
                    self.dispatch.note(transfer)
                    return Work(transfer, self._announce(transfer, connection), cancels=True)
            elif transfer.needs_open:
                opens = self._announce(transfer, connection)
                # OPEN and the first frame share one write, unless another transfer is due.
                data = None
                turn = next(self.dispatch.in_turn(now_s), None)
                if turn is transfer and self.carries_data(connection):
                    data = self._take_of(transfer, connection, now_s)
                self.dispatch.note(transfer)
                return Work(transfer, opens, data=data)
            elif transfer.needs_digest:
                transfer.begin_digest(connection)
                self.dispatch.note(transfer)
                return Work(transfer, self._announce(transfer, connection), digests=True)
        return None

    def _take_data(self, connection: int, now_s: float) -> Work | None:
        for transfer in self.dispatch.in_turn(now_s):
            data = self._take_of(transfer, connection, now_s)
            if data is not None:
                opens = self._announce(transfer, connection)
                more = self.dispatch.expects_more(transfer, data)
                return Work(transfer, opens, data=data, more=more)
        return None

    def _take_of(self, transfer: OutgoingState, connection: int, now_s: float) -> Range | None:
        max_frame_bytes = self._connections.peer(connection).max_frame_bytes
        data = self.dispatch.take(transfer, connection, max_frame_bytes, now_s)
        if data is not None:
            self._connections.took(connection, transfer, now_s)
        return data

    def carries_data(self, connection: int) -> bool:
        """Whether it is one of the `width` oldest connections."""
        return self._connections.carries_data(connection, self.dispatch.width)

    def sent(
        self, connection: int, work: Work, now_s: float, *, whole: bool, coded: Coded = RAW_CODED
    ) -> None:
        """The connection is done with `work`. `whole`: the kernel took all of it."""
        if work.data is not None:
            work.transfer.sent(connection, work.data, whole=whole, coded=coded)
            # Pacing counts bytes on the wire, so the bytes that coding saved are given back.
            if whole and coded.codec is not Codec.RAW:
                self.dispatch.refund(work.data[1] - work.data[0] - coded.wire_bytes, now_s)
        if work.digests:
            work.transfer.end_digest(connection, whole=whole)
            self.dispatch.note(work.transfer)
        if work.transfer.ended:
            self._report(work.transfer)

    def handle(self, connection: int, event: Event, now_s: float) -> None:
        """What the receiver said after the handshake; PeerError when it broke the rules."""
        match event:
            case Acked(transfer_id, ranges):
                self.acked(connection, transfer_id, ranges, now_s)
            case Opened(transfer_id, ranges):
                self.opened(connection, transfer_id, ranges, now_s)
            case Completed(transfer_id):
                self.completed(connection, transfer_id, now_s)
            case TransferFailed(transfer_id, error):
                self.refused(connection, transfer_id, error, now_s)
            case CancelAcked(transfer_id):
                self.cancel_acked(connection, transfer_id, now_s)
            case Welcomed():
                raise PeerError("protocol", "a second WELCOME")

    def acked(self, connection: int, transfer_id: bytes, ranges: list[Range], now_s: float) -> None:
        """Process an ACK. Raises PeerError("protocol") for bytes that were never sent."""
        transfer = self._heard_of(transfer_id, connection, now_s)
        if transfer is None:
            return
        for start, end in ranges:
            if not transfer.was_taken(start, end):
                # Otherwise a receiver could complete a transfer whose bytes nobody has sent.
                raise PeerError("protocol", f"ACK of [{start}, {end}), which was never sent")
        if self._is_scattered(transfer, ranges, now_s):
            return
        self._count_acked(transfer, ranges, now_s)

    def opened(
        self, connection: int, transfer_id: bytes, ranges: list[Range], now_s: float
    ) -> None:
        """Process OPENED with the ranges that the receiver has already. Raises
        PeerError("protocol") for ranges beyond the transfer.
        """
        transfer = self._heard_of(transfer_id, connection, now_s)
        if transfer is None:
            return
        if any(end > transfer.nbytes for _, end in ranges):
            raise PeerError("protocol", "OPENED lists bytes beyond the transfer")
        if self._is_scattered(transfer, ranges, now_s):
            return
        transfer.opened = True
        transfer.progress_s = now_s
        # After a lost connection this is the only acknowledgement of what was verified before.
        self._count_acked(transfer, ranges, now_s)

    def _count_acked(self, transfer: OutgoingState, ranges: list[Range], now_s: float) -> None:
        gained = transfer.ack(ranges, now_s)
        if gained:
            self.acked_bytes += gained
            self._acked_s = now_s
        self.dispatch.note(transfer)
        self._connections.settle(transfer)

    def _is_scattered(self, transfer: OutgoingState, ranges: list[Range], now_s: float) -> bool:
        """Fail the transfer if the receiver lists more ranges than it may, which cost memory here.
        Returns whether it did.
        """
        # Twice a receiver's limit, because lists may repeat known ranges and come in any order.
        limit = 2 * self._config.max_ranges_per_transfer
        if len(transfer.acked) + len(ranges) <= limit:
            return False
        self._leave(transfer)
        message = f"the receiver has more than {limit} separate ranges"
        self.fail(transfer, PeerError("fragmented", message), now_s)
        return True

    def completed(self, connection: int, transfer_id: bytes, now_s: float) -> None:
        transfer = self._heard_of(transfer_id, connection, now_s)
        if transfer is not None and not transfer.ended:
            self.acked_bytes += transfer.ack([(0, transfer.nbytes)], now_s)
            self._end(transfer, TransferState.COMPLETE, None, now_s)

    def refused(self, connection: int, transfer_id: bytes, error: PeerError, now_s: float) -> None:
        """Process FAIL: the receiver does not take the transfer, or no longer has it."""
        transfer = self._heard_of(transfer_id, connection, now_s)
        if transfer is None or transfer.ended:
            return
        # The transfer failed there while it is being cancelled here, which also ends it.
        if transfer.state is TransferState.CANCELLING:
            self.cancel_acked(connection, transfer_id, now_s)
        else:
            self.fail(transfer, error, now_s)

    def cancel_acked(self, connection: int, transfer_id: bytes, now_s: float) -> None:
        transfer = self._heard_of(transfer_id, connection, now_s)
        if transfer is not None and transfer.state is TransferState.CANCELLING:
            self._end(transfer, TransferState.CANCELLED, transfer.error, now_s)

    def kernel_queue(self, connection: int, num_bytes: int, now_s: float) -> None:
        """How much the kernel still holds for this connection: any change is a sign of life."""
        self._connections.kernel_queue(connection, num_bytes, now_s)

    def expire(self, now_s: float) -> None:
        """Apply the timeouts; call it every config.tick_s while there are transfers."""
        for connection, why in self._connections.silent(now_s):
            self._abort(connection, LinkError("ack_timeout", why))
        for transfer in list(self._transfers.values()):
            self._expire_transfer(transfer, now_s)

    def check_invariants(self) -> None:
        """Raise AssertionError when the books do not balance."""
        for transfer in self._transfers.values():
            transfer.check_invariants()
            self.dispatch.check_invariants(transfer)
            self._connections.check_invariants(transfer)

    def _expire_transfer(self, transfer: OutgoingState, now_s: float) -> None:
        if transfer.ended:
            # A connection still reads the ByteSpace. A healthy one finishes its frame within the
            # grace time; a stuck one is closed.
            if now_s - transfer.ended_s >= self._config.drop_grace_s:
                for connection in transfer.pinned:
                    self._abort(connection, LinkError("lost", "its transfer ended in mid-frame"))
        elif transfer.state is TransferState.CANCELLING:
            if now_s - transfer.progress_s >= self._config.ack_timeout_s:
                logger.warning("cancel of %s not acknowledged", transfer.spec.transfer_id.hex())
                self._leave(transfer)
                self._end(transfer, TransferState.CANCELLED, transfer.error, now_s)
        elif not transfer.waits or self._waits_its_turn(transfer, now_s):
            transfer.progress_s = now_s
        elif now_s - transfer.progress_s >= self._config.idle_timeout_s:
            self._leave(transfer)
            self.fail(transfer, self._no_progress(), now_s)

    def _waits_its_turn(self, transfer: OutgoingState, now_s: float) -> bool:
        """Whether only a budget, or other transfers whose turn comes first, delay it."""
        if not transfer.is_only_queued:
            return False
        delay_s = self.dispatch.delay_s(now_s)
        return delay_s is not None or now_s - self._acked_s < self._config.ack_timeout_s

    def _no_progress(self) -> LinkError:
        message = f"no progress towards {self._name} for {self._config.idle_timeout_s:g} s"
        if self._last_error is not None:
            message += f"; last error: {self._last_error.message}"
        return LinkError("idle" if self._connections else "unreachable", message)

    def _end(
        self,
        transfer: OutgoingState,
        state: TransferState,
        error: TransportError | None,
        now_s: float,
    ) -> None:
        transfer.turn(state, error, now_s)
        self.dispatch.note(transfer)
        self._connections.settle(transfer)
        self._report(transfer)

    def _report(self, transfer: OutgoingState) -> None:
        if transfer.ended and not transfer.pinned and not transfer.reported:
            transfer.reported = True
            self._transfers.pop(transfer.spec.transfer_id, None)
            self._effects.append(TransferEnded(transfer))

    def _announce(self, transfer: OutgoingState, connection: int) -> bool:
        """Whether OPEN must be sent first on this connection. Notes it as sent."""
        if connection in transfer.announced and not transfer.needs_open:
            return False
        transfer.announced.add(connection)
        transfer.needs_open = False
        transfer.receiver_instance = self._connections.peer(connection).instance
        return True

    def _abort(self, connection: int, error: TransportError) -> None:
        if self._connections.abort(connection):
            self._effects.append(AbortConnection(connection, error))

    def _leave(self, transfer: OutgoingState) -> None:
        """Close the connections that announced a transfer that ends without the receiver's answer:
        while one of them lives, the receiver keeps memory for the transfer.
        """
        for connection in transfer.announced:
            self._abort(connection, LinkError("lost", "its transfer ended without an answer"))

    def _heard_of(self, transfer_id: bytes, connection: int, now_s: float) -> OutgoingState | None:
        """The receiver spoke of this transfer here; None: it is over, and nothing is to be done."""
        self._connections.heard(connection, now_s)
        return self._transfers.get(transfer_id)
