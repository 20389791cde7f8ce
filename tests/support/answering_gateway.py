"""An HTTP server that gives the same answers for ever, in place of a gateway's pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web


@asynccontextmanager
async def answering(host: str, pages: Mapping[str, object]) -> AsyncIterator[int]:
    """Serve `pages`, JSON-ready values by path, at `host`; gives the port."""
    served = web.Application()
    served.add_routes([web.get(path, _always(value)) for path, value in pages.items()])
    runner = web.AppRunner(served, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _always(value: object) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(value), content_type="application/json")

    return handle
