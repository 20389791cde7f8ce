"""The receiver's end of one connection, sans-IO: bytes in, bytes out, time as an argument.

States: GREETING (only HELLO, at most 304 bytes, within handshake_timeout_s) -> ESTABLISHED (OPEN,
DATA, DIGEST and CANCEL in any order) -> closed. When the peer breaks a rule, PeerError is raised
and an ERROR frame is in the outgoing bytes; the caller sends it and closes the connection. A
problem of a single transfer (a refused OPEN, DATA for a transfer that ended) is answered with FAIL,
and the connection lives on.

The session collects acknowledgements until the shell says that no more data is waiting
(`flush_acks`), or until ack_batch_bytes are due. It does not know sockets, threads, or which
connection sends what.
"""

from __future__ import annotations

import math

from transport.config import TransportConfig
from transport.errors import PeerError
from transport.interfaces import TransferState
from transport.receiving.incoming import Discarded, IncomingData, Verified
from transport.receiving.incoming_transfer import IncomingTransfer
from transport.receiving.incoming_transfers import OpenRequest
from transport.receiving.reception import Reception
from transport.wire.frame_reader import FrameReader, Step
from transport.wire.frames import (
    MAX_CONTROL_BYTES,
    MAX_RANGES_PER_FRAME,
    DataFlags,
    FrameHeader,
    FrameType,
    decode_digest,
    decode_open,
    decode_reason,
    encode_frame,
    encode_ranges,
    encode_reason,
)
from transport.wire.handshake import check_version, decode_hello, own_features, own_hello
from transport.wire.ranges import IntervalSet, Range

MAX_WAITING_ANSWERS = 64


