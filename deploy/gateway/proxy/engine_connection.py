"""Connections to engines: one question at a time, and the body of its answer as it arrives.

The reader of an answer gives a function that takes each piece in the very callback that received
it. Only when that function says so, or the answer ends, does the reader's coroutine wake up: a task
switch for each event of a stream would cost more than passing the event on. This file knows HTTP
answers (`AnswerParser`), but not what they say.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias, cast

from deploy.gateway.proxy.http_answer import AnswerParser
from transport import Endpoint
from transport.addresses import SockAddress, dial
from transport.socket_options import keep_alive

_KEPT_BYTES: Final = 256 << 10
"""While more than this waits for the reader, nothing is read from the engine, bytes."""
_JOINED_BYTES: Final = 64 << 10
"""A body up to this length is sent in one piece with its head, bytes."""

Taker: TypeAlias = Callable[[bytes], bool]
"""Takes a piece of a body. Returns whether it wants the next piece the same way."""


class AnswerBroken(Exception):
    """The answer ended short, or is none of HTTP."""


class EngineSilent(AnswerBroken):
    """The engine sent nothing for too long."""


class Address(NamedTuple):
    """Where an engine listens. `context` is that of TLS, None without."""

    host: str
    port: int
    context: ssl.SSLContext | None


class EngineConnection(asyncio.Protocol):
    """One connection. Its owner asks, reads until the answer is over, and releases it."""

    def __init__(
        self, address: Address, silence_s: float, on_release: Callable[[EngineConnection], None]
    ) -> None:
        self.address = address
        self.parser = AnswerParser()
        """The answer to the last question."""
        self.idle_since_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._usual_silence_s = self._silence_s = silence_s
        self._on_release = on_release
        self._transport: asyncio.Transport | None = None
        self._is_asked = False
        self._is_paused = False
        self._error: AnswerBroken | None = None
        self._kept = bytearray()
        self._take: Taker | None = None
        self._waiter: asyncio.Future[Exception | None] | None = None
        self._heard_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_usable(self) -> bool:
        """Whether it can be asked again: the last answer is over and read, and nothing came
        after it.
        """
        transport = self._transport
        return (
            transport is not None
            and not transport.is_closing()
            and self.parser.is_over
            and self.parser.keeps_alive
            and not self._kept
            # An engine may answer before it has read the whole question.
            and not transport.get_write_buffer_size()
        )

    def ask(self, head: bytes, body: bytes, silence_s: float | None = None) -> None:
        """Send a question, to which the engine may be silent for so long; None: as usual. Raises
        `AnswerBroken` if the connection is gone.
        """
        silence_s = silence_s or self._usual_silence_s
        if self._transport is None or self._transport.is_closing():
            raise AnswerBroken("the connection was closed")
        self.parser, self._is_asked = AnswerParser(), True
        self._heard_s = self._loop.time()
        if self._timer is not None and silence_s != self._silence_s:
            self._timer.cancel()
            self._timer = None
        self._silence_s = silence_s
        if self._timer is None:
            self._timer = self._loop.call_later(silence_s, self._look)
        if len(body) <= _JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def read(self, take: Taker) -> None:
        """Give the body to `take`, piece by piece, until that returns False or the body is over.

        Raises `AnswerBroken` and what `take` raises. One reader at a time.
        """
        if self._kept:
            kept = bytes(self._kept)
            self._kept.clear()
            self._go_on()
            if not take(kept):
                return
        if self.parser.is_over:
            return
        if self._error is not None:
            raise self._error
        self._take, self._waiter = take, self._loop.create_future()
        try:
            error = await self._waiter
        finally:
            self._take = self._waiter = None
        if error is not None:
            raise error

    def release(self) -> None:
        """Stop reading. The connection is kept for another question if the answer is over and read;
        otherwise it is cut. To be called once for a question.
        """
        self._is_asked = False
        self._on_release(self)

    def cut(self) -> None:
        """End the connection at once; the engine then aborts what it was asked."""
        self._is_asked = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        # A host that is gone without a word is noticed after a minute, long before `silence_s`.
        sock = transport.get_extra_info("socket")
        keep_alive(sock, idle_s=30, interval_s=10, probes=3)

    def data_received(self, data: bytes) -> None:
        if not self._is_asked:
            # An engine that speaks unasked would be taken for one that answers the next question.
            self.cut()
            return
        self._heard_s = self._loop.time()
        parser = self.parser
        body = parser.feed(data)
        if body:
            self._pass(body)
        if parser.is_over:
            self._wake(None)
        elif parser.error:
            self._fail(AnswerBroken(parser.error))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._transport = None
        if exc is None:
            self.parser.closed()
        if self.parser.is_over:
            self._wake(None)
        else:
            why = self.parser.error or str(exc) or type(exc).__name__
            self._fail(AnswerBroken(why))

    def _pass(self, body: bytes) -> None:
        take = self._take
        if take is None:
            self._kept += body
            is_full = len(self._kept) > _KEPT_BYTES and not self._is_paused
            if is_full and self._transport is not None:
                self._is_paused = True
                self._transport.pause_reading()
            return
        try:
            if take(body):
                return
        except Exception as error:
            self._wake(error)
            return
        self._wake(None)

    def _go_on(self) -> None:
        if self._is_paused:
            self._is_paused = False
            # The time for which nobody listened is no silence.
            self._heard_s = self._loop.time()
            if self._transport is not None:
                self._transport.resume_reading()

    def _fail(self, error: AnswerBroken) -> None:
        if self._error is None:
            self._error = error
        self._wake(error)
        if self._transport is not None:
            self._transport.abort()

    def _wake(self, error: Exception | None) -> None:
        # What arrives before the reader runs is kept for it.
        waiter, self._take, self._waiter = self._waiter, None, None
        if waiter is not None and not waiter.done():
            waiter.set_result(error)

    def _look(self) -> None:
        """Look whether the engine has been silent for too long. One timer serves many questions."""
        self._timer = None
        if not self._is_asked or self.parser.is_over or self._error is not None:
            return
        now_s = self._loop.time()
        if self._is_paused:
            self._heard_s = now_s
        left_s = self._heard_s + self._silence_s - now_s
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        self._fail(EngineSilent(f"no byte within {self._silence_s:g} s"))


class EngineConnections:
    """Opens connections to engines, and keeps idle ones for `keep_alive_s`. No limit: the gateway's
    own limits bound the requests, and a queue here would be invisible.
    """

    def __init__(self, *, connect_s: float, silence_s: float, keep_alive_s: float) -> None:
        self._connect_s = connect_s
        self._silence_s = silence_s
        self._keep_alive_s = keep_alive_s
        self._idle: dict[Address, list[EngineConnection]] = {}
        self._busy: set[EngineConnection] = set()
        self._good: dict[Address, SockAddress] = {}
        """The address of each engine's host that answered last."""
        self._sweeping: asyncio.TimerHandle | None = None

    async def take(self, address: Address) -> EngineConnection:
        """A connection that nobody uses. Raises OSError, `AnswerBroken`."""
        loop = asyncio.get_running_loop()
        idle = self._idle.get(address)
        while idle:
            # The latest: the others may go once they have been idle for long.
            found = idle.pop()
            if found.is_usable and loop.time() - found.idle_since_s <= self._keep_alive_s:
                self._busy.add(found)
                return found
            found.cut()
        try:
            async with asyncio.timeout(self._connect_s):
                made = await self._connect(address)
        except TimeoutError:
            raise AnswerBroken(f"no connection within {self._connect_s:g} s") from None
        self._busy.add(made)
        return made

    async def _connect(self, address: Address) -> EngineConnection:
        sock = await dial(Endpoint(address.host, address.port), self._good.get(address))
        self._good[address] = sock.getpeername()
        try:
            _, made = await asyncio.get_running_loop().create_connection(
                lambda: EngineConnection(address, self._silence_s, self._release),
                sock=sock,
                ssl=address.context,
                server_hostname=address.host if address.context is not None else None,
            )
        except BaseException:
            sock.close()
            raise
        return made

    def close(self) -> None:
        """Cut all connections."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in (*self._busy, *(item for idle in self._idle.values() for item in idle)):
            connection.cut()
        self._idle.clear()

    def _release(self, connection: EngineConnection) -> None:
        self._busy.discard(connection)
        if not connection.is_usable:
            connection.cut()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.setdefault(connection.address, []).append(connection)
        if self._sweeping is None:
            self._sweeping = loop.call_later(self._keep_alive_s, self._sweep)

    def _sweep(self) -> None:
        """Close what has been idle for too long, and forget engines that are gone."""
        self._sweeping = None
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - self._keep_alive_s
        for address, idle in list(self._idle.items()):
            for connection in idle:
                if connection.idle_since_s <= oldest_s:
                    connection.cut()
            kept = [item for item in idle if item.idle_since_s > oldest_s and item.is_usable]
            if kept:
                self._idle[address] = kept
            else:
                del self._idle[address]
                self._good.pop(address, None)
        # Each list is in the order of release, so that its first has been idle longest.
        next_s = min((idle[0].idle_since_s for idle in self._idle.values()), default=None)
        if next_s is not None:
            self._sweeping = loop.call_at(next_s + self._keep_alive_s, self._sweep)
