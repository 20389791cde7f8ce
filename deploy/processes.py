"""How our processes start others of ours: the same interpreter, the same code, one life.

Knows nothing of what they do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PROJECT_ROOT = str(Path(__file__).resolve().parents[1])


def module_argv(module: str, *words: str) -> list[str]:
    """The command line that runs one of our modules; needs `module_environment`.

    The current directory is kept off the search path: whatever a user has there is not ours.
    """
    return [sys.executable, "-P", "-m", module, *words]


def module_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """`inherited`, so changed that our modules are found even when they are not installed."""
    environment = dict(inherited) | {"PYTHONUNBUFFERED": "1"}
    if _PROJECT_ROOT not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        parts = [part for part in inherited.get("PYTHONPATH", "").split(":") if part]
        environment["PYTHONPATH"] = ":".join([_PROJECT_ROOT, *parts])
    return environment


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
