"""`prfaas gateway`: a gateway as a process of its own.

It only reads the file, runs the parts and turns signals into a stop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from deploy.gateway.app import Gateway
from deploy.gateway.file import (
    GatewayFile,
    agent_clients,
    build_caches,
    build_clusters,
    build_links,
    load_gateway_file,
)
from deploy.gateway.server import serve_gateway
from kvmanager.config_files.yaml_files import exit_on_bad_file


def gateway_command(
    config: Annotated[Path, typer.Option(help="YAML file: limits, models, clusters.")],
    host: Annotated[str, typer.Option(help="Address to listen on; overrides the file.")] = "",
    port: Annotated[int, typer.Option(help="Port to listen on; overrides the file.")] = -1,
    log_level: Annotated[str, typer.Option(help="Level of this process's log.")] = "INFO",
) -> None:
    """Serve the OpenAI API for a region and route each request to one of its clusters."""
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(name)s %(message)s")
    with exit_on_bad_file():
        loaded = load_gateway_file(config)
    changes: dict[str, object] = {}
    if host:
        changes["host"] = host
    if port >= 0:
        changes["port"] = port
    gateway = loaded.gateway.model_copy(update=changes)
    try:
        with exit_on_bad_file():
            uvloop.run(run(loaded.model_copy(update={"gateway": gateway})))
    except OSError as error:
        typer.echo(f"cannot serve on {gateway.host}:{gateway.port}: {error}", err=True)
        raise typer.Exit(1) from error


async def run(file: GatewayFile) -> None:
    """Serve until SIGTERM or SIGINT; a second one skips the drain. Prints one line when ready."""
    stop = asyncio.Event()
    serving = asyncio.current_task()

    def on_signal() -> None:
        if stop.is_set() and serving is not None:
            serving.cancel()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    # Made on the loop: the clients belong to the event loop on which they are made.
    agents = agent_clients(file)
    caches = build_caches(file, agents)
    clusters = build_clusters(file)
    try:
        await clusters.start()
        gateway = Gateway(
            file.gateway,
            clusters.pd,
            clusters.prefill,
            clusters.links,
            caches,
            region_links=build_links(file, agents),
        )
        await serve_gateway(gateway, stop, _announce)
    except asyncio.CancelledError:
        # Not our second signal: the cancellation comes from outside.
        if not stop.is_set():
            raise
    finally:
        await clusters.close()


def _announce(host: str, port: int) -> None:
    ready = {"event": "ready", "url": f"http://{host}:{port}", "pid": os.getpid()}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
