"""`/ui` and `/ui/events`: the page's files, which anybody may have, and its data, for operators.

    GET  /ui          the page; it holds no data
    GET  /ui/NAME     its script, its style
    GET  /ui/events   server-sent events: one `view`, then `changes`

The browser sends the key as a header, which `EventSource` cannot, so the page reads the stream by
`fetch`. This file does not know what a view has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from importlib import resources
from typing import Any, Final

import msgspec
from aiohttp import web

from deploy.gateway.errors import ApiError
from deploy.gateway.pages import Pages
from deploy.gateway.ui.feed import SOURCES, Feed
from deploy.gateway.ui.view import View, changes

TICK_S: Final = 0.5
"""The time between two looks for changes, seconds."""
STALL_S: Final = 20.0
"""A reader that takes nothing for this long is cut off, seconds."""
QUIET_S: Final = 10.0
"""Without changes a comment is sent this often, seconds, so that the page sees a broken way."""
MAX_READERS: Final = 32

_TYPES: Final = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "stream.js": "text/javascript",
    "draw.js": "text/javascript",
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def ui_routes(pages: Pages, routes: Iterable[web.RouteDef]) -> list[web.RouteDef]:
    """The routes of the page, beside those that it collects from. None without operators' pages:
    then these are at another address.
    """
    handlers = {
        route.path: route.handler
        for route in routes
        if route.method == "GET" and route.path in SOURCES
    }
    if not handlers:
        return []
    shown = _Shown(pages, Feed(handlers))
    return [
        web.get("/ui", _file),
        web.get("/ui/events", shown.events),
        web.get("/ui/{name:[a-z]+[.][a-z]+}", _file),
    ]


async def _file(request: web.Request) -> web.Response:
    name = request.match_info.get("name", "index.html")
    if name not in _TYPES:
        raise web.HTTPNotFound
    body = resources.files("deploy.gateway.ui").joinpath("files", name).read_bytes()
    # A newer gateway has newer files, which must fit each other.
    headers = {"Cache-Control": "no-cache", **HEADERS}
    return web.Response(body=body, content_type=_TYPES[name], charset="utf-8", headers=headers)


class _Shown:
    """Sends the view to browsers."""

    def __init__(self, pages: Pages, feed: Feed) -> None:
        self._pages = pages
        self._feed = feed
        self._num_readers = 0

    async def events(self, request: web.Request) -> web.StreamResponse:
        """GET /ui/events."""
        self._pages.check_operator(request)
        if self._num_readers >= MAX_READERS:
            message = f"{MAX_READERS} pages are open already; close one."
            raise ApiError(503, "too_many_readers", message, retry_after_s=5)
        self._num_readers += 1
        try:
            return await self._follow(request)
        finally:
            self._num_readers -= 1

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        sent: View = await self._feed.latest(request)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **HEADERS}
        headers["Content-Type"] = "text/event-stream; charset=utf-8"
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        quiet_s = 0.0
        try:
            await _send(response, "view", sent)
            while True:
                await asyncio.sleep(TICK_S)
                # The key may have been revoked.
                self._pages.check_operator(request)
                now = await self._feed.latest(request)
                # Only what is written waits for a slow reader: the next difference is taken from
                # the view that it has, however many there were between.
                if found := changes(sent, now):
                    await _send(response, "changes", found)
                    sent, quiet_s = now, 0.0
                elif (quiet_s := quiet_s + TICK_S) >= QUIET_S:
                    await _write(response, b": quiet\n\n")
                    quiet_s = 0.0
        except ApiError as error:
            await _send(response, "refused", {"code": error.code})
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        return response


async def _send(response: web.StreamResponse, event: str, value: Any) -> None:
    await _write(
        response, b"event: %s\ndata: %s\n\n" % (event.encode(), msgspec.json.encode(value))
    )


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(STALL_S):
        await response.write(data)
