"""Connections through the relay: two sockets, and one pipe for each direction between them.

A pipe reads what the bottleneck admits, holds it while it is in flight, and writes it out when it
arrives. All calls are non-blocking and come from the relay's only thread. This file knows neither
the event loop nor the control socket.
"""

from __future__ import annotations

import random
import socket
import struct
from dataclasses import dataclass, field

from deploy.lab.emulator.core import ByteQueue, ChunkPool, DelayLine, LinkShape, RateClock
from deploy.lab.emulator.faults import Direction, DirectionReport
from transport.addresses import AddressInfo

# Less than a TCP segment is not worth a system call.
MIN_READ_BYTES = 1448
MIN_SPACE_BYTES = 16 << 10
QUEUE_CAP_BYTES = 1 << 20
UNLIMITED_HOLD_BYTES = 32 << 20
_SCRATCH = memoryview(bytearray(256 << 10))
# With a linger time of 0, close() sends a reset instead of an end of stream.
_SEND_NOW_LINGER = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class Side:
    """One socket of a connection with what epoll last reported of it (edge-triggered)."""

    sock: socket.socket
    fd: int
    connection: Connection
    readable: bool = False
    writable: bool = False

    def receive_into(self, memory: memoryview) -> int | None:
        """The number of bytes read, 0 at the end of the stream, None when there is nothing now."""
        try:
            return self.sock.recv_into(memory)
        except BlockingIOError:
            self.readable = False
            return None

    def send(self, views: list[memoryview]) -> int:
        """The number of bytes that the kernel took, 0 when it takes none now."""
        try:
            return self.sock.sendmsg(views)
        except BlockingIOError:
            self.writable = False
            return 0


