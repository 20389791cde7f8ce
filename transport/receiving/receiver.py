"""Receives transfers with a listening socket and one thread per connection. The rules are in
`Reception` and `ReceiverSession`.

A connection's thread reads straight into the transfer's memory, verifies, and acknowledges when
nothing more is waiting. It waits for announced data for a millisecond at most. Frames that other
threads cause (such as a drop) go through the connection's outbox, which never blocks.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Collection
from contextlib import suppress

from transport.config import TransportConfig
from transport.endpoint import Endpoint
from transport.errors import LinkError, LocalError, PeerError, TransportError, bare
from transport.interfaces import LandingRegistry, TransferProgress
from transport.receiving.reception import Reception
from transport.sockets import (
    PlainStream,
    SocketOwner,
    Stream,
    listen,
    prepare,
)
from transport.tls import RegionTls, Rotating, TlsStream, server_tls, tls_handshake, wrap_tls
from transport.wire.frames import FrameType, encode_reason
from transport.wire.receiver_session import ReceiverSession

logger = logging.getLogger("prfaas.transport")

MAX_OUTBOX_BYTES = 4 * 1024 * 1024
MAX_STRANGER_OUTBOX_BYTES = 64 * 1024
"""The outbox's limit until the registry has accepted a transfer of the connection. Until then the
peer may be anybody.
"""
FAREWELL_S = 1.0
"""Most seconds that a closing connection waits for the sender to read its ERROR."""
MORE_S = 1e-3
"""Most seconds to wait for announced DATA before an acknowledgement goes out without it."""


class Receiver:
    """Listens at `bind` and lands what the registry accepts.

    Raises LocalError("tls_files") when the TLS files cannot be used.
    """

    def __init__(self, bind: Endpoint, config: TransportConfig, registry: LandingRegistry) -> None:
        self._bind = bind
        self._config = config
        self._tls = Rotating(config.tls, server_tls) if config.tls else None
        self._instance = os.urandom(16)
        self._reception = Reception(config, registry, self)
        self._lock = threading.Lock()
        self._connections: dict[int, _Connection] = {}
        self._ids = itertools.count(1)
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._stirred = threading.Event()
        self._closing = False

    def start(self) -> None:
        """Listen; raises LocalError("bind")."""
        self._listener = listen(self._bind)
        for name, target in (("accept", self._accept), ("watchdog", self._watch)):
            thread = threading.Thread(target=target, name=f"prfaas-receive-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def endpoint(self) -> Endpoint:
        """The address with the real port. Raises RuntimeError before `start` and after `close`."""
        if self._listener is None:
            raise RuntimeError("the receiver is not listening")
        return Endpoint(self._bind.host, self._listener.getsockname()[1])

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._connections)

    def drop(self, transfer_id: bytes, reason: str) -> None:
        """Forget the transfer and tell the sender why. On return no thread writes into its
        ByteSpace any more. That takes at most drop_grace_s plus the time that a closed socket needs
        to wake its thread. The registry is not called. Unknown and ended transfers are ignored; a
        transfer that is just being accepted is refused.
        """
        self._reception.drop(transfer_id, reason, time.monotonic())

    def progress(self, transfer_id: bytes) -> TransferProgress | None:
        """A snapshot; None for a transfer that is unknown, or ended more than tombstone_s ago."""
        return self._reception.progress(transfer_id)

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop listening, close all connections, fail what is open with code "closed"."""
        with self._lock:
            self._closing = True
            connections = list(self._connections.values())
        if self._listener is not None:
            # On Linux only shutdown wakes a thread that is blocked in accept; close does not.
            with suppress(OSError):  # it may not be listening any more
                self._listener.shutdown(socket.SHUT_RDWR)
        self._stirred.set()
        # Before the connections are closed, so that senders are told. A transfer that opens
        # meanwhile is caught by the second call below.
        self._reception.close(time.monotonic())
        for connection in connections:
            connection.abort(LocalError("closed", "the receiver was closed"))
        deadline_s = time.monotonic() + timeout_s
        for thread in [*self._threads, *(connection.thread for connection in connections)]:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                logger.warning("thread %s did not end within %g s", thread.name, timeout_s)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._reception.close(time.monotonic())

    # The interface `Connections`, which `Reception` calls.

    def abort(self, connections: Collection[int], error: TransportError) -> None:
        for connection in self._find(connections):
            connection.abort(error)

    def tell(self, connections: Collection[int], frame: bytes) -> None:
        for connection in self._find(connections):
            connection.push(frame)

    def _find(self, connections: Collection[int]) -> list[_Connection]:
        with self._lock:
            return [
                self._connections[number] for number in connections if number in self._connections
            ]

    # Threads.

    def _accept(self) -> None:
        listener = self._listener
        assert listener is not None
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._closing:
                    return
                logger.error("cannot accept connections: %s", error.strerror or error)
                # Mostly EMFILE: accept fails at once until a descriptor is closed elsewhere.
                time.sleep(0.1)
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        with self._lock:
            if not self._closing and len(self._connections) < self._config.max_connections:
                number = next(self._ids)
                connection = _Connection(number, sock, self)
                self._connections[number] = connection
                try:
                    connection.thread.start()
                except RuntimeError as error:  # the process has no room for another thread
                    logger.error("cannot serve a connection: %s", error)
                    del self._connections[number]
                else:
                    self._stirred.set()
                    return
        # With TLS the sender expects a handshake first and could not read the ERROR.
        if not self._closing and self._tls is None:
            message = f"the receiver serves {self._config.max_connections} connections already"
            try:
                sock.send(encode_reason(FrameType.ERROR, "busy", message), socket.MSG_DONTWAIT)
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the peer has hung up already
        sock.close()

    def _watch(self) -> None:
        """Apply the timeouts of connections and transfers; sleep while there are none of either."""
        while not self._closing:
            with self._lock:
                connections = list(self._connections.values())
            try:
                self._apply_timeouts(connections, time.monotonic())
            except Exception:
                # The watchdog must survive: without timeouts a receiver would hold memory for ever.
                logger.exception("watchdog of the receiver")
            active = bool(connections) or bool(self._reception.transfers.open_ones())
            self._stirred.wait(self._config.tick_s if active else None)
            self._stirred.clear()

    def _apply_timeouts(self, connections: list[_Connection], now_s: float) -> None:
        for connection in connections:
            connection.tick(now_s)
        self._reception.expire(now_s)

    # What a `_Connection` needs.

    @property
    def config(self) -> TransportConfig:
        return self._config

    @property
    def tls(self) -> RegionTls | None:
        """The TLS context for a connection that begins now, and its region."""
        return self._tls.current(time.monotonic()) if self._tls else None

    def session(self, number: int) -> ReceiverSession:
        return ReceiverSession(
            number,
            config=self._config,
            reception=self._reception,
            instance=self._instance,
            now_s=time.monotonic(),
        )

    def forget(self, number: int) -> None:
        with self._lock:
            self._connections.pop(number, None)


