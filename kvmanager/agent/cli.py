"""The command `prfaas agent`: options and signals around one NodeAgent.

It does not know anything about transfers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from pathlib import Path
from typing import Annotated

import typer
import uvloop
import yaml

from kvmanager.agent.config import AgentConfig, load
from kvmanager.agent.control import ControlService
from kvmanager.agent.engines.server import SocketTaken
from kvmanager.agent.messages import SERVICE
from kvmanager.agent.metrics import MetricsServer
from kvmanager.agent.service import NodeAgent
from kvmanager.arena import ArenaError
from kvmanager.config_files.yaml_files import exit_on_bad_file
from kvmanager.loop.metrics import LoopCollector
from kvmanager.loop.watch import LoopWatch, settle_heap
from kvmanager.pool.ssd import SsdError
from transport import Endpoint, TransportError
from transport.rpc import RpcError, RpcServer

logger = logging.getLogger("prfaas.kvmanager.agent")


def agent_command(
    config: Annotated[
        Path | None, typer.Option(help="YAML file; options given here win over it.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="Data port, host:port [127.0.0.1:7100].")
    ] = None,
    control: Annotated[
        str | None, typer.Option(help="gRPC control port, host:port [127.0.0.1:7101].")
    ] = None,
    socket: Annotated[
        Path | None, typer.Option(help="Unix socket for engines [/tmp/prfaas-agent.sock].")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="host or host:port that senders connect to [listen].")
    ] = None,
    arena_gib: Annotated[
        float | None, typer.Option(help="Shared memory for KVCache, GiB [1].")
    ] = None,
    landing_gib: Annotated[
        float | None, typer.Option(help="Most of it for landings, GiB [all].")
    ] = None,
    arena_dir: Annotated[Path | None, typer.Option(help="Where it lies [/dev/shm].")] = None,
    arena_name: Annotated[
        str | None,
        typer.Option(help="Keep the arena under this name: what is cached survives a restart."),
    ] = None,
    cache_gib: Annotated[
        float | None,
        typer.Option(help="Most of the arena for cached prefixes, GiB; 0: none [all]."),
    ] = None,
    eviction: Annotated[
        str | None,
        typer.Option(help="Which cached prefix goes first: lru, lfu, length or cost [lru]."),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(
            help="Where prompts keep windows and states, as YAML: "
            "'{every_tokens: 4096, dense_tokens: 32768}' [{ends: true, branches: true}]."
        ),
    ] = None,
    ssd_dir: Annotated[
        Path | None, typer.Option(help="Directory for copies of cached prefixes [none].")
    ] = None,
    ssd_gib: Annotated[float | None, typer.Option(help="Most bytes there, GiB.")] = None,
    ssd_wait_s: Annotated[
        float | None,
        typer.Option(help="How long a prompt waits for what is only there, seconds [0.5]."),
    ] = None,
    prefault: Annotated[
        bool | None, typer.Option(help="Allocate all of it at the start [yes].")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Prometheus port on the control host [none].")
    ] = None,
    tls_dir: Annotated[
        Path | None, typer.Option(help="Directory with tls.crt, tls.key and ca.crt.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate of this node.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of this node.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="PEM CA that signed all nodes.")] = None,
    trusted_network: Annotated[
        bool | None, typer.Option(help="Serve other hosts without TLS [no].")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the node agent of this host: owns KVCache memory, moves it, serves the engines."""
    options = {name: value for name, value in locals().items() if name in AgentConfig.model_fields}
    if placement is not None:
        options["placement"] = yaml.safe_load(placement)
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    with exit_on_bad_file():
        settings = load(config, options)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except (
        ArenaError,
        SsdError,
        SocketTaken,
        RpcError,
        TransportError,
        OSError,
    ) as error:
        typer.echo(f"prfaas agent: {error}", err=True)
        raise typer.Exit(1) from error


async def serve(config: AgentConfig) -> None:
    """Run until SIGTERM or SIGINT. Raises the start's errors."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    agent = NodeAgent(config)
    await agent.start()
    rpc = RpcServer(config.control, {SERVICE: ControlService(agent).methods()}, config.tls)
    metrics: MetricsServer | None = None
    try:
        control_host = Endpoint.parse(config.control).host
        ready = {
            "event": "ready",
            "data": str(agent.data_endpoint),
            "control": str(Endpoint(control_host, await rpc.start())),
            "socket": str(config.socket),
            "pid": os.getpid(),
        }
        if config.metrics_port is not None:
            metrics = MetricsServer(agent.metrics, control_host, config.metrics_port)
            ready["metrics"] = str(Endpoint(control_host, await metrics.start()))
        settle_heap()
        print(json.dumps(ready), flush=True)
        with LoopWatch() as watch:
            agent.metrics.registry.register(LoopCollector("prfaas_agent", watch.gaps))
            await stopping.wait()
        logger.info("stopping")
    finally:
        await rpc.stop(grace_s=0.2)
        if metrics is not None:
            await metrics.stop()
        await agent.stop()
