"""HTTP client of the engines: posts a request and waits until its answer has begun.

An answer has begun when its whole body has arrived, or the first event of its stream. Everything
that goes wrong earlier is an `EngineLost`, so that the caller may try elsewhere: the client has
seen nothing yet. This file does not know routes, slots or clients.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from yarl import URL

from deploy.gateway.config import TimeoutConfig
from deploy.gateway.errors import JSON_TYPE, EngineLost, EngineTimeout
from deploy.gateway.proxy.engine_connection import (
    Address,
    AnswerBroken,
    EngineConnection,
    EngineConnections,
    EngineSilent,
)
from deploy.gateway.proxy.http_answer import AnswerParser
from deploy.gateway.proxy.sse import (
    ENDS_WITH_DONE,
    EventGate,
    StreamRules,
    error_in,
    first_data,
)
from deploy.gateway.proxy.usage import Correction
from prfaas.engines.access import EngineAccess

EVENT_STREAM: Final = "text/event-stream"
# uvicorn closes an idle connection after 5 s. A POST must not go out on one half closed: it could
# not be repeated safely.
_KEEP_ALIVE_S: Final = 4.0
_UNCOUNTED_BYTES: Final = 64 << 10
_MAX_TARGETS: Final = 4096


@dataclass(slots=True)
class EngineAnswer:
    """An answer that has begun: `begun` is the whole body, or what has been read of a stream.

    A stream has a `gate`, and a `connection` until it is closed. `correction` is to be applied to
    the usage on the way to the client; most answers have none.
    """

    instance: str
    status: int
    headers: Mapping[str, str]
    begun: bytes
    gate: EventGate | None = None
    connection: EngineConnection | None = None
    correction: Correction | None = None

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events; otherwise the body is whole."""
        return self.gate is not None

    def close(self) -> None:
        """Give the connection back, or cut it if the answer is not over; the engine then aborts its
        request.
        """
        if self.connection is not None:
            self.connection.release()
            self.connection = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What an answer may be: the rules of its stream, and for how long the engine may send nothing
    (None: `timeouts.engine_silence_s`). `count` is told of bytes of a body that is collected, and
    may raise.
    """

    rules: StreamRules = ENDS_WITH_DONE
    silence_s: float | None = None
    count: Callable[[int], None] = lambda nbytes: None


_ANY: Final = Expected()


@dataclass(frozen=True, slots=True)
class _Target:
    """An endpoint of an engine, and the beginning of each request to it."""

    host: str
    port: int
    is_tls: bool
    request_line: bytes

    @classmethod
    def of(cls, url: URL) -> _Target:
        """ValueError for what is no URL of HTTP."""
        if url.scheme not in ("http", "https") or url.host is None or url.port is None:
            raise ValueError(f"{url} is no URL of an engine")
        line = f"POST {url.raw_path_qs} HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\n"
        return cls(url.host, url.port, url.scheme == "https", line.encode("ascii"))


class EngineHttpClient:
    """One connection pool to all engines of a region."""

    def __init__(
        self, timeouts: TimeoutConfig, access: EngineAccess, *, max_answer_bytes: int
    ) -> None:
        """`access` says what the engines demand."""
        self._timeouts = timeouts
        self._access = access
        self._max_answer_bytes = max_answer_bytes
        self._targets: dict[tuple[str, str], _Target] = {}
        self._usual_tls: ssl.SSLContext | None = None
        self._connections = EngineConnections(
            connect_s=timeouts.connect_s,
            silence_s=timeouts.engine_silence_s,
            keep_alive_s=_KEEP_ALIVE_S,
        )

    async def close(self) -> None:
        """Close every connection."""
        self._connections.close()

    async def open(
        self,
        instance: str,
        engine_url: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        expected: Expected = _ANY,
    ) -> EngineAnswer:
        """POST `body` and wait until the answer has begun.

        Raises what `expected.count` raises, `EngineLost` when the engine cannot be reached or
        breaks off before that, `EngineTimeout` when it stays silent. Cancelling closes the
        connection.
        """
        silence_s = expected.silence_s or self._timeouts.engine_silence_s
        try:
            target = self._target(engine_url, path)
            head = _request_head(target, {**headers, **self._access.headers}, len(body))
            address = Address(target.host, target.port, self._tls() if target.is_tls else None)
            connection = await self._connections.take(address)
            try:
                connection.ask(head, body, silence_s)
                most = self._max_answer_bytes
                beginning = _Beginning(instance, connection.parser, most, expected)
                await connection.read(beginning.take)
                answer = beginning.answer()
            except BaseException:
                # Also after a cancellation: the engine notices it and aborts its request.
                connection.cut()
                connection.release()
                raise
        # Before `AnswerBroken`, which it is a kind of: a silent engine leaves no time for another
        # try.
        except EngineSilent:
            raise EngineTimeout(instance, f"no answer within {silence_s:g} s") from None
        except (AnswerBroken, OSError, ValueError) as error:
            raise EngineLost(instance, str(error) or type(error).__name__) from error
        answer.connection = connection
        if not answer.is_stream:
            answer.close()
        return answer

    async def render(
        self, instance: str, engine_url: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """POST to the render endpoint of `path`. Returns the status and the whole body.

        Raises `EngineLost`, `EngineTimeout`.
        """
        try:
            async with asyncio.timeout(self._timeouts.render_s):
                answer = await self.open(instance, engine_url, path + "/render", body, headers)
        except TimeoutError:
            raise EngineTimeout(
                instance, f"no rendering within {self._timeouts.render_s:g} s"
            ) from None
        answer.close()
        return answer.status, answer.begun

    def _tls(self) -> ssl.SSLContext:
        found = self._access.tls()
        if isinstance(found, ssl.SSLContext):
            return found
        if self._usual_tls is None:
            self._usual_tls = ssl.create_default_context()
        return self._usual_tls

    def _target(self, engine_url: str, path: str) -> _Target:
        # Parsing costs more than the look-up. Engines are few, and there are four paths.
        key = (engine_url, path)
        target = self._targets.get(key)
        if target is None:
            if len(self._targets) > _MAX_TARGETS:
                self._targets.clear()
            target = self._targets[key] = _Target.of(URL(engine_url.rstrip("/") + path))
        return target


class _Beginning:
    """Collects an answer until it has begun: the whole body, or the first event of a stream."""

    def __init__(
        self, instance: str, parser: AnswerParser, max_bytes: int, expected: Expected
    ) -> None:
        self._instance = instance
        self._parser = parser
        self._max_bytes = max_bytes
        self._rules = expected.rules
        self._count = expected.count
        self._num_counted = 0
        self._body = bytearray()
        self._gate: EventGate | None = None
        self._data: bytes | None = None
        """It holds what follows the first `data:` of a stream."""

    def take(self, piece: bytes) -> bool:
        """Take a piece of the body; False once there is enough of it."""
        if self._is_stream:
            gate = self._gate = self._gate or EventGate(self._rules)
            events = gate.feed(piece)
            self._body += events
            # Comments alone (keep-alive) are no answer.
            self._data = first_data(events, self._rules)
            return self._data is None and self._is_short
        self._body += piece
        self._count_new()
        return self._is_short

    def answer(self) -> EngineAnswer:
        """The answer that has begun. Raises `EngineLost` if it is none."""
        parser = self._parser
        if not self._is_short:
            text = f"its answer is longer than {self._max_bytes} bytes"
            raise EngineLost(self._instance, text)
        begun = bytes(self._body)
        self._body = bytearray()  # one copy is enough
        if not self._is_stream:
            if not parser.is_framed and not _is_json(begun):
                raise EngineLost(self._instance, "the answer ended short")
            if parser.status == 200 and not begun:
                raise EngineLost(self._instance, "the answer is empty")
            return EngineAnswer(self._instance, parser.status, parser.headers, begun)
        if self._data is None:
            raise EngineLost(self._instance, "the stream ended before its first event")
        first = self._data.partition(b"\n")[0].rstrip()
        if b'"error"' in first and (error := error_in(first)) is not None:
            # An error instead of the first token. Nothing has been sent to the client yet, so it
            # can still get a status and an error body.
            return EngineAnswer(self._instance, error[0], {"Content-Type": JSON_TYPE}, first)
        return EngineAnswer(self._instance, parser.status, parser.headers, begun, gate=self._gate)

    def _count_new(self) -> None:
        """Count what is not counted yet, once that is more than any connection buffers."""
        num_new = len(self._body) - self._num_counted
        if num_new > _UNCOUNTED_BYTES:
            self._num_counted += num_new
            self._count(num_new)

    @property
    def _is_short(self) -> bool:
        return len(self._body) <= self._max_bytes

    @property
    def _is_stream(self) -> bool:
        return self._parser.status == 200 and self._parser.content_type == EVENT_STREAM


def _request_head(target: _Target, headers: Mapping[str, str], num_body_bytes: int) -> bytes:
    """Raises ValueError for a header that would end before its value does."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if not lines.count("\n") == lines.count("\r") == len(headers):
        raise ValueError("a header has a line break")
    return b"%bAccept: */*\r\nContent-Length: %d\r\n%b\r\n" % (
        target.request_line,
        num_body_bytes,
        # As they came from the client, whatever they are.
        lines.encode("utf-8", "surrogateescape"),
    )


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True
