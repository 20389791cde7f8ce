"""Doubles for tests: memory as a ByteSpace, recorders for callbacks, and a network without sockets.

`MemoryNetwork` drives the real sans-IO parts of both ends over in-memory connections that a test
may fragment, reorder between connections, and cut. Knows no socket, no thread and no clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from transport.config import TransportConfig
from transport.endpoint import Endpoint
from transport.errors import LinkError, PeerError, Refused, TransportError
from transport.interfaces import ByteSpace, OutgoingSpec
from transport.receiving.reception import Reception
from transport.sending.link import LinkCore
from transport.sending.link_work import AbortConnection, Work
from transport.sending.outgoing import OutgoingState
from transport.wire.digest import digest_of
from transport.wire.frames import (
    FrameType,
    encode_data_header,
    encode_frame,
    encode_open,
    encode_reason,
)
from transport.wire.handshake import VERSION, Hello, own_hello
from transport.wire.receiver_session import ReceiverSession
from transport.wire.sender_session import Event, SenderSession, Welcomed

SENDER_INSTANCE = b"S" * 16


class MemorySpace:
    """`data` as a ByteSpace cut into blocks of `block_bytes`, as a block table would resolve it."""

    def __init__(self, data: bytearray, block_bytes: int = 65536) -> None:
        self.data = data
        self.block_bytes = block_bytes
        self._memory = memoryview(data)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def views(self, offset: int, length: int) -> list[memoryview]:
        views: list[memoryview] = []
        end = offset + length
        while offset < end:
            stop = min(end, (offset // self.block_bytes + 1) * self.block_bytes)
            views.append(self._memory[offset:stop])
            offset = stop
        return views

    def release(self) -> None:
        """Give the memory up; BufferError while anybody holds a view of it."""
        self._memory.release()
        self.data.append(0)  # a bytearray that is exported cannot be resized
        self.data.pop()


class RecordingListener:
    """Remembers how transfers ended; `wait` is for tests with threads."""

    def __init__(self) -> None:
        self.completed: list[bytes] = []
        self.failed: dict[bytes, TransportError] = {}
        self._changed = threading.Condition()

    def on_complete(self, transfer_id: bytes) -> None:
        with self._changed:
            self.completed.append(transfer_id)
            self._changed.notify_all()

    def on_failed(self, transfer_id: bytes, error: TransportError) -> None:
        with self._changed:
            self.failed[transfer_id] = error
            self._changed.notify_all()

    def wait(self, transfer_id: bytes, timeout_s: float = 20.0) -> TransportError | None:
        """The error the transfer ended with, None for success; TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: transfer_id in self.completed or transfer_id in self.failed, timeout_s
            ):
                raise TimeoutError(f"transfer {transfer_id.hex()} did not end in {timeout_s} s")
            return self.failed.get(transfer_id)


