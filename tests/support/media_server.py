"""An HTTP server with media on loopback, honest and otherwise, which counts what it is asked."""

import asyncio
import gzip
from collections import Counter
from typing import Any

from aiohttp import web

PIXELS = b"\x89PNG" + bytes(range(256)) * 4


class MediaServer:
    """Answers each path in its own way; `requests` are the headers of every request, by path."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.num_open = Counter[str]()
        self.gate = asyncio.Event()
        """Lets go of /slow and /trickle."""
        self.targets: dict[str, str] = {}
        """Where /redirect/NAME leads."""
        self.bodies: dict[str, tuple[str, bytes]] = {}
        """What /body/NAME answers: its type and bytes."""
        self.url = ""
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "MediaServer":
        app = web.Application()
        app.router.add_get("/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        self.gate.set()
        await self._runner.cleanup()

    def asked(self, path: str) -> int:
        return sum(seen == path for seen, _ in self.requests)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.path, dict(request.headers)))
        self.num_open[request.path] += 1
        try:
            return await self._answer(request)
        finally:
            self.num_open[request.path] -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        what, _, name = request.path[1:].partition("/")
        if what == "redirect":
            return web.Response(status=302, headers={"Location": self.targets[name]})
        if what == "loop":
            return web.Response(status=302, headers={"Location": request.path})
        if what == "status":
            return web.Response(status=int(name), text="internal secrets")
        if what == "body":
            content_type, body = self.bodies[name]
            return web.Response(body=body, headers={"Content-Type": content_type})
        if what == "bomb":
            packed = gzip.compress(b"\0" * (64 << 20))
            headers = {"Content-Type": "image/png", "Content-Encoding": "gzip"}
            return web.Response(body=packed, headers=headers)
        if what == "endless":
            return await self._endless(request)
        if what in ("slow", "trickle"):
            return await self._slow(request, sends=what == "trickle")
        return web.Response(body=PIXELS, content_type="image/png")

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "image/png"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        while True:
            await response.write(b"\0" * 65536)

    async def _slow(self, request: web.Request, *, sends: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "image/png"})
        response.enable_chunked_encoding()
        if sends:
            await response.prepare(request)
            while not self.gate.is_set():
                await response.write(b"\0")
                await asyncio.sleep(0.02)
        else:
            await self.gate.wait()
            await response.prepare(request)
        await response.write(PIXELS)
        await response.write_eof()
        return response


def settings(server: MediaServer, **more: Any) -> dict[str, Any]:
    """Settings of a gateway that may fetch from `server`."""
    private = {"private_networks": ["127.0.0.1/32"], "ports": [80, 443, server.port]}
    return {"media": private | more}


def asking(*urls: str, kind: str = "image_url") -> dict[str, Any]:
    """A chat about the media at `urls`."""
    media = [{"type": kind, kind: {"url": url}} for url in urls]
    content = [{"type": "text", "text": "what is it?"}, *media]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}]}
