"""All incoming transfers of one receiver. Each is opened once, however many connections ask for it,
and remembered for a while after its end.

States of an id: unknown -> pending (one connection asks the registry, others wait) -> known. The
`IncomingTransfer` stays for `tombstone_s` after its end, so that a sender that missed the answer
gets the same one again. A `drop` while the registry is being asked wins: the transfer has ended
when it is created, and its memory is never touched.

This is a monitor like `IncomingTransfer`; time is an argument. Knows no frame and no socket.
"""

from __future__ import annotations

import hmac
import threading
from dataclasses import dataclass

from transport.config import TransportConfig
from transport.errors import PeerError, Refused
from transport.interfaces import ByteSpace, TransferState
from transport.receiving.incoming_transfer import IncomingTransfer

MAX_TOMBSTONES = 4096
"""Ended transfers that are remembered at most, however short they lived."""


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """The body of an OPEN frame with the transfer it is for."""

    transfer_id: bytes
    token: bytes
    fingerprint: bytes
    nbytes: int
    digest: bool = False
    """The sender promises a DIGEST, without which the transfer is not complete."""


@dataclass(slots=True)
class _Times:
    opened_s: float
    first_byte_s: float | None = None
    orphaned_s: float | None = None
    ended_s: float | None = None


class IncomingTransfers:
    """A receiver's transfers by id, and when each began and ended."""

    def __init__(self, config: TransportConfig) -> None:
        self._config = config
        self._transfers: dict[bytes, IncomingTransfer] = {}
        self._times: dict[bytes, _Times] = {}
        self._pending: dict[bytes, bool] = {}  # id -> whether it was dropped meanwhile
        self._changed = threading.Condition()

    def find(self, transfer_id: bytes) -> IncomingTransfer | None:
        with self._changed:
            return self._transfers.get(transfer_id)

    def times(self, transfer_id: bytes) -> tuple[float, float | None, float | None] | None:
        """(opened, first byte, end) in seconds of the caller's clock."""
        with self._changed:
            times = self._times.get(transfer_id)
            return (times.opened_s, times.first_byte_s, times.ended_s) if times else None

    def open_ones(self) -> list[IncomingTransfer]:
        with self._changed:
            transfers = list(self._transfers.values())
        return [transfer for transfer in transfers if transfer.state is TransferState.OPEN]

    def begin_open(self, request: OpenRequest) -> IncomingTransfer | None:
        """The known transfer for this request. With None the caller must ask the registry and then
        call `admit` or `reject`. Waits while another thread does so.

        Raises Refused("bad_token" | "mismatch") when the request contradicts the known transfer.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: request.transfer_id not in self._pending, self._config.handshake_timeout_s
            )
            if request.transfer_id in self._pending:
                raise Refused("busy", "another connection is still opening this transfer")
            transfer = self._transfers.get(request.transfer_id)
            if transfer is None:
                self._pending[request.transfer_id] = False
                return None
        # In constant time: how long a refusal takes must not tell how much of a guess was right.
        if not hmac.compare_digest(transfer.token, request.token):
            raise Refused("bad_token", "wrong token for this transfer")
        if transfer.fingerprint != request.fingerprint or transfer.nbytes != request.nbytes:
            raise Refused("mismatch", "this transfer was opened with another layout or size")
        return transfer

    def admit(self, request: OpenRequest, space: ByteSpace, now_s: float) -> IncomingTransfer:
        """The registry gave `space`: create the transfer. After a drop in between it has ended
        already.

        Raises PeerError("mismatch") when the space has another size than the request.
        """
        if space.nbytes != request.nbytes:
            self.reject(request.transfer_id)
            raise PeerError(
                "mismatch", f"{request.nbytes} bytes offered, {space.nbytes} bytes reserved"
            )
        transfer = IncomingTransfer(
            request.transfer_id,
            token=request.token,
            fingerprint=request.fingerprint,
            space=space,
            wants_digest=request.digest,
            max_ranges=self._config.max_ranges_per_transfer,
        )
        with self._changed:
            dropped = self._pending.pop(request.transfer_id, False)
            # It ages from now on: the connection that asked may be gone before it attaches.
            self._transfers[request.transfer_id] = transfer
            self._times[request.transfer_id] = _Times(now_s, orphaned_s=now_s)
            self._changed.notify_all()
        # A dropped transfer stays as a tombstone, so that another OPEN of it is refused and not
        # admitted again.
        if dropped:
            transfer.end(TransferState.FAILED, "dropped", "dropped by the receiver")
            transfer.settle()
            self.ended(request.transfer_id, now_s)
        return transfer

    def reject(self, transfer_id: bytes) -> None:
        """The registry refused: the id is unknown again."""
        with self._changed:
            self._pending.pop(transfer_id, None)
            self._changed.notify_all()

    def mark_dropped(self, transfer_id: bytes) -> IncomingTransfer | None:
        """The transfer that the caller must end, or None. A pending transfer is marked, so that
        `admit` ends it.
        """
        with self._changed:
            if transfer_id in self._pending:
                self._pending[transfer_id] = True
            return self._transfers.get(transfer_id)

    def attach(self, transfer: IncomingTransfer, connection: int) -> None:
        """Note that this connection opened the transfer and must be told how it ends."""
        with self._changed:
            transfer.attached.add(connection)
            times = self._times.get(transfer.transfer_id)
            if times is not None:
                times.orphaned_s = None

    def detach(self, connection: int, now_s: float) -> None:
        """The connection is gone: give back its claims. Transfers that no connection serves begin
        to age.
        """
        with self._changed:
            transfers = [item for item in self._transfers.values() if connection in item.attached]
            for transfer in transfers:
                transfer.attached.discard(connection)
                if not transfer.attached:
                    self._times[transfer.transfer_id].orphaned_s = now_s
        for transfer in transfers:
            transfer.abandon(connection)

    def attached(self, transfer: IncomingTransfer) -> frozenset[int]:
        with self._changed:
            return frozenset(transfer.attached)

    def first_byte(self, transfer_id: bytes, now_s: float) -> None:
        with self._changed:
            times = self._times.get(transfer_id)
            if times is not None and times.first_byte_s is None:
                times.first_byte_s = now_s

    def ended(self, transfer_id: bytes, now_s: float) -> None:
        """Note the transfer's end, and forget the oldest tombstones beyond the limit."""
        with self._changed:
            times = self._times.get(transfer_id)
            if times is None:
                return
            if times.ended_s is None:
                times.ended_s = now_s
            dead = [key for key, item in self._times.items() if item.ended_s is not None]
            for key in dead[: max(0, len(dead) - MAX_TOMBSTONES)]:
                self._forget(key)

    def expire(self, now_s: float) -> list[IncomingTransfer]:
        """Forget old tombstones. Returns the open transfers that no connection has served for
        idle_timeout_s.
        """
        idle: list[IncomingTransfer] = []
        with self._changed:
            for key, times in list(self._times.items()):
                if times.ended_s is not None:
                    if now_s - times.ended_s >= self._config.tombstone_s:
                        self._forget(key)
                elif (
                    times.orphaned_s is not None
                    and now_s - times.orphaned_s >= self._config.idle_timeout_s
                ):
                    idle.append(self._transfers[key])
        return idle

    def _forget(self, transfer_id: bytes) -> None:
        self._transfers.pop(transfer_id, None)
        self._times.pop(transfer_id, None)
