"""Starts the processes of a gateway, watches them, starts again what ended, and stops them.

The parent is on the way of no request. Signals:

    SIGTERM, SIGINT    all processes drain; a second one has them skip the drain
    SIGHUP             all processes read the file again

A process that is killed loses its own requests and the connections that wait in its listening
socket; the kernel gives new connections to the others from then on. If the parent itself is killed,
the kernel has the processes drain and end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from deploy.gateway.file import GatewayFile
from deploy.gateway.processes.child import Orders
from deploy.gateway.processes.folder import OWN_METRICS, PROCESSES, Folder, ask, listen
from deploy.gateway.processes.merged_metrics import MergedMetrics
from deploy.gateway.processes.ports import HeldAddress, hold
from deploy.gateway.sharing.overview import ProcessNow
from deploy.processes import module_environment
from kvmanager.logs import LogFormat, LogLevel
from kvmanager.loop.systemd import served
from kvmanager.private_files import write_private
from prfaas.engines.supervision.restart import RestartPolicy
from transport import Endpoint
from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.gateway")

START_S: Final = 120.0
"""How long a process may take to serve, seconds."""
SILENT_S: Final = 30.0
"""A process that has not answered for so long is killed, seconds: it keeps its share of the
connections, which wait in vain.
"""
LOOK_S: Final = 1.0
LOOK_AT_START_S: Final = 0.1
_LAST_WORDS_S: Final = 3.0
# systemd hears the parent alone.
_NOT_INHERITED: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class ProcessEnded(Exception):
    """A process ended before all of them served; `status` is its exit status."""

    def __init__(self, number: int, status: int) -> None:
        super().__init__(f"process {number} of the gateway did not start: exit status {status}")
        self.status = status if 0 < status < 128 else 1


async def run_processes(
    config: Path,
    file: GatewayFile,
    logs: tuple[LogLevel, LogFormat],
    on_ready: Callable[..., None],
) -> None:
    """Serve by `processes` of `file` until SIGTERM or SIGINT.

    `on_ready` gets host, port and the ids of the processes when all serve. Raises OSError if an
    address is taken, and ProcessEnded.
    """
    gateway = file.gateway
    held = [hold(Endpoint(gateway.host, gateway.port))]
    # Where other processes of this user cannot be mistaken for siblings: a new folder.
    folder = Folder(Path(tempfile.mkdtemp(prefix="prfaas-gateway-")))
    try:
        if gateway.admin is not None:
            held.append(hold(Endpoint.parse(gateway.admin)))
        write_private(folder.secret, secrets.token_bytes(32))
        parent = Parent(config, file, folder, held, logs)
        await parent.serve(on_ready)
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
        for address in held:
            address.close()


class _Process:
    """One of the processes, over all its starts."""

    def __init__(self, number: int, argv: list[str], at: Path) -> None:
        self.number = number
        self.argv = argv
        self.at = at
        self.policy = RestartPolicy()
        self.child: asyncio.subprocess.Process | None = None
        self.state = "starting"
        self.since_s = time.monotonic()
        self.serves = asyncio.Event()
        """Set from its first answer on."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self.child is not None and self.child.returncode is None:
            with suppress(ProcessLookupError):
                self.child.send_signal(number)

    @property
    def now(self) -> ProcessNow:
        """How it is, for operators."""
        return ProcessNow(
            number=self.number,
            state=self.state,
            pid=None if self.child is None else self.child.pid,
            for_s=time.monotonic() - self.since_s,
            restarts=self.policy.num_restarts,
        )


