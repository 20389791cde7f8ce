"""The arithmetic of an emulated link: when a byte leaves the bottleneck and when it arrives.

There are three small machines, all with time as an argument. `RateClock` is the bottleneck, which
all connections of one direction share. `DelayLine` is the propagation delay of one connection in
one direction; it keeps the order. `ByteQueue` has the bytes that are inside the link meanwhile, in
chunks of a shared pool. No sockets, no clock, no randomness: the caller passes the jitter.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class LinkShape:
    """The properties of a link. `rate_bytes_per_s` 0 means no limit; `rtt_s` is there and back."""

    rate_bytes_per_s: float = 0.0
    rtt_s: float = 0.0
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.rate_bytes_per_s, self.rtt_s, self.jitter_s) < 0:
            raise ValueError("rate, rtt and jitter of a link cannot be negative")

    @property
    def one_way_s(self) -> float:
        return self.rtt_s / 2


class RateClock:
    """A bottleneck of a fixed rate as a virtual clock, which shows the instant at which it falls
    idle.

    It is equivalent to a token bucket with a depth of `read_ahead_s` worth of bytes, but also says
    exactly when the last admitted byte has passed. Bytes may be admitted up to `read_ahead_s`
    before their turn: that is the queue in front of a real bottleneck.

    If a caller had more bytes than room and comes back late, the link was not idle: up to
    `catch_up_s` of the time in between count as used. Otherwise a busy machine would make the link
    slower than its rate.
    """

    __slots__ = ("_idle_at_s", "_rate", "_starved", "catch_up_s", "read_ahead_s")

    def __init__(
        self, rate_bytes_per_s: float, read_ahead_s: float = 0.008, catch_up_s: float = 0.02
    ) -> None:
        self._rate = rate_bytes_per_s
        self.read_ahead_s = read_ahead_s
        self.catch_up_s = catch_up_s
        self._idle_at_s = float("-inf")
        self._starved = False

    @property
    def rate_bytes_per_s(self) -> float:
        return self._rate

    def room_bytes(self, now_s: float) -> int:
        """How many bytes may be admitted now."""
        if self._rate == 0:
            return UNLIMITED_BYTES
        backlog_s = self._free_at_s(now_s) - now_s
        return max(0, int((self.read_ahead_s - backlog_s) * self._rate))

    def admit(self, now_s: float, nbytes: int) -> float:
        """Admit `nbytes`. Returns the instant at which the last of them has passed the
        bottleneck.
        """
        if self._rate == 0:
            return now_s
        self._idle_at_s = self._free_at_s(now_s) + nbytes / self._rate
        return self._idle_at_s

    def turn_over(self, *, starved: bool) -> None:
        """The caller's turn ends. `starved` says that it had more bytes than there was room."""
        self._starved = starved

    def room_at_s(self, now_s: float, nbytes: int) -> float:
        """The earliest instant at which `room_bytes` is at least `nbytes`."""
        if self._rate == 0:
            return now_s
        # There is never room for more than `read_ahead_s` of bytes at once.
        wanted_s = min(nbytes / self._rate, self.read_ahead_s)
        return max(now_s, self._idle_at_s - self.read_ahead_s + wanted_s)

    def change_rate(self, now_s: float, rate_bytes_per_s: float) -> None:
        """Go on with another rate. Queued bytes pass at the new rate."""
        backlog_bytes = max(0.0, self._idle_at_s - now_s) * self._rate
        self._rate = rate_bytes_per_s
        self._idle_at_s = now_s + (backlog_bytes / rate_bytes_per_s if rate_bytes_per_s else 0.0)

    def _free_at_s(self, now_s: float) -> float:
        return max(now_s - self.catch_up_s if self._starved else now_s, self._idle_at_s)


