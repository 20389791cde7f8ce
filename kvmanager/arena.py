"""One file-backed shared-memory arena of fixed-size blocks, mapped by an agent and its engines.

It does not know which blocks are in use or by whom, nor what their bytes mean.

The agent creates the file and holds an exclusive `flock` on it for as long as it lives, so that a
later agent can tell a file in use from one left behind by a killed agent. Engines open the file by
path and map it read-write without the lock. An unlinked arena stays valid for whoever still maps
it; a new agent always makes a new file under a new epoch, so late writes of an engine that has not
noticed yet land in memory that nobody reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvmanager.blocks import BlockTable

DEFAULT_BLOCK_BYTES: Final = 64 << 10

_PREFIX: Final = "prfaas-"
_SUFFIX: Final = ".arena"


class ArenaError(Exception):
    """The arena's file cannot be made or mapped; the message says why and what helps."""


class Arena:
    """A mapped arena. Made by `create` (the agent) or `attach` (an engine).

    `memory` is the whole arena as one writable memoryview: what a GPU host registers as pinned.
    """

    def __init__(self, path: Path, block_bytes: int, mapping: mmap.mmap, lock_fd: int) -> None:
        self.path = path
        self.epoch = path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        self.block_bytes = block_bytes
        self.nbytes = len(mapping)
        self.num_blocks = self.nbytes // block_bytes
        self.memory = memoryview(mapping)
        self._mapping = mapping
        self._lock_fd = lock_fd

    @classmethod
    def create(
        cls,
        directory: Path,
        num_blocks: int,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        *,
        prefault: bool = True,
    ) -> Arena:
        """Make a new arena file with a fresh epoch; raises ArenaError.

        With `prefault` every page is allocated and mapped now, which takes about a third of a
        second for each GiB and moves running out of memory from a later SIGBUS to an error here.
        """
        if num_blocks < 1 or block_bytes < mmap.PAGESIZE or block_bytes % mmap.PAGESIZE:
            raise ArenaError(
                f"an arena of {num_blocks} blocks of {block_bytes} bytes: at least one block, "
                f"each a multiple of the page size {mmap.PAGESIZE}"
            )
        nbytes = num_blocks * block_bytes
        try:
            path, fd = _create_locked(directory)
        except OSError as error:
            raise ArenaError(f"cannot make an arena in {directory}: {error}") from error
        try:
            mapping = _allocate(fd, directory, nbytes, prefault=prefault)
        except (OSError, ArenaError) as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise ArenaError(f"cannot make an arena of {nbytes} bytes: {error}") from error
        return cls(path, block_bytes, mapping, fd)

    @classmethod
    def attach(cls, path: Path, nbytes: int, block_bytes: int) -> Arena:
        """Map the arena that another process made; raises ArenaError."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"cannot open the arena {path}: {error}") from error
        try:
            if os.fstat(fd).st_size != nbytes or nbytes < 1 or block_bytes < 1:
                raise ArenaError(f"the arena {path} has {os.fstat(fd).st_size} bytes, not {nbytes}")
            return cls(path, block_bytes, mmap.mmap(fd, nbytes), -1)
        except (OSError, ValueError) as error:
            raise ArenaError(f"cannot map the arena {path}: {error}") from error
        finally:
            os.close(fd)

    def view(self, runs: Sequence[tuple[int, int]], nbytes: int) -> ArenaSpace:
        """The logical bytes of a transfer; raises ValueError for runs that are not in the arena."""
        return ArenaSpace(self, runs, nbytes)

    def close(self) -> None:
        """Unlink the file if we made it, and unmap it. Idempotent.

        Memory that still has views outside stays mapped until the last of them is gone.
        """
        if self._lock_fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = -1
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._mapping.close()


class ArenaSpace:
    """A transfer's logical bytes resolved to arena memory (implements `transport.ByteSpace`)."""

    def __init__(self, arena: Arena, runs: Sequence[tuple[int, int]], nbytes: int) -> None:
        self._table = BlockTable(runs, arena.block_bytes, nbytes)
        if self._table.end_block > arena.num_blocks:
            raise ValueError(f"runs {list(runs)} leave the arena's {arena.num_blocks} blocks")
        self._memory = arena.memory
        self.nbytes = nbytes

    def extents(self, offset: int, length: int) -> list[tuple[int, int]]:
        """The (arena offset, length) pieces of a logical range; ValueError outside [0, nbytes)."""
        return list(self._table.extents(offset, length))

    def views(self, offset: int, length: int) -> list[memoryview]:
        """The writable memory of a logical range; ValueError outside [0, nbytes)."""
        memory = self._memory
        return [memory[base : base + size] for base, size in self._table.extents(offset, length)]


def remove_stale(directory: Path) -> list[Path]:
    """Remove the arenas in `directory` whose agent is dead; what was removed."""
    removed = []
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path)
        except OSError:  # its agent lives
            pass
        finally:
            os.close(fd)
    return removed


def _create_locked(directory: Path) -> tuple[Path, int]:
    """A new empty file that we hold the lock of, also against a `remove_stale` that runs now."""
    while True:
        path = directory / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)  # somebody took the lock first and removed the file


def _allocate(fd: int, directory: Path, nbytes: int, *, prefault: bool) -> mmap.mmap:
    stats = os.statvfs(directory)
    available = stats.f_bavail * stats.f_frsize
    if available < nbytes:
        raise ArenaError(
            f"{directory} has {available} bytes left; make the arena smaller or the file system "
            "larger (containers: --shm-size)"
        )
    os.ftruncate(fd, nbytes)
    flags = mmap.MAP_SHARED
    if prefault:
        os.posix_fallocate(fd, 0, nbytes)
        flags |= mmap.MAP_POPULATE
    return mmap.mmap(fd, nbytes, flags=flags)
