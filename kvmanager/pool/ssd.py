"""Parts of cached blocks as files on an SSD, written and read by a few threads.

It does not know what is worth keeping, how much room there is, or arenas. It moves bytes between
files and memory that the caller must keep until the future is done.

A part is one file, `<first byte of the key>/<key>.<part>`: a frame with its `SsdEntry` (framed as
in `kvmanager.pool.index_records`), padding up to `DATA_OFFSET`, then the bytes. A file is written
under another name and then renamed, so that a file under its own name is complete unless the host
crashed. The checksum finds what a crash of the host leaves behind, when the file is read.

One thread carries out the requests about one file in order, except that reads come first, because
an engine waits for them. Errors of the disk are not raised: the request results in None, each kind
of error is logged once, and the store goes on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from kvmanager.hashing import KEY_BYTES
from kvmanager.pool.index_records import decode_frame, encode_frame, part_checksum, restore_order
from kvmanager.pool.shape import CacheShape
from kvmanager.private_files import make_private_directory, open_private

logger = logging.getLogger("prfaas.kvmanager.pool.ssd")

SSD_VERSION: Final = 1
"""1: first version."""

DATA_OFFSET: Final = 4096
"""The offset of a part's bytes in its file, page-aligned."""

_MAX_VIEWS: Final = 1024
"""Most buffers of one preadv or pwritev (IOV_MAX of Linux)."""

_FOLDER: Final = re.compile(r"[0-9a-f]{2}", re.ASCII)
_FILE: Final = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})\.(\d{{1,3}})(\.new)?", re.ASCII)
_READ, _CHANGE, _END = range(3)

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)

_Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class SsdError(Exception):
    """The directory cannot be used; the message names it and says why."""


class SsdEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The header of a file: part `part` of the block with `key`, the `index`th of its prefix, after
    the block with `parent`. `checksum` is `part_checksum` of its `nbytes` bytes.

    There is one for each part on SSD, so `gc=False` spares the garbage collector the visit.
    """

    key: _Key
    parent: _Key
    index: Annotated[int, msgspec.Meta(ge=0)]
    part: Annotated[int, msgspec.Meta(ge=0, lt=256)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    checksum: int
    shape: CacheShape
    version: int = SSD_VERSION


_Outcome = bool | None
_Job = tuple[int, int, Callable[[], bool], Future[_Outcome]]
_Result = TypeVar("_Result")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SsdEntry)


class _Wrong(Exception):
    """The file's contents contradict its name or the caller."""


def encode_header(entry: SsdEntry) -> bytes:
    """The first DATA_OFFSET bytes of a part's file; raises ValueError for a shape too large."""
    frame = encode_frame(_encoder.encode(entry))
    if len(frame) > DATA_OFFSET:
        raise ValueError(f"a header of {len(frame)} bytes: at most {DATA_OFFSET}")
    return frame.ljust(DATA_OFFSET, b"\0")


def decode_header(data: bytes) -> SsdEntry | None:
    """Decode a header; None for anything else."""
    frame = decode_frame(memoryview(data))
    if frame is None or len(data) != DATA_OFFSET:
        return None
    try:
        entry = _decoder.decode(frame[0])
    except msgspec.MsgspecError:
        return None
    return entry if entry.version == SSD_VERSION else None


