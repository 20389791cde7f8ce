"""Connections to engines: kept when nothing is left of an answer, and cut in every other case."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from eventually import eventually

from deploy.gateway.proxy.engine_connection import (
    Address,
    AnswerBroken,
    EngineConnection,
    EngineConnections,
    EngineSilent,
)

QUESTION = b"POST / HTTP/1.1\r\nHost: e\r\nContent-Length: 0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
HELLO = HEAD % 5 + b"hello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Engine:
    """Counts its connections; `talk` says what happens after each question's head."""

    def __init__(self, talk: Talk) -> None:
        self.num_connections = 0
        self.ended = asyncio.Event()
        self.serving: set[asyncio.Task[None]] = set()
        self._talk = talk

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.add(asyncio.ensure_future(self.serve(reader, writer)))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await self._talk(reader, writer)
        self.ended.set()
        writer.close()


@asynccontextmanager
async def region(
    talk: Talk, *, silence_s: float = 60.0, keep_alive_s: float = 60.0
) -> AsyncIterator[tuple[Engine, EngineConnections, Address]]:
    engine = Engine(talk)
    server = await asyncio.start_server(engine.accept, "127.0.0.1", 0)
    connections = EngineConnections(connect_s=60.0, silence_s=silence_s, keep_alive_s=keep_alive_s)
    try:
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1], None)
        yield engine, connections, address
    finally:
        connections.close()
        server.close()
        # Their connections are cut, so they end.
        await asyncio.gather(*engine.serving)


def answering(answer: bytes) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    return talk


async def whole(connection: EngineConnection, question: bytes = QUESTION) -> bytes:
    pieces: list[bytes] = []
    connection.ask(question, b"")
    await connection.read(lambda piece: pieces.append(piece) is None)
    return b"".join(pieces)


async def test_a_whole_answer_leaves_its_connection_for_the_next_question() -> None:
    async with region(answering(HELLO)) as (engine, connections, address):
        for _ in range(3):
            connection = await connections.take(address)
            assert await whole(connection) == b"hello"
            connection.release()
        both = [await connections.take(address) for _ in range(2)]
        assert both[0] is not both[1]
        assert engine.num_connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        HELLO + b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
        CHUNKED + b"5\r\nhello\r\n0\r\n\r\nmore",
    ],
)
async def test_a_connection_with_anything_left_is_not_asked_again(answer: bytes) -> None:
    async with region(answering(answer)) as (engine, connections, address):
        for number in (1, 2):
            connection = await connections.take(address)
            assert await whole(connection) == b"hello"
            connection.release()
            assert engine.num_connections == number


async def test_an_engine_that_speaks_unasked_is_cut_off() -> None:
    spoke = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        await spoke.wait()
        writer.write(HEAD % 3 + b"bad")

    async with region(talk) as (engine, connections, address):
        connection = await connections.take(address)
        assert await whole(connection) == b"hello"
        connection.release()
        spoke.set()
        await engine.ended.wait()
        again = await connections.take(address)
        assert again is not connection
        assert await whole(again) == b"hello"


async def test_a_connection_that_was_idle_for_long_is_not_used() -> None:
    async with region(answering(HELLO), keep_alive_s=0.0) as (engine, connections, address):
        first = await connections.take(address)
        await whole(first)
        first.release()
        await engine.ended.wait()
        assert await connections.take(address) is not first


async def test_idle_connections_are_closed_in_time_one_by_one() -> None:
    """Not at the next round of all: the second to be idle waits no second `keep_alive_s`."""
    keep_alive_s, apart_s = 1.0, 0.1
    async with region(answering(HELLO), keep_alive_s=keep_alive_s) as (_, connections, address):
        loop = asyncio.get_running_loop()
        early, late = [await connections.take(address) for _ in range(2)]
        for connection in (early, late):
            await whole(connection)
        early.release()
        await asyncio.sleep(apart_s)
        late.release()
        released_s = loop.time()
        await eventually(lambda: not late.is_usable)
        # Looked after every `keep_alive_s` only, it would be idle for 1.9 s.
        assert loop.time() - released_s < 1.6


async def test_an_answer_that_is_given_up_ends_its_connection() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"5\r\nhello\r\n")

    async with region(talk) as (engine, connections, address):
        connection = await connections.take(address)
        connection.ask(QUESTION, b"")
        await connection.read(lambda piece: False)
        reading = asyncio.ensure_future(connection.read(lambda piece: True))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        connection.release()
        await engine.ended.wait()
        with pytest.raises(AnswerBroken):
            connection.ask(QUESTION, b"")


@pytest.mark.parametrize("begun", [b"", HEAD % 5 + b"he", CHUNKED + b"5\r\nhello\r\n"])
async def test_a_silent_engine(begun: bytes) -> None:
    async with region(answering(begun), silence_s=0.05) as (engine, connections, address):
        connection = await connections.take(address)
        with pytest.raises(EngineSilent, match=r"no byte within 0\.05 s"):
            await whole(connection)
        connection.release()
        await engine.ended.wait()


@pytest.mark.parametrize("begun", [b"", HEAD % 5 + b"he", CHUNKED + b"5\r\nhello\r\n0\r\n"])
@pytest.mark.parametrize("is_reset", [False, True])
async def test_an_engine_that_breaks_off(begun: bytes, is_reset: bool) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        if is_reset:
            writer.transport.abort()
        writer.close()

    async with region(talk) as (_, connections, address):
        connection = await connections.take(address)
        with pytest.raises(AnswerBroken):
            await whole(connection)


async def test_what_an_engine_says_is_held_up_while_nobody_reads() -> None:
    size = 8 << 20

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD % size + bytes(size))
        await writer.drain()

    async with region(talk) as (_, connections, address):
        connection = await connections.take(address)
        connection.ask(QUESTION, b"")
        pieces: list[int] = []

        def one(piece: bytes) -> bool:
            pieces.append(len(piece))
            return False

        while sum(pieces) < size:
            await connection.read(one)
            # Time for the engine to fill whatever takes it.
            for _ in range(50):
                await asyncio.sleep(0)
        assert sum(pieces) == size
        assert max(pieces) <= 1 << 20
        connection.release()
        assert await connections.take(address) is connection


async def test_an_error_of_the_reader_reaches_the_reader() -> None:
    async with region(answering(HELLO)) as (_, connections, address):
        connection = await connections.take(address)
        connection.ask(QUESTION, b"")

        def broken(piece: bytes) -> bool:
            raise KeyError("a bug")

        with pytest.raises(KeyError, match="a bug"):
            await connection.read(broken)


async def test_a_long_question_arrives_whole() -> None:
    body = bytes(range(256)) * 4096
    got = asyncio.get_running_loop().create_future()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.set_result(await reader.readexactly(len(body)))
        writer.write(HELLO)

    async with region(talk) as (_, connections, address):
        connection = await connections.take(address)
        connection.ask(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body), body)
        await connection.read(lambda piece: True)
        assert await got == body


async def test_nobody_listens() -> None:
    async with region(answering(HELLO)) as (_, connections, address):
        pass
    with pytest.raises(OSError, match="onnect"):
        await connections.take(address)
