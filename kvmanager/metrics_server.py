"""The HTTP port at which a process shows its Prometheus metrics and its health.

Beyond loopback it has a key, which every request but a probe must show; the configuration sees to
that (`kvmanager.config_files.security`). It does not know what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest

from kvmanager.bearer import key_digest, shows_key
from kvmanager.private_files import read_secret
from transport import Endpoint
from transport.addresses import listen
from transport.errors import LocalError
from transport.health import WhyNotReady, always_ready
from transport.rotating import PlainFiles, Rotating

# Imported in `start`, so that a process without metrics does not pay for aiohttp.
if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Handler


_PROBES: Final = ("/livez", "/readyz")
"""Supervisors such as Kubernetes ask for these, and have no key."""


class MetricsServer:
    """Serves /metrics, /health, /livez and /readyz on the event loop that starts it."""

    def __init__(
        self,
        registry: CollectorRegistry,
        at: Endpoint,
        key_file: Path | None = None,
        exposures: Sequence[str] = (),
        *,
        why_not_ready: WhyNotReady = always_ready,
    ) -> None:
        """Port 0 of `at`: any free one. `exposures`: what somebody on the network may do, for
        /health. With `key_file`, which is read again when it changes, every request but a probe
        must have the header "Authorization: Bearer KEY". Raises LocalError when the file cannot be
        used.
        """
        self._registry = registry
        self._at = at
        self._exposures = exposures
        self._why_not_ready = why_not_ready
        self._key = None if key_file is None else Rotating(PlainFiles((key_file,)), _digest_in)
        self._runner: web.AppRunner | None = None

    async def start(self) -> Endpoint:
        """Serve, and return where. Raises OSError when the port is taken."""
        from aiohttp import web

        from kvmanager.http_listener import HttpRunner

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            shown = request.headers.get("Authorization", "")
            if request.path in _PROBES or self._is_welcome(shown):
                return await handler(request)
            text = "Send this process's metrics key: Authorization: Bearer KEY\n"
            return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"}, text=text)

        async def show_metrics(_: web.Request) -> web.Response:
            text = generate_latest(self._registry)
            return web.Response(body=text, content_type="text/plain", charset="utf-8")

        async def show_health(_: web.Request) -> web.Response:
            lines = ("ok", *(f"open: {what}" for what in self._exposures))
            return web.Response(text="".join(f"{line}\n" for line in lines))

        async def live(_: web.Request) -> web.Response:
            return web.Response(text="ok\n")  # only a loop that turns comes here

        async def ready(_: web.Request) -> web.Response:
            why_not = await self._why_not_ready()
            return web.Response(status=503 if why_not else 200, text=f"{why_not or 'ok'}\n")

        app = web.Application(middlewares=[guard])
        app.router.add_get("/metrics", show_metrics)
        app.router.add_get("/health", show_health)
        app.router.add_get("/livez", live)
        app.router.add_get("/readyz", ready)
        self._runner = HttpRunner(
            app, lambda status, _, message: web.Response(status=status, text=message + "\n")
        )
        await self._runner.setup()
        port = await start_sites(self._runner, self._at)
        return Endpoint(self._at.host, port)

    async def stop(self) -> None:
        """Close the port. Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _is_welcome(self, authorization: str) -> bool:
        if self._key is None:
            return True
        # Headers may hold bytes that are no UTF-8.
        offered = authorization.encode("utf-8", "surrogateescape")
        return shows_key(offered, self._key.current(time.monotonic()))


async def start_sites(
    runner: web.AppRunner, at: Endpoint, *, backlog: int = 128, reuse_port: bool = False
) -> int:
    """Serve at each address of a host until the runner's `cleanup`. Returns the port. Raises
    OSError.
    """
    from aiohttp import web

    sockets = listen(at, reuse_port=reuse_port)
    port = int(sockets[0].getsockname()[1])
    try:
        while sockets:
            await web.SockSite(runner, sockets[-1], backlog=backlog).start()
            sockets.pop()  # it is the runner's now
    finally:
        for sock in sockets:
            sock.close()
    return port


def _digest_in(files: PlainFiles) -> bytes:
    (path,) = files.paths
    try:
        return key_digest(read_secret(path).encode())
    except (OSError, ValueError) as error:
        raise LocalError("metrics_key", f"cannot use the key of metrics: {error}") from error