class SsdStore:
    """The files of one directory, which belongs to this store alone. Any thread may call it."""

    def __init__(self, directory: Path, num_threads: int = 2, max_queued: int = 64) -> None:
        """Make the directory. Raises SsdError. `max_queued`: most writes that are not done yet."""
        if num_threads < 1 or max_queued < 1:
            raise ValueError(f"{num_threads} threads, {max_queued} queued writes: at least 1 each")
        self.directory = directory
        self._lock_fd: int | None = _claim(directory)
        self._writes_left = threading.Semaphore(max_queued)
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._closing = False
        self._told: set[str] = set()
        self._queues: list[queue.PriorityQueue[_Job]] = []
        self._threads: list[threading.Thread] = []
        for number in range(num_threads):
            jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
            thread = threading.Thread(
                target=self._serve, args=(jobs,), name=f"prfaas-ssd-{number}", daemon=True
            )
            self._queues.append(jobs)
            self._threads.append(thread)
            thread.start()

    def scan(self) -> list[SsdEntry]:
        """The parts in the directory, parents before children. Removes files that are not whole.

        Call it before everything else. It reads a header for each file, so with many files it needs
        a thread of its own. It verifies no checksum.
        """
        folders = self._tried(lambda: [*self.directory.iterdir()]) or []
        shapes: dict[CacheShape, CacheShape] = {}
        entries = []
        for folder in folders:
            if _FOLDER.fullmatch(folder.name) and folder.is_dir():
                for entry in self._tried(functools.partial(self._scan_folder, folder)) or []:
                    # Each header brings its own copy of the shape; one object for all saves most of
                    # the memory.
                    shape = shapes.setdefault(entry.shape, entry.shape)
                    entries.append(msgspec.structs.replace(entry, shape=shape))
        return sorted(entries, key=restore_order)

    def write(self, entry: SsdEntry, views: Sequence[memoryview]) -> Future[_Outcome] | None:
        """Begin to write a part. The result is True once its file is there, False if the disk has
        no room for it. None in place of a future: too many writes are queued.

        The views must not change before the future is done. Raises ValueError if they do not have
        the entry's size.
        """
        _check_size(entry, views)
        header = encode_header(entry)
        # Each write keeps its arena memory until it is done, so a slow disk must not collect many.
        if self._closing or not self._writes_left.acquire(blocking=False):
            return None
        future = self._submit(_CHANGE, entry.key, lambda: self._write(entry, header, views))
        future.add_done_callback(lambda _: self._writes_left.release())
        return future

    def read(self, entry: SsdEntry, views: Sequence[memoryview]) -> Future[_Outcome]:
        """Begin to read a part into `views`. The result is True once its bytes are verified.

        The file's own checksum counts and not `entry.checksum`, since a part may have been stored
        again with bytes that differ in rounding. After another result the views hold anything. A
        wrong file is removed. The views belong to the store until this future is done. Raises
        ValueError if they do not have the entry's size.
        """
        _check_size(entry, views)
        return self._submit(_READ, entry.key, lambda: self._read(entry, views))

    def remove(self, key: bytes, part: int) -> Future[_Outcome]:
        """Begin to remove a part's file. True: it was removed; False: there was none."""
        return self._submit(_CHANGE, key, lambda: self._remove(self._path(key, part)))

    def close(self) -> None:
        """Finish requests under way and release the directory. Queued ones result in None."""
        with self._lock:
            self._closing = True
        for jobs in self._queues:
            jobs.put((_END, next(self._order), bool, Future()))
        for thread in self._threads:
            thread.join()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _path(self, key: bytes, part: int) -> Path:
        return self.directory / f"{key[0]:02x}" / f"{key.hex()}.{part}"

    def _submit(self, order: int, key: bytes, work: Callable[[], bool]) -> Future[_Outcome]:
        future: Future[_Outcome] = Future()
        # All requests about one file go to the same thread, which keeps their order.
        jobs = self._queues[key[0] % len(self._queues)]
        with self._lock:  # no job may be queued behind the end marker, or its future never ends
            if not self._closing:
                jobs.put((order, next(self._order), work, future))
                return future
        future.set_result(None)
        return future

    # Below: the store's threads, and scan.

    def _serve(self, jobs: queue.PriorityQueue[_Job]) -> None:
        while True:
            order, _, work, future = jobs.get()
            if order == _END:
                return
            if future.set_running_or_notify_cancel():
                future.set_result(None if self._closing else self._tried(work))
            del work, future  # they would hold the caller's memory until the next job

    def _tried(self, work: Callable[[], _Result]) -> _Result | None:
        """The result of `work`; None after an error. Each kind of error is logged once."""
        try:
            return work()
        except (OSError, _Wrong) as error:
            self._log(error)
        except Exception:
            logger.exception("unexpected failure in %s", self.directory)
        return None

    def _log(self, error: Exception) -> None:
        kind = f"{type(error).__name__} {error.errno if isinstance(error, OSError) else ''}"
        level = logging.DEBUG if kind in self._told else logging.WARNING
        self._told.add(kind)
        logger.log(level, "cached parts in %s: %s", self.directory, error)

    def _write(self, entry: SsdEntry, header: bytes, views: Sequence[memoryview]) -> bool:
        path = self._path(entry.key, entry.part)
        new_path = path.with_name(path.name + ".new")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            new_path.unlink(missing_ok=True)
            with open(new_path, "xb", opener=open_private) as file:
                _write_whole(file.fileno(), [memoryview(header), *views])
            os.replace(new_path, path)
        except OSError as error:
            # What was written so far would take room on a disk that may be full.
            with contextlib.suppress(OSError):
                new_path.unlink()
            if error.errno not in _NO_ROOM:
                raise
            self._log(error)
            return False
        return True

    def _read(self, entry: SsdEntry, views: Sequence[memoryview]) -> bool:
        path = self._path(entry.key, entry.part)
        try:
            with open(path, "rb", opener=open_private) as file:
                _read_verified(file.fileno(), entry, views)
        except FileNotFoundError:  # removed meanwhile
            return False
        except _Wrong:
            path.unlink()
            raise
        return True

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True

    def _scan_folder(self, folder: Path) -> list[SsdEntry]:
        found = []
        for path in list(folder.iterdir()):
            if _FILE.fullmatch(path.name):
                entry = self._tried(functools.partial(self._scanned, path))
                if entry is not None:
                    found.append(entry)
        return found

    def _scanned(self, path: Path) -> SsdEntry:
        """What is in the file. Raises OSError, and _Wrong after removing what is not whole."""
        entry = _read_header(path)
        if entry is not None and self._path(entry.key, entry.part) == path:
            return entry
        path.unlink()
        raise _Wrong(f"{path.name} is no whole part: removed")


