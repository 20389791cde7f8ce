"""Attacks on both ends of a connection, by scripts made from bytes.

`attack_reader`, `attack_receiver` and `attack_sender` raise AssertionError when a promise of the
transport breaks, and let every exception through that is not a PeerError. The first two need no
socket; the sender is a whole one, with its threads and connections.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hostile import (
    SIZES_BYTES,
    Choices,
    Forger,
    GuardedSpace,
    OnceRegistry,
    held_bytes,
    own_greeting,
    pieces,
)
from transport_doubles import MemorySpace, RecordingListener, make_spec
from transport_network import WELCOME, PlayedReceiver, is_readable

from transport import OutgoingTransfer, PeerError, Sender, TransferState, TransportError
from transport.config import TransportConfig
from transport.receiving.incoming_transfer import IncomingTransfer
from transport.receiving.reception import Reception
from transport.wire.frame_reader import FrameReader, Step
from transport.wire.frames import (
    MAX_CONTROL_BYTES,
    FrameType,
    decode_open,
    decode_ranges,
    decode_reason,
)
from transport.wire.handshake import decode_hello
from transport.wire.ranges import IntervalSet
from transport.wire.receiver_session import ReceiverSession
from transport.wire.sender_session import SenderSession

logger = logging.getLogger("prfaas.transport")

CONFIG = TransportConfig(
    frame_bytes=300,
    max_frame_bytes=900,
    ack_batch_bytes=500,
    drop_grace_s=0,
    handshake_timeout_s=5,
    max_transfers_per_connection=3,
    max_ranges_per_transfer=20,
)
SENDER_CONFIG = replace(
    CONFIG, num_connections=2, autotune=False, reconnect_first_s=0.001, reconnect_max_s=0.001
)
MAX_SESSION_BYTES = 2 * MAX_CONTROL_BYTES + 64 * 1024 + CONFIG.ack_batch_bytes * 100
"""What one session may hold under CONFIG: a control body and its copy, a sink of 64 KiB or repeated
data, which is smaller, and acknowledgements of single bytes.
"""


# FrameReader.


def attack_reader(data: bytes) -> None:
    """The same hostile bytes in two fragmentations: the same frames and the same end, and never
    more memory than one control body.
    """
    choices = Choices(data)
    established, cut_seed = bool(choices.below(4)), choices.take(24)
    forger = Forger(choices)
    wire = b""
    for _ in range(12):
        if choices:
            wire += forger.next()
    whole = _read(wire, [wire], established)
    assert _read(wire, pieces(Choices(cut_seed), wire), established) == whole
    for _, body in whole[0]:
        for decode in (decode_open, decode_ranges, decode_reason, decode_hello):
            with suppress(PeerError):
                decode(body)


def _read(
    wire: bytes, fragments: list[bytes], established: bool
) -> tuple[list[tuple[FrameType, bytes]], str]:
    reader = FrameReader(CONFIG.max_frame_bytes)
    reader.established = established
    frames: list[tuple[FrameType, bytes]] = []
    placed, sink = bytearray(), bytearray(100)
    try:
        for fragment in fragments:
            while fragment:
                target = reader.buffers()[0]
                count = min(target.nbytes, len(fragment))
                target[:count] = fragment[:count]
                fragment = fragment[count:]
                step, header = reader.advance(count), reader.header
                assert held_bytes(reader, (placed, sink)) < MAX_CONTROL_BYTES + 8192
                if step is Step.PARTIAL or header is None:
                    continue
                if header.kind is not FrameType.DATA:
                    if step is Step.FRAME:
                        frames.append((header.kind, reader.control_body()))
                elif step is Step.FRAME:
                    if placed:
                        reader.verify_data()
                    frames.append((header.kind, bytes(placed)))
                elif header.length % 2:
                    placed = bytearray()
                    reader.discard(memoryview(sink))
                else:
                    placed = bytearray(header.length)
                    reader.place([memoryview(placed)])
    except PeerError as error:
        return frames, error.code
    return frames, ""


# ReceiverSession.


@dataclass
class _Frozen:
    """What of one transfer is verified, as it was when it was verified."""

    space: GuardedSpace
    verified: IntervalSet = field(default_factory=IntervalSet)
    content: bytes = b""
    ended: bool = False


class ReceiverUnderFire:
    """A `Reception` and connections to it, whose promises are checked after every step."""

    def __init__(self, config: TransportConfig = CONFIG) -> None:
        self.now_s = 0.0
        self._config = config
        self.registry = OnceRegistry()
        self.frozen: dict[bytes, _Frozen] = {}
        for number, nbytes in enumerate(SIZES_BYTES):
            space = GuardedSpace(nbytes)
            self.registry.expect(make_spec(number), space)
            self.frozen[make_spec(number).transfer_id] = _Frozen(space, content=space.content)
        self.reception = Reception(config, self.registry, self)
        self.sessions: dict[int, ReceiverSession] = {}
        self._senders: dict[int, SenderSession] = {}
        self._num_made = 0
        self._num_fed = 0

    def connect(self) -> int:
        self._num_made += 1
        number = self._num_made
        self.sessions[number] = ReceiverSession(
            number,
            config=self._config,
            reception=self.reception,
            instance=b"R" * 16,
            now_s=self.now_s,
        )
        self._senders[number] = SenderSession(CONFIG, b"S" * 16)
        return number

    def feed(self, number: int, data: bytes) -> None:
        """As the shell does: receive, acknowledge when due, close when a rule was broken."""
        session = self.sessions.get(number)
        if session is None:
            return
        try:
            session.feed(data, self.now_s)
            if session.acks_due:
                session.flush_acks()
        except PeerError:
            try:
                self._senders[number].feed(session.outgoing())
            except PeerError:
                self.close(number)
            else:
                raise AssertionError("a broken rule was not answered with ERROR") from None
        else:
            self._senders[number].feed(session.outgoing())
            self._num_fed += 1
            if self._num_fed % 4 == 0:  # to look is slow
                spaces = [frozen.space.data for frozen in self.frozen.values()]
                assert held_bytes(session, spaces) <= MAX_SESSION_BYTES
        self.check()

    def idle(self, number: int) -> None:
        """Nothing more is waiting in the socket."""
        session = self.sessions.get(number)
        if session is not None:
            session.flush_acks()
            self._senders[number].feed(session.outgoing())

    def close(self, number: int) -> None:
        session = self.sessions.pop(number, None)
        if session is not None:
            session.close(self.now_s)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for number, session in list(self.sessions.items()):
            if session.deadline_s is not None and session.deadline_s <= self.now_s:
                self.close(number)
        self.reception.expire(self.now_s)
        self.check()

    def check(self) -> None:
        for transfer_id, frozen in self.frozen.items():
            frozen.space.check()
            self._check_frozen(frozen, self.reception.transfers.find(transfer_id))

    def _check_frozen(self, frozen: _Frozen, landing: IncomingTransfer | None) -> None:
        content = frozen.space.content
        for start, end in frozen.verified:
            assert content[start:end] == frozen.content[start:end], (
                "a verified byte was overwritten"
            )
        if frozen.ended:
            assert content == frozen.content, "written after the end"
        elif landing is None:
            assert content == frozen.content, "written without an OPEN"
        else:
            landing.check_invariants()
            frozen.ended = landing.state is not TransferState.OPEN
            frozen.content = content
            for start, end in landing.verified():
                frozen.verified.add(start, end)

    # Connections, for Reception.

    def abort(self, connections: Collection[int], error: TransportError) -> None:
        for number in connections:
            self.close(number)

    def tell(self, connections: Collection[int], frame: bytes) -> None:
        for number in connections:
            if number in self.sessions:
                self._senders[number].feed(frame)


def attack_receiver(data: bytes) -> None:
    """Up to three connections send hostile frames about the same transfers."""
    choices = Choices(data)
    fire = ReceiverUnderFire(replace(CONFIG, checksum=choices.below(4) > 0))
    forger = Forger(choices, (FrameType.OPEN, FrameType.DATA, FrameType.DATA, FrameType.DATA))
    numbers = [fire.connect(), fire.connect(), fire.connect()]
    rests: dict[int, bytes] = {}
    for number in numbers:
        if choices.below(8):
            fire.feed(number, own_greeting())
    for _ in range(40):
        if not choices:
            break
        slot, action = choices.below(3), choices.below(32)
        number = numbers[slot]
        if action == 31:
            fire.pass_time(choices.below(200))
        elif action == 30:
            fire.reception.drop(make_spec(choices.below(5)).transfer_id, "test", fire.now_s)
        elif action == 29:
            fire.close(number)
        elif action == 28:
            fire.idle(number)
        else:
            wire = rests.pop(number, b"") + forger.next()
            kept = choices.below(len(wire)) if action >= 22 else 0  # others speak in mid-frame
            rests[number] = wire[len(wire) - kept :]
            wire = wire[: len(wire) - kept]
            for piece in pieces(choices, wire) if action & 1 else [wire]:
                fire.feed(number, piece)
        if numbers[slot] not in fire.sessions:
            numbers[slot] = fire.connect()
            fire.feed(numbers[slot], own_greeting())
    for number in list(fire.sessions):
        fire.close(number)
    fire.pass_time(CONFIG.idle_timeout_s)
    assert not fire.reception.transfers.open_ones()
    fire.pass_time(CONFIG.tombstone_s)
    assert all(fire.reception.transfers.find(key) is None for key in fire.frozen)


# A sender and its links.


class Unexpected(logging.Handler):
    """Keeps what a sender logs as an error: no receiver may cause an exception of another kind."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