class DelayLine:
    """Byte counts in flight, each with its instant of arrival. A stream, so never reordered."""

    __slots__ = ("_due_bytes", "_marks", "_on_way_bytes")

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()
        self._on_way_bytes = 0
        self._due_bytes = 0

    @property
    def held_bytes(self) -> int:
        """All bytes inside: in flight, or arrived and not yet taken."""
        return self._on_way_bytes + self._due_bytes

    def push(self, arrive_at_s: float, nbytes: int) -> None:
        """Add `nbytes` that arrive at `arrive_at_s`, but not before earlier bytes."""
        if self._marks and arrive_at_s < self._marks[-1][0]:
            arrive_at_s = self._marks[-1][0]
        self._marks.append((arrive_at_s, nbytes))
        self._on_way_bytes += nbytes

    def due(self, now_s: float) -> int:
        """How many bytes have arrived by now and were not taken."""
        marks = self._marks
        while marks and marks[0][0] <= now_s:
            nbytes = marks.popleft()[1]
            self._on_way_bytes -= nbytes
            self._due_bytes += nbytes
        return self._due_bytes

    def take(self, nbytes: int) -> None:
        """Remove `nbytes` that `due` reported. ValueError beyond that."""
        if nbytes > self._due_bytes:
            raise ValueError(f"{nbytes} bytes taken, {self._due_bytes} have arrived")
        self._due_bytes -= nbytes

    def next_arrival_s(self) -> float | None:
        """When the next bytes arrive; None if none are in flight."""
        return self._marks[0][0] if self._marks else None

    def clear(self) -> None:
        self._marks.clear()
        self._on_way_bytes = self._due_bytes = 0


class ChunkPool:
    """Equal buffers that are used again: the working memory of a busy link stays constant."""

    def __init__(self, chunk_bytes: int = 256 << 10, max_spare: int = 64) -> None:
        self.chunk_bytes = chunk_bytes
        self._max_spare = max_spare
        self._spare: list[memoryview] = []

    def take(self) -> memoryview:
        return self._spare.pop() if self._spare else memoryview(bytearray(self.chunk_bytes))

    def give_back(self, chunk: memoryview) -> None:
        if len(self._spare) < self._max_spare:
            self._spare.append(chunk)


@dataclass(slots=True)
class _Chunk:
    memory: memoryview
    start: int = 0
    end: int = 0


@dataclass(slots=True)
class ByteQueue:
    """Bytes in order, received into and sent from pool chunks without another copy."""

    pool: ChunkPool
    _chunks: deque[_Chunk] = field(default_factory=deque)
    num_bytes: int = 0

    def free_space(self, min_bytes: int) -> memoryview:
        """Memory for the next bytes, at least `min_bytes` (at most a chunk) long."""
        tail = self._chunks[-1] if self._chunks else None
        if tail is None or len(tail.memory) - tail.end < min_bytes:
            tail = _Chunk(self.pool.take())
            self._chunks.append(tail)
        return tail.memory[tail.end :]

    def filled(self, nbytes: int) -> None:
        """`nbytes` (0 allowed) were written to the start of what `free_space` returned."""
        self._chunks[-1].end += nbytes
        self.num_bytes += nbytes
        # An idle connection must not keep the chunk that `free_space` took for it.
        if not self.num_bytes:
            self.clear()

    def front(self, limit_bytes: int) -> list[memoryview]:
        """The oldest bytes, at most `limit_bytes` of them, as views to send from."""
        views: list[memoryview] = []
        for chunk in self._chunks:
            if limit_bytes <= 0:
                break
            stop = min(chunk.end, chunk.start + limit_bytes)
            if stop > chunk.start:
                views.append(chunk.memory[chunk.start : stop])
                limit_bytes -= stop - chunk.start
        return views

    def drop_front(self, nbytes: int) -> None:
        """Remove the oldest `nbytes`."""
        if nbytes > self.num_bytes:
            raise ValueError(f"{nbytes} bytes dropped, {self.num_bytes} are held")
        self.num_bytes -= nbytes
        while self._chunks and (nbytes or not self.num_bytes):
            head = self._chunks[0]
            step = min(nbytes, head.end - head.start)
            head.start += step
            nbytes -= step
            if head.start < head.end:
                break
            self.pool.give_back(self._chunks.popleft().memory)

    def clear(self) -> None:
        while self._chunks:
            self.pool.give_back(self._chunks.popleft().memory)
        self.num_bytes = 0
