"""Starts a program while the other threads of this process go on.

`subprocess` and `os.posix_spawn` hold the interpreter's lock until the kernel has given the new
process a core and read its program. On a busy machine that takes 100 ms and more, and no other
Python thread runs meanwhile, event loops included. `ctypes` releases the lock while it calls the C
library's posix_spawn.

It does not know what the program is for, and leaves waiting for its end to the caller.
"""

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

# The header's POSIX_SPAWN_SETSID: glibc, musl; macOS.
_SETSID: Final = 0x80 if sys.platform == "linux" else 0x400
# More than any C library's posix_spawn_file_actions_t or posix_spawnattr_t takes.
_OPAQUE_BYTES: Final = 1024


def spawn(argv: Sequence[str], env: Mapping[str, str], output: Path) -> int:
    """Start `argv`, whose first word is the program's path, and return its process id.

    The program leads a session of its own, reads nothing, and appends its output to `output`. The
    call blocks until the program is loaded. For PR_SET_PDEATHSIG its parent is the calling thread.
    Raises OSError.
    """
    libc = ctypes.CDLL(None)
    # posix_spawn and its relatives return the error's number instead of setting errno.
    actions = ctypes.create_string_buffer(_OPAQUE_BYTES)
    attributes = ctypes.create_string_buffer(_OPAQUE_BYTES)
    _check(libc.posix_spawn_file_actions_init(actions), "posix_spawn_file_actions_init")
    _check(libc.posix_spawnattr_init(attributes), "posix_spawnattr_init")
    try:
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        path = os.fsencode(output)
        for error in (
            libc.posix_spawn_file_actions_addopen(actions, 0, b"/dev/null", os.O_RDONLY, 0),
            libc.posix_spawn_file_actions_addopen(actions, 1, path, append, 0o600),
            libc.posix_spawn_file_actions_adddup2(actions, 1, 2),
            libc.posix_spawnattr_setflags(attributes, _SETSID),
        ):
            _check(error, "posix_spawn_file_actions")
        pid = ctypes.c_int()
        variables = [f"{name}={value}" for name, value in env.items()]
        program = os.fsencode(argv[0])
        error = libc.posix_spawn(
            ctypes.byref(pid), program, actions, attributes, _strings(argv), _strings(variables)
        )
        _check(error, argv[0])
    finally:
        libc.posix_spawn_file_actions_destroy(actions)
        libc.posix_spawnattr_destroy(attributes)
    return pid.value


def _strings(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    """A C array of strings with a null pointer behind the last."""
    return (ctypes.c_char_p * (len(texts) + 1))(*map(os.fsencode, texts), None)


def _check(error: int, what: str) -> None:
    if error:
        raise OSError(error, os.strerror(error), what)