def _claim(directory: Path) -> int:
    """Make the directory and lock it; the lock's descriptor. Raises SsdError."""
    try:
        make_private_directory(directory)
        fd = open_private(directory / ".lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise SsdError(f"cannot keep cached parts in {directory}: {error}") from error
    try:
        # The kernel drops a flock(2) with its process, so a killed agent leaves no stale lock
        # behind.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise SsdError(
            f"{directory} is in use by an agent that runs: give this one another directory"
        ) from error
    return fd


def _check_size(entry: SsdEntry, views: Sequence[memoryview]) -> None:
    nbytes = sum(view.nbytes for view in views)
    if nbytes != entry.nbytes:
        raise ValueError(f"views of {nbytes} bytes for a part of {entry.nbytes}")


def _read_header(path: Path) -> SsdEntry | None:
    """The header of a part's file with the right size; None for anything else. Raises OSError."""
    with open(path, "rb", opener=open_private) as file:
        entry = decode_header(os.pread(file.fileno(), DATA_OFFSET, 0))
        nbytes = os.fstat(file.fileno()).st_size
    return entry if entry is not None and nbytes == DATA_OFFSET + entry.nbytes else None


def _read_verified(fd: int, entry: SsdEntry, views: Sequence[memoryview]) -> None:
    found = decode_header(os.pread(fd, DATA_OFFSET, 0))
    name = f"{entry.key.hex()}.{entry.part}"
    if found is None or msgspec.structs.replace(found, checksum=entry.checksum) != entry:
        raise _Wrong(f"{name} is not the part it is named after: removed")
    num_read = _move(os.preadv, fd, views, DATA_OFFSET)
    if num_read != entry.nbytes or part_checksum(views) != found.checksum:
        raise _Wrong(f"{name} is damaged: removed")


def _write_whole(fd: int, views: Sequence[memoryview]) -> None:
    if _move(os.pwritev, fd, views, 0) != sum(view.nbytes for view in views):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _move(
    move: Callable[[int, list[memoryview], int], int],
    fd: int,
    views: Sequence[memoryview],
    offset: int,
) -> int:
    """Move bytes between the views and the file from `offset` on, up to the file's end. Returns
    their number.
    """
    left = [view for view in views if view.nbytes]
    first = 0
    total = 0
    while first < len(left):
        num_moved = move(fd, left[first : first + _MAX_VIEWS], offset + total)
        if num_moved == 0:
            break
        total += num_moved
        while first < len(left) and num_moved >= left[first].nbytes:
            num_moved -= left[first].nbytes
            first += 1
        if num_moved:
            left[first] = left[first][num_moved:]
    return total
