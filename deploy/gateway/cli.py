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
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from deploy.gateway.app import Gateway
from deploy.gateway.config import GatewayConfig, open_listeners
from deploy.gateway.file import (
    GatewayFile,
    agent_clients,
    build_caches,
    build_clusters,
    build_granter,
    build_links,
    build_region,
    build_tracer,
    load_gateway_file,
)
from deploy.gateway.intake.traced import RequestTraces
from deploy.gateway.own_file import follow_own_file, weaknesses
from deploy.gateway.processes.siblings import Siblings
from deploy.gateway.server import serve_gateway
from kvmanager.config_files.followed_files import hang_up
from kvmanager.config_files.problems import FileError, Problem
from kvmanager.config_files.yaml_files import exit_on_bad_file
from kvmanager.logs import FormatOption, LevelOption, LogFormat, LogLevel, set_up_logging
from kvmanager.private_files import read_secret
from kvmanager.process_series import ProcessSeries
from transport import Endpoint
from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.gateway")


def gateway_command(
    config: Annotated[Path, typer.Option(help="YAML file: limits, models, clusters.")],
    host: Annotated[str, typer.Option(help="Address to listen on; overrides the file.")] = "",
    port: Annotated[int, typer.Option(help="Port to listen on; overrides the file.")] = -1,
    log_level: LevelOption = "info",
    log_format: FormatOption = "text",
) -> None:
    """Serve the OpenAI API for a region and route each request to one of its clusters."""
    set_up_logging(log_level, log_format)
    with exit_on_bad_file():
        loaded = load_gateway_file(config)
    changes: dict[str, object] = {}
    if host:
        changes["host"] = host
    if port >= 0:
        changes["port"] = port
    gateway = loaded.gateway.model_copy(update=changes)
    with exit_on_bad_file():
        check_listener(gateway, trusted_network=loaded.trusted_network)
    file = loaded.model_copy(update={"gateway": gateway})
    if gateway.processes > 1:
        raise typer.Exit(serve_processes(config, file, (log_level, log_format)))
    try:
        with exit_on_bad_file():
            uvloop.run(run(config, loaded, file))
    except OSError as error:
        typer.echo(f"cannot serve on {gateway.host}:{gateway.port}: {error}", err=True)
        raise typer.Exit(1) from error


def check_listener(gateway: GatewayConfig, *, trusted_network: bool) -> None:
    """FileError: everybody who reaches it could use the models, or change roles."""
    if gateway.api_keys or trusted_network:
        return
    mend = "give api_keys_file or api_keys_env, or set trusted_network"
    problems = [
        Problem(("gateway", name), f"{danger}; {mend}")
        for name, danger in open_listeners(gateway).items()
    ]
    if problems:
        raise FileError("the gateway's file", problems)


def exposure_of(file: GatewayFile) -> str | None:
    """The rights of anybody on the network, for the log and /health; None if there are none."""
    listeners = {} if file.gateway.api_keys else open_listeners(file.gateway)
    found = filter(None, (file.exposure("gateway"), *listeners.values()))
    return "; ".join(found) or None


def serve_processes(config: Path, file: GatewayFile, logs: tuple[LogLevel, LogFormat]) -> int:
    """Serve by several processes until a signal; the exit status."""
    # Only gateways of several processes need the parent.
    from deploy.gateway.processes.parent import ProcessEnded, run_processes

    try:
        asyncio.run(run_processes(config, file, logs, announce))
    except ProcessEnded as error:
        typer.echo(str(error), err=True)
        return error.status
    except OSError as error:
        at = Endpoint(file.gateway.host, file.gateway.port)
        typer.echo(f"cannot serve on {at}: {error}", err=True)
        return 1
    return 0


async def run(
    path: Path,
    read: GatewayFile,
    file: GatewayFile,
    siblings: Siblings | None = None,
    on_ready: Callable[[str, int], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; a second one skips the drain. `on_ready` gets the address,
    which is printed if it is left out. SIGHUP reads the file again.

    `read` is what `path` had, which is followed, and `file` the same with the command's options, or
    those of the process if the gateway has several, the `siblings`.
    """
    stop = asyncio.Event()
    serving = asyncio.current_task()

    def on_signal() -> None:
        if stop.is_set() and serving is not None:
            serving.cancel()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    exposure = exposure_of(file)
    if exposure is not None:
        logger.warning("%s", exposure)
    for weakness in weaknesses(file):
        logger.warning("%s", weakness)
    granter = build_granter(file)
    tracer = build_tracer(file)
    # Made on the loop: the clients belong to the event loop on which they are made.
    agents = agent_clients(file, granter)
    caches = build_caches(file, agents)
    clusters = build_clusters(file, granter, tracer)
    shared = build_region(file)
    following: asyncio.Task[None] | None = None
    try:
        await clusters.start()
        gateway = Gateway(
            file.gateway,
            clusters.pds,
            clusters.prefill,
            {(source, pd): name for source, pd, name in file.links()},
            caches,
            region_links=build_links(file, agents),
            spill={source.name: source.spill for source in file.pd},
            uplinks=file.uplinks,
            granter=granter,
            exposure=exposure,
            keys_file=file.api_keys_file,
            run_key=await asyncio.to_thread(_run_key, file),
            engine_access=await asyncio.to_thread(file.engine_access),
            shared=shared,
            names_key=b"" if siblings is None else siblings.names_key,
            traces=RequestTraces(tracer, 1.0 if file.traces is None else file.traces.sample),
        )
        ProcessSeries(gateway.metrics.registry, "gateway", file.credentials("gateway"))
        own_file = follow_own_file(path, read, gateway.use_live, clusters.change_members, hang_up())
        following = start_task(own_file, "the gateway's file")
        await serve_gateway(gateway, stop, on_ready or announce, siblings)
    except asyncio.CancelledError:
        # Not our second signal: the cancellation comes from outside.
        if not stop.is_set():
            raise
    finally:
        if following is not None:
            following.cancel()
        await clusters.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def _run_key(file: GatewayFile) -> str:
    """Raises FileError."""
    if file.operator_key_file is None:
        return ""
    try:
        return read_secret(file.operator_key_file)
    except (OSError, ValueError) as error:
        problem = Problem(("operator_key_file",), str(error))
        raise FileError("the gateway's file", [problem]) from error


def announce(host: str, port: int, **more: object) -> None:
    """Print the line by which programs know that the gateway serves, and where."""
    ready = {"event": "ready", "url": f"http://{Endpoint(host, port)}", "pid": os.getpid()} | more
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
