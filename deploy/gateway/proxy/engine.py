"""HTTP client of the engines: posts a request and waits until its answer has begun.

An answer has begun when its whole body has arrived, or the first event of its stream. Everything
that goes wrong earlier is an `EngineLost`, so that the caller may try elsewhere: the client has
seen nothing yet. This file does not know routes, slots or clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec
from yarl import URL

from deploy.gateway.config import TimeoutConfig
from deploy.gateway.errors import JSON_TYPE, EngineLost, EngineTimeout
from deploy.gateway.proxy.sse import EventGate, first_data
from deploy.gateway.proxy.usage import Correction
from prfaas.engines.access import EngineAccess

EVENT_STREAM: Final = "text/event-stream"
_READ_BUFFER_BYTES: Final = 1 << 18
# uvicorn closes an idle connection after 5 s. A POST must not go out on one half closed: it could
# not be repeated safely.
_KEEP_ALIVE_S: Final = 4.0


@dataclass(slots=True)
class EngineAnswer:
    """An answer that has begun: `begun` is the whole body, or what has been read of a stream.

    A stream has a `gate`, and a `response` until nothing more will come. `correction` is to be
    applied to the usage on the way to the client; most answers have none.
    """

    instance: str
    status: int
    headers: Mapping[str, str]
    begun: bytes
    gate: EventGate | None = None
    response: aiohttp.ClientResponse | None = None
    correction: Correction | None = None

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events; otherwise the body is whole."""
        return self.gate is not None

    def close(self) -> None:
        """Cut the connection if the answer is not over; the engine then aborts its request."""
        if self.response is not None:
            self.response.close()
            self.response = None


class EngineHttpClient:
    """One connection pool to all engines of a region."""

    def __init__(
        self, timeouts: TimeoutConfig, access: EngineAccess, *, max_answer_bytes: int
    ) -> None:
        """`access` says what the engines demand."""
        self._timeouts = timeouts
        self._access = access
        self._max_answer_bytes = max_answer_bytes
        self._urls: dict[tuple[str, str], URL] = {}
        self._session = aiohttp.ClientSession(
            # No limit: the gateway's own limits bound the requests, and a queue here would be
            # invisible.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(
                # No total limit: a long answer may stream for hours.
                total=None,
                sock_connect=timeouts.connect_s,
                sock_read=timeouts.engine_silence_s,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            skip_auto_headers=("User-Agent",),
            read_bufsize=_READ_BUFFER_BYTES,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def open(
        self, instance: str, engine_url: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> EngineAnswer:
        """POST `body` and wait until the answer has begun.

        Raises `EngineLost` when the engine cannot be reached or breaks off before that,
        `EngineTimeout` when it stays silent. Cancelling closes the connection.
        """
        try:
            response = await self._session.post(
                self._url(engine_url, path),
                data=body,
                headers={**headers, **self._access.headers},
                allow_redirects=False,
                ssl=self._access.tls(),
            )
            try:
                return await self._begin(instance, response)
            except BaseException:
                # Also after a cancellation: the engine notices it and aborts its request.
                response.close()
                raise
        # Before `ClientError`, which it is a kind of: a silent engine leaves no time for another
        # try.
        except aiohttp.SocketTimeoutError:
            raise EngineTimeout(
                instance, f"no answer within {self._timeouts.engine_silence_s:g} s"
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineLost(instance, str(error) or type(error).__name__) from error

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

    async def _begin(self, instance: str, response: aiohttp.ClientResponse) -> EngineAnswer:
        is_stream = response.status == 200 and response.content_type == EVENT_STREAM
        if not is_stream:
            body = await self._read_whole(instance, response)
            return EngineAnswer(instance, response.status, response.headers, body)
        gate = EventGate()
        begun = b""
        # Comments alone (keep-alive) are no answer.
        while (data := first_data(begun)) is None:
            chunk = await response.content.readany()
            if not chunk:
                raise EngineLost(instance, "the stream ended before its first event")
            begun += gate.feed(chunk)
        if data.startswith(b'{"error"') and (error := _error_of(data)) is not None:
            # An error instead of the first token. Nothing has been sent to the client yet, so it
            # can still get a status and an error body.
            response.close()
            status, body = error
            return EngineAnswer(instance, status, {"Content-Type": JSON_TYPE}, body)
        return EngineAnswer(
            instance, response.status, response.headers, begun, gate=gate, response=response
        )

    async def _read_whole(self, instance: str, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        while chunk := await response.content.readany():
            body += chunk
            if len(body) > self._max_answer_bytes:
                raise EngineLost(
                    instance, f"its answer is longer than {self._max_answer_bytes} bytes"
                )
        whole = bytes(body)
        if not _is_framed(response) and not _is_json(whole):
            raise EngineLost(instance, "the answer ended short")
        if response.status == 200 and not whole:
            raise EngineLost(instance, "the answer is empty")
        return whole

    def _url(self, engine_url: str, path: str) -> URL:
        # Parsing costs more than the look-up. Engines are few, and there are four paths.
        key = (engine_url, path)
        url = self._urls.get(key)
        if url is None:
            if len(self._urls) > 4096:
                self._urls.clear()
            url = self._urls[key] = URL(engine_url.rstrip("/") + path)
        return url


class _StreamedErrorBody(msgspec.Struct):
    code: int | str | None = None


class _StreamedError(msgspec.Struct):
    error: _StreamedErrorBody


def _error_of(data: bytes) -> tuple[int, bytes] | None:
    """Status and JSON of the error event at the start of `data`; None if it is no error event."""
    body = data.partition(b"\n")[0].rstrip()
    try:
        code = msgspec.json.decode(body, type=_StreamedError).error.code
    except (msgspec.MsgspecError, RecursionError):
        return None
    return (code if isinstance(code, int) and 400 <= code < 600 else 500), body


def _is_framed(response: aiohttp.ClientResponse) -> bool:
    """Whether HTTP can tell the end of this body from a broken connection."""
    headers = response.headers
    return "Content-Length" in headers or "chunked" in headers.get("Transfer-Encoding", "").lower()


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True
