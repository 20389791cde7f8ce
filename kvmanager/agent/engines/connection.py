"""Keeps one connection of an engine to its node agent for as long as the engine lives.

It reconnects for ever. A missing, dying or restarting agent is a normal state, in which every send
returns False. `send` does not block. If the kernel takes the frame, it goes straight into the
socket from the calling thread; otherwise the engine's busy main thread would wait for a thread
switch at each layer. If not, the frame goes into a bounded buffer that the connection's own thread
drains. A full buffer means that the agent is stuck, and counts as a lost connection.

It uses threads, no asyncio and no torch, and is safe inside the engine. It does not know what the
messages mean.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Final, Protocol

from kvmanager.agent.engines.protocol import (
    PROTOCOL_VERSIONS,
    AgentMessage,
    CacheFound,
    CacheSlots,
    EmbeddingFound,
    EmbeddingRoom,
    FailureNotice,
    FrameDecoder,
    Hello,
    HelloRefused,
    Landed,
    OutboxOpened,
    ProtocolError,
    Welcome,
    decode_agent_message,
    encode_frame,
)
from kvmanager.arena import Arena, ArenaError
from kvmanager.private_files import check_peer
from transport.backoff import Backoff
from transport.versions import NoCommonVersion, Versions

logger = logging.getLogger("prfaas.kvmanager.engine_client")

HANDSHAKE_TIMEOUT_S: Final = 5.0
RECONNECT_FIRST_S: Final = 0.05
RECONNECT_MAX_S: Final = 2.0
MAX_UNSENT_BYTES: Final = 8 << 20
"""Most bytes that the agent may leave unread before the connection counts as lost."""

_RECV_BYTES: Final = 64 << 10


# The connector implements these; it imports this module, so its classes cannot be named here.


class ConnectionEvents(Protocol):
    """The calls that both sides of an engine get, from the client's thread, one at a time.

    A call that raises is logged and otherwise ignored. A slow call delays only later ones.
    """

    def on_connected(self, welcome: Welcome, arena: Arena) -> None:
        """Sends work from now on. `arena` is mapped. If the same agent is still running, it is the
        same object as on the connection before.
        """

    def on_disconnected(self) -> None:
        """Every watch, outbox and cache handle of this connection is lost, also unanswered ones.

        The engine must stop writing into the arena, and stop reading landings and cached blocks of
        this epoch.
        """

    def on_failed(self, transfer_id: bytes, reason: str, attempt: int) -> None:
        """A watched landing failed, or an outbox that this engine fills or might have to fill.

        `attempt` is the opening of the outbox; 0 for a landing. A worker answers a failed outbox
        with `release` of that attempt, and does not write into it any more.
        """


class WorkerEvents(ConnectionEvents, Protocol):
    """The calls that a worker gets. It has the arena mapped."""

    def on_agent_gone(self) -> None:
        """The agent is gone. Unmap its arena: its memory stays in use as long as an engine has it
        mapped, and the next agent of this host may lack it.
        """


class SchedulerEvents(ConnectionEvents, Protocol):
    """The calls that a scheduler gets. It watches landings and asks the prefix cache."""

    def on_outbox_opened(self, opened: OutboxOpened) -> None:
        """A request may come that fills this outbox."""

    def on_landed(self, landed: Landed) -> None:
        """The landing is complete, and this engine owns it until `release`."""

    def on_cache_found(self, found: CacheFound) -> None:
        """The answer to `cache_find`. The slots that it names stay in place until `cache_free`."""

    def on_cache_slots(self, slots: CacheSlots) -> None:
        """The answer to `cache_reserve`: memory for the workers to fill, or none."""


class EmbeddingEvents(Protocol):
    """The calls that a process gets which puts or finds embeddings. One that puts them has
    `on_embedding_room` as well, one that finds them `on_embedding_found`; both get the message.
    """

    def on_disconnected(self) -> None:
        """The agent is away: it answers no open question and holds nothing for this process."""


class _Lost(Exception):
    """The connection must be closed; the message says why."""


class AgentConnection:
    """Keeps one connection to the agent at `socket_path`."""

    def __init__(self, socket_path: str | Path, hello: Hello) -> None:
        self.arena: Arena | None = None
        """The agent's arena while connected. A reference to it keeps the memory mapped."""
        self._path = str(socket_path)
        self._hello = hello
        self._events: WorkerEvents | SchedulerEvents | EmbeddingEvents | None = None
        """Who is told, from `start` on."""
        self._lock = threading.Lock()
        self._mapped: Arena | None = None  # of the latest connection, kept between connections
        self._socket: socket.socket | None = None  # set while sends are possible
        self._unsent = bytearray()
        self._overflowed = False
        self._closing = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Closed with this object and not at the thread's end, after which a late `send` could
        # write into a descriptor that the kernel has given to somebody else.
        weakref.finalize(self, os.close, self._wake_fd)
        self._thread: threading.Thread | None = None
        self._last_trouble = ""

    @property
    def connected(self) -> bool:
        return self._socket is not None

    def start(self, events: WorkerEvents | SchedulerEvents | EmbeddingEvents) -> None:
        """Begin to connect in the background; returns at once. Further calls do nothing.

        Exceptions of `events` do not end the connection.
        """
        with self._lock:
            if self._thread is not None or self._closing:
                return
            self._events = events
            self._thread = threading.Thread(
                target=self._run, name="prfaas-engine-client", daemon=True
            )
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Disconnect for good and wait for the thread to end. Idempotent; allowed in a callback."""
        with self._lock:
            self._closing = True
            thread = self._thread
        self._wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def send(self, frame: bytes) -> bool:
        """Hand the frame to the kernel or to the buffer. Returns whether that worked. Never
        blocks.
        """
        with self._lock:
            if self._socket is None or self._overflowed:
                return False
            # Frames must stay in order, so a frame goes around the buffer only when it is empty.
            if not self._unsent:
                try:
                    sent = self._socket.send(frame)
                except BlockingIOError:
                    sent = 0
                except OSError:  # the client's thread sees the same and cleans up
                    return False
                if sent == len(frame):
                    return True
                frame = frame[sent:]
            elif len(self._unsent) + len(frame) > MAX_UNSENT_BYTES:
                self._overflowed = True
                self._wake()
                return False
            self._unsent += frame
        self._wake()
        return True

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)

    # Below: the client's own thread.

    def _run(self) -> None:
        backoff = Backoff(RECONNECT_FIRST_S, RECONNECT_MAX_S)
        may_live_on = False  # whether the agent of the last connection may still be running
        while not self._closing:
            try:
                was_welcome = self._serve_connection()
            except Exception:
                logger.exception("unexpected failure of the connection to %s", self._path)
                was_welcome = False
            if may_live_on and not was_welcome:
                # A refused or failed new connection shows that the old agent is gone; a lost
                # connection does not.
                self._mapped = None
                self._call("on_agent_gone")
            may_live_on = was_welcome
            if was_welcome:
                backoff.reset()
            deadline_s = time.monotonic() + backoff.after(0.0)
            while not self._closing and time.monotonic() < deadline_s:
                self._wait(None, deadline_s - time.monotonic())

    def _serve_connection(self) -> bool:
        """Serve one connection until it is lost. Returns whether the agent had sent Welcome."""
        connected = False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.setblocking(False)
            connection.connect(self._path)
            check_peer(connection)
            decoder = FrameDecoder()
            early = self._shake_hands(connection, decoder)
            connected = True
            self._deliver(early)
            while not self._closing:
                self._deliver(self._pump(connection, decoder, timeout_s=None))
        except (OSError, ProtocolError, ArenaError, NoCommonVersion, _Lost) as error:
            self._tell_trouble(f"{type(error).__name__.strip('_')}: {error}")
        finally:
            with self._lock:
                self._socket = None
                self.arena = None
                self._unsent.clear()
                self._overflowed = False
            connection.close()
            if connected:
                self._call("on_disconnected")
        return connected

    def _shake_hands(self, connection: socket.socket, decoder: FrameDecoder) -> list[AgentMessage]:
        """Send Hello, await Welcome, map the arena and tell the engine. Returns the messages that
        came right behind Welcome.
        """
        with self._lock:
            self._unsent[:] = encode_frame(self._hello)
        deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
        messages: list[AgentMessage] = []
        while not messages:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise _Lost("the agent did not answer Hello")
            messages = self._pump(connection, decoder, timeout_s=left_s)
        welcome = messages[0]
        if isinstance(welcome, HelloRefused):
            raise _Lost(f"the agent refuses this engine: {welcome.reason}")
        if not isinstance(welcome, Welcome):
            raise _Lost(f"the agent began with {type(welcome).__name__}")
        PROTOCOL_VERSIONS.common(Versions(welcome.version, welcome.version), "agent")
        arena = self._mapped = self._map(welcome)
        with self._lock:
            self._socket = connection
            self.arena = arena
        self._last_trouble = ""
        logger.info("connected to the node agent at %s, epoch %s", self._path, arena.epoch)
        self._call("on_connected", welcome, arena)
        return messages[1:]

    def _map(self, welcome: Welcome) -> Arena:
        """Map the arena of this Welcome. Raises ArenaError.

        The mapping of the connection before is used again if the agent is the same and has not
        restarted. A worker maps all of its pages (`ArenaAccess.map_pages`), which takes seconds.
        """
        path, nbytes = Path(welcome.arena_path), welcome.arena_bytes
        known = self._mapped
        if (
            known is not None
            and (known.path, known.epoch) == (path, welcome.arena_epoch)
            and (known.nbytes, known.block_bytes) == (nbytes, welcome.block_bytes)
        ):
            return known
        return Arena.attach(path, nbytes, welcome.block_bytes, epoch=welcome.arena_epoch)

    def _pump(
        self, connection: socket.socket, decoder: FrameDecoder, timeout_s: float | None
    ) -> list[AgentMessage]:
        """Wait for the socket, send the buffer, and read messages. Raises OSError, _Lost."""
        readable = self._wait(connection, timeout_s)
        if self._closing:
            raise _Lost("closed by this engine")
        with self._lock:
            if self._overflowed:
                raise _Lost(f"the agent left {len(self._unsent)} bytes unread")
            if self._unsent:
                with contextlib.suppress(BlockingIOError):
                    del self._unsent[: connection.send(self._unsent)]
        if not readable:
            return []
        try:
            data = connection.recv(_RECV_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise _Lost("the agent closed the connection")
        return [decode_agent_message(payload) for payload in decoder.feed(data)]

    def _wait(self, connection: socket.socket | None, timeout_s: float | None) -> bool:
        """Sleep until somebody wakes this thread, the time is over, or the connection is usable.
        Returns whether it can be read.
        """
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        if connection is not None:
            with self._lock:
                unsent = bool(self._unsent)
            poller.register(connection, select.POLLIN | (select.POLLOUT if unsent else 0))
        events = dict(poller.poll(None if timeout_s is None else max(0, timeout_s) * 1000))
        if events.get(self._wake_fd):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        return connection is not None and bool(events.get(connection.fileno(), 0) & ~select.POLLOUT)

    def _deliver(self, messages: list[AgentMessage]) -> None:
        for message in messages:
            match message:
                case OutboxOpened():
                    self._call("on_outbox_opened", message)
                case Landed():
                    self._call("on_landed", message)
                case FailureNotice(transfer_id, reason, attempt):
                    self._call("on_failed", transfer_id, reason, attempt)
                case CacheFound():
                    self._call("on_cache_found", message)
                case CacheSlots():
                    self._call("on_cache_slots", message)
                case EmbeddingRoom():
                    self._call("on_embedding_room", message)
                case EmbeddingFound():
                    self._call("on_embedding_found", message)
                case HelloRefused(reason):
                    raise _Lost(f"the agent refused what we sent: {reason}")
                case Welcome():
                    raise _Lost("the agent said Welcome twice")

    def _call(self, event: str, *arguments: object) -> None:
        # Nobody has a handler for everything: a worker has none for landings, for example.
        handler = getattr(self._events, event, None)
        if handler is None:
            return
        try:
            handler(*arguments)
        except Exception:
            logger.exception("%s of the engine raised", event)

    def _tell_trouble(self, trouble: str) -> None:
        """Warn once for each new reason, since the same one repeats for as long as the agent is
        down.
        """
        level = logging.DEBUG if trouble == self._last_trouble or self._closing else logging.WARNING
        self._last_trouble = trouble
        logger.log(level, "no connection to the node agent at %s: %s", self._path, trouble)
