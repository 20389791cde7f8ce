"""One outgoing transfer: its bytes that are ready, in flight and acknowledged, and its end.

Bytes move between sets: ready -> unsent -> in flight on one connection -> acknowledged. A lost
connection moves its bytes back to unsent. The transfer is complete only when the receiver says so.
An end (success or not) is decided first, and reported when no connection is pinned any more, so
that nobody reads the ByteSpace.

Pure state, guarded by the link that owns it; time is an argument. Knows no frame, no socket and no
other transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

from transport.codec.codecs import Codec
from transport.errors import TransportError
from transport.interfaces import OutgoingSpec, TransferProgress, TransferState
from transport.wire.ranges import IntervalSet, Range

_ALLOWED = {
    TransferState.OPEN: {
        TransferState.CANCELLING,
        TransferState.COMPLETE,
        TransferState.FAILED,
        TransferState.CANCELLED,
    },
    TransferState.CANCELLING: {
        TransferState.COMPLETE,
        TransferState.FAILED,
        TransferState.CANCELLED,
    },
    TransferState.COMPLETE: set(),
    TransferState.FAILED: set(),
    TransferState.CANCELLED: set(),
}


@dataclass(frozen=True, slots=True)
class Coded:
    """How a chunk was sent: the bytes of its DATA body, and its codec."""

    wire_bytes: int = 0
    codec: Codec = Codec.RAW


RAW_CODED = Coded()


class OutgoingState:
    """The ready, sent and acknowledged bytes of one transfer. All ranges lie in [0, nbytes)."""

    def __init__(self, spec: OutgoingSpec, nbytes: int, now_s: float) -> None:
        self.spec = spec
        self.nbytes = nbytes
        self.state = TransferState.OPEN
        self.error: TransportError | None = None
        self.reported = False
        """Whether the end was passed on, so that the listener is told once."""
        self.unsent = IntervalSet()
        self.acked = IntervalSet()
        self.announced: set[int] = set()
        """Connections on which an OPEN of this transfer was sent."""
        self.needs_open = True
        self.opened = False
        self.needs_cancel = False
        self.receiver_instance: bytes | None = None
        self.progress_s = now_s
        """When something last moved, or became due. A cancel restarts it."""
        self.owed_since_s: float | None = None
        """The time since which there have always been ready bytes without acknowledgement."""
        self.ended_s = now_s
        self._ready = IntervalSet()
        self._sent = IntervalSet()
        self._in_flight: dict[int, IntervalSet] = {}
        self._pins: set[int] = set()
        self._resent_bytes = 0
        self._wire_bytes = 0
        self._codecs: set[str] = set()
        self._digest_connection: int | None = None  # where DIGEST was sent, or is being made for
        self.opened_s = now_s
        self._first_sent_s: float | None = None

    @property
    def ended(self) -> bool:
        return not _ALLOWED[self.state]

    @property
    def pinned(self) -> frozenset[int]:
        """Connections that may be reading the ByteSpace now."""
        return frozenset(self._pins)

    @property
    def waits(self) -> bool:
        """Whether the transfer waits for the receiver or the network, so that timeouts run."""
        return self.state is TransferState.OPEN and (
            self.needs_open
            or not self.opened
            or bool(self.unsent)
            or bool(self._in_flight)
            or self.acked.total == self.nbytes
        )

    @property
    def is_only_queued(self) -> bool:
        """Whether the receiver takes it, there are bytes to send, and none are in flight."""
        return (
            self.state is TransferState.OPEN
            and self.opened
            and not self.needs_open
            and bool(self.unsent)
            and not self._in_flight
        )

    @property
    def needs_digest(self) -> bool:
        """Whether all bytes are final and the receiver has not been told their digest."""
        return (
            self.spec.digest
            and self.state is TransferState.OPEN
            and self._digest_connection is None
            and self._ready.total == self.nbytes
        )

    @property
    def has_control(self) -> bool:
        """Whether there is something to send that is not DATA."""
        if self.state is TransferState.OPEN:
            return self.needs_open or self.needs_digest
        return self.needs_cancel and not self.ended

    def ready(self, start: int, end: int, now_s: float) -> int:
        """[start, end) may be sent from now on; returns how many bytes are new."""
        if self.state is not TransferState.OPEN:
            return 0
        if not self.waits:
            self.progress_s = now_s
        gained = 0
        for first, last in self._ready.gaps(start, end):
            gained += self._ready.add(first, last)
            self._queue(first, last)
        if self.owed_since_s is None and self.unsent:
            self.owed_since_s = now_s
        return gained

    def take(self, connection: int, max_bytes: int, now_s: float) -> Range | None:
        """The next range for this connection, which is pinned until `sent`."""
        taken = self.unsent.pop_first(max_bytes)
        if taken is None:
            return None
        self._in_flight.setdefault(connection, IntervalSet()).add(*taken)
        self._pins.add(connection)
        if self._first_sent_s is None:
            self._first_sent_s = now_s
        return taken

    def sent(self, connection: int, taken: Range, *, whole: bool, coded: Coded = RAW_CODED) -> None:
        """The connection has stopped reading `taken`. `whole`: the kernel took all of it."""
        self._pins.discard(connection)
        self._wire_bytes += coded.wire_bytes
        if coded.codec is not Codec.RAW:
            self._codecs.add(coded.codec.name.lower())
        if whole:
            gained = self._sent.add(*taken)
            self._resent_bytes += taken[1] - taken[0] - gained

    def begin_digest(self, connection: int) -> None:
        """This connection computes and sends the digest; it is pinned until `end_digest`."""
        self._digest_connection = connection
        self._pins.add(connection)

    def end_digest(self, connection: int, *, whole: bool) -> None:
        """The connection has stopped reading. `whole`: the kernel took the frame."""
        self._pins.discard(connection)
        if not whole and self._digest_connection == connection:
            self._digest_connection = None

    def is_in_flight(self, connection: int) -> bool:
        return connection in self._in_flight

    def was_taken(self, start: int, end: int) -> bool:
        """Whether all of [start, end) was ready once. Only such bytes can be acknowledged."""
        return self._ready.covers(start, end)

    def ack(self, ranges: list[Range], now_s: float) -> int:
        """The receiver verified these ranges; returns how many bytes are new."""
        gained = 0
        for start, end in ranges:
            gained += self.acked.add(start, end)
            self.unsent.remove(start, end)
            for connection, in_flight in list(self._in_flight.items()):
                in_flight.remove(start, end)
                if not in_flight:
                    del self._in_flight[connection]
        if gained:
            self.progress_s = now_s
        if not self.unsent and not self._in_flight:
            self.owed_since_s = None
        return gained

    def lost(self, connection: int) -> None:
        """The connection is gone: its bytes in flight must be sent again on another one."""
        for start, end in self._in_flight.pop(connection, ()):
            self._queue(start, end)
        if self._digest_connection == connection:
            self._digest_connection = None
        if connection in self.announced:
            self.announced.discard(connection)
            self.needs_open = True
            if self.state is TransferState.CANCELLING:
                self.needs_cancel = True

    def turn(self, state: TransferState, error: TransportError | None, now_s: float) -> None:
        """Change the state; ValueError when the table does not allow it."""
        if state not in _ALLOWED[self.state]:
            raise ValueError(f"transfer cannot go from {self.state} to {state}")
        self.state = state
        self.error = error
        self.unsent = IntervalSet()
        self.owed_since_s = None
        if self.ended:
            self.ended_s = now_s

    def progress(self, num_connections: int) -> TransferProgress:
        return TransferProgress(
            state=self.state,
            nbytes=self.nbytes,
            ready_bytes=self._ready.total,
            sent_bytes=self._sent.total,
            acked_bytes=self.acked.total,
            resent_bytes=self._resent_bytes,
            opened_s=self.opened_s,
            first_sent_s=self._first_sent_s,
            completed_s=self.ended_s if self.ended else None,
            num_connections=num_connections,
            wire_bytes=self._wire_bytes,
            codecs=tuple(sorted(self._codecs)),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError unless every ready byte is somewhere and none is in two places."""
        places = IntervalSet(list(self.acked))
        total = self.acked.total
        for part in (self.unsent, *self._in_flight.values()):
            total += part.total
            for start, end in part:
                places.add(start, end)
                assert self._ready.covers(start, end), "sending what is not ready"
        if self.state is TransferState.OPEN:
            assert total == places.total, "a byte is in two places"
            # Acknowledged bytes may exceed ready ones: the receiver may have had them before.
            assert all(places.covers(start, end) for start, end in self._ready), "a byte is lost"
            is_owing = bool(self.unsent or self._in_flight)
            assert is_owing == (self.owed_since_s is not None), "the age of the queue is wrong"

    def _queue(self, start: int, end: int) -> None:
        if self.state is TransferState.OPEN:
            for first, last in self.acked.gaps(start, end):
                self.unsent.add(first, last)