class LinkDirection:
    """What all pipes of one direction share: the bottleneck, the faults, the counters."""

    def __init__(self, name: Direction, shape: LinkShape, seed: int) -> None:
        self.name = name
        self.stalled = False
        self.swallowing = False
        self.flip_next = False
        self.in_bytes = self.out_bytes = self.swallowed_bytes = self.flipped_bytes = 0
        self.first_in_s: float | None = None
        self.last_in_s: float | None = None
        self.first_out_s: float | None = None
        self.last_out_s: float | None = None
        self._random = random.Random(seed)
        self._clock = RateClock(shape.rate_bytes_per_s, _read_ahead_s(shape))
        self.configure(shape, now_s=0.0)

    def configure(self, shape: LinkShape, now_s: float) -> None:
        rate = shape.rate_bytes_per_s
        self.shape = shape
        self._clock.change_rate(now_s, rate)
        self._clock.read_ahead_s = _read_ahead_s(shape)
        if rate == 0:
            self.quantum_bytes = 256 << 10
            self.hold_limit_bytes = UNLIMITED_HOLD_BYTES
            return
        # About a millisecond of the link's rate at a time, so that connections take turns often.
        self.quantum_bytes = int(min(max(rate * 1e-3, MIN_READ_BYTES), 256 << 10))
        on_way_s = shape.one_way_s + shape.jitter_s + self._clock.read_ahead_s
        # What is in flight at the full rate, and a queue. Beyond that TCP makes the sender wait.
        self.hold_limit_bytes = int(rate * on_way_s) + QUEUE_CAP_BYTES

    def room_bytes(self, now_s: float) -> int:
        """How much may be read now: 0, or enough to be worth a system call."""
        room = self._clock.room_bytes(now_s)
        return room if room >= self.quantum_bytes // 2 else 0

    def room_at_s(self, now_s: float) -> float:
        return self._clock.room_at_s(now_s, self.quantum_bytes // 2 + 1)

    def turn_over(self, *, starved: bool) -> None:
        """Reading ends for this turn. `starved` says that there were more bytes than room."""
        self._clock.turn_over(starved=starved)

    def admit(self, now_s: float, nbytes: int) -> float:
        """Count `nbytes` in. Returns the instant at which the last of them reaches the other
        end.
        """
        if self.first_in_s is None:
            self.first_in_s = now_s
        self.last_in_s = now_s
        self.in_bytes += nbytes
        jitter_s = self.shape.jitter_s
        swing_s = self._random.uniform(-jitter_s, jitter_s) if jitter_s else 0.0
        return self._clock.admit(now_s, nbytes) + max(0.0, self.shape.one_way_s + swing_s)

    def delivered(self, now_s: float, nbytes: int) -> None:
        if self.first_out_s is None:
            self.first_out_s = now_s
        self.last_out_s = now_s
        self.out_bytes += nbytes

    def fin_arrives_s(self, now_s: float) -> float:
        return now_s + self.shape.one_way_s

    def report(self, held_bytes: int) -> DirectionReport:
        return DirectionReport(
            in_bytes=self.in_bytes,
            out_bytes=self.out_bytes,
            held_bytes=held_bytes,
            swallowed_bytes=self.swallowed_bytes,
            flipped_bytes=self.flipped_bytes,
            first_in_s=self.first_in_s,
            last_in_s=self.last_in_s,
            first_out_s=self.first_out_s,
            last_out_s=self.last_out_s,
        )


class Pipe:
    """One direction of one connection."""

    __slots__ = (
        "damaged", "direction", "dst", "ended", "fin_at_s", "finished", "line", "queue", "src",
    )  # fmt: skip

    def __init__(self, src: Side, dst: Side, direction: LinkDirection, pool: ChunkPool) -> None:
        self.src = src
        self.dst = dst
        self.direction = direction
        self.queue = ByteQueue(pool)
        self.line = DelayLine()
        self.ended = False
        self.fin_at_s: float | None = None
        self.finished = False
        self.damaged = False

    def wants_bytes(self) -> bool:
        """Whether there may be bytes to read, and there is memory to hold them."""
        return (
            self.src.readable
            and not self.ended
            and self.queue.num_bytes < self.direction.hold_limit_bytes
        )

    def pull(self, now_s: float, limit_bytes: int) -> int:
        """Read at most `limit_bytes` into the link. Returns how many entered. OSError: broken."""
        if self.direction.swallowing:
            return self._swallow(now_s, limit_bytes)
        space = self.queue.free_space(min(limit_bytes, MIN_SPACE_BYTES))[:limit_bytes]
        nbytes = self.src.receive_into(space)
        if not nbytes:
            self.queue.filled(0)
            # None: there is nothing to read now; 0: the source has ended.
            if nbytes == 0:
                self._end_of_stream(now_s)
            return 0
        if self.direction.flip_next:
            space[0] ^= 0xFF
            self.direction.flip_next = False
            self.direction.flipped_bytes += 1
        self.queue.filled(nbytes)
        self.line.push(self.direction.admit(now_s, nbytes), nbytes)
        return nbytes

    def _swallow(self, now_s: float, limit_bytes: int) -> int:
        nbytes = self.src.receive_into(_SCRATCH[:limit_bytes])
        if nbytes is None:
            return 0
        self.damaged = True
        self.ended = nbytes == 0
        # Counted as entered, so that faults planned at a byte count still happen.
        self.direction.admit(now_s, nbytes)
        self.direction.swallowed_bytes += nbytes
        return nbytes

    def _end_of_stream(self, now_s: float) -> None:
        self.ended = True
        self.fin_at_s = self.direction.fin_arrives_s(now_s)

    def push(self, now_s: float, grain_s: float) -> int:
        """Write out what arrives within `grain_s`. Returns how many bytes left. OSError: broken."""
        due_bytes = self.line.due(now_s + grain_s)
        left_bytes = 0
        while due_bytes and self.dst.writable:
            sent = self.dst.send(self.queue.front(due_bytes))
            self.line.take(sent)
            self.queue.drop_front(sent)
            due_bytes -= sent
            left_bytes += sent
        if left_bytes:
            self.direction.delivered(now_s, left_bytes)
        if (
            self.fin_at_s is not None
            and not self.finished
            and self.fin_at_s <= now_s + grain_s
            and not self.queue.num_bytes
        ):
            self.finished = True
            self.dst.sock.shutdown(socket.SHUT_WR)
        return left_bytes

    def next_arrival_s(self) -> float | None:
        """When `push` has something to do next; None if only an epoll event can tell."""
        if self.line.held_bytes:
            return self.line.next_arrival_s() if self.dst.writable else None
        return self.fin_at_s if self.fin_at_s is not None and not self.finished else None

    def lose_all(self) -> None:
        """Drop what is inside, when a black hole opens or the connection is over."""
        if self.queue.num_bytes:
            self.damaged = True
        self.queue.clear()
        self.line.clear()


@dataclass(slots=True, eq=False)
class Connection:
    """A client of the relay, the target, and the two pipes between them.

    Nothing is read before `open_at_s`, as if connecting had taken a round trip of the link.
    """

    open_at_s: float
    untried: list[AddressInfo] = field(default_factory=list)
    """Addresses of the target that were not tried yet."""
    sides: list[Side] = field(default_factory=list)
    pipes: list[Pipe] = field(default_factory=list)
    connecting: bool = True

    def is_over(self) -> bool:
        return all(pipe.finished for pipe in self.pipes)

    def close(self, *, reset: bool) -> None:
        """Close both sockets. With `reset` the peers see a TCP reset, not an end of stream."""
        for pipe in self.pipes:
            pipe.lose_all()
        for side in self.sides:
            if reset:
                side.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _SEND_NOW_LINGER)
            side.sock.close()


def _read_ahead_s(shape: LinkShape) -> float:
    if shape.rate_bytes_per_s == 0:
        return 0.0
    return max(0.008, 4096 / shape.rate_bytes_per_s)
