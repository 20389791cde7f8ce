"""Doubles for tests: memory as a ByteSpace, recorders for callbacks, and nobody who is connected.

Knows no socket, no thread and no clock. Both ends and a network between them: `transport_network`.
"""

from __future__ import annotations

import threading

from transport import ByteSpace, Endpoint, OutgoingSpec, Refused, TransportError
from transport.wire.frames import FrameType
from transport.wire.handshake import VERSION, Hello, own_hello

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


class NoConnections:
    """The owner of connections, as a `Reception` sees it, when nobody else is connected."""

    def abort(self, connections: object, error: object) -> None: ...

    def tell(self, connections: object, frame: bytes) -> None: ...


def greeting(version_min: int = VERSION, version_max: int = VERSION) -> bytes:
    """A HELLO frame of a sender that speaks these versions."""
    hello = own_hello(SENDER_INSTANCE, 1 << 20)
    return Hello(
        version_min, version_max, hello.max_frame_bytes, hello.features, hello.instance
    ).encode(FrameType.HELLO)
