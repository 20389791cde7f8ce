"""Two proxies that do nothing but pass on: what the HTTP stack alone costs on this machine.

Run: python tests/bench/bare_proxy.py KIND PORT ENGINE_PORT. `aiohttp` is aiohttp's server with its
client behind it; `sockets` passes bytes between uvloop's transports and looks for the end of an
answer only. Neither checks, counts or retries anything.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final

import uvloop
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from echo_engine import take_message

KINDS: Final = ("aiohttp", "sockets")


async def serve_aiohttp(port: int, engine_port: int) -> None:
    """A handler that reads a request, posts it and writes what comes, piece by piece."""
    url = f"http://127.0.0.1:{engine_port}/v1/completions"

    async def pass_on(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with session.post(url, data=body) as answer:
            if answer.content_type != "text/event-stream":
                whole = await answer.read()
                return web.Response(body=whole, content_type=answer.content_type)
            response = web.StreamResponse(headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            while piece := await answer.content.readany():
                await response.write(piece)
            return response

    timeout, connector = ClientTimeout(total=None), TCPConnector(limit=0)
    async with ClientSession(connector=connector, timeout=timeout) as session:
        app = web.Application()
        app.router.add_post("/v1/completions", pass_on)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


class _Near(asyncio.Protocol):
    """A client's connection, with one to the engine that lives as long."""

    def __init__(self, engine_port: int) -> None:
        self._engine_port = engine_port
        self._buffer = bytearray()
        self._far: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self._far, _ = await loop.create_connection(
            lambda: _Far(self.transport), "127.0.0.1", self._engine_port
        )
        self.data_received(b"")

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._far is not None and (message := take_message(self._buffer)) is not None:
            self._far.write(b"".join(message))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._far is not None:
            self._far.close()


class _Far(asyncio.Protocol):
    def __init__(self, client: Any) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.close()


async def serve_sockets(port: int, engine_port: int) -> None:
    """Bytes in, bytes out."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Near(engine_port), "127.0.0.1", port)
    await server.serve_forever()


def main(kind: str, port: str, engine_port: str) -> None:
    """Serve until killed."""
    serve = serve_aiohttp if kind == "aiohttp" else serve_sockets
    uvloop.run(serve(int(port), int(engine_port)))


if __name__ == "__main__":
    main(*sys.argv[1:])
