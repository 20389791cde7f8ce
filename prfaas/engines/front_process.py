"""Runs a stand-alone cluster front until it is told to stop.

It does not know which front: anything with the few methods below will do.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from typing import Protocol

from prometheus_client import REGISTRY, start_http_server

from kvmanager.loop.metrics import LoopCollector
from kvmanager.loop.watch import LoopWatch, settle_heap
from transport import Endpoint
from transport.rpc import RpcServer

logger = logging.getLogger("prfaas.kvmanager.engines")


class Front(Protocol):
    """A cluster."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


async def serve_front(
    front: Front, server: RpcServer, host: str, *, metrics_prefix: str, metrics_port: int = 0
) -> None:
    """Start both, print a JSON line {"event": "ready", ...} to stdout, and stop on SIGTERM/SIGINT.

    `metrics_prefix` begins the names of metrics of the process itself. Raises whatever keeps either
    from starting; nothing stays behind then.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    try:
        await front.start()
        port = await server.start()
        metrics = start_http_server(metrics_port) if metrics_port else None
        ready = {
            "event": "ready",
            "front": front.name,
            "control": str(Endpoint(host, port)),
            "pid": os.getpid(),
        }
        settle_heap()
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        with LoopWatch() as watch:
            REGISTRY.register(LoopCollector(metrics_prefix, watch.gaps))
            await stop.wait()
        logger.info("%s: stopping", front.name)
        if metrics is not None:
            # Waits for the server's next look at its own state, up to half a second away.
            await asyncio.to_thread(metrics[0].shutdown)
            metrics[0].server_close()
    finally:
        await server.stop()
        await front.close()
