"""One file-backed shared-memory arena of fixed-size blocks, mapped by an agent and its engines.

It does not know which blocks are in use or by whom, nor what their bytes mean.

The agent creates the file and holds an exclusive `flock` on it for as long as it lives. So a later
agent can tell a file in use from a file that a killed agent left behind. Engines open the file by
path and map it read-write without the lock. An unlinked arena stays valid for processes that still
map it.

Every start of an agent has an epoch of its own. Without a name, an agent also makes a new file at
each start. So late writes of an engine that has not yet noticed the restart go to memory that
nobody reads. A named arena outlives its agent, however that ended, and the next agent of the name
adopts the file with its bytes. Late writes can then reach memory in use. So the adopting agent must
not use, for a while, the blocks that the former one may have handed out. The index of the arena's
bytes lies beside it under the same name, and is removed whenever the arena is.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from kvmanager.private_files import NotPrivate, allocate, open_private
from kvmanager.transfers.blocks import BlockExtents

DEFAULT_BLOCK_BYTES: Final = 64 << 10

_PREFIX: Final = "prfaas-"
_KEPT_PREFIX: Final = "prfaas-kept-"
_SUFFIX: Final = ".arena"
_INDEX_SUFFIXES: Final = (".index", ".index.new", ".used")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)


class ArenaError(Exception):
    """The arena's file cannot be made or mapped. The message says why, and what helps."""


class Arena:
    """A mapped arena. The agent calls `create` or `adopt`, an engine calls `attach`.

    `memory` is the whole arena as one writable memoryview.
    """

    def __init__(
        self, path: Path, block_bytes: int, mapping: mmap.mmap, lock_fd: int, epoch: str
    ) -> None:
        self.path = path
        self.epoch = epoch
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
        name: str | None = None,
        prefault: bool = True,
    ) -> Arena:
        """Make a new arena file with a new epoch. Raises ArenaError.

        With a `name` it can be adopted later, and replaces the arena that a dead agent left under
        that name. Every page is allocated now, so that a lack of memory is an error here instead of
        a SIGBUS later. With `prefault` every page is mapped too, which takes about a third of a
        second for each GiB.
        """
        nbytes = _arena_bytes(num_blocks, block_bytes)
        wanted = None if name is None else _kept_path(directory, name)
        try:
            path, fd = _create_locked(directory) if wanted is None else _replace_locked(wanted)
        except OSError as error:
            raise ArenaError(f"cannot make an arena in {directory}: {error}") from error
        try:
            mapping = _allocate(fd, directory, nbytes, prefault=prefault)
        except (OSError, ArenaError) as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise ArenaError(f"cannot make the arena {path}: {error}") from error
        if name is None:
            return cls(path, block_bytes, mapping, fd, _token_of(path))
        return cls(path, block_bytes, mapping, fd, _new_token())

    @classmethod
    def adopt(
        cls,
        directory: Path,
        name: str,
        num_blocks: int,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        *,
        prefault: bool = True,
    ) -> Arena | None:
        """Take over the arena that a dead agent left under `name`, under a fresh epoch.

        None when there is none, or one of another size: `create` replaces it. Raises ArenaError
        when its agent lives.
        """
        nbytes = _arena_bytes(num_blocks, block_bytes)
        path = _kept_path(directory, name)
        fd = -1
        try:
            fd = _lock_existing(path)
            if fd < 0:
                return None
            if os.fstat(fd).st_size != nbytes:
                os.close(fd)
                return None
            mapping = _allocate(fd, directory, nbytes, prefault=prefault)
        except (OSError, ArenaError) as error:
            if fd >= 0:
                os.close(fd)
            raise ArenaError(f"cannot take over the arena {path}: {error}") from error
        return cls(path, block_bytes, mapping, fd, _new_token())

    @staticmethod
    def discard(directory: Path, name: str) -> list[Path]:
        """Remove the arena of that name and its index, unless an agent holds them. Returns the
        removed files. Raises ArenaError for an impossible name.
        """
        path = _kept_path(directory, name)
        try:
            return [*_remove_locked(path), *_remove_all(_index_paths(path))]
        except (OSError, ArenaError):  # another user's, or in use
            return []

    @classmethod
    def attach(cls, path: Path, nbytes: int, block_bytes: int, *, epoch: str) -> Arena:
        """Map the arena that an agent of this `epoch` made. Raises ArenaError.

        The epoch is not in the file: the agent says it in its Welcome.
        """
        try:
            fd = open_private(path, os.O_RDWR)
        except OSError as error:
            raise ArenaError(f"cannot open the arena {path}: {error}") from error
        try:
            if os.fstat(fd).st_size != nbytes or nbytes < 1 or block_bytes < 1:
                raise ArenaError(f"the arena {path} has {os.fstat(fd).st_size} bytes, not {nbytes}")
            return cls(path, block_bytes, mmap.mmap(fd, nbytes), -1, epoch)
        except (OSError, ValueError) as error:
            raise ArenaError(f"cannot map the arena {path}: {error}") from error
        finally:
            os.close(fd)

    def view(self, runs: Sequence[tuple[int, int]], nbytes: int) -> ArenaSpace:
        """The logical bytes of a transfer; raises ValueError for runs that are not in the arena."""
        return ArenaSpace(self, runs, nbytes)

    @property
    def index_path(self) -> Path | None:
        """The path of the index of this arena's bytes; None for an arena that is not kept."""
        return _index_paths(self.path)[0] if self.path.name.startswith(_KEPT_PREFIX) else None

    def close(self, *, keep: bool = False) -> None:
        """Unmap the arena, and unlink its file if this process is its agent. Idempotent.

        `keep`: leave a named arena to be adopted. Memory with views outside stays mapped until the
        last of them is gone.
        """
        if self._lock_fd >= 0:
            # Removed while locked, or another agent could adopt a file that is about to go.
            if self.index_path is None:
                _remove_all([self.path])
            elif not keep:
                _remove_all([self.path, *_index_paths(self.path)])
            os.close(self._lock_fd)
            self._lock_fd = -1
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._mapping.close()


