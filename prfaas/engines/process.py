"""One child process in a session of its own, with its output in a log file, stopped as a whole.

It does not know what the process is for, when it is healthy, or whether it should be restarted
(see supervisor.py). guard.py does the part that must survive this process.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prfaas.engines.guard import live_session_members

logger = logging.getLogger("prfaas.kvmanager.engines")

_GUARD: Final = str(Path(__file__).with_name("guard.py"))
_TAIL_BYTES: Final = 64 << 10
_KILL_TIMEOUT_S: Final = 5.0
_GUARD_MARGIN_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run. `env` is the whole environment; output is appended to `log_path`.

    `term_grace_s` is the time between SIGTERM and SIGKILL.
    """

    name: str
    argv: Sequence[str]
    log_path: Path
    env: Mapping[str, str] = field(repr=False)
    cwd: Path | None = None
    term_grace_s: float = 10.0


class ChildProcess:
    """A running command. Every process it starts belongs to the session `pid`."""

    def __init__(
        self, spec: ProcessSpec, process: asyncio.subprocess.Process, log_offset_bytes: int
    ) -> None:
        self.spec = spec
        self._process = process
        self._log_offset_bytes = log_offset_bytes

    @classmethod
    async def start(cls, spec: ProcessSpec) -> "ChildProcess":
        """Start `spec`. It ends when the calling thread does, even by SIGKILL (Linux).

        Raises OSError when the log file or the interpreter cannot be opened.
        """
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_path.open("ab") as log:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
            log.write(f"=== {stamp} start {spec.name}\n".encode())
            log.flush()
            offset_bytes = log.tell()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", _GUARD,
                str(os.getpid()), f"{spec.term_grace_s:g}", *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(spec.env),
                cwd=spec.cwd,
                start_new_session=True,
            )  # fmt: skip
        return cls(spec, process, offset_bytes)

    @property
    def pid(self) -> int:
        """The process id of the session's leader, which guards the command."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The command's exit status; 128 + N when signal N ended it; None while it runs."""
        status = self._process.returncode
        return 128 - status if status is not None and status < 0 else status

    def members(self) -> list[int]:
        """Processes of the session that still run, the guard among them."""
        return live_session_members(self.pid)

    async def wait(self) -> int:
        """Wait until the command has ended and nothing of it runs any more; its exit status."""
        await self._process.wait()
        await self._kill_rest()
        assert self.exit_status is not None
        return self.exit_status

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the grace. On return nothing of it runs. Idempotent."""
        if self._process.returncode is None:
            self._signal_guard(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.spec.term_grace_s + _GUARD_MARGIN_S):
                    await self._process.wait()
        await self._kill_rest()
        await self._process.wait()

    def log_tail(self, num_lines: int = 20) -> list[str]:
        """The last lines this run (not an earlier one) wrote to its log."""
        try:
            with self.spec.log_path.open("rb") as log:
                end_bytes = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_offset_bytes, end_bytes - _TAIL_BYTES))
                text = log.read().decode("utf-8", "replace")
        except OSError:
            return []
        return text.splitlines()[-num_lines:]

    def _signal_guard(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signum)

    async def _kill_rest(self) -> None:
        deadline_s = time.monotonic() + _KILL_TIMEOUT_S
        while (members := self.members()) or self._process.returncode is None:
            if time.monotonic() > deadline_s:
                logger.error("%s: processes %s survive SIGKILL", self.spec.name, members)
                return
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not members:
                self._signal_guard(signal.SIGKILL)
            await asyncio.sleep(0.02)
