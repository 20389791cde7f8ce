"""The threads of one link: `num_connections` lanes, each a connection that is made anew when it is
lost.

A lane has a writer thread, which lives as long as the link, and a reader thread per connection.
Threads only move bytes; what to send and what answers mean is `LinkCore`'s, guarded by the link's
one lock. Listeners are called without that lock, from these threads or the sender's watchdog.
"""

from __future__ import annotations

import itertools
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from transport.backoff import Backoff
from transport.config import Endpoint, TransportConfig
from transport.errors import LinkError, LocalError, PeerError, TransportError, bare
from transport.frames import FrameType, encode_data_header, encode_open, encode_reason
from transport.handshake import Hello
from transport.interfaces import ByteSpace, OutgoingSpec, TransferListener, TransferProgress
from transport.link import Abort, Effect, LinkCore, Work
from transport.outgoing import Outgoing
from transport.protocol import (
    Acked,
    CancelAcked,
    Completed,
    Event,
    Failed,
    Opened,
    SenderSession,
    Welcomed,
)
from transport.sockets import (
    Buffer,
    PlainStream,
    SocketOwner,
    Stream,
    connect,
    prepare_to_send,
    resolve,
    tls_handshake,
    wrap_tls,
)

logger = logging.getLogger("prfaas.transport")

READ_BYTES: Final = 64 * 1024
# Nothing but a change of configuration or release helps against these, so transfers fail at once.
_HOPELESS = frozenset({"version", "tls"})


@dataclass(frozen=True, slots=True)
class _Party:
    space: ByteSpace
    listener: TransferListener


