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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, Final

from prfaas.engines.ownership import finished
from prfaas.engines.supervision.guard import live_session_members
from prfaas.engines.supervision.log_files import open_log
from prfaas.engines.supervision.spawn import spawn

logger = logging.getLogger("prfaas.engines")

_GUARD: Final = str(Path(__file__).with_name("guard.py"))
_TAIL_BYTES: Final = 64 << 10
_KILL_TIMEOUT_S: Final = 5.0
_GUARD_MARGIN_S: Final = 3.0
KILL_S: Final = _GUARD_MARGIN_S + _KILL_TIMEOUT_S
"""How much longer than its grace a process that does not end by itself may take."""
_UNKNOWN_STATUS: Final = 255 << 8


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run. `env` is the whole environment; output is appended to `log_path`.

    `term_grace_s` is the time between SIGTERM and SIGKILL.
    """

    name: str
    argv: Sequence[str]
    log_path: Path
    env: Mapping[str, str] = field(repr=False)
    term_grace_s: float = 10.0


@dataclass(frozen=True, slots=True)
class _Started:
    """A process that runs. Its own output begins at `log_offset_bytes` of the log."""

    pid: int
    log_offset_bytes: int


class ChildProcess:
    """A running command. Every process it starts belongs to the session `pid`."""

    def __init__(self, spec: ProcessSpec, found: _Started, ended: asyncio.Future[int]) -> None:
        self.spec = spec
        self._started = found
        self._ended = ended

    @classmethod
    async def start(cls, spec: ProcessSpec) -> "ChildProcess":
        """Start `spec`. It ends when this process does, even by SIGKILL (Linux).

        Cancelled, it returns when nothing of the command runs. Raises OSError when the log file or
        the interpreter cannot be opened.
        """
        loop = asyncio.get_running_loop()
        started: asyncio.Future[_Started] = loop.create_future()
        ended: asyncio.Future[int] = loop.create_future()

        async def undo() -> None:
            await asyncio.wait({started})
            if started.exception() is None:
                await cls(spec, started.result(), ended).stop()

        # Each child has a thread of its own: PR_SET_PDEATHSIG fires when the parent *thread* ends,
        # so a thread of a pool, which may end earlier, would take the guard with it.
        Thread(target=_live, args=(spec, loop, started, ended), daemon=True).start()
        try:
            await asyncio.wait({started})
        except asyncio.CancelledError:
            # The thread cannot be interrupted, so wait for its result and then stop the process.
            await finished(undo())
            raise
        return cls(spec, started.result(), ended)

    @property
    def pid(self) -> int:
        """The process id of the session's leader, which guards the command."""
        return self._started.pid

    @property
    def exit_status(self) -> int | None:
        """The command's exit status; 128 + N when signal N ended it; None while it runs."""
        if not self._ended.done():
            return None
        status = self._ended.result()
        return 128 - status if status < 0 else status

    def members(self) -> list[int]:
        """Processes of the session that still run, the guard among them."""
        return live_session_members(self.pid)

    async def wait(self) -> int:
        """Wait until the command has ended and nothing of it runs any more; its exit status."""
        await asyncio.wait({self._ended})
        await self._kill_rest()
        assert self.exit_status is not None
        return self.exit_status

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the grace. On return nothing of it runs. Idempotent."""
        self._signal_guard(signal.SIGTERM)
        await asyncio.wait({self._ended}, timeout=self.spec.term_grace_s + _GUARD_MARGIN_S)
        await self._kill_rest()
        await asyncio.wait({self._ended})

    def log_tail(self, num_lines: int = 20) -> list[str]:
        """The last lines this run (not an earlier one) wrote to its log."""
        try:
            with self.spec.log_path.open("rb") as log:
                end_bytes = log.seek(0, os.SEEK_END)
                # A log that was rotated since holds lines of this run only.
                begin_bytes = self._started.log_offset_bytes
                begin_bytes = begin_bytes if begin_bytes <= end_bytes else 0
                log.seek(max(begin_bytes, end_bytes - _TAIL_BYTES))
                text = log.read().decode("utf-8", "replace")
        except OSError:
            return []
        return text.splitlines()[-num_lines:]

    def _signal_guard(self, signum: int) -> None:
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    async def _kill_rest(self) -> None:
        deadline_s = time.monotonic() + _KILL_TIMEOUT_S
        while (members := self.members()) or not self._ended.done():
            if time.monotonic() > deadline_s:
                logger.error("%s: processes %s survive SIGKILL", self.spec.name, members)
                return
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            # Without /proc no members are known, but the guard's id is.
            if not members:
                self._signal_guard(signal.SIGKILL)
            await asyncio.sleep(0.02)


def _live(
    spec: ProcessSpec,
    loop: asyncio.AbstractEventLoop,
    started: asyncio.Future[_Started],
    ended: asyncio.Future[int],
) -> None:
    """Start the command and wait for its end; both futures belong to `loop`."""

    def tell(callback: Callable[[Any], None], value: object) -> None:
        # RuntimeError: the loop is closed, so nobody waits for the command any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback, value)

    try:
        found = _spawned(spec)
    except OSError as error:
        tell(started.set_exception, error)
        return
    tell(started.set_result, found)
    try:
        _, status = os.waitpid(found.pid, 0)
    except ChildProcessError:
        # Other code in this process waits for any child (waitpid(-1)) and took the status.
        status = _UNKNOWN_STATUS
    tell(ended.set_result, os.waitstatus_to_exitcode(status))


def _spawned(spec: ProcessSpec) -> _Started:
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    with open(open_log(spec.log_path), "ab") as log:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
        log.write(f"=== {stamp} start {spec.name}\n".encode())
        log.flush()
        offset_bytes = os.fstat(log.fileno()).st_size
    guard = (sys.executable, "-I", "-S", _GUARD, str(os.getpid()), f"{spec.term_grace_s:g}")
    return _Started(spawn((*guard, *spec.argv), spec.env, spec.log_path), offset_bytes)
