"""Runs a gateway's HTTP server until it is told to stop, then drains it.

This file does not know signals.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from aiohttp import web

from deploy.gateway.app import Gateway
from deploy.gateway.errors import JSON_TYPE, ApiError
from deploy.gateway.processes.folder import listen
from deploy.gateway.processes.siblings import Siblings, own_app
from deploy.gateway.web_app import create_admin_app, create_app
from kvmanager.http_listener import HttpRunner
from kvmanager.loop.metrics import LoopCollector
from kvmanager.loop.systemd import served
from kvmanager.loop.watch import LoopWatch, settle_heap
from kvmanager.metrics_server import start_sites
from transport import Endpoint

logger = logging.getLogger("prfaas.deploy.gateway")

_LAST_WORDS_S: Final = 0.5
_LINGER_S: Final = 2.0
"""How long a refused client that still sends may take to read the answer, seconds."""


async def serve_gateway(
    gateway: Gateway,
    stop: asyncio.Event,
    on_ready: Callable[[str, int], None],
    siblings: Siblings | None = None,
) -> None:
    """Serve until `stop` is set: then refuse new requests, let the others end, close.

    `on_ready` gets the host and the port in use. Raises `OSError` if an address is not free.
    Cancelling skips the drain; what requests hold is given back all the same. With `siblings` it
    shares its addresses with the other processes of the gateway, and answers them.
    """
    runner = await start_server(gateway, siblings)
    others: list[web.AppRunner] = []
    try:
        if (admin := await start_admin_server(gateway, siblings)) is not None:
            others.append(admin)
        if siblings is not None:
            at = siblings.folder.process(siblings.number)
            others.append(await listen(at, own_app(gateway)))
        port = runner.addresses[0][1]
        # Before the first request, which a full collection would delay.
        settle_heap()
        on_ready(gateway.config.host, port)
        with LoopWatch() as watch:
            gateway.metrics.registry.register(LoopCollector("prfaas_gateway", watch.gaps))
            async with served():
                await stop.wait()
            logger.info("draining %d requests", gateway.num_in_flight)
            await gateway.drain()
    finally:
        for other in others:
            await other.cleanup()
        await runner.cleanup()


async def start_server(gateway: Gateway, siblings: Siblings | None = None) -> web.AppRunner:
    """Start the gateway and bind. `addresses` of the result are its sockets, `cleanup()` ends both.

    Raises `OSError` if the address is not free.
    """
    at = Endpoint(gateway.config.host, gateway.config.port)
    app = create_app(gateway, siblings)
    return await _listening(gateway, app, at, shares=siblings is not None)


async def start_admin_server(
    gateway: Gateway, siblings: Siblings | None = None
) -> web.AppRunner | None:
    """The listener of the pages for operators of a gateway that has started, if it has one of its
    own. Raises `OSError` if the address is not free.
    """
    if gateway.config.admin is None:
        return None
    at = Endpoint.parse(gateway.config.admin)
    app = create_admin_app(gateway, siblings)
    return await _listening(gateway, app, at, shares=siblings is not None)


async def _listening(
    gateway: Gateway, app: web.Application, at: Endpoint, *, shares: bool
) -> web.AppRunner:
    def refuse(status: int, code: str, message: str) -> web.Response:
        gateway.metrics.rejected(code)
        body = ApiError(status, code, message).body()
        return web.Response(status=status, body=body, headers={"Content-Type": JSON_TYPE})

    runner = HttpRunner(
        app,
        refuse,
        # A client that goes away must cancel its handler, which frees its engine and landing.
        handler_cancellation=True,
        keepalive_timeout=gateway.config.client_keep_alive_s,
        # The drain is over by then, so what still runs is cut off.
        shutdown_timeout=_LAST_WORDS_S,
        lingering_time=_LINGER_S,
    )
    await runner.setup()
    try:
        await start_sites(runner, at, backlog=1024, reuse_port=shares)
    except BaseException:
        await runner.cleanup()
        raise
    return runner