class SenderUnderFire:
    """A sender, with its own threads, whose receiver says what the test makes it say."""

    def __init__(self) -> None:
        self.unexpected = Unexpected()
        logger.addHandler(self.unexpected)
        self.listener = RecordingListener()
        self.contents: list[tuple[bytearray, bytes]] = []
        self.transfers: list[OutgoingTransfer] = []
        self._receiver = PlayedReceiver()
        self._sender = Sender(SENDER_CONFIG)
        self.lines: dict[int, socket.socket] = {}
        for number, nbytes in enumerate(SIZES_BYTES):
            data = bytearray((number + index) % 256 for index in range(nbytes))
            self.contents.append((data, bytes(data)))
            spec = make_spec(number, self._receiver.endpoint)
            transfer = self._sender.open(spec, MemorySpace(data, 256), self.listener)
            transfer.ready(0, nbytes - nbytes // 3)
            self.transfers.append(transfer)

    @property
    def is_over(self) -> bool:
        """Whether all transfers have ended, after which nobody connects any more."""
        return len(self.listener.completed) + len(self.listener.failed) >= len(self.transfers)

    def connect(self, line: int, *, welcomed: bool = True) -> None:
        try:
            sock = self._receiver.accept(WELCOME if welcomed else b"", timeout_s=0.05)
        except OSError:
            return
        self.lines[line] = sock
        # What comes together with WELCOME only ends the connection.
        is_readable(sock, 0.005)

    def say(self, line: int, data: bytes) -> None:
        """On one of two lines, if it stands. Nobody looks at what the sender sends."""
        sock = self.lines.get(line)
        if sock is None:
            return
        try:
            sock.sendall(data)
            is_ended = is_readable(sock, 0.0) and not sock.recv(1 << 16)
        except OSError:
            is_ended = True
        if is_ended:
            self.cut(line)

    def cut(self, line: int) -> None:
        if (sock := self.lines.pop(line, None)) is not None:
            sock.close()

    def check(self) -> None:
        for data, original in self.contents:
            assert data == original, "what is to be sent was written to"

    def end(self) -> None:
        """Whatever was said, every transfer ends, and its owner hears so once."""
        self._sender.close()
        self._receiver.close()
        logger.removeHandler(self.unexpected)
        self.check()
        ends = sorted([*self.listener.completed, *self.listener.failed])
        assert ends == sorted(make_spec(number).transfer_id for number in range(len(SIZES_BYTES)))
        assert not self.unexpected.messages, self.unexpected.messages[0]


def attack_sender(data: bytes) -> None:
    """A hostile receiver on two connections, while transfers are sent and cancelled."""
    choices = Choices(data)
    fire = SenderUnderFire()
    forger = Forger(choices, (FrameType.ACK, FrameType.OPENED))
    for line in range(2):
        fire.connect(line, welcomed=bool(choices.below(8)))
    for _ in range(40):
        if not choices or fire.is_over:
            break
        line, action = choices.below(2), choices.below(16)
        if action == 15:
            fire.cut(line)
        elif action >= 12:
            transfer = fire.transfers[choices.below(len(fire.transfers))]
            if action == 14:
                transfer.cancel("test")
            transfer.ready(0, transfer.progress().nbytes)
        else:
            for piece in pieces(choices, forger.next()) if action & 1 else [forger.next()]:
                fire.say(line, piece)
        if line not in fire.lines:
            fire.connect(line)
    fire.end()


ATTACKS: dict[str, Callable[[bytes], None]] = {
    "frames": attack_reader,
    "receiver_session": attack_receiver,
    "sender_session": attack_sender,
}
