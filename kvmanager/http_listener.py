"""How our HTTP servers hold their connections: aiohttp's way, but for what comes before a handler.

Heads may be as long as engines take them. What is no request is answered as the server answers, and
logged without its bytes, which may be somebody's cookie or key. Bodies are not unpacked: strangers
send them. Probes find peers that are gone without a word, and have NAT keep connections over which
nothing is said. It knows no routes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import _ErrInfo

logger = logging.getLogger("prfaas.kvmanager")

MAX_HEAD_BYTES: Final = 64 << 10
"""The longest head of a request, bytes: what vLLM's server takes."""
_MAX_HEADERS: Final = 256
_PROBES: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
)

Refuse: TypeAlias = Callable[[int, str, str], web.Response]
"""Makes the answer to what is no request, given a status, a word for programs and a message."""


class HttpRunner(web.AppRunner):
    """Serves an application over such connections."""

    __slots__ = ("_refuse",)

    def __init__(self, app: web.Application, refuse: Refuse, **settings: Any) -> None:
        super().__init__(app, access_log=None, **settings)
        self._refuse = refuse

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            self._refuse,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )


class _Server(web.Server):
    def __init__(self, handler: Any, refuse: Refuse, **settings: Any) -> None:
        super().__init__(handler, **settings)
        self.refuse = refuse

    def __call__(self) -> web.RequestHandler:
        return _Connection(
            self,
            loop=self._loop,
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
            max_headers=_MAX_HEADERS,
            auto_decompress=False,
            **self._kwargs,
        )


class _Connection(web.RequestHandler):
    __slots__ = ("_head_bytes", "_refuse")

    def __init__(self, server: _Server, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._refuse = server.refuse
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        for level, option, value in _PROBES:
            sock.setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        if self._waits():
            end = data.find(b"\r\n\r\n")
            self._head_bytes += len(data) if end < 0 else end
        if self._head_bytes <= MAX_HEAD_BYTES:
            super().data_received(data)
        elif self._waits() and not self._close:
            # aiohttp bounds each header and their number, which together would be megabytes.
            error = LineTooLong(b"", MAX_HEAD_BYTES)
            self._messages.append((_ErrInfo(431, error, ""), EMPTY_PAYLOAD))
            if self._waiter is not None:
                self._waiter.set_result(None)
            self._close = True  # what follows is not parsed
        if not self._waits():
            self._head_bytes = 0

    def _waits(self) -> bool:
        """Whether no request is being served, so that what arrives is a head."""
        return self._waiter is not None and not self._waiter.done()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no request, or whose handler has failed."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        # The exception has the bytes at fault, so neither the log nor the answer may.
        logger.info("no request from %s: %s", request.remote, type(exc).__name__)
        if isinstance(exc, LineTooLong):
            text = f"The head of the request is longer than {MAX_HEAD_BYTES} bytes. Send less."
            response = self._refuse(431, "head_too_large", text)
        else:
            text = f"The request is not HTTP/1.1 ({type(exc).__name__})."
            response = self._refuse(400, "bad_request", text)
        response.force_close()
        return response
