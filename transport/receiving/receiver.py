"""Receives transfers with a listening socket and one thread per connection. The rules are in
`Reception` and `ReceiverSession`, those of who may stay in `Places`, the threads in
`IncomingConnection`.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from transport.addresses import listen
from transport.config import TransportConfig
from transport.endpoint import Endpoint, network_of
from transport.errors import LocalError, TransportError
from transport.interfaces import LandingRegistry, TransferProgress
from transport.receiving.connection import NO_PLACE, IncomingConnection
from transport.receiving.places import Places
from transport.receiving.reception import Reception
from transport.rotating import Rotating
from transport.tls import RegionTls, server_tls
from transport.wire.frames import FrameType, encode_reason
from transport.wire.receiver_session import ReceiverSession

logger = logging.getLogger("prfaas.transport")

REPORT_S = 60.0
"""Seconds between two lines of the log about connections that were turned away."""


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
        self._left = threading.Condition(self._lock)
        self._connections: dict[int, IncomingConnection] = {}
        """Those that have a place, at most max_connections."""
        self._ending: list[threading.Thread] = []
        """Threads of connections that have given up their place, until they have ended."""
        # A sender has at most max_link_connections, and as many again while it replaces them.
        share = 2 * max(config.num_connections, config.max_link_connections)
        self._places = Places(config.max_connections, share=share, is_idle=self._is_idle)
        self._num_reported = 0
        self._reported_s = -REPORT_S
        self._ids = itertools.count(1)
        self._listeners: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._stirred = threading.Event()
        self._closing = False

    def start(self) -> None:
        """Listen at each address of the host; raises LocalError("bind")."""
        try:
            self._listeners = listen(self._bind)
        except OSError as error:
            message = f"cannot listen on {self._bind}: {error.strerror}"
            raise LocalError("bind", message) from error
        for listener in self._listeners:
            self._run("accept", self._accept, listener)
        self._run("watchdog", self._watch)

    def _run(self, name: str, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(
            target=target, args=args, name=f"prfaas-receive-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    @property
    def endpoint(self) -> Endpoint:
        """The address with the real port. Raises RuntimeError before `start` and after `close`."""
        if not self._listeners:
            raise RuntimeError("the receiver is not listening")
        return Endpoint(self._bind.host, self._listeners[0].getsockname()[1])

    @property
    def is_listening(self) -> bool:
        """Whether new connections are taken."""
        return not self._closing and all(thread.is_alive() for thread in self._threads)

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._connections)

    @property
    def num_turned_away(self) -> int:
        """Connections that were closed or refused because there were too many."""
        with self._lock:
            return self._places.num_turned_away

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
            self._left.notify_all()
            connections = list(self._connections.values())
            threads = [
                *self._threads,
                *(connection.thread for connection in connections),
                *self._ending,
            ]
        for listener in self._listeners:
            # On Linux only shutdown wakes a thread that is blocked in accept; close does not.
            with suppress(OSError):  # it may not be listening any more
                listener.shutdown(socket.SHUT_RDWR)
        self._stirred.set()
        # Before the connections are closed, so that senders are told. A transfer that opens
        # meanwhile is caught by the second call below.
        self._reception.close(time.monotonic())
        for connection in connections:
            connection.abort(LocalError("closed", "the receiver was closed"))
        deadline_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                logger.warning("thread %s did not end within %g s", thread.name, timeout_s)
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        self._reception.close(time.monotonic())

    # The interface `Connections`, which `Reception` calls.

    def abort(self, connections: Collection[int], error: TransportError) -> None:
        for connection in self._find(connections):
            connection.abort(error)

    def tell(self, connections: Collection[int], frame: bytes) -> None:
        for connection in self._find(connections):
            connection.push(frame)

    def _find(self, connections: Collection[int]) -> list[IncomingConnection]:
        with self._lock:
            return [
                self._connections[number] for number in connections if number in self._connections
            ]

    # Threads.

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, address = listener.accept()
            except OSError as error:
                if self._closing:
                    return
                logger.error("cannot accept connections: %s", error.strerror or error)
                # Mostly EMFILE: accept fails at once until a descriptor is closed elsewhere.
                time.sleep(0.1)
                continue
            self._admit(sock, network_of(address[0]))

    def _admit(self, sock: socket.socket, network: str) -> None:
        number = next(self._ids)
        with self._lock:
            loser = self._places.admit(number, network, time.monotonic())
        if loser == number:
            self._refuse(sock)
            return
        self._turn_away(loser)
        with self._lock:
            # The loser's thread holds memory and a descriptor until it ends, in a moment.
            self._left.wait_for(
                lambda: self._closing or len(self._connections) < self._config.max_connections
            )
            if not self._closing:
                connection = IncomingConnection(number, sock, self, network)
                self._connections[number] = connection
                try:
                    connection.thread.start()
                except RuntimeError as error:  # the process has no room for another thread
                    logger.error("cannot serve a connection: %s", error)
                    del self._connections[number]
                else:
                    self._stirred.set()
                    return
            self._places.leave(number)
        self._refuse(sock)

    def _refuse(self, sock: socket.socket) -> None:
        # With TLS the sender expects a handshake first and could not read the ERROR.
        if not self._closing and self._tls is None:
            try:
                sock.send(encode_reason(FrameType.ERROR, "busy", NO_PLACE), socket.MSG_DONTWAIT)
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the peer has hung up already
        sock.close()

    def _is_idle(self, number: int) -> bool:
        connection = self._connections.get(number)
        return connection is not None and connection.is_idle

    def _turn_away(self, number: int | None) -> None:
        for connection in self._find([] if number is None else [number]):
            connection.turn_away()

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

    def _apply_timeouts(self, connections: list[IncomingConnection], now_s: float) -> None:
        for connection in connections:
            connection.tick(now_s)
        self._reception.expire(now_s)
        self._report(now_s)

    def _report(self, now_s: float) -> None:
        with self._lock:
            number, party = self._places.num_turned_away, self._places.turned_away_party
        if number == self._num_reported or now_s - self._reported_s < REPORT_S:
            return
        logger.warning(
            "too many connections: turned away %d, the last from %s",
            number - self._num_reported,
            party,
        )
        self._num_reported, self._reported_s = number, now_s

    # What an `IncomingConnection` needs.

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

    def authenticated(self, number: int) -> None:
        """The connection's other end is an agent of the region. Turns away whichever connection has
        to go then, perhaps this one.
        """
        with self._lock:
            loser = self._places.authenticated(number, time.monotonic())
        self._turn_away(loser)

    def keeps(self, number: int, session: ReceiverSession) -> bool:
        """Whether the connection, which has been greeted, keeps its place from now on."""
        with self._lock:
            connection = self._connections[number]
            return self._places.greeted(
                number,
                session.peer_instance,
                has_opened=session.has_opened,
                party=connection.party,
            )

    def forget(self, number: int) -> None:
        """The connection gives up its place. Its own thread calls this, shortly before it ends."""
        with self._lock:
            connection = self._connections.pop(number)
            self._places.leave(number)
            self._ending = [thread for thread in self._ending if thread.is_alive()]
            self._ending.append(connection.thread)
            self._left.notify_all()


__all__ = ["Receiver"]
