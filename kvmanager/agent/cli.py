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
from typing import Annotated, Any

import typer
import uvloop

from kvmanager.agent.config import AgentConfig, load
from kvmanager.agent.control import ControlService
from kvmanager.agent.engines.server import SocketTaken
from kvmanager.agent.messages import SERVICE
from kvmanager.agent.service import NodeAgent
from kvmanager.arena import ArenaError
from kvmanager.config_files.followed_files import follow, hang_up
from kvmanager.config_files.options import setting
from kvmanager.config_files.problems import FileError
from kvmanager.config_files.traces import open_tracer
from kvmanager.config_files.yaml_files import exit_on_bad_file, read_values
from kvmanager.logs import FormatOption, LevelOption, set_up_logging
from kvmanager.loop.metrics import LoopCollector
from kvmanager.loop.systemd import served
from kvmanager.loop.watch import LoopWatch, settle_heap
from kvmanager.metrics_server import MetricsServer
from kvmanager.pool.ssd import SsdError
from kvmanager.process_series import ProcessSeries
from transport import Endpoint, TransportError
from transport.errors import LocalError
from transport.rpc import RpcError, RpcServer
from transport.tasks import start_task

logger = logging.getLogger("prfaas.kvmanager.agent")


def agent_command(
    config: Annotated[
        Path | None, typer.Option(help="YAML file; options given here win over it.")
    ] = None,
    listen: Annotated[str | None, setting(AgentConfig, "listen")] = None,
    control: Annotated[str | None, setting(AgentConfig, "control")] = None,
    socket: Annotated[Path | None, setting(AgentConfig, "socket")] = None,
    advertise: Annotated[str | None, setting(AgentConfig, "advertise")] = None,
    arena_gib: Annotated[str | None, setting(AgentConfig, "arena_gib")] = None,
    landing_gib: Annotated[str | None, setting(AgentConfig, "landing_gib")] = None,
    arena_dir: Annotated[Path | None, setting(AgentConfig, "arena_dir")] = None,
    arena_name: Annotated[str | None, setting(AgentConfig, "arena_name")] = None,
    cache_gib: Annotated[str | None, setting(AgentConfig, "cache_gib")] = None,
    eviction: Annotated[str | None, setting(AgentConfig, "eviction")] = None,
    placement: Annotated[
        str | None,
        typer.Option(
            help="Where prompts keep windows and states, as YAML: "
            "'{every_tokens: 4096, dense_tokens: 32768}' [{ends: true, branches: true}]."
        ),
    ] = None,
    ssd_dir: Annotated[Path | None, setting(AgentConfig, "ssd_dir")] = None,
    ssd_gib: Annotated[str | None, setting(AgentConfig, "ssd_gib")] = None,
    ssd_wait_s: Annotated[str | None, setting(AgentConfig, "ssd_wait_s")] = None,
    prefault: Annotated[bool | None, setting(AgentConfig, "prefault")] = None,
    metrics_port: Annotated[int | None, setting(AgentConfig, "metrics_port")] = None,
    metrics_host: Annotated[str | None, setting(AgentConfig, "metrics_host")] = None,
    metrics_key_file: Annotated[Path | None, setting(AgentConfig, "metrics_key_file")] = None,
    tls_dir: Annotated[Path | None, setting(AgentConfig, "tls_dir")] = None,
    tls_cert: Annotated[Path | None, setting(AgentConfig, "tls_cert")] = None,
    tls_key: Annotated[Path | None, setting(AgentConfig, "tls_key")] = None,
    tls_ca: Annotated[Path | None, setting(AgentConfig, "tls_ca")] = None,
    trusted_network: Annotated[bool | None, setting(AgentConfig, "trusted_network")] = None,
    log_level: LevelOption = "info",
    log_format: FormatOption = "text",
) -> None:
    """Run this host's node agent, which owns KVCache memory, moves it and serves the engines."""
    options = {name: value for name, value in locals().items() if name in AgentConfig.model_fields}
    set_up_logging(log_level, log_format)
    with exit_on_bad_file():
        if placement is not None:
            options["placement"] = read_values(placement, "--placement")
        settings = load(config, options)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, config, options))
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


async def serve(
    config: AgentConfig, path: Path | None = None, options: dict[str, Any] | None = None
) -> None:
    """Run until SIGTERM or SIGINT. `path` has the settings besides `options`, and is followed;
    SIGHUP reads it again. Raises the errors of `NodeAgent.start`.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    for exposure in config.exposures:
        logger.warning("%s", exposure)
    tracer = open_tracer(config.traces, "prfaas-agent", config.control)
    agent = NodeAgent(config, tracer)
    await agent.start()
    ProcessSeries(agent.metrics.registry, "agent", config.credentials)
    services = {SERVICE: ControlService(agent).methods()}
    rpc = RpcServer(config.control, services, config.credentials, why_not_ready=agent.why_not_ready)
    metrics: MetricsServer | None = None
    following: asyncio.Task[None] | None = None
    try:
        control_host = Endpoint.parse(config.control).host
        ready = {
            "event": "ready",
            "data": str(agent.transfers.data_endpoint),
            "control": str(Endpoint(control_host, await rpc.start())),
            "socket": str(config.socket),
            "pid": os.getpid(),
        }
        if config.metrics_port is not None:
            at = Endpoint(config.metrics_host, config.metrics_port)
            metrics = MetricsServer(
                agent.metrics.registry,
                at,
                config.metrics_key_file,
                config.exposures,
                why_not_ready=rpc.why_not_ready,
            )
            ready["metrics"] = str(await metrics.start())
        # The objects of the start stay for good; visiting them in each full garbage collection
        # would hold the loop up for 50 ms.
        settle_heap()
        if path is not None:
            work = _follow_destinations(path, options or {}, agent)
            following = start_task(work, "the agent's file")
        # Whoever started the agent reads the real ports from this line, since a port may be 0.
        print(json.dumps(ready), flush=True)
        with LoopWatch() as watch:
            agent.metrics.registry.register(LoopCollector("prfaas_agent", watch.gaps))
            async with served():
                await stopping.wait()
        logger.info("stopping")
    finally:
        if following is not None:
            following.cancel()
        await rpc.stop(grace_s=0.2)
        await agent.stop()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        # Last, so that probes hear until the end that the process lives and no longer serves.
        if metrics is not None:
            await metrics.stop()


async def _follow_destinations(path: Path, options: dict[str, Any], agent: NodeAgent) -> None:
    """Send to the endpoints that the file names now, until cancelled: nodes join and leave."""

    def read() -> AgentConfig:
        try:
            return load(path, options)
        except (FileError, OSError) as error:
            raise LocalError("agent_file", f"the settings stay as they were: {error}") from error

    def use(found: AgentConfig) -> None:
        io = agent.transfers.io
        # Whether it names endpoints at all decides what needs a grant, and does not change.
        if io.send_to is not None and found.destinations not in (None, io.send_to):
            io.send_to = found.destinations
            logger.info("sends to other endpoints from now on (send_to)")

    await follow((path,), read, use, hang_up())
