"""The response to a client that asked for a stream, from before its answer has begun.

A stream that is silent for too long gets comments, as proxies cut connections that are. Before the
first event this sends the head, and so the status 200, as vLLM does at once: what goes wrong later
is an event. This file does not know engines, routes or records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

import aiohttp
from aiohttp import web

from deploy.gateway.errors import ApiError
from deploy.gateway.proxy.slow_client import ClientPatience
from deploy.gateway.proxy.sse import StreamRules, error_event

STREAM_HEADERS: Final = {
    # Proxies such as nginx would gather events before they pass them on.
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_EVENT_STREAM: Final = {"Content-Type": "text/event-stream; charset=utf-8"}
_COMMENT: Final = b": keep-alive\n\n"
_DONE: Final = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection or stopped reading."""


class ClientStream:
    """One response. `stop` it in the end, however that comes."""

    def __init__(self, request: web.Request, rules: StreamRules, patience: ClientPatience) -> None:
        self.request = request
        self.patience = patience
        self.response: web.StreamResponse | None = None
        self.num_bytes = 0
        """Bytes of the body that were given to the client, without comments."""
        self.num_events = 0
        """Events that were given to the client, as far as the relay has said."""
        self.is_between_events: Callable[[], bool] = lambda: True
        """Whether a comment may be written now."""
        self._rules = rules
        self._seen_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._starting: asyncio.Task[None] | None = None

    def keep_alive(self, headers: Callable[[], Mapping[str, str]]) -> None:
        """From now on no silence lasts longer than `patience.keep_alive_s`. `headers` gives those
        of a head that must be sent before the answer has begun.
        """
        every_s = self.patience.keep_alive_s
        if not every_s:
            return

        def look() -> None:
            self._timer = asyncio.get_running_loop().call_later(every_s, look)
            if self.response is None:
                self._starting = self._starting or asyncio.create_task(self._early(headers()))
            elif (
                self.num_bytes == self._seen_bytes
                and self.is_between_events()
                and not self.request.protocol.writing_paused
            ):
                self.write_now(_COMMENT)
            self._seen_bytes = self.num_bytes

        self._timer = asyncio.get_running_loop().call_later(every_s, look)

    async def start(self, status: int, headers: Mapping[str, str]) -> web.StreamResponse:
        """Send the head, unless an earlier one is on its way. Raises `ClientGone`."""
        if self._starting is not None:
            await self._starting
        if self.response is None:
            response = web.StreamResponse(status=status, headers=headers)
            await _sent(response.prepare(self.request))
            self.response = response
        return self.response

    async def whole(self, response: web.Response) -> web.StreamResponse:
        """What the client gets if the answer is this response in one piece: the response, or an
        event where the head of a stream has been sent.
        """
        if self._starting is None:
            return response
        try:
            stream = await self.start(200, {})
            assert isinstance(response.body, bytes)
            await self.write(error_event(response.body, self._rules))
            await self.write(b"" if self._rules.last else _DONE)
            await _sent(stream.write_eof())
        except ClientGone:
            self.request.protocol.force_close()
        return self.response or response

    async def write(self, data: bytes) -> None:
        """Write part of the body. Raises `ClientGone`."""
        assert self.response is not None
        if data:
            await _sent(self.response.write(data))
            self.num_bytes += len(data)

    async def drain(self) -> None:
        """Wait until the client has taken enough. Raises `ClientGone`."""
        await _sent(self.request.writer.drain())

    def write_now(self, data: bytes) -> None:
        """Write part of the body without waiting for the client."""
        response, transport = self.response, self.request.transport
        if response is None or transport is None or transport.is_closing():
            return
        is_chunked = response.headers.get("Transfer-Encoding") == "chunked"
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

    def break_off(self, error: ApiError) -> None:
        """Tell the client that a stream which has begun is not whole, and close the connection
        without ending the body.
        """
        transport = self.request.transport
        if self.response is None or transport is None:
            return
        if self.is_between_events():
            body = error.body("anthropic" if self._rules.errors == "anthropic" else "openai")
            self.write_now(error_event(body, self._rules, self.num_events))
        # close() sends what is buffered, but not the mark that would end the body.
        transport.close()

    def stop(self) -> None:
        """Send no more comments."""
        if self._timer is not None:
            self._timer.cancel()
        if self._starting is not None:
            self._starting.cancel()

    async def _early(self, headers: Mapping[str, str]) -> None:
        response = web.StreamResponse(headers={**_EVENT_STREAM, **STREAM_HEADERS, **headers})
        # Who is gone is noticed by the handler, whose task ends.
        with suppress(ClientGone):
            await _sent(response.prepare(self.request))
            await _sent(response.write(_COMMENT))
            self.response = response


async def _sent(sending: Awaitable[object]) -> None:
    # aiohttp raises the same errors for a lost client as for a lost engine.
    try:
        await sending
    except (aiohttp.ClientError, OSError) as error:
        raise ClientGone(str(error) or type(error).__name__) from None
