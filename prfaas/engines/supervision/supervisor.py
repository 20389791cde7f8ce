"""Keeps one process running: start, wait until healthy, watch, restart with backoff, stop.

It does not know what the process serves: its caller gives it a probe. restart.py decides when to
start again, process.py handles processes and signals.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from prfaas.engines.command import EngineSpec
from prfaas.engines.errors import EngineStartFailed
from prfaas.engines.health import ProbeTiming
from prfaas.engines.ownership import finished
from prfaas.engines.supervision.log_files import rotate
from prfaas.engines.supervision.process import ChildProcess, ProcessSpec
from prfaas.engines.supervision.restart import RestartPolicy
from transport.tasks import start_task

logger = logging.getLogger("prfaas.engines")

HANG_TIMEOUT_S: Final = 60.0
NUM_LOG_LINES: Final = 30
"""Last lines of its log that the error of a process shows."""
Probe = Callable[[], Awaitable[bool]]
"""True when the process serves. May raise; that counts as False."""


class ProcessState(StrEnum):
    """The states of a supervised process."""

    STOPPED = "stopped"
    STARTING = "starting"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    BACKOFF = "backoff"


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """Probe intervals, and the time limit of a start.

    A process that is not healthy `start_timeout_s` after its start, or that was healthy and then is
    not for `HANG_TIMEOUT_S`, is killed and counts as failed.
    """

    start_timeout_s: float = 60.0 * EngineSpec.model_fields["start_minutes"].default
    probes: ProbeTiming = field(default_factory=ProbeTiming)


@dataclass(frozen=True, slots=True)
class SupervisorEvent:
    """A change of state, with the reason for a person."""

    name: str
    state: ProcessState
    reason: str


class Supervisor:
    """One supervised process. All methods belong to one event loop."""

    def __init__(
        self,
        process: ProcessSpec,
        probe: Probe,
        config: SupervisorConfig | None = None,
        on_event: Callable[[SupervisorEvent], None] | None = None,
    ) -> None:
        self.spec = process
        self.state = ProcessState.STOPPED
        self.reason = "not started"
        self.last_error: EngineStartFailed | None = None
        self._config = config or SupervisorConfig()
        self._policy = RestartPolicy()
        self._probe = probe
        self._on_event = on_event
        self._task: asyncio.Task[None] | None = None
        self._child: ChildProcess | None = None
        self._changed = asyncio.Event()

    @property
    def num_restarts(self) -> int:
        """Starts after the first one."""
        return self._policy.num_restarts

    @property
    def pid(self) -> int | None:
        """The id of the session that holds the process and its children; None when none runs."""
        return self._child.pid if self._child is not None else None

    def members(self) -> list[int]:
        """The processes of the current run that still run."""
        return self._child.members() if self._child is not None else []

    def start(self) -> None:
        """Start and keep running in the background. Idempotent."""
        if self._task is None:
            self._move(ProcessState.STARTING, "starting")
            self._task = start_task(self._run(), f"supervise {self.spec.name}")

    async def wait_healthy(
        self,
        timeout_s: float,
        progress: Callable[[str], None] | None = None,
        *,
        patient: bool = False,
    ) -> None:
        """Wait until the process is healthy; `progress` gets its newest log line about once a
        second. Raises EngineStartFailed with the log's last lines: on the first failed start, or
        (`patient`) only when the time is over or it was stopped.
        """
        deadline_s = time.monotonic() + timeout_s
        while self.state is not ProcessState.HEALTHY:
            if self.state is ProcessState.STOPPED or (self.last_error is not None and not patient):
                raise self.last_error or self._failure(self.reason)
            if time.monotonic() >= deadline_s:
                raise self._failure(f"not healthy after {timeout_s:g} s")
            if progress is not None:
                progress(self._newest_line())
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(1.0, max(0.0, deadline_s - time.monotonic()))):
                    await self._changed.wait()

    async def stop(self) -> None:
        """Stop the process and all its children; on return none runs. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self.state is not ProcessState.STOPPED:
            self._move(ProcessState.STOPPED, "stopped on request")

    async def _run(self) -> None:
        while True:
            reason = await self._run_once()
            delay_s = self._policy.process_ended(time.monotonic())
            again = f"failure {self._policy.num_failures} in a row, next start in {delay_s:.3g} s"
            self._move(ProcessState.BACKOFF, f"{reason}; {again}")
            await asyncio.sleep(delay_s)
            self._move(ProcessState.STARTING, f"restart {self._policy.num_restarts}")

    async def _run_once(self) -> str:
        """Run the process once and return why it ended. Nothing of it runs afterwards."""
        try:
            child = await ChildProcess.start(self.spec)
        except OSError as error:
            self.last_error = self._failure(f"cannot start: {error}")
            return self.last_error.reason
        self._child = child
        exited = asyncio.create_task(child.wait())
        try:
            trouble = await self._watch(exited)
            if trouble is None:
                reason = f"ended with status {exited.result()}"
            else:
                reason = f"killed: {trouble}"
            self.last_error = self._failure(reason)
            logger.error("%s", self.last_error)
            return reason
        finally:
            exited.cancel()
            await finished(child.stop())
            self._child = None

    async def _watch(self, exited: asyncio.Task[int]) -> str | None:
        """Probe until the process ends (None) or has to be killed (the reason)."""
        config, probes = self._config, self._config.probes
        last_good_s = time.monotonic()
        was_healthy = False
        while not exited.done():
            if await self._is_healthy():
                last_good_s = time.monotonic()
                was_healthy = True
                self._policy.healthy(last_good_s)
                self.last_error = None
                if self.state is not ProcessState.HEALTHY:
                    self._move(ProcessState.HEALTHY, "probe succeeded")
            elif was_healthy and self.state is ProcessState.HEALTHY:
                self._move(ProcessState.UNHEALTHY, "probe failed")
            patience_s = HANG_TIMEOUT_S if was_healthy else config.start_timeout_s
            await self._rotate_log()
            if time.monotonic() - last_good_s > patience_s:
                return f"not healthy for {patience_s:g} s"
            interval_s = probes.interval_s if was_healthy else probes.start_interval_s
            await asyncio.wait({exited}, timeout=interval_s)
        return None

    async def _rotate_log(self) -> None:
        try:
            await asyncio.to_thread(rotate, self.spec.log_path)
        except OSError as error:  # a full disk must not end the process whose log it is
            logger.warning("%s: its log cannot be rotated: %s", self.spec.name, error)

    async def _is_healthy(self) -> bool:
        try:
            async with asyncio.timeout(self._config.probes.timeout_s):
                return await self._probe()
        except Exception:
            logger.debug("%s: probe failed", self.spec.name, exc_info=True)
            return False

    def _newest_line(self) -> str:
        lines = self._child.log_tail(1) if self._child is not None else []
        return lines[0] if lines else self.reason

    def _failure(self, reason: str) -> EngineStartFailed:
        tail = self._child.log_tail(NUM_LOG_LINES) if self._child is not None else []
        return EngineStartFailed(self.spec.name, reason, tail, str(self.spec.log_path))

    def _move(self, state: ProcessState, reason: str) -> None:
        self.state, self.reason = state, reason
        self._changed.set()
        logger.info("%s: %s (%s)", self.spec.name, state, reason)
        if self._on_event is not None:
            self._on_event(SupervisorEvent(self.spec.name, state, reason))


def engine_process(spec: EngineSpec, log_dir: Path, *, term_grace_s: float = 15.0) -> ProcessSpec:
    """The process of one engine; logs go to `log_dir`/INSTANCE.log. Reads this environment."""
    return ProcessSpec(
        name=spec.instance,
        argv=spec.argv(),
        log_path=log_dir / f"{spec.instance}.log",
        env=spec.environment(os.environ),
        term_grace_s=term_grace_s,
    )
