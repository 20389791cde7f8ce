"""Runs a stand-alone cluster front, from its command line until it is told to stop.

Its file is followed: instances that it names anew join, and those that it names no more leave. It
does not know which kind of front it runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import typer
from prometheus_client import REGISTRY

from kvmanager.config_files.followed_files import follow, hang_up
from kvmanager.config_files.problems import FileError
from kvmanager.config_files.yaml_files import exit_on_bad_file, read_settings
from kvmanager.logs import LogFormat, LogLevel, set_up_logging
from kvmanager.loop.metrics import LoopCollector
from kvmanager.loop.systemd import served
from kvmanager.loop.watch import LoopWatch, settle_heap
from kvmanager.metrics_server import MetricsServer
from kvmanager.process_series import ProcessSeries, show_exposure
from prfaas.engines.departures import Departures, follow_changes
from prfaas.engines.discovery.following import follow_discovery
from prfaas.engines.front_config import EXPECTED, FrontConfig
from prfaas.engines.members import member_changes
from transport import Endpoint
from transport.errors import LocalError
from transport.rpc import RpcError, RpcServer
from transport.tasks import start_task

if TYPE_CHECKING:  # which needs the extra `traces`
    from kvmanager.tracing.export import Tracer

logger = logging.getLogger("prfaas.engines")

ConfigT = TypeVar("ConfigT", bound=FrontConfig)


class Front(Protocol):
    """A cluster."""

    departures: Departures

    @property
    def name(self) -> str: ...

    async def start(self) -> None: ...

    async def finish(self) -> None:
        """Refuse new jobs, and return when none runs."""

    async def close(self) -> None: ...


def run_front(
    path: Path,
    kind: type[ConfigT],
    serve: Callable[[ConfigT, Path], Coroutine[Any, Any, None]],
    *,
    listen: str | None,
    logs: tuple[LogLevel, LogFormat],
) -> None:
    """Serve the front that the file at `path` describes; `listen` overrides the file's address.
    `logs` are the level and the form of its log.

    Exits 2 when the file is wrong, 1 when an address is not free or a file that it names cannot be
    used; stderr says why.
    """
    set_up_logging(*logs)
    with exit_on_bad_file():
        config = read_settings(path, kind, expected=EXPECTED, options={"listen": listen})
    try:
        asyncio.run(serve(config, path))
    except (RpcError, LocalError, OSError) as error:
        typer.echo(str(error) if isinstance(error, OSError) else error.message, err=True)
        raise typer.Exit(1) from error


async def serve_front(
    front: Front,
    server: RpcServer,
    config: FrontConfig,
    path: Path,
    *,
    metrics_prefix: str,
    tracer: Tracer | None = None,
) -> None:
    """Start both, print a JSON line {"event": "ready", ...} to stdout, and stop on SIGTERM/SIGINT
    when the jobs that run have ended; a second signal skips that. `path` is the file of `config`;
    SIGHUP reads it again.

    `metrics_prefix` begins the names of metrics of the process itself. `tracer` is closed in the
    end. What somebody on the network may do by `config` is logged, and in the metrics. Raises
    whatever keeps the front or a port from starting; nothing stays behind then.
    """
    exposure = config.exposure(config.role)
    if exposure is not None:
        logger.warning("%s", exposure)
        show_exposure(REGISTRY, metrics_prefix, exposure)
    component = metrics_prefix.removeprefix("prfaas_")
    ProcessSeries(REGISTRY, component, config.credentials(config.role))
    at = Endpoint(config.metrics_host, config.metrics_port)
    exposures = () if exposure is None else (exposure,)
    metrics = MetricsServer(
        REGISTRY, at, config.metrics_key_file, exposures, why_not_ready=server.why_not_ready
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    following: set[asyncio.Task[None]] = set()
    try:
        await front.start()
        # The port opens only now: a caller that connects finds instances that have been probed.
        port = await server.start()
        if config.metrics_port:
            await metrics.start()
        ready = {
            "event": "ready",
            "front": front.name,
            "control": str(Endpoint(Endpoint.parse(config.listen).host, port)),
            "pid": os.getpid(),
        }
        settle_heap()
        members = _follow_members(path, config, front.departures, hang_up())
        start_task(members, f"the file of {front.name}", following)
        if config.discover is not None:
            found = follow_discovery(config.discover, front.departures)
            start_task(found, f"discovery of {front.name}", following)
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        with LoopWatch() as watch:
            REGISTRY.register(LoopCollector(metrics_prefix, watch.gaps))
            async with served():
                await stop.wait()
            logger.info("%s: stopping", front.name)
            stop.clear()
            await _finish(front, stop, config.drain_s)
    finally:
        for task in following:
            task.cancel()
        await server.stop()
        await front.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        # Last, so that probes hear until the end that the process lives and no longer serves.
        await metrics.stop()


async def _finish(front: Front, skip: asyncio.Event, drain_s: float) -> None:
    """Let the jobs end that run, at most for so long. They are minutes of work of GPUs."""
    finishing = [asyncio.create_task(front.finish()), asyncio.create_task(skip.wait())]
    await asyncio.wait(finishing, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    for task in finishing:
        task.cancel()
    await asyncio.gather(*finishing, return_exceptions=True)


async def _follow_members(
    path: Path, running: FrontConfig, departures: Departures, again: asyncio.Event
) -> None:
    """Let instances join and leave as the file says, until cancelled."""

    def load() -> FrontConfig:
        try:
            return read_settings(path, type(running), expected=EXPECTED)
        except (FileError, OSError) as error:
            raise LocalError("front_file", f"the instances stay as they were: {error}") from error

    def use(read: FrontConfig) -> None:
        nonlocal running
        changes = member_changes(running.instances, read.instances)
        for message in follow_changes(departures, changes).values():
            logger.warning("%s", message)
        # `listen` may come from the command line instead.
        same = {"instances", "listen"}
        waiting = [
            name
            for name in type(read).model_fields
            if name not in same and getattr(read, name) != getattr(running, name)
        ]
        if waiting:
            logger.warning("changed, but needs a restart of the front: %s", ", ".join(waiting))
        running = running.model_copy(update={"instances": read.instances})

    await follow((path,), load, use, again)
