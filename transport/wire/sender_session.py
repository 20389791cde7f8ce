"""The sender's end of one connection, sans-IO: it turns the receiver's answers into events.

`transport.sending.link` decides what to send. Knows no socket and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from transport.config import TransportConfig
from transport.errors import PeerError
from transport.wire.frame_reader import FrameReader, Step
from transport.wire.frames import FrameHeader, FrameType, decode_ranges, decode_reason
from transport.wire.handshake import Hello, check_version, decode_hello, own_features, own_hello
from transport.wire.ranges import Range


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The handshake is done."""

    peer: Hello


@dataclass(frozen=True, slots=True)
class Opened:
    """The receiver takes the transfer and already has these ranges."""

    transfer_id: bytes
    ranges: list[Range]


@dataclass(frozen=True, slots=True)
class Acked:
    """These ranges are in place and verified."""

    transfer_id: bytes
    ranges: list[Range]


@dataclass(frozen=True, slots=True)
class Completed:
    """The whole transfer is in place and verified."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The receiver refuses the transfer or no longer has it."""

    transfer_id: bytes
    error: PeerError


@dataclass(frozen=True, slots=True)
class CancelAcked:
    """The receiver has ended the transfer as asked."""

    transfer_id: bytes


Event = Welcomed | Opened | Acked | Completed | TransferFailed | CancelAcked


class SenderSession:
    """The sender's end of one connection: it turns the receiver's bytes into events."""

    def __init__(self, config: TransportConfig, instance: bytes) -> None:
        # No DATA flows towards a sender.
        self._reader = FrameReader(max_data_bytes=0)
        self._hello = own_hello(instance, config.max_frame_bytes, own_features(config))

    def hello(self) -> bytes:
        """The first bytes of the connection."""
        return self._hello.encode(FrameType.HELLO)

    @property
    def established(self) -> bool:
        return self._reader.established

    def feed(self, data: bytes | memoryview, events: list[Event] | None = None) -> list[Event]:
        """Take bytes from the receiver; raises PeerError when the connection must end. Appends to
        `events`, so that those before the error are not lost with it.
        """
        events = [] if events is None else events
        position = 0
        data = memoryview(data)
        while position < len(data):
            taken = self._reader.take_frame(data[position:])
            if taken:
                position += taken
                assert self._reader.header is not None
                events.append(self._event(self._reader.header, self._reader.control_body()))
                continue
            (target,) = self._reader.buffers()  # only DATA is read into several
            count = min(target.nbytes, len(data) - position)
            target[:count] = data[position : position + count]
            position += count
            header = None
            if self._reader.advance(count) is Step.FRAME:
                header = self._reader.header
            if header is not None:
                events.append(self._event(header, self._reader.control_body()))
        return events

    def _event(self, header: FrameHeader, body: bytes) -> Event:
        kind, transfer_id = header.kind, header.transfer_id
        if kind is FrameType.ERROR:
            raise PeerError(*decode_reason(body))
        if kind is FrameType.WELCOME and not self.established:
            peer = decode_hello(body)
            check_version(peer, "receiver")
            self._reader.established = True
            return Welcomed(peer)
        if kind is FrameType.ACK:
            return Acked(transfer_id, decode_ranges(body))
        if kind is FrameType.OPENED:
            return Opened(transfer_id, decode_ranges(body))
        if kind is FrameType.COMPLETE:
            return Completed(transfer_id)
        if kind is FrameType.FAIL:
            return TransferFailed(transfer_id, PeerError(*decode_reason(body)))
        if kind is FrameType.CANCELLED:
            return CancelAcked(transfer_id)
        raise PeerError("protocol", f"unexpected {kind.name} from a receiver")