class Parent:
    """The parent, on one event loop."""

    def __init__(
        self,
        config: Path,
        file: GatewayFile,
        folder: Folder,
        held: list[HeldAddress],
        logs: tuple[LogLevel, LogFormat],
    ) -> None:
        """`held` are the address of the gateway and, if it has one, that of pages for operators."""
        gateway, timeouts = file.gateway, file.gateway.timeouts
        self._at = held[0].endpoint
        admin = str(held[1].endpoint) if len(held) > 1 else ""
        self._folder = folder
        self._stop_s = timeouts.drain_s + timeouts.cluster_s + _LAST_WORDS_S
        self._stop = asyncio.Event()
        self._processes = [
            _Process(
                number,
                Orders(
                    config=str(config.absolute()),
                    folder=str(folder.path),
                    number=number,
                    num=gateway.processes,
                    host=self._at.host,
                    port=self._at.port,
                    admin=admin,
                    logs=logs,
                ).argv(),
                folder.process(number),
            )
            for number in range(gateway.processes)
        ]
        self._environment = {
            name: value
            for name, value in module_environment(os.environ).items()
            if name not in _NOT_INHERITED
        }
        self._scraping = asyncio.Lock()
        self._metrics = MergedMetrics()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._metrics)
        prefix = "prfaas_gateway_process"
        self._serving = Gauge(
            f"{prefix}es_serving", "Processes of this gateway that serve.", registry=self._registry
        )
        self._restarts = Counter(
            f"{prefix}_restarts", "Starts of processes that had ended.", registry=self._registry
        )

    async def serve(self, on_ready: Callable[..., None]) -> None:
        """Serve until a signal. Raises OSError, ProcessEnded."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, self._on_hang_up)
        runner = await listen(self._folder.parent, self._app())
        keeping = [
            start_task(self._keep(item), f"process {item.number}") for item in self._processes
        ]
        try:
            if await self._all_serve(keeping):
                pids = [item.child.pid for item in self._processes if item.child is not None]
                on_ready(self._at.host, self._at.port, processes=pids)
                async with served():
                    await self._stop.wait()
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
            await asyncio.gather(*map(self._ended, self._processes))
            await runner.cleanup()

    def _on_stop(self) -> None:
        is_second = self._stop.is_set()
        self._stop.set()
        if is_second:
            for item in self._processes:
                item.signal(signal.SIGTERM)

    def _on_hang_up(self) -> None:
        for item in self._processes:
            # One that starts reads the file anyway, and may not know the signal yet.
            if item.serves.is_set():
                item.signal(signal.SIGHUP)

    async def _all_serve(self, keeping: list[asyncio.Task[None]]) -> bool:
        """Whether all processes serve; False if it has to stop before. Raises ProcessEnded."""
        waiting = asyncio.gather(*(item.serves.wait() for item in self._processes))
        told = asyncio.ensure_future(self._stop.wait())
        try:
            begun: list[asyncio.Future[Any]] = [waiting, told, *keeping]
            await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            for task in keeping:
                if task.done():
                    task.result()  # it raises
            return waiting.done() and not self._stop.is_set()
        finally:
            waiting.cancel()
            told.cancel()
            await asyncio.gather(waiting, told, return_exceptions=True)

    async def _keep(self, item: _Process) -> None:
        """Keep one process running until cancelled. Raises ProcessEnded if it never served."""
        was_serving = False
        while True:
            item.state, item.since_s = "starting", time.monotonic()
            # A process group of its own: a terminal's Ctrl-C is for the parent alone, which tells
            # the others once.
            item.child = await asyncio.create_subprocess_exec(
                *item.argv, env=self._environment, process_group=0
            )
            reason = await self._watch(item, item.child)
            was_serving = was_serving or item.serves.is_set()
            item.serves.clear()
            self._metrics.ended(str(item.number))
            item.state, item.since_s = "ended", time.monotonic()
            self._count()
            assert item.child.returncode is not None
            if not was_serving:
                raise ProcessEnded(item.number, item.child.returncode)
            delay_s = item.policy.process_ended(time.monotonic())
            logger.warning(
                "process %d %s; it is started again in %.1f s", item.number, reason, delay_s
            )
            await asyncio.sleep(delay_s)
            self._restarts.inc()

    async def _watch(self, item: _Process, child: asyncio.subprocess.Process) -> str:
        """Ask a process again and again whether it answers, until it has ended, and say why."""
        ending = asyncio.ensure_future(child.wait())
        heard_s, reason = time.monotonic(), ""
        try:
            while not ending.done():
                if await _answers(item.at):
                    heard_s = time.monotonic()
                    item.policy.healthy(heard_s)
                    self._now_serves(item)
                elif item.serves.is_set() and item.state == "serving":
                    item.state = "silent"
                    self._count()
                if time.monotonic() - heard_s > (SILENT_S if item.serves.is_set() else START_S):
                    reason = f"was killed, since it had not answered for {SILENT_S:g} s"
                    item.signal(signal.SIGKILL)
                    break
                look_s = LOOK_S if item.serves.is_set() else LOOK_AT_START_S
                await asyncio.wait((ending,), timeout=look_s)
            status = await ending
        finally:
            ending.cancel()
        return reason or f"ended with status {status}"

    def _now_serves(self, item: _Process) -> None:
        if item.state == "serving":
            return
        item.state = "serving"
        if not item.serves.is_set():
            logger.info("process %d serves", item.number)
            item.serves.set()
        self._count()

    def _count(self) -> None:
        self._serving.set(sum(item.state == "serving" for item in self._processes))

    async def _ended(self, item: _Process) -> None:
        """Have a process drain and end; kill it when that takes too long."""
        if item.child is None:
            return
        item.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._stop_s):
                await item.child.wait()
        except TimeoutError:
            logger.warning("process %d does not end, and is killed", item.number)
            item.signal(signal.SIGKILL)
            await item.child.wait()

    # -- what processes ask -----------------------------------------------------------------------

    def _app(self) -> web.Application:
        async def processes(_request: web.Request) -> web.Response:
            found = [item.now for item in self._processes]
            return web.Response(body=msgspec.json.encode(found))

        async def metrics(_request: web.Request) -> web.Response:
            headers = {"Content-Type": CONTENT_TYPE_LATEST}
            return web.Response(body=await self._scrape(), headers=headers)

        app = web.Application()
        app.add_routes([web.get(PROCESSES, processes), web.get(OWN_METRICS, metrics)])
        return app

    async def _scrape(self) -> bytes:
        # One at a time: an answer that is overtaken by a newer one would go backwards.
        async with self._scraping:
            await asyncio.gather(*map(self._scrape_one, self._processes))
            return generate_latest(self._registry)

    async def _scrape_one(self, item: _Process) -> None:
        child = item.child
        if not item.serves.is_set():
            return
        try:
            answer = await ask(item.at, OWN_METRICS)
            text = answer.body.decode()
        except (OSError, TimeoutError, ValueError):
            text = ""
        # What it counted until its end is kept; a late answer would count twice.
        if item.child is not child or not item.serves.is_set():
            return
        if not text:
            self._metrics.silent(str(item.number))
            return
        try:
            self._metrics.put(str(item.number), text)
        except ValueError as error:
            logger.warning("the metrics of process %d cannot be read: %s", item.number, error)


async def _answers(at: Path) -> bool:
    try:
        return (await ask(at, "/livez")).status == 200
    except (OSError, TimeoutError):
        return False
