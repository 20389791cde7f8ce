"""One process of a running region, with the hooks that operators and fault tests use on it.

Adds names and signals to kvmanager's supervisor; does not know what the process is for.
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
from prfaas.engines.supervision.supervisor import (
    Probe,
    ProcessState,
    Supervisor,
    SupervisorConfig,
    SupervisorEvent,
)


class RunningProcess:
    """A supervised process; it is started again when it dies, unless it was stopped."""

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
        """What its supervisor is about."""
        return self._supervisor.state

    @property
    def reason(self) -> str:
        """Why it is in its state."""
        return self._supervisor.reason

    @property
    def pid(self) -> int | None:
        """The leader of its session, which guards it; None when it does not run."""
        return self._supervisor.pid

    @property
    def pids(self) -> list[int]:
        """Every process of it, its guard left out."""
        return [pid for pid in self._supervisor.members() if pid != self.pid]

    @property
    def num_restarts(self) -> int:
        """Starts after the first one."""
        return self._supervisor.num_restarts

    @property
    def log_path(self) -> Path:
        """Its output, all runs of it."""
        return self._supervisor.spec.log_path

    def elapsed_s(self, now_s: float) -> float:
        """Time since it was first started."""
        return 0.0 if self._started_s is None else now_s - self._started_s

    def start(self) -> None:
        """Start it in the background; no effect while it runs."""
        if self._started_s is None:
            self._started_s = time.monotonic()
        self._supervisor.start()

    async def wait_healthy(
        self, timeout_s: float = 600.0, progress: Callable[[str], None] | None = None
    ) -> None:
        """Wait until it is healthy; EngineStartFailed with its last log lines otherwise."""
        await self._supervisor.wait_healthy(timeout_s, progress)

    async def wait_restarted(self, timeout_s: float = 600.0) -> None:
        """Wait until it is healthy again after `kill`. EngineStartFailed when time is over."""
        await self._supervisor.wait_healthy(timeout_s, patient=True)

    async def stop(self) -> None:
        """Stop it in an orderly way; it stays stopped until `start`. Idempotent."""
        await self._supervisor.stop()

    async def kill(self, *, restart: bool = True) -> None:
        """SIGKILL all of it at once, as a crash would. With `restart` its supervisor brings it
        back after a backoff; without, it stays dead until `start`. Returns when it is dead."""
        guard = self.pid
        self.kill_now()
        if not restart:
            await self._supervisor.stop()
        # The supervisor tells its own task only, so the end is polled for.
        while guard is not None and self.pid == guard:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def kill_now(self) -> None:
        """Send SIGKILL to all of it."""
        self._signal(signal.SIGKILL)

    def suspend(self) -> None:
        """Freeze it (SIGSTOP): alive, but deaf."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End `suspend`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
