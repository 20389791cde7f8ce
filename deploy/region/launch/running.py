"""One process of a running region, with the hooks that operators and fault tests use on it.

It adds names and signals to the supervisor and does not know what the process is for.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from deploy.region.launch.plan import Kind, PlannedProcess
from deploy.region.launch.rundir import ProcessRecord
from prfaas.engines.supervision.supervisor import (
    Probe,
    ProcessState,
    Supervisor,
    SupervisorConfig,
    SupervisorEvent,
)


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
        self.start_timeout_s = config.start_timeout_s
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

    async def wait_healthy(
        self, timeout_s: float = 600.0, progress: Callable[[str], None] | None = None
    ) -> None:
        """Wait until it is healthy. EngineStartFailed with its last log lines otherwise."""
        await self._supervisor.wait_healthy(timeout_s, progress)

    async def wait_restarted(self, timeout_s: float = 600.0) -> None:
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
