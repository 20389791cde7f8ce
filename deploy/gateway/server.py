"""Runs a gateway's HTTP server until told to stop, then drains it.

Does not know where the gateway's clusters come from, nor signals.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from aiohttp import web

from deploy.gateway.app import Gateway, create_app
from kvmanager.loop.metrics import LoopCollector
from kvmanager.loop.watch import LoopWatch, settle_heap

logger = logging.getLogger("prfaas.deploy.gateway")

_KEEP_ALIVE_S: Final = 75.0
_LAST_WORDS_S: Final = 0.5
_LINGER_S: Final = 2.0
"""A client that is refused while it still sends may go on for so long, to read the answer."""


async def serve_gateway(
    gateway: Gateway, stop: asyncio.Event, on_ready: Callable[[str, int], None]
) -> None:
    """Serve until `stop` is set: then refuse new requests, let the others end, close.

    `on_ready` gets host and real port. Raises `OSError` when the address is not free. Cancelling
    skips the drain; what requests hold is given back all the same.
    """
    runner = await start_server(gateway)
    try:
        host, port = runner.addresses[0][:2]
        settle_heap()
        on_ready(host, port)
        with LoopWatch() as watch:
            gateway.metrics.registry.register(LoopCollector("prfaas_gateway", watch.gaps))
            await stop.wait()
            logger.info("draining %d requests", gateway.num_in_flight)
            await gateway.drain()
    finally:
        await runner.cleanup()


async def start_server(gateway: Gateway) -> web.AppRunner:
    """Bind and start; `cleanup()` of the result ends it, `addresses` are its sockets."""
    runner = web.AppRunner(
        create_app(gateway),
        # A client that goes away cancels its handler: that is what frees engines and landings.
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=_KEEP_ALIVE_S,
        # Draining has been done before: what still runs is cut off.
        shutdown_timeout=_LAST_WORDS_S,
        lingering_time=_LINGER_S,
    )
    await runner.setup()
    try:
        config = gateway.config
        await web.TCPSite(runner, config.host, config.port, backlog=1024).start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner
