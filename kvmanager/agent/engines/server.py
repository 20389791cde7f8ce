"""The agent's end of the unix socket: connections of engines, framing, and the ends of processes.

It does not know what a message means; the `EngineHandler` does. Whatever an engine sends or fails
to read costs only that engine its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import socket
from collections import deque
from pathlib import Path
from typing import Final, Protocol, cast

from msgspec import structs

from kvmanager.agent.engines.protocol import (
    AgentMessage,
    CacheMessage,
    EmbeddingMessage,
    EncoderHello,
    EngineHello,
    FrameDecoder,
    Hello,
    HelloRefused,
    ProtocolError,
    TransferMessage,
    decode_engine_message,
    encode_frame,
)
from kvmanager.private_files import check_peer, peer_process

logger = logging.getLogger("prfaas.kvmanager.agent")

HELLO_TIMEOUT_S: Final = 5.0
MAX_CONNECTIONS: Final = 1024
MAX_UNREAD_BYTES: Final = 4 << 20
"""Most bytes that an engine may leave unread before it counts as stuck."""


class SocketTaken(Exception):
    """Another live agent listens on this path, or the path cannot be used."""


class EngineHandler(Protocol):
    """The receiver of messages and events. Its methods run on the event loop and must not block."""

    # `NodeAgent` implements it. It owns the server, so the server cannot import it.

    def hello(self, conn_id: int, hello: Hello) -> AgentMessage:
        """Welcome, or Refused to close the connection."""

    def message(
        self, conn_id: int, message: TransferMessage | CacheMessage | EmbeddingMessage
    ) -> None:
        """Process a message. Raises ProtocolError for a message that this engine must not send,
        which then costs it its connection.
        """

    def connection_lost(self, conn_id: int) -> None:
        """A welcomed connection is closed. Its process may still run."""

    def process_gone(self, conn_id: int) -> None:
        """The process of a lost connection has ended. Not called where that cannot be found out."""


class EngineServer:
    """Listens on a unix socket path that only this user may open."""

    def __init__(self, path: Path, handler: EngineHandler, linger_s: float) -> None:
        """`linger_s`: time for which the process of a lost connection is watched for its end."""
        self.path = path
        self.handler = handler
        self._linger_s = linger_s
        self._ids = itertools.count()
        self._connections: dict[int, _EngineConnection] = {}
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._inode: int | None = None
        self._exit_watches: set[_ExitWatch] = set()
        self._changed = asyncio.Event()

    def claim(self) -> None:
        """Take the path; engines that connect wait for `start`. Raises SocketTaken.

        A socket that a dead agent left behind is replaced.
        """
        self._listener = _listen(self.path)
        self._inode = self.path.stat().st_ino

    async def start(self) -> None:
        """Serve; after `claim`."""
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _EngineConnection(next(self._ids), self), sock=self._listener
        )

    async def stop(self) -> None:
        """Close every connection and remove the socket file if it is still ours."""
        if self._server is not None:
            self._server.close()
            self._server = None
        elif self._listener is not None:
            self._listener.close()
        with contextlib.suppress(OSError):
            # Another agent may have replaced the file at this path.
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        for connection in list(self._connections.values()):
            connection.close()
        try:
            async with asyncio.timeout(1.0):
                while self._connections:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            logger.warning("%d engine connections did not close", len(self._connections))
        for watch in list(self._exit_watches):
            watch.close()

    def send(self, conn_id: int, message: AgentMessage) -> None:
        """Send a message without waiting. A lost connection is ignored, a stuck one is closed."""
        connection = self._connections.get(conn_id)
        if connection is not None:
            connection.send(message)

    def add(self, connection: _EngineConnection) -> None:
        self._connections[connection.conn_id] = connection

    def remove(self, connection: _EngineConnection) -> None:
        self._connections.pop(connection.conn_id, None)
        self._changed.set()

    @property
    def is_full(self) -> bool:
        return len(self._connections) >= MAX_CONNECTIONS

    def watch_exit(self, conn_id: int, pidfd: int) -> None:
        watch = _ExitWatch(self, conn_id, pidfd, self._linger_s)
        self._exit_watches.add(watch)

    def end_exit_watch(self, watch: _ExitWatch) -> None:
        self._exit_watches.discard(watch)


class _EngineConnection(asyncio.Protocol):
    """One engine process (or one of its threads) on the other side."""

    def __init__(self, conn_id: int, server: EngineServer) -> None:
        self.conn_id = conn_id
        self._server = server
        self._decoder = FrameDecoder()
        self._waiting: deque[bytes] = deque()
        self._transport: asyncio.Transport | None = None
        self._hello_timer: asyncio.TimerHandle | None = None
        self._welcomed = False
        self._pid = 0
        self._pidfd = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports behave like asyncio.Transport without deriving from it.
        self._transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        self._pid, self._pidfd = _process_of(connection)
        try:
            check_peer(connection)
        except OSError as error:  # an engine of ours would see the same from its end
            logger.warning("engine connection %d refused: %s", self.conn_id, error)
            self.close()
            return
        if self._server.is_full:
            self._refuse(f"{MAX_CONNECTIONS} engines are connected already")
            return
        self._server.add(self)
        loop = asyncio.get_running_loop()
        # A silent connection would hold one of MAX_CONNECTIONS for ever.
        self._hello_timer = loop.call_later(HELLO_TIMEOUT_S, self._refuse, "no Hello in time")

    def data_received(self, data: bytes) -> None:
        is_idle = not self._waiting
        try:
            self._waiting += self._decoder.feed(data)
        except ProtocolError as error:
            self._refuse(str(error))
        if is_idle and self._waiting:
            self._take_next()

    def _take_next(self) -> None:
        """Process one message now, and the next one in another turn of the event loop.

        Messages that arrive together may take some milliseconds each, and other tasks wait.
        Reading pauses meanwhile.
        """
        transport = self._transport
        if transport is None or transport.is_closing() or not self._waiting:
            return
        self._take(self._waiting.popleft())
        if self._waiting:
            transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._take_next)
        elif not transport.is_closing():
            transport.resume_reading()

    def _take(self, payload: bytes) -> None:
        try:
            self._dispatch(payload)
        except ProtocolError as error:
            self._refuse(str(error))
        except Exception as error:
            logger.exception("engine connection %d: unexpected error", self.conn_id)
            self._refuse(f"the agent failed: {type(error).__name__}: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        # An engine's last messages, such as the end of a prefill, count even if it has gone.
        while self._waiting:
            self._take(self._waiting.popleft())
        self._server.remove(self)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        pidfd, self._pidfd = self._pidfd, -1
        if not self._welcomed:
            if pidfd >= 0:
                os.close(pidfd)
            return
        self._server.handler.connection_lost(self.conn_id)
        if pidfd >= 0:
            self._server.watch_exit(self.conn_id, pidfd)

    def send(self, message: AgentMessage) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(encode_frame(message))
        # The event loop waits for no engine, so what a stuck one leaves unread would grow without
        # bound.
        if transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            logger.warning("engine connection %d does not read; closing it", self.conn_id)
            transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _dispatch(self, payload: bytes) -> None:
        message = decode_engine_message(payload)
        if isinstance(message, EngineHello | EncoderHello):
            if self._welcomed:
                raise ProtocolError("Hello twice")
            self._greet(message)
        elif self._welcomed:
            self._server.handler.message(self.conn_id, message)
        else:
            raise ProtocolError(f"{type(message).__name__} before Hello")

    def _greet(self, hello: Hello) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        # An engine in a container of its own knows another number of its process.
        hello = structs.replace(hello, pid=self._pid)
        answer = self._server.handler.hello(self.conn_id, hello)
        if isinstance(answer, HelloRefused):
            self._refuse(answer.reason)
            return
        self._welcomed = True
        self.send(answer)

    def _refuse(self, reason: str) -> None:
        logger.warning("engine connection %d refused: %s", self.conn_id, reason)
        self._waiting.clear()
        self.send(HelloRefused(reason))
        self.close()


class _ExitWatch:
    """Waits for the end of one process, for a limited time."""

    def __init__(self, server: EngineServer, conn_id: int, pidfd: int, linger_s: float) -> None:
        self._server = server
        self._conn_id = conn_id
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._exited)
        self._timer = self._loop.call_later(linger_s, self.close)

    def close(self) -> None:
        if self._pidfd < 0:
            return
        self._timer.cancel()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._server.end_exit_watch(self)

    def _exited(self) -> None:
        self.close()
        self._server.handler.process_gone(self._conn_id)


def _process_of(connection: socket.socket) -> tuple[int, int]:
    """The peer process, or 0, and a descriptor that shows when it ends (pidfd_open(2)), or -1.
    Unlike a pid the descriptor cannot come to mean another process.
    """
    pid = 0
    try:
        pid, _ = peer_process(connection)
        return pid, os.pidfd_open(pid) if pid > 0 else -1
    except OSError:
        return pid, -1


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        try:
            _bind_private(listener, path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _remove_if_dead(path)
            _bind_private(listener, path)
        listener.listen(128)
        listener.setblocking(False)
    except (OSError, SocketTaken) as error:
        listener.close()
        if isinstance(error, SocketTaken):
            raise
        raise SocketTaken(f"cannot listen on {path}: {error}") from error
    return listener


def _bind_private(listener: socket.socket, path: Path) -> None:
    # With the umask the socket never exists with wider permissions; chmod after bind would leave a
    # gap.
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)


def _remove_if_dead(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            # A socket file outlives its process; connect(2) is refused when nobody listens behind
            # it.
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            raise SocketTaken(f"{path} is in the way: {error}") from error
    raise SocketTaken(f"another agent serves {path}")
