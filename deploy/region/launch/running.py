"""The processes of a running region, with the hooks that operators and fault tests use on them.

It adds names, signals and an order of start and stop to the supervisor, and does not know what the
processes are for.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.command_line import CommandFailed
from deploy.region.launch.plan import STOP_ORDER, Kind, PlannedProcess
from deploy.region.launch.rundir import ProcessRecord
from prfaas.engines.errors import EngineStartFailed
from prfaas.engines.health import ProbeTiming
from prfaas.engines.supervision.supervisor import (
    Probe,
    ProcessState,
    Supervisor,
    SupervisorConfig,
    SupervisorEvent,
)

# Relays and agents first: engines connect to their agent, and the gateway needs all of them.
_STAGES: tuple[tuple[Kind, ...], ...] = (("relay", "agent"), ("engine",), ("front",), ("gateway",))
# What loads no model serves within a moment.
_SOON: Final = ProbeTiming(start_interval_s=0.05)


class RegionStartFailed(CommandFailed):
    """A process did not start; the message has the last lines of its log."""


@dataclass(frozen=True, slots=True)
class ProcessProgress:
    """The state of one process. `line` is the newest line of its log while it starts, at any
    length.

    `state` is a `ProcessState`, or "waiting" while the gateway is healthy and its engines are not.
    """

    name: str
    kind: Kind
    state: str
    reason: str
    elapsed_s: float
    line: str = ""


class RunningProcess:
    """A supervised process. It is restarted when it dies, unless it was stopped."""

    def __init__(
        self,
        planned: PlannedProcess,
        probe: Probe,
        config: SupervisorConfig,
        on_event: Callable[[SupervisorEvent], None],
    ) -> None:
        self.name = planned.name
        self.kind: Kind = planned.kind
        self.address = planned.address
        self._start_timeout_s = config.start_timeout_s
        self._started_s: float | None = None
        self._supervisor = Supervisor(planned.process, probe, config, on_event)

    @property
    def state(self) -> ProcessState:
        """The state according to its supervisor."""
        return self._supervisor.state

    @property
    def reason(self) -> str:
        """Why it is in its state."""
        return self._supervisor.reason

    @property
    def pid(self) -> int | None:
        """The guard process that leads its session; None while it does not run."""
        return self._supervisor.pid

    @property
    def pids(self) -> list[int]:
        """All its processes except the guard."""
        return [pid for pid in self._supervisor.members() if pid != self.pid]

    @property
    def num_restarts(self) -> int:
        """How often it was started after the first time."""
        return self._supervisor.num_restarts

    @property
    def log_path(self) -> Path:
        """The log with the output of all its runs."""
        return self._supervisor.spec.log_path

    @property
    def record(self) -> ProcessRecord:
        """It in the state file."""
        return ProcessRecord(
            name=self.name,
            kind=self.kind,
            state=str(self.state),
            reason=self.reason,
            pid=self.pid,
            address=self.address,
            log=str(self.log_path),
            num_restarts=self.num_restarts,
        )

    def elapsed_s(self, now_s: float) -> float:
        """The time since it was first started, seconds."""
        return 0.0 if self._started_s is None else now_s - self._started_s

    def start(self) -> None:
        """Start it in the background. No effect while it runs."""
        if self._started_s is None:
            self._started_s = time.monotonic()
        self._supervisor.start()

    async def wait_healthy(self, progress: Callable[[str], None] | None = None) -> None:
        """Wait until it is healthy. EngineStartFailed with its last log lines otherwise."""
        await self._supervisor.wait_healthy(self._start_timeout_s, progress)

    async def wait_restarted(self, timeout_s: float) -> None:
        """Wait until it is healthy again after `kill`. EngineStartFailed after `timeout_s`."""
        await self._supervisor.wait_healthy(timeout_s, patient=True)

    async def stop(self) -> None:
        """Stop it in an orderly way. It stays stopped until `start`. Idempotent."""
        await self._supervisor.stop()

    async def kill(self, *, restart: bool = True) -> None:
        """Send SIGKILL to all its processes at once, like a crash. Returns when they are dead.

        With `restart` its supervisor restarts it after a backoff. Without, it stays dead until
        `start`.
        """
        guard = self.pid
        self.kill_now()
        if not restart:
            await self._supervisor.stop()
        # The supervisor tells only its own task, so the end is polled for.
        while guard is not None and self.pid == guard:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def kill_now(self) -> None:
        """Send SIGKILL to all its processes."""
        self._signal(signal.SIGKILL)

    def suspend(self) -> None:
        """Freeze it (SIGSTOP): it is alive, but does not answer."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End `suspend`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        # Not to the guard, which reports the end of the command and kills what it left.
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class RunningProcesses:
    """The supervised processes of a region on this machine, by name, in the order of their start.

    `on_progress` gets each step of each of them; `on_change` follows a change of any state.
    """

    def __init__(
        self, on_progress: Callable[[ProcessProgress], None], on_change: Callable[[], None]
    ) -> None:
        self._on_progress = on_progress
        self._on_change = on_change
        self._by_name: dict[str, RunningProcess] = {}

    def __iter__(self) -> Iterator[RunningProcess]:
        return iter(self._by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> RunningProcess:
        return self._by_name[name]

    def add(
        self, planned: PlannedProcess, probe_of: Callable[[PlannedProcess], Probe]
    ) -> RunningProcess:
        """Supervise a process, which `start` starts."""
        probes = ProbeTiming() if planned.kind == "engine" else _SOON
        supervision = SupervisorConfig(planned.start_s, probes)

        def on_event(event: SupervisorEvent) -> None:
            self.report(self._by_name[planned.name], event.reason)
            self._on_change()

        process = RunningProcess(planned, probe_of(planned), supervision, on_event)
        self._by_name[planned.name] = process
        return process

    async def start(self, processes: Sequence[RunningProcess]) -> None:
        """Start them, stage by stage. Returns when all are healthy; RegionStartFailed otherwise."""
        for kinds in _STAGES:
            stage = [item for item in processes if item.kind in kinds]
            for process in stage:
                process.start()
            await self._wait_healthy(stage)

    async def stop(self, processes: Sequence[RunningProcess]) -> None:
        """Stop them in an orderly way, kind by kind, the gateway first."""
        for kind in STOP_ORDER:
            await asyncio.gather(*(item.stop() for item in processes if item.kind == kind))

    async def discard(self, processes: Sequence[RunningProcess]) -> None:
        """Stop and forget them."""
        await self.stop(processes)
        for item in processes:
            self._by_name.pop(item.name, None)
        self._on_change()

    def kill_all(self) -> None:
        """Send SIGKILL to every process now."""
        for process in self._by_name.values():
            process.kill_now()

    def report(
        self, process: RunningProcess, reason: str, line: str = "", *, state: str = ""
    ) -> None:
        """Tell `on_progress` how a process stands. `state` replaces its own."""
        elapsed_s = process.elapsed_s(time.monotonic())
        state = state or str(process.state)
        self._on_progress(
            ProcessProgress(process.name, process.kind, state, reason, elapsed_s, line)
        )

    async def _wait_healthy(self, stage: Sequence[RunningProcess]) -> None:
        async def wait(process: RunningProcess) -> None:
            def on_line(line: str) -> None:
                self.report(process, process.reason, line)

            await process.wait_healthy(on_line)

        try:
            async with asyncio.TaskGroup() as group:
                for process in stage:
                    group.create_task(wait(process))
        except* EngineStartFailed as failures:
            first = failures.exceptions[0]
            raise RegionStartFailed(str(first)) from first