class Link:
    """All connections and transfers to one endpoint. Public methods are thread-safe."""

    def __init__(
        self,
        endpoint: Endpoint,
        config: TransportConfig,
        tls: ssl.SSLContext | None,
        *,
        instance: bytes,
        stir: Callable[[], None],
    ) -> None:
        """`stir` wakes the watchdog, which then calls `tick`."""
        self.endpoint = endpoint
        self.config = config
        self.tls = tls
        self.instance = instance
        self._stir = stir
        self.idle_since_s = time.monotonic()
        self._core = LinkCore(config, str(endpoint))
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._wanted = threading.Condition(self._lock)
        self._parties: dict[Outgoing, _Party] = {}
        self._lanes: dict[int, _Lane] = {}  # by the id of their present connection
        self._ids = itertools.count(1)
        self._warm_until_s = 0.0
        self._closing = False
        self._threads = [
            threading.Thread(
                target=_Lane(self).run, name=f"prfaas-send-{endpoint}-{index}", daemon=True
            )
            for index in range(config.num_connections)
        ]
        for thread in self._threads:
            thread.start()

    # Called by the sender and its transfers.

    def open(self, spec: OutgoingSpec, space: ByteSpace, listener: TransferListener) -> Outgoing:
        """Raises ValueError when the id is in use."""
        with self._lock:
            transfer = self._core.add(spec, space.nbytes, time.monotonic())
            self._parties[transfer] = _Party(space, listener)
            self._work.notify()
            self._wanted.notify_all()
        self._stir()
        return transfer

    def warm(self) -> None:
        with self._lock:
            self._warm_until_s = time.monotonic() + self.config.idle_timeout_s
            self._wanted.notify_all()
        self._stir()

    def ready(self, transfer: Outgoing, offset: int, length: int) -> None:
        with self._lock:
            gained = self._core.ready(transfer, offset, offset + length, time.monotonic())
            if gained:
                self._work.notify(1 + gained // self.config.frame_bytes)

    def cancel(self, transfer: Outgoing, reason: str) -> None:
        with self._lock:
            self._core.cancel(transfer, LocalError("cancelled", reason), time.monotonic())
            self._work.notify_all()
        self._stir()

    def progress(self, transfer: Outgoing) -> TransferProgress:
        with self._lock:
            return transfer.progress(self._core.num_connections)

    # Called by the watchdog.

    def tick(self, now_s: float) -> None:
        """Apply timeouts and report what ended."""
        with self._lock:
            for connection, lane in self._lanes.items():
                stream = lane.stream
                if stream is not None:
                    self._core.kernel_queue(connection, stream.unsent_bytes(), now_s)
                if lane.deadline_s is not None and now_s >= lane.deadline_s:
                    lane.abort(LinkError("handshake_timeout", "no answer to HELLO"))
            self._core.expire(now_s)
            if self._core.has_transfers or now_s < self._warm_until_s:
                self.idle_since_s = now_s
            effects = self._core.pop_effects()
        self.perform(effects)

    @property
    def is_active(self) -> bool:
        """Whether timeouts are running."""
        with self._lock:
            return self._core.has_transfers or len(self._lanes) > self._core.num_connections

    @property
    def has_transfers(self) -> bool:
        with self._lock:
            return self._core.has_transfers

    @property
    def num_connections(self) -> int:
        with self._lock:
            return self._core.num_connections

    def close(self) -> None:
        """Fail all transfers and end all threads; `join` waits for them."""
        with self._lock:
            self._closing = True
            self._core.broken(LocalError("closed", "the sender was closed"), time.monotonic())
            for lane in self._lanes.values():
                lane.abort(LocalError("closed", "the sender was closed"))
            self._work.notify_all()
            self._wanted.notify_all()

    def join(self, deadline_s: float) -> bool:
        """Wait for the threads; False when one is still alive at the deadline."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # Called by the lanes.

    def wait_wanted(self, delay_s: float) -> bool:
        """Wait until a connection is wanted, at least `delay_s`; False when the link closes."""
        earliest_s = time.monotonic() + delay_s
        with self._lock:
            while not self._closing:
                now_s = time.monotonic()
                if now_s < earliest_s:
                    self._wanted.wait(earliest_s - now_s)
                elif self._core.has_transfers or now_s < self._warm_until_s:
                    return True
                else:
                    self._wanted.wait()
            return False

    def begin(self, lane: _Lane) -> int:
        """A new connection id for this lane; raises LocalError("closed")."""
        with self._lock:
            if self._closing:
                raise LocalError("closed", "the sender was closed")
            connection = next(self._ids)
            self._lanes[connection] = lane
            return connection

    def established(self, connection: int, peer: Hello) -> None:
        with self._lock:
            self._core.connected(connection, peer, time.monotonic())
            effects = self._core.pop_effects()
        self.perform(effects)

    def next_work(self, lane: _Lane, done: Work | None, *, whole: bool = True) -> Work:
        """Give back `done`, wait for the next; raises what ended the lane's connection."""
        while True:
            with self._lock:
                now_s = time.monotonic()
                if done is not None:
                    self._core.sent(lane.connection, done, now_s, whole=whole)
                    done = None
                if lane.error is not None:
                    raise lane.error
                work = self._core.take(lane.connection, now_s)
                effects = self._core.pop_effects()
                if work is None and not effects:
                    self._work.wait()
            self.perform(effects)
            if work is not None:
                return work

    def unsent(self, lane: _Lane, work: Work) -> None:
        """The lane could not send `work` whole and does not read its bytes any more."""
        with self._lock:
            self._core.sent(lane.connection, work, time.monotonic(), whole=False)

    def unreadable(self, work: Work, error: Exception) -> None:
        """The ByteSpace raised: end the transfer at both ends."""
        logger.error("ByteSpace of %s raised", work.transfer.spec.transfer_id.hex(), exc_info=error)
        message = f"the sender's memory could not be read: {type(error).__name__}: {error}"
        with self._lock:
            self._core.cancel(work.transfer, LocalError("space", message), time.monotonic())

    def space(self, transfer: Outgoing) -> ByteSpace:
        return self._parties[transfer].space

    def ended(self, connection: int, error: TransportError, *, in_handshake: bool) -> None:
        """The lane's connection is closed and forgotten."""
        with self._lock:
            self._lanes.pop(connection, None)
            self._core.disconnected(connection, error)
            if in_handshake and error.code in _HOPELESS:
                self._core.broken(error, time.monotonic())
                self._warm_until_s = 0.0
            self._work.notify_all()
            effects = self._core.pop_effects()
        self.perform(effects)

    def handle(self, lane: _Lane, events: Iterable[Event]) -> None:
        """What the receiver said on this lane; raises PeerError when it broke the rules."""
        with self._lock:
            try:
                for event in events:
                    self._handle(lane.connection, event, time.monotonic())
            finally:
                effects = self._core.pop_effects()
        self.perform(effects)

    def fail_lane(self, lane: _Lane, error: TransportError) -> None:
        """The reader found the connection ended."""
        with self._lock:
            lane.abort(error)
            self._work.notify_all()

    def _handle(self, connection: int, event: Event, now_s: float) -> None:
        match event:
            case Acked(transfer_id, ranges):
                self._core.acked(connection, transfer_id, ranges, now_s)
            case Opened(transfer_id, ranges):
                self._core.opened(connection, transfer_id, ranges, now_s)
            case Completed(transfer_id):
                self._core.completed(connection, transfer_id, now_s)
            case Failed(transfer_id, error):
                self._core.refused(connection, transfer_id, error, now_s)
            case CancelAcked(transfer_id):
                self._core.cancel_acked(connection, transfer_id, now_s)
            case Welcomed():
                raise PeerError("protocol", "a second WELCOME")

    def perform(self, effects: list[Effect]) -> None:
        """Do what the core decided; called without the lock."""
        for effect in effects:
            if isinstance(effect, Abort):
                with self._lock:
                    lane = self._lanes.get(effect.connection)
                    if lane is not None:
                        lane.abort(effect.error)
                        self._work.notify_all()
            else:
                self._report(effect.transfer)

    def _report(self, transfer: Outgoing) -> None:
        transfer_id = transfer.spec.transfer_id
        party = self._parties.pop(transfer)
        try:
            if transfer.error is None:
                party.listener.on_complete(transfer_id)
            else:
                party.listener.on_failed(transfer_id, transfer.error)
        except Exception:
            logger.exception("listener raised for transfer %s", transfer_id.hex())


class _Lane:
    """One connection after the other."""

    def __init__(self, link: Link) -> None:
        self.connection = 0
        self.error: TransportError | None = None
        self.stream: SocketOwner | None = None
        self.deadline_s: float | None = None
        """When the handshake must be done; guarded by nothing, read by the watchdog."""
        self._link = link
        self._config = link.config
        self._backoff = Backoff(link.config.reconnect_first_s, link.config.reconnect_max_s)

    def abort(self, error: TransportError) -> None:
        """End the present connection from any thread; the first error counts."""
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
            except OSError as error:  # of a call that is not on a connected socket
                cause = LocalError("internal", f"cannot make a connection: {error.strerror}")
            except Exception as error:
                logger.exception("unexpected error on a connection to %s", self._link.endpoint)
                cause = LocalError("internal", f"{type(error).__name__}: {error}")
            self._finish(cause, in_handshake=established_s is None)
            lived_s = time.monotonic() - established_s if established_s is not None else 0.0
            delay_s = self._backoff.after(lived_s)

    def _finish(self, cause: TransportError, *, in_handshake: bool) -> None:
        self.deadline_s = None
        owner, self.stream = self.stream, None
        if owner is not None:
            owner.close()
        if cause.code != "closed":
            logger.info("connection to %s ended: %s", self._link.endpoint, cause.message)
        self._link.ended(self.connection, cause, in_handshake=in_handshake)

    def _establish(self, session: SenderSession) -> Stream:
        family, address = resolve(self._link.endpoint)
        sock = socket.socket(family, socket.SOCK_STREAM)
        plain = PlainStream(sock)
        self._own(plain)
        prepare_to_send(sock, self._config, address)
        connect(sock, address, self._config.connect_timeout_s)
        stream: Stream = plain
        if self._link.tls is not None:
            stream = self._establish_tls(sock, self._link.tls)
        self.deadline_s = time.monotonic() + self._config.handshake_timeout_s
        stream.send([session.hello()])
        events = self._answer_to_hello(stream, session)
        if len(events) > 1 or not isinstance(events[0], Welcomed):
            raise PeerError("protocol", "the receiver spoke before it was asked")
        self.deadline_s = None
        self._link.established(self.connection, events[0].peer)
        return stream

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

    def _establish_tls(self, sock: socket.socket, context: ssl.SSLContext) -> Stream:
        assert self._config.tls is not None
        wrapped = wrap_tls(context, sock, server_name=self._config.tls.server_name)
        self._own(SocketOwner(wrapped))
        stream = tls_handshake(wrapped, self._config.handshake_timeout_s)
        self._own(stream)
        return stream

    def _own(self, owner: SocketOwner) -> None:
        """From now on `abort` acts on this socket; raises if it was called before."""
        self.stream = owner
        if self.error is not None:
            raise self.error

    def _serve(self, stream: Stream, session: SenderSession) -> None:
        """Send until the connection ends; always raises."""
        reader = threading.Thread(
            target=self._read,
            args=(stream, session),
            name=f"prfaas-acks-{self._link.endpoint}",
            daemon=True,
        )
        reader.start()
        try:
            work = self._link.next_work(self, None)
            while True:
                whole = self._send(stream, work)
                work = self._link.next_work(self, work, whole=whole)
        finally:
            stream.abort()
            reader.join()

    def _send(self, stream: Stream, work: Work) -> bool:
        """Send one piece of work; False when its bytes could not be read. When it raises, and
        after, nobody reads them any more.
        """
        buffers = self._control(work)
        try:
            if work.data is not None:
                try:
                    buffers.extend(self._data(work.transfer, *work.data))
                except Exception as error:
                    self._link.unreadable(work, error)
                    return False
            if buffers:
                stream.send(buffers)
            return True
        except BaseException:
            buffers.clear()
            self._link.unsent(self, work)
            raise

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
                )
            )
        if work.cancels:
            error = work.transfer.error
            reason = error.message if error is not None else ""
            buffers.append(encode_reason(FrameType.CANCEL, "cancelled", reason, spec.transfer_id))
        return buffers

    def _data(self, transfer: Outgoing, start: int, end: int) -> list[Buffer]:
        views = self._link.space(transfer).views(start, end - start)
        header = encode_data_header(transfer.spec.transfer_id, start, views)
        return [header, *views]

    def _read(self, stream: Stream, session: SenderSession) -> None:
        memory = memoryview(bytearray(READ_BYTES))
        try:
            while True:
                count = stream.receive([memory], fill=False)
                self._link.handle(self, session.feed(memory[:count]))
        except TransportError as error:
            self._link.fail_lane(self, bare(error))
        except Exception as error:
            logger.exception("unexpected error on a connection to %s", self._link.endpoint)
            self._link.fail_lane(self, LocalError("internal", f"{type(error).__name__}: {error}"))
