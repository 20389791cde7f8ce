"""Logs that only this user may read and that do not grow for ever. Does not know what is in them.

A child holds its log open and appends to it, so the file cannot be renamed away from it: it is
copied and then emptied. A line that is written in between is lost.
"""

import os
import shutil
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

MAX_LOG_BYTES: Final = 64 << 20
NUM_OLD_LOGS: Final = 3


def open_log(path: Path) -> int:
    """A descriptor that appends to the log, which only this user may read. OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


class OwnLog(RotatingFileHandler):
    """The log of this process. It is opened with the first record, when its directory exists."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MAX_LOG_BYTES, backupCount=NUM_OLD_LOGS, delay=True)

    def _open(self) -> TextIOWrapper:
        # The handler's own way would give a new file the mode that the user's umask allows.
        return os.fdopen(open_log(Path(self.baseFilename)), "a", encoding="utf-8")


def rotate(path: Path, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Where the log is larger, keep it as NAME.1, and older ones as NAME.2 and so on; whether it
    was. Blocks while it copies. OSError.
    """
    if path.stat().st_size <= max_bytes:
        return False
    for number in range(NUM_OLD_LOGS - 1, 0, -1):
        older = _old(path, number)
        if older.exists():
            older.replace(_old(path, number + 1))
    newest = _old(path, 1)
    with path.open("rb") as log, open(newest, "xb", opener=_private) as copy:
        shutil.copyfileobj(log, copy, 1 << 20)
        os.truncate(path, 0)
    return True


def _old(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