class _Connection:
    """One accepted socket and its thread."""

    def __init__(self, number: int, sock: socket.socket, receiver: Receiver) -> None:
        self.thread = threading.Thread(
            target=self._run, name=f"prfaas-receive-{number}", daemon=True
        )
        self._number = number
        self._sock = sock
        self._receiver = receiver
        self._config = receiver.config
        self._owner: SocketOwner = PlainStream(sock)
        self._stream: Stream | None = None
        self._session: ReceiverSession | None = None
        self._error: TransportError | None = None
        self._farewell_s: float | None = None
        self._outbox = bytearray()
        self._outbox_lock = threading.Lock()

    def abort(self, error: TransportError) -> None:
        """End the connection, from any thread. The first error is the one reported."""
        if self._error is None:
            self._error = error
        self._owner.abort()

    def push(self, data: bytes) -> None:
        """Send what the kernel takes now, and keep the rest for later. An overfull outbox ends the
        connection.
        """
        with self._outbox_lock:
            self._outbox += data
            try:
                self._flush()
            except TransportError as error:
                self.abort(bare(error))
            is_known = self._session is not None and self._session.has_opened
            if len(self._outbox) > (MAX_OUTBOX_BYTES if is_known else MAX_STRANGER_OUTBOX_BYTES):
                self.abort(PeerError("protocol", "the sender does not read its acknowledgements"))

    def tick(self, now_s: float) -> None:
        """The watchdog calls this: apply deadlines, and send what is left in the outbox."""
        session, farewell_s = self._session, self._farewell_s
        deadline_s = session.deadline_s if session is not None else None
        if farewell_s is not None:
            deadline_s = farewell_s
        if deadline_s is not None and now_s >= deadline_s:
            self.abort(_silence(session))
        if self._outbox:
            self.push(b"")

    def _flush(self) -> None:
        while self._outbox and self._stream is not None:
            # A view: a slice would copy all that waits for every answer. It must be released
            # before the outbox can shrink.
            with memoryview(self._outbox) as waiting:
                count = self._stream.try_send(waiting)
            if not count:
                return
            del self._outbox[:count]

    def _run(self) -> None:
        session = self._session = self._receiver.session(self._number)
        error = self._error_of(session)
        session.close(time.monotonic())
        # These three are how connections end in normal operation.
        if error.code not in ("lost", "closed", "idle"):
            logger.warning("connection %s closed: %s", self._number, error.message)
        if isinstance(error, PeerError) and self._error is None:
            self._say_farewell()
        self._receiver.forget(self._number)
        self._owner.close()

    def _error_of(self, session: ReceiverSession) -> TransportError:
        """Serve until the connection ends, and return why. The result holds no view of a
        ByteSpace.
        """
        try:
            stream = self._open_stream()
            while True:
                self._serve(stream, session)
        except TransportError as error:
            if isinstance(error, PeerError):
                self.push(session.outgoing())
            return self._error or bare(error)
        except Exception as error:
            logger.exception("unexpected error on connection %s", self._number)
            return LocalError("internal", f"{type(error).__name__}: {error}")

    def _open_stream(self) -> Stream:
        prepare(self._sock, self._config)
        tls = self._receiver.tls
        stream: PlainStream | TlsStream
        wrong = None
        if tls is None:
            stream = PlainStream(self._sock)
        else:
            wrapped = wrap_tls(tls.context, self._sock, is_server=True)
            self._owner = SocketOwner(wrapped)
            stream = tls_handshake(wrapped, self._config.handshake_timeout_s)
            wrong = stream.wrong_peer(tls.region)
        self._owner = self._stream = stream
        # An abort before the line above acted on the old owner, whose socket TLS has taken over.
        if self._error is not None:
            raise self._error
        if wrong is not None:
            self.push(encode_reason(FrameType.ERROR, "tls", wrong))
            raise PeerError("tls", wrong)
        return stream

    def _serve(self, stream: Stream, session: ReceiverSession) -> None:
        """Receive once. Answers go out before the thread sleeps for bytes, and when they are due
        while bytes keep coming.
        """
        buffers = session.buffers()
        count = 0
        if session.has_answers:
            if session.may_wait:
                stream.wait_readable(MORE_S)
            count = stream.try_receive(buffers)
        if not count:
            session.flush_acks()
            self._push_outgoing(session)
            count = stream.receive(buffers, fill=session.in_body)
        # `received` may end a transfer, after which no view of its memory may be left.
        del buffers
        session.received(count, time.monotonic())
        if session.acks_due:
            session.flush_acks()
            self._push_outgoing(session)

    def _push_outgoing(self, session: ReceiverSession) -> None:
        data = session.outgoing()
        if data:
            self.push(data)

    def _say_farewell(self) -> None:
        """Let the ERROR arrive before closing. A socket that is closed with unread bytes sends a
        reset, and the peer's kernel then drops what it has not read yet (RFC 1122, 4.2.2.13).
        """
        stream = self._stream
        if stream is None:
            return
        self._farewell_s = time.monotonic() + FAREWELL_S
        sink = memoryview(bytearray(64 * 1024))
        try:
            self._owner.finish()
            while True:
                stream.receive([sink], fill=False)
        except TransportError:
            pass  # the sender has hung up, or the watchdog lost patience


def _silence(session: ReceiverSession | None) -> LinkError:
    """The error for a connection whose deadline has passed."""
    if session is None or not session.established:
        return LinkError("handshake_timeout", "the sender fell silent in the handshake")
    if session.in_frame:
        return LinkError("frame_timeout", "the sender fell silent in the middle of a message")
    return LinkError("idle", "the sender does nothing with its connection")


__all__ = ["Receiver"]
