"""A TCP proxy that misbehaves on command: resets, silence, damage, delay, connections half gone.

One thread moves the bytes of all connections, so a command holds for everything that moves after it
returns. Knows bytes, not frames.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from transport.endpoint import Endpoint

Direction = Literal["forward", "backward"]
"""forward: from whoever connected to the proxy towards its target; backward: the answers."""
Fault = Literal["cut", "flip", "hold", "reset"]
"""cut, reset: the connection ends at both sides; hold: nothing passes until `resume`."""

BOTH: Final[tuple[Direction, ...]] = ("forward", "backward")
MAX_HELD_BYTES: Final = 256 * 1024
HELD_POLL_S: Final = 0.005
RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # struct linger: on, 0 s


@dataclass(slots=True)
class _Pipe:
    """One direction of one connection."""

    source: socket.socket
    sink: socket.socket
    direction: Direction
    held: deque[tuple[float, memoryview]] = field(default_factory=deque)
    """What was read and not yet passed on, each with the instant before which it must not leave."""
    held_bytes: int = 0
    num_read: int = 0
    """Bytes that the source has sent so far."""
    faults: list[tuple[int, Fault]] = field(default_factory=list)
    """Each with the number of bytes before it; sorted."""
    is_swallowing: bool = False
    is_read_out: bool = False
    """The source said its end."""
    is_ended: bool = False
    """And the sink was told."""

    @property
    def fault(self) -> Fault | None:
        """What strikes before the next byte moves."""
        return self.faults[0][1] if self.faults and self.faults[0][0] <= self.num_read else None

    @property
    def room(self) -> int:
        """Bytes that may be read before something else strikes."""
        if self.fault is None:
            return self.faults[0][0] - self.num_read if self.faults else MAX_HELD_BYTES
        return 1 if self.fault == "flip" else 0


@dataclass(slots=True)
class _Connection:
    number: int
    near: socket.socket
    far: socket.socket
    pipes: tuple[_Pipe, _Pipe]
    is_holed: bool = False
    """Bytes of it were lost: its ends must not learn from each other how they end."""


class HurtfulProxy:
    """Forwards TCP connections to `target` and does to them what a test asks for.

    `damage(data, is_forward)` may change bytes on their way. While `flows` is clear nothing moves.
    `bytes_per_read` slows things down, so that a test can act in the middle of a transfer.
    `delay_s(connection, is_forward)` keeps what a connection (numbered from 1) carries that long,
    so that connections overtake each other. `strike` hurts one connection at one byte. A reset or
    an end passes through like bytes do.
    """

    def __init__(self, target: Endpoint) -> None:
        self.target = target
        self.damage: Callable[[bytes, bool], bytes] | None = None
        self.delay_s: Callable[[int, bool], float] | None = None
        self.flows = threading.Event()
        self.flows.set()
        self.bytes_per_read = 65536
        self.num_accepted = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self._connections: dict[int, _Connection] = {}
        self._stalled: set[Direction] = set()
        self._swallowed: set[Direction] = set()
        self._planned: dict[int, list[tuple[Direction, int, Fault]]] = {}
        self._commands: deque[tuple[Callable[[], None], threading.Event]] = deque()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    # Commands; each has taken effect when it returns.

    @property
    def open_connections(self) -> list[int]:
        """Numbers of the connections that are open now, the oldest first."""
        return list(self._connections)

    def strike(
        self, fault: Fault, direction: Direction, *, after_bytes: int = 0, connection: int
    ) -> None:
        """Hurt a connection once so many more bytes have come in this direction; those arrive.
        `connection` may be the number of one that is still to be accepted.
        """
        self._command(lambda: self._plan(connection, direction, after_bytes, fault))

    def cut(self) -> None:
        """End every connection that is open now, at both ends, as a peer that closes would."""
        self._command(lambda: self._drop_all(is_reset=False))

    def reset(self) -> None:
        """Every connection that is open now gets a TCP reset at both ends."""
        self._command(lambda: self._drop_all(is_reset=True))

    def stall(self, *directions: Direction) -> None:
        """Freeze these directions (both if none is named): nothing moves, nothing is lost."""
        self._command(lambda: self._stalled.update(directions or BOTH))

    def swallow(self, *directions: Direction) -> None:
        """From now on bytes of all connections, new ones too, vanish: a black hole."""
        self._command(lambda: self._swallowed.update(directions or BOTH))
        self.vanish(*directions)

    def vanish(self, *directions: Direction) -> None:
        """The connections of now lose what is sent on them, ends and resets included, and nobody is
        told; new connections are well. This is what a host that went away leaves behind.
        """
        self._command(lambda: self._lose(directions or BOTH))

    def resume(self) -> None:
        """End a stall, and let go of what `strike` holds."""
        self._command(lambda: self._resume("hold"))

    def heal(self) -> None:
        """End every fault; connections that lost bytes are reset."""
        self.damage = None
        self.delay_s = None
        self.bytes_per_read = 65536
        self.flows.set()
        self._command(self._heal)

    def close(self) -> None:
        """End everything and free every descriptor. May be called twice."""
        if self._closing:
            return
        self._closing = True
        self.flows.set()
        self._ring()
        self._thread.join(5)
        for sock in (self._listener, self._bell, self._ringer):
            sock.close()

    def _command(self, act: Callable[[], None]) -> None:
        done = threading.Event()
        self._commands.append((act, done))
        self._ring()
        if not self._closing and not done.wait(10):
            raise TimeoutError("the proxy does not obey")

    def _ring(self) -> None:
        with suppress(OSError):
            self._ringer.send(b"!")

    # The thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            self._drop_all(is_reset=False)

    def _turn(self) -> None:
        now_s = time.monotonic()
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        actions: dict[int, list[tuple[_Connection, _Pipe, int]]] = {}
        timeout_s = self._register(actions, now_s) if self.flows.is_set() else HELD_POLL_S
        for fd, waiting in actions.items():
            events = 0
            for _, _, event in waiting:
                events |= event
            poll.register(fd, events)
        for fd, got in self._ready(poll, timeout_s):
            if fd == self._bell.fileno():
                self._obey()
                return  # what was found ready may be gone now
            if fd == self._listener.fileno():
                self._accept()
            for connection, pipe, event in actions.get(fd, ()):
                if got & (event | select.POLLERR | select.POLLHUP):
                    self._move(connection, pipe, event)

    def _ready(self, poll: select.poll, timeout_s: float | None) -> list[tuple[int, int]]:
        try:
            return poll.poll(None if timeout_s is None else max(1, int(timeout_s * 1000)))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # A test has lowered the limit of open descriptors, and poll(2) takes no more than that
        # limit allows. Commands must work still: the next one may end the connections.
        bells, _, _ = select.select([self._bell], [], [], HELD_POLL_S)
        return [(bell.fileno(), select.POLLIN) for bell in bells]

    def _register(
        self, actions: dict[int, list[tuple[_Connection, _Pipe, int]]], now_s: float
    ) -> float | None:
        """Note what may move now; returns how long until something else may."""
        timeout_s: float | None = None
        for connection in self._connections.values():
            for pipe in connection.pipes:
                if pipe.direction in self._stalled:
                    continue
                if not pipe.is_read_out and pipe.room and pipe.held_bytes < MAX_HELD_BYTES:
                    waiting = actions.setdefault(pipe.source.fileno(), [])
                    waiting.append((connection, pipe, select.POLLIN))
                if not pipe.held or pipe.is_swallowing:
                    continue
                wait_s = pipe.held[0][0] - now_s
                if wait_s <= 0:
                    waiting = actions.setdefault(pipe.sink.fileno(), [])
                    waiting.append((connection, pipe, select.POLLOUT))
                else:
                    timeout_s = wait_s if timeout_s is None else min(timeout_s, wait_s)
        return timeout_s

    def _obey(self) -> None:
        with suppress(BlockingIOError):
            self._bell.recv(4096)
        while self._commands:
            act, done = self._commands.popleft()
            act()
            done.set()

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            time.sleep(HELD_POLL_S)  # it gave up already, or this process is out of descriptors
            return
        self.num_accepted += 1
        try:
            far = socket.create_connection((self.target.host, self.target.port), 2)
        except OSError:
            _end_socket(near, is_reset=True)
            return
        for sock in (near, far):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pipes = (_Pipe(near, far, "forward"), _Pipe(far, near, "backward"))
        connection = _Connection(self.num_accepted, near, far, pipes, bool(self._swallowed))
        for pipe in pipes:
            pipe.is_swallowing = pipe.direction in self._swallowed
        self._connections[connection.number] = connection
        for direction, after_bytes, fault in self._planned.pop(connection.number, []):
            self._plan(connection.number, direction, after_bytes, fault)

    def _plan(self, number: int, direction: Direction, after_bytes: int, fault: Fault) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            pipe = connection.pipes[BOTH.index(direction)]
            pipe.faults.append((pipe.num_read + after_bytes, fault))
            pipe.faults.sort()
            self._cut(connection, pipe)
        elif number > self.num_accepted:
            self._planned.setdefault(number, []).append((direction, after_bytes, fault))

    def _cut(self, connection: _Connection, pipe: _Pipe) -> bool:
        """End the connection if that is what strikes now, and all before it has left."""
        if pipe.fault not in ("cut", "reset") or (pipe.held and not pipe.is_swallowing):
            return False
        self._drop(connection, is_reset=pipe.fault == "reset")
        return True

    def _resume(self, *over: Fault) -> None:
        self._stalled.clear()
        for connection in list(self._connections.values()):
            for pipe in connection.pipes:
                pipe.faults = [one for one in pipe.faults if one[1] not in over]
                if self._cut(connection, pipe):
                    break

    def _move(self, connection: _Connection, pipe: _Pipe, event: int) -> None:
        if connection.number not in self._connections:
            return
        try:
            if event == select.POLLIN:
                self._read(connection, pipe)
            else:
                self._write(pipe)
        except BlockingIOError:
            return
        except OSError:
            self._broken(connection, pipe.source if event == select.POLLIN else pipe.sink)
            return
        self._pass_on_end(connection, pipe)

    def _read(self, connection: _Connection, pipe: _Pipe) -> None:
        data = pipe.source.recv(min(self.bytes_per_read, pipe.room))
        if not data:
            pipe.is_read_out = True
            return
        if pipe.fault == "flip":
            pipe.faults.pop(0)
            data = bytes([data[0] ^ 0x10])
        pipe.num_read += len(data)
        if pipe.is_swallowing:
            return
        is_forward = pipe.direction == "forward"
        if self.damage is not None:
            data = self.damage(data, is_forward)
        delay_s = self.delay_s(connection.number, is_forward) if self.delay_s is not None else 0.0
        pipe.held.append((time.monotonic() + delay_s, memoryview(data)))
        pipe.held_bytes += len(data)

    def _write(self, pipe: _Pipe) -> None:
        leave_s, data = pipe.held.popleft()
        count = 0
        try:
            count = pipe.sink.send(data)
        finally:
            if count < len(data):
                pipe.held.appendleft((leave_s, data[count:]))
        pipe.held_bytes -= count

    def _pass_on_end(self, connection: _Connection, pipe: _Pipe) -> None:
        if self._cut(connection, pipe):
            return
        if pipe.is_read_out and not pipe.is_ended and (pipe.is_swallowing or not pipe.held):
            pipe.is_ended = True
            if not pipe.is_swallowing:
                with suppress(OSError):
                    pipe.sink.shutdown(socket.SHUT_WR)
        if all(pipe.is_ended for pipe in connection.pipes):
            self._drop(connection, is_reset=False)

    def _broken(self, connection: _Connection, sock: socket.socket) -> None:
        """One end reset its side: the other learns it, unless the way between them is gone."""
        if not connection.is_holed:
            self._drop(connection, is_reset=True)
            return
        for pipe in connection.pipes:
            if pipe.sink is sock:
                pipe.is_swallowing = True
            else:
                pipe.is_read_out = pipe.is_ended = True
        self._pass_on_end(connection, connection.pipes[0])

    def _lose(self, directions: tuple[Direction, ...]) -> None:
        for connection in self._connections.values():
            connection.is_holed = True
            for pipe in connection.pipes:
                if pipe.direction in directions:
                    pipe.is_swallowing = True
                    pipe.held.clear()
                    pipe.held_bytes = 0

    def _heal(self) -> None:
        self._resume(*get_args(Fault))
        self._swallowed.clear()
        self._planned.clear()
        for connection in list(self._connections.values()):
            if connection.is_holed:
                self._drop(connection, is_reset=True)

    def _drop_all(self, *, is_reset: bool) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection, is_reset=is_reset)

    def _drop(self, connection: _Connection, *, is_reset: bool) -> None:
        del self._connections[connection.number]
        for sock in (connection.near, connection.far):
            _end_socket(sock, is_reset=is_reset)


def _end_socket(sock: socket.socket, *, is_reset: bool) -> None:
    with suppress(OSError):
        if is_reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        else:
            sock.shutdown(socket.SHUT_RDWR)
    sock.close()
