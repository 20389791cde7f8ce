"""One connection of a receiver: its socket, its thread, and the answers that wait to be sent.

The thread reads straight into the transfer's memory, verifies, and acknowledges when nothing more
is waiting. On a near path it waits for announced data for a millisecond at most. Frames that other
threads cause (such as a drop) go through the connection's outbox, which never blocks. The rules are
in `ReceiverSession`.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import TYPE_CHECKING

from transport.errors import LinkError, LocalError, PeerError, TransportError, bare
from transport.socket_options import is_near, prepare
from transport.sockets import PlainStream, SocketOwner, Stream
from transport.tls import tls_handshake, wrap_tls
from transport.wire.frames import FrameType, encode_reason
from transport.wire.receiver_session import ReceiverSession

if TYPE_CHECKING:
    from transport.receiving.receiver import Receiver

logger = logging.getLogger("prfaas.transport")

MAX_OUTBOX_BYTES = 4 * 1024 * 1024
MAX_UNKNOWN_OUTBOX_BYTES = 64 * 1024
"""The outbox's limit until the registry has accepted a transfer of the connection. Until then the
peer may be anybody.
"""
NO_PLACE = "the receiver has too many connections already"
FAREWELL_S = 1.0
"""Most seconds that a closing connection waits for the sender to read its ERROR."""
MORE_S = 1e-3
"""Most seconds to wait for announced DATA before an acknowledgement goes out without it."""


class IncomingConnection:
    """One accepted socket and its thread."""

    def __init__(self, number: int, sock: socket.socket, receiver: Receiver, network: str) -> None:
        self.party = network
        """Whose connection it is: with TLS the names in the certificate."""
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
        self._keeps_place = False
        self._is_near = True
        self._farewell_s: float | None = None
        self._outbox = bytearray()
        self._outbox_lock = threading.Lock()

    @property
    def is_idle(self) -> bool:
        """Whether it serves no open transfer. Any thread may ask."""
        return self._session is None or not self._session.has_open

    def abort(self, error: TransportError) -> None:
        """End the connection, from any thread. The first error is the one reported."""
        if self._error is None:
            self._error = error
        self._owner.abort()

    def turn_away(self) -> None:
        """Another connection gets its place. Says so as far as the kernel takes it now."""
        self.push(encode_reason(FrameType.ERROR, "busy", NO_PLACE))
        self.abort(LocalError("turned_away", NO_PLACE))

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
            if len(self._outbox) > (MAX_OUTBOX_BYTES if is_known else MAX_UNKNOWN_OUTBOX_BYTES):
                self.abort(PeerError("protocol", "the sender does not read its acknowledgements"))

    def tick(self, now_s: float) -> None:
        """The watchdog calls this: apply deadlines, and send what is left in the outbox."""
        session, farewell_s = self._session, self._farewell_s
        if session is not None:
            session.tick(now_s)
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
        # The first three are how connections end in normal operation. The receiver counts the last.
        if error.code not in ("lost", "closed", "idle", "turned_away"):
            logger.warning("connection %s closed: %s", self._number, error.message)
        if isinstance(error, PeerError) and self._error is None:
            self._say_farewell()
        self._receiver.forget(self._number)
        # Another thread may be about to push: it must not send to a descriptor that is closed, and
        # then perhaps that of another connection.
        with self._outbox_lock:
            self._stream = None
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
        self._is_near = is_near(self._sock)
        tls = self._receiver.tls
        if tls is None:
            self._stream = PlainStream(self._sock, is_near=self._is_near)
            self._own(self._stream)
            return self._stream
        wrapped = wrap_tls(tls.context, self._sock, is_server=True)
        self._own(SocketOwner(wrapped))
        stream = tls_handshake(wrapped, self._config.handshake_timeout_s)
        self._stream = stream
        wrong = stream.wrong_peer(tls.region)
        self.party = stream.peer_names
        if wrong is None:
            self._receiver.authenticated(self._number)
        self._own(stream)
        if wrong is not None:
            self.push(encode_reason(FrameType.ERROR, "tls", wrong))
            raise PeerError("tls", wrong)
        return stream

    def _own(self, owner: SocketOwner) -> None:
        """Make `abort` act on this socket from now on. Raises the error of an earlier `abort`,
        which acted on the owner before, whose socket TLS has taken over.
        """
        self._owner = owner
        if self._error is not None:
            raise self._error

    def _serve(self, stream: Stream, session: ReceiverSession) -> None:
        """Receive once. Answers go out before the thread sleeps for bytes, and when they are due
        while bytes keep coming.
        """
        buffers = session.buffers()
        count = 0
        if session.has_answers and stream.wait_readable(self._patience_s(session)):
            count = stream.try_receive(buffers)
        if not count:
            session.flush_acks()
            self._push_outgoing(session)
            count = stream.receive(buffers, fill=session.in_body)
        # `received` may end a transfer, after which no view of its memory may be left.
        del buffers
        session.received(count, time.monotonic())
        if not self._keeps_place and session.established:
            self._keeps_place = self._receiver.keeps(self._number, session)
        if session.acks_due:
            session.flush_acks()
            self._push_outgoing(session)

    def _patience_s(self, session: ReceiverSession) -> float:
        """Seconds for which answers wait for more DATA. On a far path the rest of a frame takes
        longer than an acknowledgement may wait.
        """
        return MORE_S if self._is_near and session.may_wait else 0.0

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
