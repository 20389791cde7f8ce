"""How our processes start other processes of ours, with the same interpreter and code.

It knows nothing of what they do.
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
    """The command line that runs one of our modules; it needs `module_environment`.

    The current directory is kept off the search path (-P): the user's files there are not ours.
    """
    return [sys.executable, "-P", "-m", module, *words]


def module_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """`inherited`, changed so that our modules are found even when they are not installed."""
    environment = dict(inherited) | {"PYTHONUNBUFFERED": "1"}
    # An installed package is found anyway, and site-packages must not come before the standard
    # library.
    if _PROJECT_ROOT not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        parts = [part for part in inherited.get("PYTHONPATH", "").split(":") if part]
        environment["PYTHONPATH"] = ":".join([_PROJECT_ROOT, *parts])
    return environment


def exit_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `number` to this process when its parent thread ends.

    It survives exec and is not inherited by fork. OSError if the kernel refuses. Exits at once if
    the parent is already gone.
    """
    parent_pid = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    # The parent may have died before prctl, which then sends nothing.
    if os.getppid() != parent_pid:
        raise SystemExit("the parent process is gone")
