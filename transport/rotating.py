"""Certificate and key files that may be replaced while the processes that use them run.

It knows when files have changed, and not what is in them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from transport.errors import LocalError

logger = logging.getLogger("prfaas.transport")

RECHECK_S: Final = 1.0
"""Least seconds between two looks at the certificate files."""

T = TypeVar("T")
FilesT = TypeVar("FilesT", bound="WatchedFiles")
Stamp = tuple[tuple[int, int, int, int] | None, ...]


class WatchedFiles(Protocol):
    """Files that belong together: certificates (`TlsFiles`) or a region's keys (`RegionKey`)."""

    @property
    def paths(self) -> tuple[Path, ...]: ...


@dataclass(frozen=True, slots=True)
class PlainFiles:
    """Watched files of which only the paths are known."""

    paths: tuple[Path, ...]


class Rotating(Generic[FilesT, T]):
    """The result of `load` for certificate or key files, loaded again when the files have changed.

    `current` looks at the files at most once a second and follows symbolic links, so that a
    Kubernetes secret or cert-manager may replace them while this process runs. When the new files
    cannot be loaded (half-written, or of two generations), the last good result stays in use and
    one warning is logged. A connection keeps the certificate that it began with until it ends.

    `load` raises LocalError. The constructor passes that error on; `current` never raises.
    """

    def __init__(self, files: FilesT, load: Callable[[FilesT], T]) -> None:
        self._files = files
        self._load = load
        self._lock = threading.Lock()
        self._stamp = _stamp(files)
        self._current = load(files)
        self._checked_s: float | None = None

    def current(self, now_s: float) -> T:
        """The result for a connection that begins now. Thread-safe; never raises."""
        with self._lock:
            if self._checked_s is None or now_s - self._checked_s >= RECHECK_S:
                self._checked_s = now_s
                self._check()
            return self._current

    def _check(self) -> None:
        stamp = _stamp(self._files)
        if stamp == self._stamp:
            return
        try:
            loaded = self._load(self._files)
        except LocalError as error:
            # A changed stamp means that somebody is writing the files just now: look again later.
            if _stamp(self._files) == stamp:
                self._stamp = stamp
                logger.warning("changed files are not used: %s", error.message)
            return
        # Unless the files stood still while they were read, certificate and key may not match.
        if _stamp(self._files) == stamp:
            self._stamp = stamp
            self._current = loaded
            logger.info("changed files are used from now on: %s", self._files.paths[0])


def _stamp(files: WatchedFiles) -> Stamp:
    return tuple(_stamp_of(path) for path in files.paths)


def _stamp_of(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
