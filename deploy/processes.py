"""Ties the life of this process to its parent's. Linux only; knows nothing of what it runs."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def exit_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `number` to this process when its parent thread ends.

    Survives exec, is not inherited by fork. OSError if the kernel refuses; exits at once if the
    parent is already gone.
    """
    parent_pid = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent_pid:
        raise SystemExit("the parent process is gone")
