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
from deploy.gateway.web_app import create_admin_app, create_app
from kvmanager.loop.metrics import LoopCollector
from kvmanager.loop.systemd import served
from kvmanager.loop.watch import LoopWatch, settle_heap
from transport import Endpoint

logger = logging.getLogger("prfaas.deploy.gateway")

_KEEP_ALIVE_S: Final = 75.0
_LAST_WORDS_S: Final = 0.5
_LINGER_S: Final = 2.0
"""How long a refused client that still sends may take to read the answer, seconds."""


async def serve_gateway(
    gateway: Gateway, stop: asyncio.Event, on_ready: Callable[[str, int], None]
) -> None:
    """Serve until `stop` is set: then refuse new requests, let the others end, close.

    `on_ready` gets the host and the port in use. Raises `OSError` if an address is not free.
    Cancelling skips the drain; what requests hold is given back all the same.
    """
    runner = await start_server(gateway)
    admin: web.AppRunner | None = None
    try:
        admin = await start_admin_server(gateway)
        host, port = runner.addresses[0][:2]
        # Before the first request, which a full collection would delay.
        settle_heap()
        on_ready(host, port)
        with LoopWatch() as watch:
            gateway.metrics.registry.register(LoopCollector("prfaas_gateway", watch.gaps))
            async with served():
                await stop.wait()
            logger.info("draining %d requests", gateway.num_in_flight)
            await gateway.drain()
    finally:
        if admin is not None:
            await admin.cleanup()
        await runner.cleanup()


async def start_server(gateway: Gateway) -> web.AppRunner:
    """Start the gateway and bind. `addresses` of the result are its sockets, `cleanup()` ends both.

    Raises `OSError` if the address is not free.
    """
    config = gateway.config
    return await _listening(create_app(gateway), config.host, config.port)


async def start_admin_server(gateway: Gateway) -> web.AppRunner | None:
    """The listener of the pages for operators of a gateway that has started, if it has one of its
    own. Raises `OSError` if the address is not free.
    """
    if gateway.config.admin is None:
        return None
    at = Endpoint.parse(gateway.config.admin)
    return await _listening(create_admin_app(gateway), at.host, at.port)


async def _listening(app: web.Application, host: str, port: int) -> web.AppRunner:
    runner = web.AppRunner(
        app,
        # A client that goes away must cancel its handler, which frees its engine and landing.
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=_KEEP_ALIVE_S,
        # The drain is over by then, so what still runs is cut off.
        shutdown_timeout=_LAST_WORDS_S,
        lingering_time=_LINGER_S,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner
