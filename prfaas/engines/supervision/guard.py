"""Runs one command for a supervisor, and leaves no process of the command behind.

Run as a script (`python -I -S guard.py PARENT_PID GRACE_S COMMAND...`) as the leader of a new
session. The command runs as its child in the same session. When the guard gets SIGTERM, or its
parent dies (Linux), it sends the command SIGTERM, waits GRACE_S, and then kills every process of
the session. When the command ends by itself, the processes that it left behind get SIGTERM and
then SIGKILL. The guard's exit status is the command's, or 128 + N if signal N ended it.

PR_SET_PDEATHSIG on the command alone would not do: a forked child does not inherit it, and vLLM's
API server starts an engine core and workers. The guard knows nothing of engines, and imports only
the standard library, because it runs without site packages.
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
    """The fields of /proc/PID/stat after the command's name: state, ppid, pgrp, session, ..."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name stands in brackets and may itself contain spaces and brackets, but no later
            # field does.
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
    """Runs the command, ends its session, and gives its exit status."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._child = 0
        self._stopping = False

    def run(self, command: list[str]) -> int:
        """Start the command, reap until no descendant is left, and return its exit status."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGALRM, self._kill_all)
        guard = os.getpid()
        # Blocked until `_child` is set: `_stop` would otherwise find no child to pass SIGTERM to.
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
        # setitimer(0) would switch the timer off instead of firing it at once.
        signal.setitimer(signal.ITIMER_REAL, self._grace_s or 0.001)

    def _sweep(self) -> None:
        """The command has ended: ask the processes it left behind to end, and kill them later."""
        self._signal_rest(signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, _LAST_GRACE_S, 0.5)

    def _kill_all(self, _signum: int, _frame: FrameType | None) -> None:
        self._signal_rest(signal.SIGKILL)
        # Again and again: a process may fork while the session is read.
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
        # The guard died before prctl took effect, so its death sends this process no signal any
        # more.
        if os.getppid() != guard:
            os._exit(1)
        # The mask would survive exec; until exec, the guard's handlers would run in this process.
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
    # Orphans of the command become children of the guard, not of init, so that it can wait for
    # them.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # The parent died before the first prctl took effect, so no signal would tell of it.
    if os.getppid() != parent:
        return 1
    # Python opens its descriptors with O_CLOEXEC (PEP 446); a C library in the parent may not.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    status = _Guard(grace_s).run(command)
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
