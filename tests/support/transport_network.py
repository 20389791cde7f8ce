"""One network for both ends of the transport: sender and receiver as their users have them, with
their own threads, and between them a proxy that cuts, holds and damages at any byte. In place of
either end, a test may play its part itself.

All of it is in this process, over TCP sockets of this host: what lies between the two needs no
argument of either, since both take the endpoint that they are given.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from transport_doubles import MemorySpace, greeting, make_spec
from transport_loopback import LoopbackPair

from transport import Endpoint, OutgoingSpec, OutgoingTransfer
from transport.config import TransportConfig
from transport.testing.proxy import HurtfulProxy
from transport.wire.frames import FrameType, encode_open
from transport.wire.handshake import own_hello

PATIENCE_S = 10.0
"""Most seconds that a played end waits for the other one."""
WELCOME = own_hello(b"R" * 16, 1 << 20).encode(FrameType.WELCOME)


@dataclass(frozen=True, slots=True)
class NetworkTransfer:
    """A transfer that the receiver expects, and the memory of both of its ends."""

    handle: OutgoingTransfer
    data: bytes
    source: MemorySpace
    landing: MemorySpace

    @property
    def id(self) -> bytes:
        return self.handle.transfer_id

    @property
    def landed(self) -> bytes:
        return bytes(self.landing.data)

    def ready(self) -> None:
        """All of it may be sent."""
        self.handle.ready(0, len(self.data))


class Network(LoopbackPair):
    """A sender and a receiver in this process whose connections all go through `proxy`."""

    def __init__(
        self, config: TransportConfig, *, receiver_config: TransportConfig | None = None
    ) -> None:
        super().__init__(config, receiver_config=receiver_config)
        self.proxy = HurtfulProxy(self.endpoint)

    def close(self) -> None:
        super().close()
        self.proxy.close()

    def open(self, number: int, data: bytes, **of_spec: Any) -> NetworkTransfer:
        """A transfer with nothing ready; `of_spec` are fields of its OutgoingSpec."""
        spec = replace(make_spec(number, self.proxy.endpoint), **of_spec)
        source, landing = MemorySpace(bytearray(data), 333), MemorySpace(bytearray(len(data)), 512)
        self.registry.expect(spec, landing)
        handle = self.sender.open(spec, source, self.listener)
        return NetworkTransfer(handle, data, source, landing)

    def is_connected(self, num_connections: int = 1) -> bool:
        """Whether so many connections stand, by what both the sender and the proxy say."""
        standing = self.sender.num_connections(self.proxy.endpoint)
        return standing == len(self.proxy.open_connections) == num_connections


class PlayedReceiver:
    """Where a sender finds a receiver whose part the test plays."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.settimeout(PATIENCE_S)
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self._accepted: list[socket.socket] = []

    def accept(self, welcome: bytes = WELCOME, timeout_s: float = PATIENCE_S) -> socket.socket:
        """The sender's next connection; its HELLO was read, and was answered with `welcome`.

        Raises TimeoutError when none comes, and ConnectionError when it ends before that.
        """
        self._listener.settimeout(timeout_s)
        sock, _ = self._listener.accept()
        self._accepted.append(sock)
        sock.settimeout(PATIENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(_heard(sock, len(greeting()))) < len(greeting()):
            raise ConnectionAbortedError("the sender hung up before its HELLO")
        sock.sendall(welcome)
        return sock

    def close(self) -> None:
        for sock in (self._listener, *self._accepted):
            sock.close()


def _heard(sock: socket.socket, num_bytes: int) -> bytes:
    """So many bytes, fewer only when the other end has hung up."""
    data = b""
    while len(data) < num_bytes and (more := sock.recv(num_bytes - len(data))):
        data += more
    return data


def is_readable(sock: socket.socket, timeout_s: float) -> bool:
    """Whether bytes or the end arrive within this time."""
    return bool(select.select([sock], [], [], timeout_s)[0])


def is_ended(sock: socket.socket) -> bool:
    """Wait until the other end has closed or reset this connection, reading what it sends.
    False: it still sends nothing and does not end.
    """
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def played_sender(endpoint: Endpoint) -> socket.socket:
    """A connection to a receiver on which a test plays the sender; it has been greeted."""
    sock = socket.create_connection((endpoint.host, endpoint.port), PATIENCE_S)
    sock.sendall(greeting())
    assert len(_heard(sock, len(WELCOME))) == len(WELCOME), "the receiver hung up"
    return sock


def opening(spec: OutgoingSpec, nbytes: int, **of_spec: Any) -> bytes:
    """An OPEN frame as a sender with this spec says it, but for the fields named."""
    spec = replace(spec, **of_spec)
    return encode_open(
        spec.transfer_id, token=spec.token, fingerprint=spec.fingerprint, nbytes=nbytes
    )


def answer(sock: socket.socket, wanted: bytes) -> bytes:
    """What the other end says up to and with `wanted`; AssertionError if it ends before."""
    heard = b""
    with suppress(TimeoutError):
        while wanted not in heard:
            more = sock.recv(1 << 16)
            assert more, f"no {wanted!r} before the end"
            heard += more
    assert wanted in heard, f"no {wanted!r} in {PATIENCE_S:g} s"
    return heard
