"""The sockets of an emulated link: its clients, its connections to the target, one epoll for all.

Every socket is registered once, edge-triggered, so that a tick costs no system call for those that
have nothing new. This file knows neither the rate of the link nor its faults.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from deploy.lab.emulator.core import ChunkPool
from deploy.lab.emulator.pipes import Connection, LinkDirection, Pipe, Side
from transport import Endpoint
from transport.addresses import bind, resolve

_EDGE = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_GONE = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
# Small, so that the bytes a sender believes to be in flight have passed the bottleneck or are
# close to it. Large enough for 5 Gbit/s on one connection.
_RECEIVE_BUFFER_BYTES = 128 << 10

Address = tuple[str, int]


class LinkSockets:
    """Listens at `listen` and connects every client to `target`, as `connections`."""

    def __init__(
        self, listen: Address, target: Address, directions: tuple[LinkDirection, LinkDirection]
    ) -> None:
        self.connections: list[Connection] = []
        self.num_accepted = self.num_failed = 0
        self._directions = directions
        self._target = Endpoint(*target)
        # The one of the target's addresses that is tried first: the last that was good.
        self._good = resolve(self._target)[0][4]
        self._pool = ChunkPool()
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        # Bound but never listening: it keeps the port ours while the link is cut.
        self._holders = bind(Endpoint(*listen))
        self.address = Endpoint(listen[0], self._holders[0].getsockname()[1])
        self._listeners: list[socket.socket] = []
        self.open_listener()

    def add_handler(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call `handler(epoll events)` when `fd` is readable (level-triggered)."""
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def remove_handler(self, fd: int) -> None:
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def wait(self, timeout_s: float) -> None:
        """Wait for events and call their handlers. A negative `timeout_s` means no limit."""
        for fd, events in self._epoll.poll(timeout_s):
            # A handler earlier in this batch may have closed the later one.
            handler = self._handlers.get(fd)
            if handler is not None:
                handler(events)

    def open_listener(self) -> None:
        """Accept new connections. Without effect if it does so already."""
        if self._listeners:
            return
        self._listeners = bind(self.address)
        for listener in self._listeners:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            listener.setblocking(False)
            listener.listen(256)
            self.add_handler(listener.fileno(), partial(self._accept, listener))

    def close_listener(self) -> None:
        """Refuse new connections."""
        for listener in self._listeners:
            self.remove_handler(listener.fileno())
            listener.close()
        self._listeners = []

    def drop(self, connection: Connection, *, reset: bool) -> None:
        """Close both sides of a connection. Without effect on a closed one."""
        if connection not in self.connections:
            return
        self.connections.remove(connection)
        for side in connection.sides:
            # Closing takes the descriptor out of epoll, and the handler must not outlive it.
            self._handlers.pop(side.fd, None)
        connection.close(reset=reset)

    def drop_all(self, *, reset: bool) -> None:
        for connection in tuple(self.connections):
            self.drop(connection, reset=reset)

    def close(self) -> None:
        """Close everything."""
        self.drop_all(reset=True)
        self.close_listener()
        for holder in self._holders:
            holder.close()
        self._epoll.close()

    def _accept(self, listener: socket.socket, _events: int) -> None:
        while listener in self._listeners:
            try:
                client, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                self.num_failed += 1
                return
            self.num_accepted += 1
            self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        forward, backward = self._directions
        connection = Connection(open_at_s=time.monotonic() + forward.shape.rtt_s)
        near, far = (_side_of(sock, connection) for sock in (client, socket.socket()))
        connection.sides += [near, far]
        connection.pipes.append(Pipe(near, far, forward, self._pool))
        connection.pipes.append(Pipe(far, near, backward, self._pool))
        self.connections.append(connection)
        self._register(near)
        with suppress(OSError):  # the name is unknown now
            connection.untried = resolve(self._target, self._good)
        self._dial(connection)

    def _dial(self, connection: Connection) -> None:
        """Begin to connect to the target's next address. Without one the connection ends."""
        far = connection.sides[1]
        while connection.untried:
            family, kind, protocol, _, address = connection.untried.pop(0)
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError:  # such as no IPv6
                continue
            far.sock.close()
            far.sock, far.fd = sock, sock.fileno()
            # Before connecting, when TCP fixes the scale of its window (RFC 7323). Accepted sockets
            # inherit the listener's size.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            _prepare(sock)
            if sock.connect_ex(address) in (0, errno.EINPROGRESS):
                self._register(far)
                return
        self.num_failed += 1
        self.drop(connection, reset=True)

    def _register(self, side: Side) -> None:
        self._handlers[side.fd] = self._side_handler(side)
        self._epoll.register(side.fd, _EDGE)

    def _side_handler(self, side: Side) -> Callable[[int], None]:
        connection = side.connection
        is_far = side is connection.sides[1]

        def handle(events: int) -> None:
            if is_far and connection.connecting and not self._connected(connection, side, events):
                return
            if events & (select.EPOLLIN | _GONE):
                side.readable = True
            if events & (select.EPOLLOUT | _GONE):
                side.writable = True

        return handle

    def _connected(self, connection: Connection, far: Side, events: int) -> bool:
        if far.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            del self._handlers[far.fd]
            self._dial(connection)
            return False
        if not events & select.EPOLLOUT:
            return False
        connection.connecting = False
        self._good = far.sock.getpeername()
        return True


def _side_of(sock: socket.socket, connection: Connection) -> Side:
    _prepare(sock)
    return Side(sock, sock.fileno(), connection)


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    # The link has a delay of its own, to which Nagle's algorithm must not add.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
