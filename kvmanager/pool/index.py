"""The journal of the parts in an arena, in a file beside it, for the agent that takes over.

It does not know eviction, engines or prefixes. Its records are in `kvmanager.pool.index_records`.

Records may be lost in these ways only:

- A `Dropped` is in the kernel before `append` returns, with everything before it, because the
  part's memory may be reused right after. So no record of a live part ever names reused memory.
- A `Stored` waits for `flush`. A killed agent loses the parts stored since then, and nothing else.
- Nothing is forced onto a disk. An arena in shared memory is lost when its host crashes, and so is
  this file. Elsewhere the checksums show after a crash which parts are whole.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvmanager.pool.index_records import (
    Dropped,
    IndexDistrusted,
    IndexHeader,
    PartId,
    Shape,
    Stored,
    encode_record,
    part_id,
    read_index,
)
from kvmanager.pool.shape import CacheShape
from kvmanager.private_files import open_private

logger = logging.getLogger("prfaas.kvmanager.pool.index")

_BUFFER_BYTES: Final = 256 << 10
_MIN_RECORDS_TO_COMPACT: Final = 1024

FRAMES_PER_FLUSH: Final = 4096
"""Frames of a rewrite that one `flush` writes: some 600 KB, so that it does not hold up the event
loop.
"""


@dataclass(slots=True)
class _Rewrite:
    """A new file that will replace the index.

    `frames`: records that were live at its beginning and are not yet written. `tail`: records that
    came since.
    """

    fd: int
    frames: Iterator[bytes]
    num_records: int
    tail: bytearray = field(default_factory=bytearray)


class PoolIndex:
    """An open index. Single-threaded. Errors of its file are logged and never raised.

    A file that cannot be written is removed and the journal ends, because a journal with holes
    would name reused memory. The cache is then empty after the agent's next start.
    """

    def __init__(self, path: Path, header: IndexHeader) -> None:
        """Use `open`."""
        self._path = path
        self._new_path = path.with_name(path.name + ".new")
        self._header = header
        self._fd: int | None = None
        self._buffer = bytearray()
        self._live: dict[PartId, bytes] = {}
        self._shape_ids: dict[CacheShape, int] = {}
        self._shapes: dict[int, CacheShape] = {}
        self._num_records = 0
        self._compact_at = _MIN_RECORDS_TO_COMPACT
        self._rewrite: _Rewrite | None = None

    @classmethod
    def open(cls, path: Path, header: IndexHeader) -> tuple[PoolIndex, list[Stored]]:
        """Open or begin the index at `path`. Returns it with the live parts in restore order.

        The caller must hold the arena's lock, which covers the index as well.
        """
        index = cls(path, header)
        try:
            index._fd = fd = open_private(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            with open(fd, "rb", closefd=False) as file:
                data = file.read()
            stored = index._take_over(fd, data) if data else []
            if index._num_records == 0:
                index._begin(fd)
        except OSError as error:
            index._give_up(error)
            return index, []
        return index, stored

    @property
    def is_open(self) -> bool:
        """Whether records still go into a file."""
        return self._fd is not None

    @property
    def num_live(self) -> int:
        """Parts that are present according to the file."""
        return len(self._live)

    @property
    def num_records(self) -> int:
        """Records since the file was last rewritten."""
        return self._num_records

    def shape(self, shape_id: int) -> CacheShape:
        """The shape of this number. Raises KeyError."""
        return self._shapes[shape_id]

    def shape_id(self, shape: CacheShape) -> int:
        """The number for `Stored` records of this shape."""
        known = self._shape_ids.get(shape)
        if known is not None:
            return known
        shape_id = len(self._shape_ids)
        self._note_shape(shape_id, shape)
        self._put(encode_record(Shape(shape_id, shape)))
        return shape_id

    def append(self, record: Stored | Dropped) -> None:
        """Journal that a part with complete bytes was stored or dropped.

        Call it for `Dropped` before the memory is used for something else. Raises KeyError for a
        shape without a number.
        """
        if isinstance(record, Stored):
            self.shape(record.shape_id)
            if self._fd is None:
                return
            frame = encode_record(record)
            self._live[part_id(record)] = frame
            self._put(frame)
        elif self._live.pop(part_id(record), None) is not None:
            self._put(encode_record(record))
            self._write_out()

    def flush(self) -> None:
        """Write everything to the kernel. When most of the file is out of date, rewrite it, a part
        with each call.
        """
        if self._rewrite is None and self._num_records > max(self._compact_at, 2 * len(self._live)):
            self.compact()
        if self._rewrite is not None:
            self._go_on(self._rewrite)
        self._write_out()

    def compact(self) -> None:
        """Begin to write the live records to a new file, which `flush` continues.

        The new file replaces the old one in one step when it is complete.
        """
        if self._fd is None or self._rewrite is not None:
            return
        try:
            self._new_path.unlink(missing_ok=True)  # what an interrupted rewrite left
            fd = open_private(self._new_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            self._stop_rewrite(error)
            return
        # A copy: parts come and go between the calls of `flush` that write it.
        frames = list(self._live_frames())
        self._rewrite = _Rewrite(fd, iter(frames), len(frames))

    def _go_on(self, rewrite: _Rewrite) -> None:
        try:
            some = list(itertools.islice(rewrite.frames, FRAMES_PER_FLUSH))
            if some:
                _write_all(rewrite.fd, bytearray(b"".join(some)))
                return
            _write_all(rewrite.fd, rewrite.tail)
            # rename(2) is atomic, so a killed agent leaves either the old index or the new one.
            os.replace(self._new_path, self._path)
        except OSError as error:
            self._stop_rewrite(error)
            return
        assert self._fd is not None, "a rewrite ends with its index"
        os.close(self._fd)
        self._fd = rewrite.fd
        self._rewrite = None
        # The new file has these records already, as live ones or in its tail.
        self._buffer.clear()
        self._num_records = rewrite.num_records
        self._compact_at = _MIN_RECORDS_TO_COMPACT

    def _stop_rewrite(self, error: OSError) -> None:
        logger.warning("cannot write the index %s anew, it goes on: %s", self._path, error)
        # Not with each flush: a rewrite that failed is tried again when the file has doubled.
        self._compact_at = 2 * self._num_records
        self._drop_rewrite()

    def _drop_rewrite(self) -> None:
        if self._rewrite is not None:
            _abandon(self._rewrite.fd, self._new_path)
            self._rewrite = None

    def close(self) -> None:
        """Flush and close. Idempotent."""
        self._drop_rewrite()
        self._write_out()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _take_over(self, fd: int, data: bytes) -> list[Stored]:
        """Continue behind the valid records of the file. Returns none if it must begin anew."""
        try:
            contents = read_index(data, self._header)
        except IndexDistrusted as error:
            logger.warning("the index %s is not used, the cache is empty: %s", self._path, error)
            return []
        if contents.nbytes < len(data):
            # Reading stops at damage, so records appended behind it would be lost.
            num_cut = len(data) - contents.nbytes
            logger.warning("the index %s ends in %d damaged bytes: cut off", self._path, num_cut)
            os.ftruncate(fd, contents.nbytes)
        for shape_id, shape in contents.shapes.items():
            self._note_shape(shape_id, shape)
        self._live = {part_id(record): encode_record(record) for record in contents.stored}
        self._num_records = contents.num_records
        return contents.stored

    def _begin(self, fd: int) -> None:
        os.ftruncate(fd, 0)
        self._put(encode_record(self._header))
        self._write_out()

    def _live_frames(self) -> Iterable[bytes]:
        yield encode_record(self._header)
        for shape_id, shape in self._shapes.items():
            yield encode_record(Shape(shape_id, shape))
        yield from self._live.values()

    def _note_shape(self, shape_id: int, shape: CacheShape) -> None:
        self._shapes[shape_id] = shape
        self._shape_ids[shape] = shape_id

    def _put(self, frame: bytes) -> None:
        if self._fd is None:
            return
        self._buffer += frame
        self._num_records += 1
        if self._rewrite is not None:
            self._rewrite.tail += frame
            self._rewrite.num_records += 1
        if len(self._buffer) >= _BUFFER_BYTES:
            self._write_out()

    def _write_out(self) -> None:
        if self._fd is None:
            return
        try:
            _write_all(self._fd, self._buffer)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.error(
            "cannot keep the index %s: %s; cached prefixes will not outlive this agent",
            self._path,
            error,
        )
        self._drop_rewrite()
        _abandon(self._fd, self._path)
        self._fd = None


def _write_all(fd: int, data: bytearray) -> None:
    """Write `data` and empty it. On OSError `data` keeps the bytes that were not written."""
    while data:
        del data[: os.write(fd, data)]


def _abandon(fd: int | None, path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    if fd is not None:
        # close(2) may report errors of earlier writes.
        with contextlib.suppress(OSError):
            os.close(fd)