class MemoryRegistry(RecordingListener):
    """Accepts the transfers it was told to expect."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[bytes, tuple[bytes, bytes, ByteSpace]] = {}
        self.num_asked = 0

    def expect(self, spec: OutgoingSpec, space: ByteSpace) -> None:
        self.expected[spec.transfer_id] = (spec.token, spec.fingerprint, space)

    def accept(
        self, transfer_id: bytes, token: bytes, fingerprint: bytes, nbytes: int
    ) -> ByteSpace:
        self.num_asked += 1
        known = self.expected.get(transfer_id)
        if known is None:
            raise Refused("unknown_transfer", "no landing is reserved for this transfer")
        if token != known[0]:
            raise Refused("bad_token", "wrong token for this transfer")
        if fingerprint != known[1]:
            raise Refused("fingerprint", "the sender's layout is not the reserved one")
        return known[2]


def make_spec(number: int, endpoint: Endpoint | None = None) -> OutgoingSpec:
    """A distinct transfer per number."""
    return OutgoingSpec(
        transfer_id=number.to_bytes(16, "little"),
        token=bytes([number % 256]) * 32,
        fingerprint=b"layout".ljust(32, b"\0"),
        endpoint=endpoint or Endpoint("test", 1),
    )


@dataclass
class MemoryConnection:
    """One connection: bytes on their way in each direction."""

    number: int
    sender: SenderSession
    receiver: ReceiverSession
    to_receiver: bytearray = field(default_factory=bytearray)
    to_sender: bytearray = field(default_factory=bytearray)
    established: bool = False
    deaf: bool = False
    """The sender has given it up."""


class MemoryNetwork:
    """Both ends of a link with any number of connections, stepped by the test.

    `now_s` is the clock. A connection that breaks (`cut`, a violation, an abort by either end) is
    removed from `connections`; the reason is appended to `endings`.
    """

    def __init__(self, config: TransportConfig, registry: MemoryRegistry) -> None:
        self.config = config
        self.now_s = 0.0
        self.registry = registry
        self.reception = Reception(config, registry, self)
        self.core = LinkCore(config, "test:1")
        self.listener = RecordingListener()
        self.connections: dict[int, MemoryConnection] = {}
        self.endings: list[TransportError] = []
        self.receiver_instance = b"R" * 16
        self._spaces: dict[OutgoingState, ByteSpace] = {}
        self._num_made = 0

    # The sender.

    def open(self, spec: OutgoingSpec, space: ByteSpace) -> OutgoingState:
        transfer = self.core.add(spec, space.nbytes, self.now_s)
        self._spaces[transfer] = space
        return transfer

    def ready(self, transfer: OutgoingState, offset: int, length: int) -> None:
        self.core.ready(transfer, offset, offset + length, self.now_s)

    def connect(self) -> int:
        """A new connection with its HELLO under way."""
        self._num_made += 1
        number = self._num_made
        receiver = ReceiverSession(
            number,
            config=self.config,
            reception=self.reception,
            instance=self.receiver_instance,
            now_s=self.now_s,
        )
        connection = MemoryConnection(number, SenderSession(self.config, SENDER_INSTANCE), receiver)
        connection.to_receiver += connection.sender.hello()
        self.connections[number] = connection
        return number

    def send(self, number: int) -> bool:
        """Put the next piece of work of this connection on its way; False when there is none."""
        connection = self.connections.get(number)
        if connection is None or not connection.established:
            return False
        work = self.core.take(number, self.now_s)
        self._perform()
        if work is None:
            return False
        connection.to_receiver += self._encode(work)
        self.core.sent(number, work, self.now_s, whole=True)
        self._perform()
        return True

    def _encode(self, work: Work) -> bytes:
        spec = work.transfer.spec
        data = b""
        if work.opens:
            data += encode_open(
                spec.transfer_id,
                token=spec.token,
                fingerprint=spec.fingerprint,
                nbytes=work.transfer.nbytes,
                digest=spec.digest,
            )
        if work.cancels:
            data += encode_reason(FrameType.CANCEL, "cancelled", "test", spec.transfer_id)
        if work.digests:
            digest = digest_of(self._spaces[work.transfer])
            data += encode_frame(FrameType.DIGEST, spec.transfer_id, digest)
        if work.data is not None:
            start, end = work.data
            views = self._spaces[work.transfer].views(start, end - start)
            data += encode_data_header(spec.transfer_id, start, views)
            data += b"".join(views)
        return data

    # The wire.

    def deliver(
        self, number: int, num_bytes: int, damage: Callable[[bytes], bytes] | None = None
    ) -> None:
        """Let up to `num_bytes` arrive at the receiver, and its answers leave."""
        connection = self.connections.get(number)
        if connection is None:
            return
        data = bytes(connection.to_receiver[:num_bytes])
        del connection.to_receiver[:num_bytes]
        if damage is not None:
            data = damage(data)
        try:
            connection.receiver.feed(data, self.now_s)
            connection.receiver.flush_acks()
        except PeerError as error:
            connection.to_sender += connection.receiver.outgoing()
            self.answer(number, len(connection.to_sender))
            self._remove(number, error)
            return
        connection.to_sender += connection.receiver.outgoing()

    def answer(self, number: int, num_bytes: int) -> None:
        """Let up to `num_bytes` of the receiver's answers arrive at the sender."""
        connection = self.connections.get(number)
        if connection is None:
            return
        data = bytes(connection.to_sender[:num_bytes])
        del connection.to_sender[:num_bytes]
        if connection.deaf:
            return
        try:
            for event in connection.sender.feed(data):
                self._handle(connection, event)
        except PeerError as error:
            self._remove(number, error)
        self._perform()

    def cut(self, number: int) -> None:
        """The connection is lost with everything on its way."""
        self._remove(number, LinkError("lost", "cut"))

    def give_up(self, number: int) -> None:
        """The sender closes the connection; the receiver never hears of it."""
        connection = self.connections[number]
        connection.established = False
        connection.to_receiver.clear()
        connection.deaf = True
        self.core.disconnected(number, LinkError("ack_timeout", "given up"))
        self._perform()

    def run(self, max_steps: int = 100_000) -> None:
        """Send and deliver in order until nothing moves."""
        for _ in range(max_steps):
            moved = False
            for number in list(self.connections):
                moved |= self.send(number)
                moved |= self._drain(number)
            if not moved:
                return
        raise AssertionError("the network does not come to rest")

    def _drain(self, number: int) -> bool:
        connection = self.connections.get(number)
        if connection is None or not (connection.to_receiver or connection.to_sender):
            return False
        self.deliver(number, len(connection.to_receiver))
        self.answer(number, len(connection.to_sender))
        return True

    def expire(self) -> None:
        """Apply both ends' timeouts at `now_s`."""
        self.core.expire(self.now_s)
        self._perform()
        self.reception.expire(self.now_s)

    def check_invariants(self) -> None:
        self.core.check_invariants()
        for landing in self.reception.transfers.open_ones():
            landing.check_invariants()

    # Connections, for Reception.

    def abort(self, connections: Collection[int], error: TransportError) -> None:
        for number in connections:
            self._remove(number, error)

    def tell(self, connections: Collection[int], frame: bytes) -> None:
        for number in connections:
            if number in self.connections:
                self.connections[number].to_sender += frame

    def _handle(self, connection: MemoryConnection, event: Event) -> None:
        if isinstance(event, Welcomed):
            connection.established = True
            self.core.connected(connection.number, event.peer, self.now_s)
        else:
            self.core.handle(connection.number, event, self.now_s)

    def _perform(self) -> None:
        for effect in self.core.pop_effects():
            if isinstance(effect, AbortConnection):
                self._remove(effect.connection, effect.error)
                continue
            transfer = effect.transfer
            self._spaces.pop(transfer)
            if transfer.error is None:
                self.listener.on_complete(transfer.spec.transfer_id)
            else:
                self.listener.on_failed(transfer.spec.transfer_id, transfer.error)

    def _remove(self, number: int, error: TransportError) -> None:
        connection = self.connections.pop(number, None)
        if connection is None:
            return
        self.endings.append(error)
        connection.receiver.close(self.now_s)
        self.core.disconnected(number, error)
        self._perform()


def greeting(version_min: int = VERSION, version_max: int = VERSION) -> bytes:
    """A HELLO frame of a sender that speaks these versions."""
    hello = own_hello(SENDER_INSTANCE, 1 << 20)
    return Hello(
        version_min, version_max, hello.max_frame_bytes, hello.features, hello.instance
    ).encode(FrameType.HELLO)