class ArenaSpace:
    """Maps a transfer's logical bytes to arena memory (implements `transport.ByteSpace`)."""

    def __init__(self, arena: Arena, runs: Sequence[tuple[int, int]], nbytes: int) -> None:
        self._table = BlockExtents(runs, arena.block_bytes, nbytes)
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
    """Remove the arenas without a name in `directory` whose agent is dead. Returns their paths."""
    removed = []
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        # A named arena waits for its next agent.
        if path.name.startswith(_KEPT_PREFIX):
            continue
        try:
            fd = open_private(path, os.O_RDWR)
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


def _arena_bytes(num_blocks: int, block_bytes: int) -> int:
    if num_blocks < 1 or block_bytes < mmap.PAGESIZE or block_bytes % mmap.PAGESIZE:
        raise ArenaError(
            f"an arena of {num_blocks} blocks of {block_bytes} bytes: at least one block, "
            f"each a multiple of the page size {mmap.PAGESIZE}"
        )
    return num_blocks * block_bytes


def _new_token() -> str:
    return secrets.token_hex(8)


def _token_of(path: Path) -> str:
    return path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)


def _kept_path(directory: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ArenaError(
            f"{name!r} cannot name an arena: letters, digits, '.', '-' and '_', at most 100, "
            "the first a letter or digit"
        )
    return directory / f"{_KEPT_PREFIX}{name}{_SUFFIX}"


def _index_paths(path: Path) -> list[Path]:
    """The index of the arena at `path`, and what an interrupted rewrite of it leaves."""
    return [path.with_name(path.name.removesuffix(_SUFFIX) + suffix) for suffix in _INDEX_SUFFIXES]


def _remove_all(paths: Iterable[Path]) -> list[Path]:
    """Remove the files that exist. Returns their paths."""
    removed = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            removed.append(path)
    return removed


def _remove_locked(path: Path) -> list[Path]:
    """Remove the arena at `path`, if there is one. Raises ArenaError when its agent lives."""
    fd = _lock_existing(path)
    if fd < 0:
        return []
    try:
        return _remove_all([path])
    finally:
        os.close(fd)


def _create_locked(directory: Path) -> tuple[Path, int]:
    """Make a new empty file and lock it, safe against a `remove_stale` that runs now."""
    while True:
        path = directory / f"{_PREFIX}{_new_token()}{_SUFFIX}"
        fd = _open_new(path)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)  # another process took the lock first and removed the file


def _replace_locked(path: Path) -> tuple[Path, int]:
    """Make and lock the file of a named arena, in place of the file that a dead agent left.

    It is always a new file, because engines of the former agent may still write into the old one.
    Raises ArenaError when its agent lives.
    """
    while True:
        _remove_locked(path)
        try:
            fd = _open_new(path)
        except FileExistsError:  # another agent of this name starts at the same time
            continue
        if os.fstat(fd).st_nlink:
            _remove_all(_index_paths(path))
            return path, fd
        os.close(fd)


def _open_new(path: Path) -> int:
    fd = open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def _lock_existing(path: Path) -> int:
    """The locked file at `path`; -1: there is none. Raises ArenaError when its agent lives or when
    other users may use the file.
    """
    try:
        fd = open_private(path, os.O_RDWR)
    except FileNotFoundError:
        return -1
    except NotPrivate as error:
        raise ArenaError(f"{error}; remove it, or use another name or arena_dir") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ArenaError(
            f"the arena {path} belongs to an agent that runs: stop it, or use another name"
        ) from None
    if os.fstat(fd).st_nlink:
        return fd
    os.close(fd)  # another process removed it before this one had the lock
    return -1


def _allocate(fd: int, directory: Path, nbytes: int, *, prefault: bool) -> mmap.mmap:
    allocate(fd, nbytes, directory, "an arena")
    populate = mmap.MAP_POPULATE if prefault else 0
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | populate)
