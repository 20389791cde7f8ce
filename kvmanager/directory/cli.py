"""The command `prfaas directory`: options and signals around one directory.

With `redis` it fills a Redis server, otherwise it serves gRPC. It does not know what nodes report.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from pathlib import Path
from typing import Annotated, Final

import typer
import uvloop

from kvmanager.agent.shared_clients import AgentClients
from kvmanager.config_files.options import setting
from kvmanager.config_files.yaml_files import exit_on_bad_file
from kvmanager.directory.config import DirectoryConfig, load
from kvmanager.directory.embedded import EmbeddedDirectory
from kvmanager.directory.errors import DirectoryError, StoreError
from kvmanager.directory.feed_client import DirectoryFollower
from kvmanager.directory.messages import SERVICE, NodeState
from kvmanager.directory.metrics import DirectoryMetrics
from kvmanager.directory.service import DirectoryService
from kvmanager.logs import FormatOption, LevelOption, set_up_logging
from kvmanager.loop.metrics import LoopCollector
from kvmanager.loop.systemd import served
from kvmanager.loop.watch import LoopWatch, settle_heap
from kvmanager.metrics_server import MetricsServer
from kvmanager.process_series import ProcessSeries, show_exposure
from transport import Endpoint
from transport.errors import LocalError
from transport.health import WhyNotReady
from transport.rpc import RpcError, RpcServer

logger = logging.getLogger("prfaas.kvmanager.directory")

_METRICS_INTERVAL_S: Final = 5.0
_REDIS_TIMEOUT_S: Final = 5.0


def directory_command(
    config: Annotated[
        Path | None, typer.Option(help="YAML file; options given here win over it.")
    ] = None,
    listen: Annotated[str | None, setting(DirectoryConfig, "listen")] = None,
    agent: Annotated[
        list[str] | None, typer.Option(help="cluster/node=host:port to follow; once for each.")
    ] = None,
    redis: Annotated[str | None, setting(DirectoryConfig, "redis")] = None,
    metrics_port: Annotated[int | None, setting(DirectoryConfig, "metrics_port")] = None,
    metrics_host: Annotated[str | None, setting(DirectoryConfig, "metrics_host")] = None,
    metrics_key_file: Annotated[Path | None, setting(DirectoryConfig, "metrics_key_file")] = None,
    log_level: LevelOption = "info",
    log_format: FormatOption = "text",
) -> None:
    """Run a directory, which follows node agents and knows what each node has cached."""
    set_up_logging(log_level, log_format)
    agents = dict(item.partition("=")[::2] for item in agent) if agent else None
    options = {
        name: value for name, value in locals().items() if name in DirectoryConfig.model_fields
    }
    with exit_on_bad_file():
        settings = load(config, options)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except (DirectoryError, RpcError, LocalError, OSError, ValueError) as error:
        typer.echo(f"prfaas directory: {error}", err=True)
        raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        typer.echo(f"prfaas directory: {error}; pip install 'prfaas[redis]'", err=True)
        raise typer.Exit(1) from error


async def serve(config: DirectoryConfig) -> None:
    """Run until SIGTERM or SIGINT. Raises the errors of its start."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if config.redis is None:
        await _serve_grpc(config, stopping)
    else:
        await _fill_redis(config, config.redis.get_secret_value(), stopping)


async def _serve_grpc(config: DirectoryConfig, stopping: asyncio.Event) -> None:
    credentials = config.credentials("directory")
    directory = EmbeddedDirectory(AgentClients(credentials).open, forget_s=config.forget_s)
    server = RpcServer(config.listen, {SERVICE: DirectoryService(directory).methods()}, credentials)
    host = Endpoint.parse(config.listen).host
    metrics = _Metrics(config, directory.follower, server.why_not_ready)
    try:
        port = await server.start()
        await metrics.start()
        await directory.follow(config.targets)
        _say_ready(control=str(Endpoint(host, port)))
        with LoopWatch() as watch:
            metrics.show_loop(watch)
            async with served():
                while not await _stopped(stopping):
                    metrics.update(await directory.nodes(), directory.core.nbytes)
    finally:
        await server.stop(grace_s=0.2)
        await directory.close()
        await metrics.close()


async def _fill_redis(config: DirectoryConfig, url: str, stopping: asyncio.Event) -> None:
    from kvmanager.directory.redis_client import connect, reached
    from kvmanager.directory.redis_sink import RedisSink
    from kvmanager.directory.redis_store import RedisDirectory, RedisSettings

    credentials = config.credentials("directory")
    settings = RedisSettings(forget_s=config.forget_s)
    redis = connect(url, timeout_s=_REDIS_TIMEOUT_S)
    follower = DirectoryFollower(
        RedisSink(redis, settings), AgentClients(credentials).open, forget_s=config.forget_s
    )
    reader = RedisDirectory(redis, settings)

    async def why_not_ready() -> str:
        if stopping.is_set():
            return "stopping"
        try:
            await reached(redis)
        except StoreError:
            return "the store does not answer"
        return ""

    metrics = _Metrics(config, follower, why_not_ready)
    try:
        await reached(redis)
        await metrics.start()
        await follower.follow(config.targets)
        _say_ready()
        with LoopWatch() as watch:
            metrics.show_loop(watch)
            async with served():
                while not await _stopped(stopping):
                    metrics.update(await reader.nodes(), 0)
    finally:
        await follower.stop()
        await reader.close()
        await metrics.close()


class _Metrics:
    """The metrics, and their server if one is wanted. Raises LocalError when its key cannot be
    used.
    """

    def __init__(
        self, config: DirectoryConfig, follower: DirectoryFollower, why_not_ready: WhyNotReady
    ) -> None:
        self._follower = follower
        self._metrics = DirectoryMetrics()
        self._server: MetricsServer | None = None
        registry, exposure = self._metrics.registry, config.exposure("directory")
        ProcessSeries(registry, "directory", config.credentials("directory"))
        if exposure is not None:
            logger.warning("%s", exposure)
            show_exposure(registry, "prfaas_directory", exposure)
        if config.metrics_port:
            at = Endpoint(config.metrics_host, config.metrics_port)
            exposures = () if exposure is None else (exposure,)
            self._server = MetricsServer(
                registry, at, config.metrics_key_file, exposures, why_not_ready=why_not_ready
            )

    async def start(self) -> None:
        """Raises OSError when the port is taken."""
        if self._server is not None:
            await self._server.start()

    def show_loop(self, watch: LoopWatch) -> None:
        self._metrics.registry.register(LoopCollector("prfaas_directory", watch.gaps))

    def update(self, nodes: list[NodeState], nbytes: int) -> None:
        self._metrics.update(nodes, self._follower.counts, nbytes)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop()


def _say_ready(**what: str) -> None:
    settle_heap()
    print(json.dumps({"event": "ready", **what, "pid": os.getpid()}), flush=True)


async def _stopped(stopping: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(_METRICS_INTERVAL_S):
            await stopping.wait()
    except TimeoutError:
        return False
    logger.info("stopping")
    return True
