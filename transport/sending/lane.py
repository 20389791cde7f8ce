"""A lane: the threads for one connection of a link, which is made again whenever it is lost.

The writer thread lives as long as the link, a reader thread as long as the connection. They only
move bytes. `LinkCore`, behind the lock of `SenderLink`, decides what to send and what answers mean.
While the writer thread waits for work, another thread may borrow its lane for a small piece.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from transport.addresses import SockAddress, connect, leave_from, resolve
from transport.backoff import Backoff
from transport.codec.coder import RAW_CHUNK
from transport.config import TlsFiles
from transport.errors import LinkError, LocalError, PeerError, TransportError, bare, release_frames
from transport.receiving.incoming import RAW_LENGTH
from transport.rotating import Rotating
from transport.sending.link_work import Work
from transport.sending.outgoing import RAW_CODED, Coded
from transport.sending.paths import RETURN_S, PathChoice
from transport.sending.waiting_lanes import WaitingLane
from transport.socket_options import prepare_to_send, suit_to_distance
from transport.sockets import (
    Buffer,
    PlainStream,
    SocketOwner,
    Stream,
)
from transport.tls import RegionTls, tls_handshake, wrap_tls
from transport.wire.digest import digest_of
from transport.wire.frames import (
    FrameType,
    encode_data_header,
    encode_frame,
    encode_open,
    encode_reason,
)
from transport.wire.handshake import Feature
from transport.wire.sender_session import Event, SenderSession, Welcomed

if TYPE_CHECKING:
    from transport.sending.sender_link import SenderLink

logger = logging.getLogger("prfaas.transport")

READ_BYTES: Final = 64 * 1024
MAX_TLS_BYTES = 256 * 1024**3
"""A TLS connection is renewed after this many bytes: an AES-GCM key may encrypt at most 2^24.5 full
records (RFC 8446, 5.5), and OpenSSL does not update it by itself.
"""


@dataclass(slots=True)
class _Sending:
    """A piece of work and the bytes of it that are still to be sent. `coded` is None when the bytes
    of its transfer could not be read.
    """

    work: Work
    buffers: list[Buffer]
    coded: Coded | None


class Lane(WaitingLane):
    """Keeps one connection at a time, and makes a new one when it is lost."""

    def __init__(self, link: SenderLink, index: int = 0) -> None:
        super().__init__(link.lock)
        self.connection = 0
        self.began_s = 0.0
        """When the present connection was begun. The link's lock guards it."""
        self.error: TransportError | None = None
        self.address: SockAddress | None = None
        """The one that the present connection leads to."""
        self.stream: SocketOwner | None = None
        self.deadline_s: float | None = None
        """The time by which the handshake must be done. The watchdog reads it without a lock."""
        self._link = link
        self._serving: Stream | None = None  # once the handshake is done
        self._serving_since_s = 0.0
        self._num_bytes = 0  # of DATA bodies that the present connection has carried
        self._left_over: _Sending | None = None  # by a thread that borrowed the lane
        self._config = link.config
        self._with_sum = True
        self._peer_features = 0
        self._choice = PathChoice(link.paths, index)
        self._backoff = Backoff(link.config.reconnect_first_s, link.config.reconnect_max_s)

    def abort(self, error: TransportError) -> None:
        """End the present connection, from any thread. The first error is the one reported."""
        if self.error is None:
            self.error = error
        stream = self.stream
        if stream is not None:
            stream.abort()

    def run(self) -> None:
        """Keep a connection while one is wanted, until the link closes."""
        delay_s = 0.0
        while self._link.wait_wanted(delay_s):
            established_s: float | None = None
            self.error = None
            try:
                self.connection = self._link.begin(self)
                session = SenderSession(self._config, self._link.instance)
                stream = self._establish(session)
                established_s = time.monotonic()
                self._serve(stream, session)
            except TransportError as error:
                cause = self.error or bare(error)
            except OSError as error:  # from socket() or an option; streams raise TransportError
                cause = LocalError("internal", f"cannot make a connection: {error.strerror}")
            except Exception as error:
                logger.exception("unexpected error on a connection to %s", self._link.endpoint)
                cause = LocalError("internal", f"{type(error).__name__}: {error}")
            self._finish(cause, in_handshake=established_s is None)
            if established_s is None:
                self._choice.failed()
                lived_s = 0.0
            else:
                self._choice.lost()
                lived_s = time.monotonic() - established_s
            # Another path is tried at once; they all wait together once each has failed.
            delay_s = 0.0 if self._choice.is_away else self._backoff.after(lived_s)

    def _finish(self, cause: TransportError, *, in_handshake: bool) -> None:
        self.deadline_s = None
        owner, self.stream = self.stream, None
        if owner is not None:
            owner.close()
        if cause.code != "closed":
            logger.info("connection to %s ended: %s", self._link.endpoint, cause.message)
        self._link.ended(self.connection, cause, in_handshake=in_handshake)

    def _establish(self, session: SenderSession) -> Stream:
        sock = self._connected()
        plain = PlainStream(sock)
        self._own(plain)
        suit_to_distance(sock, self._config)
        stream: Stream = plain
        if self._link.tls is not None:
            stream = self._establish_tls(sock, self._link.tls)
        self.deadline_s = time.monotonic() + self._config.handshake_timeout_s
        stream.send([session.hello()])
        events = self._answer_to_hello(stream, session)
        if len(events) > 1 or not isinstance(events[0], Welcomed):
            raise PeerError("protocol", "the receiver spoke before it was asked")
        self.deadline_s = None
        peer = events[0].peer
        self._peer_features = peer.features
        self._with_sum = self._config.checksum or not peer.features & Feature.NO_SUM
        self._link.established(self.connection, peer)
        return stream

    def _connected(self) -> socket.socket:
        """A connection to an address of the present path, first the one that was good before."""
        path, known = self._choice.path, self._link.addresses
        self.address = None

        def prepare(sock: socket.socket) -> None:
            prepare_to_send(sock, self._config)
            if path.source:
                leave_from(sock, path.source)

        try:
            found = resolve(path.to, known[path.to][0] if path.to in known else None)
            known[path.to] = [info[4] for info in found]
            # Somebody else may answer at an address: the others' turns come after failures.
            turn = self._choice.num_rounds % len(found)
            found = [*found[turn:], *found[:turn]]
            timeout_s, is_over = self._config.connect_timeout_s, lambda: self.error is not None
            sock, self.address = connect(found, timeout_s, prepare, is_over)
        except OSError as error:
            reason = f"cannot connect: {error.strerror or error}"
            raise LinkError("connect", reason) from error
        return sock

    def _answer_to_hello(self, stream: Stream, session: SenderSession) -> list[Event]:
        memory = memoryview(bytearray(READ_BYTES))
        events: list[Event] = []
        try:
            while not events:
                events = session.feed(memory[: stream.receive([memory], fill=False)])
        except LinkError as error:
            hint = "" if self._link.tls else " (does it expect TLS?)"
            message = f"the receiver did not answer HELLO{hint}: {error.message}"
            raise LinkError(error.code, message) from error
        return events

    def _establish_tls(
        self, sock: socket.socket, contexts: Rotating[TlsFiles, RegionTls]
    ) -> Stream:
        assert self._config.tls is not None
        tls = contexts.current(time.monotonic())
        # Each agent of the region has the role. The host tells that it is the one that is meant.
        host = self._config.tls.server_name or self._link.host
        wrapped = wrap_tls(tls.context, sock, server_name=host)
        self._own(SocketOwner(wrapped))
        stream = tls_handshake(wrapped, self._config.handshake_timeout_s)
        self._own(stream)
        wrong = stream.wrong_peer(tls.region)
        if wrong is not None:
            raise PeerError("tls", wrong)
        return stream

    def _own(self, owner: SocketOwner) -> None:
        """Make `abort` act on this socket from now on. Raises the error of an earlier `abort`."""
        self.stream = owner
        if self.error is not None:
            raise self.error

    def _serve(self, stream: Stream, session: SenderSession) -> None:
        """Send until the connection ends. Always raises."""
        reader = threading.Thread(
            target=self._read,
            args=(stream, session),
            name=f"prfaas-acks-{self._link.endpoint}",
            daemon=True,
        )
        reader.start()
        self._num_bytes, self._serving_since_s = 0, time.monotonic()
        self._serving = stream
        try:
            work = self._link.next_work(self, None)
            while True:
                coded = self._send(stream, work)
                if coded is None:
                    work = self._link.next_work(self, work, whole=False)
                elif (end := self._renewal()) is not None:
                    self._link.sent(self, work, coded=coded)
                    raise end
                else:
                    work = self._link.next_work(self, work, coded=coded)
        finally:
            self._serving = None
            stream.abort()
            reader.join()

    def _renewal(self) -> LinkError | None:
        """Why the connection should be made again after what was just sent."""
        if self._num_bytes > MAX_TLS_BYTES and self._link.tls is not None:
            return LinkError("renewed", "the TLS connection has carried enough bytes")
        if self._choice.is_away and time.monotonic() - self._serving_since_s > RETURN_S:
            return LinkError("renewed", "the connection's own path is tried again")
        return None

    @property
    def left_over(self) -> Work | None:
        """The work that a thread which borrowed the lane did not finish."""
        return self._left_over.work if self._left_over is not None else None

    def send_now(self, work: Work) -> Coded | None:
        """Send what the kernel takes at once, not coded; what does not fit is `left_over`
        afterwards. Only for a thread that has borrowed the lane. The result is that of `_send`.
        When the connection ends, `error` is set. Without `left_over`, nobody reads the bytes any
        more.
        """
        assert self._serving is not None
        sending = self._encode(work, may_code=False)
        try:
            sending.buffers = self._serving.send_some(sending.buffers)
        except TransportError as error:
            sending.buffers.clear()
            self.abort(bare(error))
            return None
        if sending.buffers:
            self._left_over = sending
            return sending.coded
        self._note_sent(sending)
        if (end := self._renewal()) is not None:
            self.abort(end)
        return sending.coded

    def _send(self, stream: Stream, work: Work) -> Coded | None:
        """Send one piece of work. None: its bytes could not be read. When this has returned or
        raised, the lane does not read the bytes any more.
        """
        sending, self._left_over = self._left_over, None
        try:
            if sending is None:
                sending = self._encode(work)
            if sending.buffers:
                stream.send(sending.buffers)
        except BaseException as error:
            if sending is not None:
                sending.buffers.clear()
            release_frames(error)
            self._link.sent(self, work, whole=False)
            raise
        self._note_sent(sending)
        return sending.coded

    def _encode(self, work: Work, *, may_code: bool = True) -> _Sending:
        """The frames of a piece of work."""
        control = self._control(work)
        buffers = list(control)
        coded: Coded | None = RAW_CODED
        try:
            if work.digests:
                digest = digest_of(self._link.space(work.transfer))
                transfer_id = work.transfer.spec.transfer_id
                buffers.append(encode_frame(FrameType.DIGEST, transfer_id, digest))
            if work.data is not None:
                coded = self._add_data(buffers, work, *work.data, may_code=may_code)
        except Exception as error:
            self._link.unreadable(work, error)
            # The core counts these frames as sent, and later DATA needs the OPEN.
            buffers, coded = control, None
        return _Sending(work, buffers, coded)

    def _note_sent(self, sending: _Sending) -> None:
        data, coded = sending.work.data, sending.coded
        if data is not None and coded is not None:
            self._num_bytes += coded.wire_bytes
            self._link.coder.sent(coded.codec, data[1] - data[0], coded.wire_bytes)

    def _control(self, work: Work) -> list[Buffer]:
        spec = work.transfer.spec
        buffers: list[Buffer] = []
        if work.opens:
            buffers.append(
                encode_open(
                    spec.transfer_id,
                    token=spec.token,
                    fingerprint=spec.fingerprint,
                    nbytes=work.transfer.nbytes,
                    digest=spec.digest,
                )
            )
        if work.cancels:
            error = work.transfer.error
            reason = error.message if error is not None else ""
            buffers.append(encode_reason(FrameType.CANCEL, "cancelled", reason, spec.transfer_id))
        return buffers

    def _add_data(
        self, buffers: list[Buffer], work: Work, start: int, end: int, *, may_code: bool
    ) -> Coded:
        spec, raw_bytes = work.transfer.spec, end - start
        views = self._link.space(work.transfer).views(start, raw_bytes)
        chunk = RAW_CHUNK
        if may_code:
            chunk = self._link.coder.encode(views, start, spec.elements, self._peer_features)
        body: list[Buffer] = list(views)
        if chunk.payload is not None:
            body = [RAW_LENGTH.pack(raw_bytes), chunk.payload]
        header = encode_data_header(
            spec.transfer_id,
            start,
            body,
            codec=chunk.codec,
            with_sum=self._with_sum,
            more=work.more,
        )
        buffers += [header, *body]
        return Coded(sum(map(len, body)), chunk.codec)

    def _read(self, stream: Stream, session: SenderSession) -> None:
        memory = memoryview(bytearray(READ_BYTES))
        try:
            while True:
                count = stream.receive([memory], fill=False)
                events: list[Event] = []
                try:
                    session.feed(memory[:count], events)
                finally:
                    self._link.handle(self, events)
        except TransportError as error:
            self._link.fail_lane(self, bare(error))
        except Exception as error:
            logger.exception("unexpected error on a connection to %s", self._link.endpoint)
            self._link.fail_lane(self, LocalError("internal", f"{type(error).__name__}: {error}"))