class ReceiverSession:
    """The receiver's end of one connection. Use: fill `buffers()`, call `received`, send
    `outgoing()`.

    Not thread-safe: one thread drives it. Others may read `deadline_s`, and call `tick`.
    """

    def __init__(
        self,
        connection: int,
        *,
        config: TransportConfig,
        reception: Reception,
        instance: bytes,
        now_s: float,
    ) -> None:
        self.connection = connection
        self.has_opened = False
        """Whether the registry has accepted a transfer of this connection."""
        self.peer_instance = b""
        """The instance of the sender's process, from its HELLO on."""
        self.deadline_s = now_s + config.handshake_timeout_s
        """The time at which the connection must be closed unless something arrives before."""
        self._config = config
        self._reception = reception
        self._instance = instance
        self._reader = FrameReader(config.max_frame_bytes)
        self._reader.data_flags = 0 if config.checksum else DataFlags.NO_SUM
        self._outgoing: list[bytes] = []
        self._opened: dict[bytes, IncomingTransfer] = {}
        self._data = IncomingData(connection, config, reception)
        self._acks: dict[bytes, IntervalSet] = {}
        self._unacked_bytes = 0
        self._num_unacked = 0  # DATA frames, each of which may cost a range
        self._greeted_s: float  # from HELLO on
        self._now_s: float  # from the first bytes on
        self._ack_by_s: float  # while `_unacked_bytes`
        self._expects_more = False
        self._is_urgent = False  # somebody waits for an answer: a transfer has ended

    @property
    def established(self) -> bool:
        return self._reader.established

    @property
    def in_frame(self) -> bool:
        """Whether the rest of a frame is missing."""
        return not self._reader.at_boundary

    @property
    def in_body(self) -> bool:
        """Whether `buffers()` is exactly the rest of a frame body, worth waiting for as a whole."""
        return self._reader.in_body

    @property
    def _patience_s(self) -> float:
        """Seconds that the next byte may take."""
        if not self._reader.at_boundary:
            return self._config.idle_timeout_s
        return math.inf if self._opened else self._unopened_s

    @property
    def _unopened_s(self) -> float:
        # A peer that never opens a transfer must not keep its place for ever. This also closes
        # spare connections of a sender, which connects again when it needs them.
        return 2 * self._config.link_idle_timeout_s

    @property
    def acks_due(self) -> bool:
        """Whether answers must be sent now, though more data is coming in."""
        return (
            self._is_urgent
            or self._unacked_bytes >= self._config.ack_batch_bytes
            or (self._unacked_bytes > 0 and self._now_s >= self._ack_by_s)
            or self._num_unacked >= MAX_RANGES_PER_FRAME
            or len(self._outgoing) >= MAX_WAITING_ANSWERS
            or sum(map(len, self._outgoing)) >= MAX_CONTROL_BYTES
        )

    @property
    def may_wait(self) -> bool:
        """Whether answers may wait a moment for DATA that the sender has announced."""
        return self._expects_more and self._reader.at_boundary and not self.acks_due

    @property
    def has_answers(self) -> bool:
        """Whether `flush_acks` and `outgoing` would give anything to send."""
        return bool(self._acks) or bool(self._outgoing)

    @property
    def has_open(self) -> bool:
        """Whether a transfer that was opened here is still open. Any thread may ask."""
        return any(item.state is TransferState.OPEN for item in list(self._opened.values()))

    def tick(self, now_s: float) -> None:
        """Begin to lose patience when transfers have ended elsewhere, without a word here. The
        watchdog calls this.
        """
        if self.deadline_s == math.inf and not self.has_open:
            self.deadline_s = now_s + self._unopened_s

    def buffers(self) -> list[memoryview]:
        return self._reader.buffers()

    def received(self, num_bytes: int, now_s: float) -> None:
        """Process `num_bytes` bytes that were written to the start of `buffers()`.

        Raises PeerError when the connection must end, after its ERROR frame was sent.
        """
        self._now_s = now_s
        try:
            step = self._reader.advance(num_bytes)
            header = self._reader.header
            if step is not Step.PARTIAL and header is not None:
                if header.kind is FrameType.DATA:
                    self._on_data(step, header, now_s)
                elif step is Step.FRAME:
                    self._on_control(header, self._reader.control_body(), now_s)
        except PeerError as error:
            self._outgoing.append(encode_reason(FrameType.ERROR, error.code, error.message))
            raise
        if self._reader.established:
            self.deadline_s = now_s + self._patience_s
            # Refused OPENs and DATA for nobody cost a peer nothing, so they extend nothing.
            if not self.has_opened:
                self.deadline_s = min(self.deadline_s, self._greeted_s + self._unopened_s)

    def feed(self, data: bytes, now_s: float) -> None:
        """Copy `data` into `buffers()` and process it as `received` does."""
        position = 0
        while position < len(data):
            target = self._reader.buffers()[0]
            count = min(target.nbytes, len(data) - position)
            target[:count] = data[position : position + count]
            position += count
            self.received(count, now_s)

    def flush_acks(self) -> None:
        """Append acknowledgements of everything verified so far to the outgoing bytes."""
        for transfer_id, ranges in self._acks.items():
            self._outgoing.append(encode_ranges(FrameType.ACK, transfer_id, ranges))
        self._acks.clear()
        self._unacked_bytes = 0
        self._num_unacked = 0

    def outgoing(self) -> bytes:
        """Take the bytes that are to be sent now."""
        data = b"".join(self._outgoing)
        self._outgoing.clear()
        self._is_urgent = False
        return data

    def close(self, now_s: float) -> None:
        """The connection is gone: give back its claims and drop all views of memory."""
        self._reader.forget()
        self._data.forget()
        self._opened.clear()
        self._reception.transfers.detach(self.connection, now_s)

    def _on_control(self, header: FrameHeader, body: bytes, now_s: float) -> None:
        kind = header.kind
        if kind is FrameType.HELLO and not self.established:
            self._on_hello(body, now_s)
        elif kind is FrameType.OPEN:
            self._on_open(OpenRequest(header.transfer_id, *decode_open(body)), now_s)
        elif kind is FrameType.CANCEL:
            self._on_cancel(header.transfer_id, decode_reason(body)[1], now_s)
        elif kind is FrameType.DIGEST:
            self._on_digest(header.transfer_id, decode_digest(body), now_s)
        elif kind is FrameType.ERROR:
            code, message = decode_reason(body)
            raise PeerError(code, f"the sender reports: {message}")
        else:
            raise PeerError("protocol", f"unexpected {kind.name} from a sender")

    def _on_hello(self, body: bytes, now_s: float) -> None:
        peer = decode_hello(body)
        check_version(peer, "sender")
        self._reader.established = True
        self.peer_instance = peer.instance
        self._greeted_s = now_s
        hello = own_hello(self._instance, self._config.max_frame_bytes, own_features(self._config))
        self._outgoing.append(hello.encode(FrameType.WELCOME))

    def _on_open(self, request: OpenRequest, now_s: float) -> None:
        transfer_id = request.transfer_id
        try:
            self._make_room()
            transfer = self._reception.open(self.connection, request, now_s)
        except PeerError as error:
            self._outgoing.append(
                encode_reason(FrameType.FAIL, error.code, error.message, transfer_id)
            )
            return
        self._opened[transfer_id] = transfer
        self.has_opened = True
        if transfer.state is TransferState.OPEN:
            self._outgoing.append(encode_ranges(FrameType.OPENED, transfer_id, transfer.verified()))
        else:
            self._outgoing.append(self._reception.outcome(transfer))

    def _make_room(self) -> None:
        limit = self._config.max_transfers_per_connection
        # Transfers that ended are forgotten lazily, only when a peer reaches its limit.
        if len(self._opened) < limit:
            return
        for transfer_id, transfer in list(self._opened.items()):
            if transfer.state is not TransferState.OPEN:
                del self._opened[transfer_id]
        if len(self._opened) >= limit:
            raise PeerError("busy", f"more than {limit} open transfers on one connection")

    def _on_cancel(self, transfer_id: bytes, reason: str, now_s: float) -> None:
        transfer = self._opened.pop(transfer_id, None)
        if transfer is not None:
            self._reception.cancel(transfer, reason, now_s)
            outcome = self._reception.outcome(transfer)
            # The last byte was verified before the CANCEL arrived, so the transfer is complete.
            if transfer.state is TransferState.COMPLETE:
                self._outgoing.append(outcome)
                return
        self._acks.pop(transfer_id, None)
        # An unknown transfer is answered as well: a CANCEL may be sent again on a new connection.
        self._outgoing.append(encode_frame(FrameType.CANCELLED, transfer_id))

    def _on_data(self, step: Step, header: FrameHeader, now_s: float) -> None:
        if step is Step.HEADER:
            transfer = self._opened.get(header.transfer_id)
            self._expects_more = bool(header.flags & DataFlags.MORE)
            self._data.begin(self._reader, header, transfer, now_s)
            return
        match self._data.finish(self._reader, header, now_s):
            case Discarded(transfer):
                self._answer_discarded(header.transfer_id, transfer)
            case Verified(transfer, verified, completed):
                self._acknowledge(header.transfer_id, verified)
                if completed:
                    self._all_verified(transfer, now_s)

    def _acknowledge(self, transfer_id: bytes, verified: Range) -> None:
        pending = self._acks.get(transfer_id)
        if pending is None:
            pending = self._acks[transfer_id] = IntervalSet()
        pending.add(*verified)
        if not self._unacked_bytes:
            self._ack_by_s = self._now_s + self._config.ack_delay_s
        self._unacked_bytes += verified[1] - verified[0]
        self._num_unacked += 1

    def _all_verified(self, transfer: IncomingTransfer, now_s: float) -> None:
        """Every byte has arrived: complete the transfer, or fail it if its digest differs."""
        if self._reception.conclude(self.connection, transfer, now_s):
            self._opened.pop(transfer.transfer_id, None)
            self.flush_acks()
            self._outgoing.append(self._reception.outcome(transfer))
            # The sender waits for COMPLETE to give memory back: it does not wait for the next
            # batch.
            self._is_urgent = True

    def _answer_discarded(self, transfer_id: bytes, transfer: IncomingTransfer | None) -> None:
        if transfer is None:
            self._answer_not_open(FrameType.DATA, transfer_id)
        else:
            self._opened.pop(transfer_id, None)
            self._outgoing.append(self._reception.outcome(transfer))

    def _on_digest(self, transfer_id: bytes, digest: bytes, now_s: float) -> None:
        transfer = self._opened.get(transfer_id)
        if transfer is None:
            self._answer_not_open(FrameType.DIGEST, transfer_id)
        elif transfer.expect_digest(digest):
            self._all_verified(transfer, now_s)

    def _answer_not_open(self, kind: FrameType, transfer_id: bytes) -> None:
        message = f"{kind.name} for a transfer that was not opened on this connection"
        self._outgoing.append(encode_reason(FrameType.FAIL, "not_open", message, transfer_id))
