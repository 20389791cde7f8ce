"""The receiving side's rules across connections: open, place, complete, cancel, drop, expire.

One `Reception` serves all connections of a receiver. `ReceiverSession` calls it with what arrived,
the shell calls it with drops and the time. It tells the registry how transfers end, and asks
`Connections` to close connections or to send frames on them. An incoming transfer ends in this
order: no new claims -> frames in flight finish, or their connection is closed -> the registry is
told -> the sender is told. Whoever learns of the end may reuse the memory at once.

Knows no socket. It waits only for claims that other threads will give back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from typing import Protocol

from transport.config import TransportConfig
from transport.errors import LinkError, LocalError, PeerError, Refused, TransportError
from transport.interfaces import LandingRegistry, TransferProgress, TransferState
from transport.receiving.incoming_transfer import ClaimAnswer, Destination, IncomingTransfer
from transport.receiving.incoming_transfers import IncomingTransfers, OpenRequest
from transport.wire.frames import FrameType, encode_frame, encode_reason

logger = logging.getLogger("prfaas.transport")


class Connections(Protocol):
    """The owner of the connections, as `Reception` sees it. Neither method blocks."""

    def abort(self, connections: Collection[int], error: TransportError) -> None:
        """Make these connections stop reading at once; their sessions are closed soon after."""
        ...

    def tell(self, connections: Collection[int], frame: bytes) -> None:
        """Send a frame on each of these connections that still exists."""
        ...


class Reception:
    """Opens, completes and ends the incoming transfers of one receiver, over all connections."""

    def __init__(
        self, config: TransportConfig, registry: LandingRegistry, connections: Connections
    ) -> None:
        self.transfers = IncomingTransfers(config)
        self._config = config
        self._registry = registry
        self._connections = connections

    def open(self, connection: int, request: OpenRequest, now_s: float) -> IncomingTransfer:
        """The transfer for an OPEN: new or known, open or ended. Raises PeerError to refuse it."""
        transfer = self.transfers.begin_open(request)
        if transfer is None:
            transfer = self._ask_registry(request, now_s)
        self.transfers.attach(transfer, connection)
        if transfer.is_all_there():
            self.conclude(connection, transfer, now_s)
        return transfer

    def claim(
        self, connection: int, transfer: IncomingTransfer, start: int, end: int
    ) -> ClaimAnswer:
        """Claim [start, end) for this connection. Raises as `IncomingTransfer.claim` does, and
        PeerError("busy").

        When two connections carry the same range, the sender has given up one of them, whose bytes
        may still be on their way. The other connection's frame mostly ends soon; otherwise that
        connection is stuck.
        """
        while True:
            placement = transfer.claim(connection, start, end)
            if placement.place is not Destination.CONFLICT:
                return placement
            rivals = placement.rivals
            if transfer.wait_claimable(rivals, self._config.drop_grace_s):
                continue
            message = "superseded: its data arrived again elsewhere"
            # A rival that neither finishes its frame nor fails is a dead connection.
            self._connections.abort(rivals, LinkError("lost", message))
            if not transfer.wait_claimable(rivals, self._config.handshake_timeout_s):
                raise PeerError("busy", "the range is still being written by another connection")

    def conclude(self, connection: int, transfer: IncomingTransfer, now_s: float) -> bool:
        """Complete a transfer in which nothing is missing, or fail it if its digest differs.

        True when it is complete: the caller then tells the sender on its own connection. The other
        connections are told here.
        """
        try:
            agrees = transfer.judge()
        except Exception as error:  # the ByteSpace is the caller's code and may raise anything
            logger.error("ByteSpace of %s raised", transfer.transfer_id.hex(), exc_info=error)
            message = f"the receiver's memory could not be used: {type(error).__name__}"
            self.fail(transfer, PeerError("space", message), now_s)
            return False
        if not agrees:
            message = "the bytes that arrived do not have the digest that the sender computed"
            self.fail(transfer, PeerError("digest", message), now_s)
            return False
        self.transfers.ended(transfer.transfer_id, now_s)
        try:
            self._registry.on_complete(transfer.transfer_id)
        # The bytes are in place even if the registry fails, so the sender is still told.
        except Exception:
            logger.exception("registry.on_complete raised for %s", transfer.transfer_id.hex())
        transfer.settle()
        # The caller's connection may be dead by now, and the sender waits on the others as well.
        others = self.transfers.attached(transfer) - {connection}
        if others:
            self._connections.tell(others, _outcome_frame(transfer))
        return True

    def cancel(self, transfer: IncomingTransfer, reason: str, now_s: float) -> None:
        """The sender cancels. On return nothing writes any more, and the registry knows."""
        self._end([transfer], TransferState.CANCELLED, PeerError("cancelled", reason), now_s)

    def fail(self, transfer: IncomingTransfer, error: TransportError, now_s: float) -> None:
        """End the transfer for `error`, and tell the registry and the sender."""
        self._fail_all([transfer], error, now_s)

    def drop(self, transfer_id: bytes, reason: str, now_s: float) -> None:
        """As Receiver.drop: tell the sender and not the registry."""
        transfer = self.transfers.mark_dropped(transfer_id)
        if transfer is None:
            return
        ended_here = transfer.end(TransferState.FAILED, "dropped", reason)
        self._quiesce([transfer])
        # Otherwise the thread that ended it first settles it and tells the sender.
        if ended_here:
            transfer.settle()
        self.transfers.ended(transfer_id, now_s)
        if ended_here:
            self._tell_end(transfer)

    def expire(self, now_s: float) -> None:
        """Fail the open transfers that no connection has served for idle_timeout_s."""
        message = f"no connection from the sender for {self._config.idle_timeout_s:g} s"
        self._fail_all(self.transfers.expire(now_s), LinkError("idle", message), now_s)

    def close(self, now_s: float) -> None:
        """Fail all transfers that are open now."""
        error = LocalError("closed", "the receiver was closed")
        self._fail_all(self.transfers.open_ones(), error, now_s)

    def outcome(self, transfer: IncomingTransfer) -> bytes:
        """The frame that tells the sender how a transfer ended, after the registry was told."""
        if not transfer.wait_settled(self._config.handshake_timeout_s):
            logger.warning("the registry takes long over the end of %s", transfer.transfer_id.hex())
        return _outcome_frame(transfer)

    def progress(self, transfer_id: bytes) -> TransferProgress | None:
        transfer = self.transfers.find(transfer_id)
        times = self.transfers.times(transfer_id)
        if transfer is None or times is None:
            return None
        opened_s, first_byte_s, ended_s = times
        verified = transfer.verified_bytes
        return TransferProgress(
            state=transfer.state,
            nbytes=transfer.nbytes,
            ready_bytes=verified,
            sent_bytes=verified,
            acked_bytes=verified,
            resent_bytes=transfer.received_again_bytes,
            opened_s=opened_s,
            first_sent_s=first_byte_s,
            completed_s=ended_s,
            num_connections=len(self.transfers.attached(transfer)),
        )

    def _ask_registry(self, request: OpenRequest, now_s: float) -> IncomingTransfer:
        try:
            space = self._registry.accept(
                request.transfer_id, request.token, request.fingerprint, request.nbytes
            )
        except Refused:
            self.transfers.reject(request.transfer_id)
            raise
        except Exception as error:
            self.transfers.reject(request.transfer_id)
            logger.exception("registry.accept raised for %s", request.transfer_id.hex())
            raise Refused("registry", "the receiver could not look up this transfer") from error
        return self.transfers.admit(request, space, now_s)

    def _fail_all(
        self, transfers: Iterable[IncomingTransfer], error: TransportError, now_s: float
    ) -> None:
        for transfer in self._end(transfers, TransferState.FAILED, error, now_s):
            self._tell_end(transfer)

    def _end(
        self,
        transfers: Iterable[IncomingTransfer],
        state: TransferState,
        error: TransportError,
        now_s: float,
    ) -> list[IncomingTransfer]:
        """End transfers, and tell the registry. Returns those that had not ended before."""
        ended = [item for item in transfers if item.end(state, error.code, error.message)]
        self._quiesce(ended)
        for transfer in ended:
            self.transfers.ended(transfer.transfer_id, now_s)
            try:
                self._registry.on_failed(transfer.transfer_id, error)
            except Exception:
                logger.exception("registry.on_failed raised for %s", transfer.transfer_id.hex())
            transfer.settle()
        return ended

    def _quiesce(self, transfers: Collection[IncomingTransfer]) -> None:
        # A frame in flight mostly ends within the grace, and closing its connection would cost the
        # other transfers on it a resend. All have the same grace: it must not add up.
        deadline_s = time.monotonic() + self._config.drop_grace_s
        holders: set[int] = set()
        for transfer in transfers:
            holders |= transfer.wait_quiet(max(0.0, deadline_s - time.monotonic()))
        if holders:
            self._connections.abort(
                holders, LinkError("lost", "its transfer ended while a frame was on its way")
            )
        for transfer in transfers:
            transfer.wait_quiet(None)

    def _tell_end(self, transfer: IncomingTransfer) -> None:
        self._connections.tell(self.transfers.attached(transfer), _outcome_frame(transfer))


def _outcome_frame(transfer: IncomingTransfer) -> bytes:
    if transfer.state is TransferState.COMPLETE:
        return encode_frame(FrameType.COMPLETE, transfer.transfer_id)
    return encode_reason(FrameType.FAIL, *transfer.failure, transfer.transfer_id)
