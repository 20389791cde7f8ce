"""A sender and a receiver over real sockets on 127.0.0.1, and a proxy between them that misbehaves
on command.

For integration tests of this package and of those who use it. The proxy knows bytes, not frames.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from transport.config import Endpoint, TransportConfig
from transport.receiver import Receiver
from transport.sender import OutgoingTransfer, Sender
from transport.testing import MemoryRegistry, MemorySpace, RecordingListener, make_spec

LOOPBACK = Endpoint("127.0.0.1", 0)


class LoopbackPair:
    """A receiver and a sender in this process, and the transfers between them."""

    def __init__(
        self,
        config: TransportConfig,
        *,
        receiver_config: TransportConfig | None = None,
        bind: Endpoint = LOOPBACK,
    ) -> None:
        self.registry = MemoryRegistry()
        self.receiver = Receiver(bind, receiver_config or config, self.registry)
        self.receiver.start()
        self.endpoint = self.receiver.endpoint
        self.sender = Sender(config)
        self.listener = RecordingListener()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    def begin(
        self, number: int, data: bytearray, *, via: Endpoint | None = None
    ) -> tuple[OutgoingTransfer, bytearray]:
        """A transfer the receiver expects, with nothing ready, and the memory where it lands."""
        spec = make_spec(number, via or self.endpoint)
        landed = bytearray(len(data))
        self.registry.expect(spec, MemorySpace(landed, 48 * 1024))
        return self.sender.open(spec, MemorySpace(data), self.listener), landed


class HurtfulProxy:
    """Forwards TCP connections to `target` and does to them what a test asks for.

    `damage(data, is_forward)` may change bytes on their way. While `hold` is clear nothing moves.
    `bytes_per_read` slows things down, so that a test can act in the middle of a transfer.
    """

    def __init__(self, target: Endpoint) -> None:
        self.target = target
        self.damage: Callable[[bytes, bool], bytes] | None = None
        self.flows = threading.Event()
        self.flows.set()
        self.bytes_per_read = 65536
        self.num_forwarded_bytes = 0
        self.num_accepted = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._spawn(self._accept)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("127.0.0.1", self._listener.getsockname()[1])

    def cut(self) -> None:
        """Break every connection that is open now."""
        with self._lock:
            for sock in self._sockets:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closing = True
        self.flows.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.num_accepted += 1
            try:
                far = socket.create_connection((self.target.host, self.target.port), 2)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._sockets |= {near, far}
            ends = threading.Barrier(2)
            self._spawn(self._pump, near, far, True, ends)
            self._spawn(self._pump, far, near, False, ends)

    def _pump(
        self, source: socket.socket, sink: socket.socket, is_forward: bool, ends: threading.Barrier
    ) -> None:
        try:
            while data := source.recv(self.bytes_per_read):
                self.flows.wait()
                if self.damage is not None:
                    data = self.damage(data, is_forward)
                if is_forward:
                    self.num_forwarded_bytes += len(data)
                sink.sendall(data)
        except OSError:
            pass  # cut, by a test or by either end
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        ends.wait(10)
        with self._lock:
            self._sockets.discard(source)
        source.close()
