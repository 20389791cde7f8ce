"""Stands between a supervisor and one command so that no process of it outlives either.

Run as a script (`python -I -S guard.py PARENT_PID GRACE_S COMMAND...`) as the leader of a new
session. The command runs as its child in the same session. When the guard is told to stop, or its
parent dies (Linux), it passes SIGTERM on, waits GRACE_S, and then kills everything that descends
from it; it also does so when the command ends by itself. It ends with the command's exit status,
128 + N for signal N.

A death signal on the command alone would not do: vLLM's API server spawns an engine core and
workers, and the death signal is not inherited by those. Knows nothing of engines, and imports only
the standard library because it runs without site packages.
"""

import contextlib
import ctypes
import os
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_LAST_GRACE_S: Final = 2.0
_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _fields(pid: str) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may contain anything: state, ppid, ..."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def live_session_members(session: int) -> list[int]:
    """Processes of a session that still run, zombies left out. Needs /proc; else empty."""
    try:
        entries = os.listdir("/proc")
    except OSError:
        return []
    members = []
    for entry in entries:
        if not entry.isdigit():
            continue
        fields = _fields(entry)
        if len(fields) > 3 and int(fields[3]) == session and fields[0] not in "ZX":
            members.append(int(entry))
    return members


class _Guard:
    """The command, its deadline, and the exit status it had."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._child = 0
        self._stopping = False

    def run(self, command: list[str]) -> int:
        """Start the command, reap until nothing descends from us; its exit status."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGALRM, self._kill_all)
        guard = os.getpid()
        # Blocked, so that no request to stop falls between the fork and what acts on it.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        self._child = os.fork()
        if self._child == 0:
            _exec(command, guard)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        status = 0
        while True:
            try:
                pid, code = os.waitpid(-1, 0)
            except ChildProcessError:
                return status
            if pid == self._child:
                status = os.waitstatus_to_exitcode(code)
                self._child = 0
                self._sweep()

    def _stop(self, _signum: int, _frame: FrameType | None) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._signal_child(signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, self._grace_s or 0.001)

    def _sweep(self) -> None:
        """The command is gone: what it left behind has a short time to end by itself."""
        self._signal_rest(signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, _LAST_GRACE_S, 0.5)

    def _kill_all(self, _signum: int, _frame: FrameType | None) -> None:
        self._signal_rest(signal.SIGKILL)
        signal.setitimer(signal.ITIMER_REAL, 0.5)

    def _signal_child(self, signum: int) -> None:
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signum)

    def _signal_rest(self, signum: int) -> None:
        own = os.getpid()
        if not os.path.isdir("/proc/self"):
            self._signal_child(signum)
            return
        for pid in live_session_members(own):
            if pid != own:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signum)


def _exec(command: list[str], guard: int) -> NoReturn:
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        for signum in _HANDLED:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        os.execvp(command[0], command)
    except BaseException as error:
        sys.stderr.write(f"cannot run {command[0]}: {error}\n")
        sys.stderr.flush()
        os._exit(127)


def main(argv: list[str]) -> int:
    """`argv`: parent pid, grace in seconds, command and its arguments."""
    parent, grace_s, command = int(argv[0]), float(argv[1]), argv[2:]
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        return 1
    # The parent's own are closed at exec; a library's might not be.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    status = _Guard(grace_s).run(command)
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
