"""An engine's OpenAI server with fixed answers, and a client that only measures.

Neither computes anything: what a bench finds between the two is what it has put there.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any

NUM_EVENTS = 32
NUM_PACED_EVENTS = 150
PACE_S = 0.01

ANSWER = json.dumps(
    {
        "id": "cmpl-bench",
        "object": "text_completion",
        "created": 1,
        "model": "echo",
        "choices": [{"index": 0, "text": "word " * 32, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 64, "completion_tokens": 32, "total_tokens": 96},
    }
).encode()
EVENT = b"data: " + ANSWER + b"\n\n"


class EchoEngine(asyncio.Protocol):
    """The cheapest possible OpenAI server: fixed answers, no parsing beyond the request's end."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: Any = None
        self._pacing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    async def _paced(self) -> None:
        """Events one by one, as decoding makes them, so that each is a piece of its own."""
        self._transport.write(STREAM_HEAD)
        for _ in range(NUM_PACED_EVENTS):
            self._transport.write(STREAM_PIECE)
            await asyncio.sleep(PACE_S)
        self._transport.write(STREAM_END)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (request := take_message(self._buffer)) is not None:
            self.answer(*request)

    def answer(self, head: bytes, body: bytes) -> None:
        """Answer one request."""
        if head.startswith(b"GET"):
            self._transport.write(response(b"{}"))
        elif b"/render HTTP/" in head:
            self._transport.write(response(_rendered(body)))
        elif _PACED.search(body):
            self._pacing = asyncio.get_running_loop().create_task(self._paced())
        elif _STREAMED.search(body):
            self._transport.write(_STREAM)
        else:
            self._transport.write(response(ANSWER))


def _rendered(body: bytes) -> bytes:
    prompt = json.loads(body)["prompt"]
    token_ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return json.dumps([{"token_ids": token_ids}]).encode()


def response(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


# A router may have written the body anew, with other spaces.
_PACED = re.compile(rb'"prompt": ?"paced"')
_STREAMED = re.compile(rb'"stream": ?true')
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
STREAM_PIECE = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_STREAM = STREAM_HEAD + STREAM_PIECE * NUM_EVENTS + STREAM_END


def take_message(buffer: bytearray) -> tuple[bytes, bytes] | None:
    """One whole HTTP message with Content-Length or chunked body, or None."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = bytes(buffer[: end + 4])
    lowered = head.lower()
    if b"transfer-encoding: chunked" in lowered:
        stop = buffer.find(b"\r\n0\r\n\r\n", end)
        size = stop + 7 if stop >= 0 else -1
    else:
        _, _, rest = lowered.partition(b"content-length:")
        size = end + 4 + int(rest.split(b"\r\n", 1)[0] or 0)
    if size < 0 or len(buffer) < size:
        return None
    body = bytes(buffer[end + 4 : size])
    del buffer[:size]
    return head, body


class UnwantedHead(RuntimeError):
    """A whole answer whose head lacks what was wanted."""


class Client(asyncio.Protocol):
    """One kept-alive connection that sends the same request again and again.

    The head of each answer must contain `wanted`, in lower case.
    """

    def __init__(self, request: bytes, wanted: bytes = b"") -> None:
        self._request = request
        self._wanted = wanted
        self._buffer = bytearray()
        self._transport: Any = None
        self._answer: asyncio.Future[float] | None = None
        self._first_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"closed: {error}"))

    async def ask(self) -> tuple[float, float]:
        """Seconds to the first byte and to the whole answer.

        Raises UnwantedHead, RuntimeError for no completion at all, ConnectionError for no answer.
        """
        self._answer = asyncio.get_running_loop().create_future()
        self._first_s = 0.0
        started_s = time.perf_counter()
        self._transport.write(self._request)
        ended_s = await self._answer
        return self._first_s - started_s, ended_s - started_s

    def data_received(self, data: bytes) -> None:
        self._first_s = self._first_s or time.perf_counter()
        self._buffer += data
        message = take_message(self._buffer)
        if message is None or self._answer is None:
            return
        head, body = message
        told = f"{head!r} {body[:200]!r}"
        if not head.startswith(b"HTTP/1.1 200") or b"choices" not in body:
            self._answer.set_exception(RuntimeError(told))
        elif self._wanted not in head.lower():
            self._answer.set_exception(UnwantedHead(told))
        else:
            self._answer.set_result(time.perf_counter())

    def close(self) -> None:
        self._transport.close()


async def serve_engine(port: int, engine: Callable[[], EchoEngine]) -> None:
    """Serve connections at `port` of loopback until cancelled."""
    server = await asyncio.get_running_loop().create_server(engine, "127.0.0.1", port)
    await server.serve_forever()
