"""The format of an arena's index: records, frames, and the parts that the records add up to.

It does not know files, and cannot know when a part's bytes are complete: the maker of a `Stored`
record promises that they are, and that they have the checksum.

An index is a sequence of frames: little-endian u32 length, u64 xxh3 of the payload, the payload in
msgpack. The first frame is the header, which ties the index to one arena file. Then come records;
of two records about one part the later one is valid. Nothing is read behind the first torn or
damaged frame. An index of another arena is not used at all, nor is an index whose live records
contradict each other or the arena.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Protocol

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from kvmanager.arena import Arena
from kvmanager.hashing import KEY_BYTES
from kvmanager.pool.records import Tier
from kvmanager.pool.shape import CacheShape
from kvmanager.transfers.blocks import BlockExtents, Run

INDEX_VERSION: Final = 1
"""1: first version."""

MAX_RECORD_BYTES: Final = 1 << 20

_FRAME: Final = struct.Struct("<IQ")

_Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_PartNumber = Annotated[int, msgspec.Meta(ge=0, lt=256)]


class IndexHeader(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The arena file of the index: its device and inode number, and its division into blocks."""

    version: int
    device: int
    inode: int
    num_blocks: int
    block_bytes: int

    @classmethod
    def of(cls, arena: Arena) -> IndexHeader:
        """The header for an arena that we hold. Raises OSError when its file is gone."""
        stat = arena.path.stat()
        return cls(INDEX_VERSION, stat.st_dev, stat.st_ino, arena.num_blocks, arena.block_bytes)


class Shape(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Defines `shape_id` for the records that follow."""

    shape_id: _Count
    shape: CacheShape


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """This part of a block is complete. `parent` is the key before it, `index` the block's place in
    its prefix; `runs` are the arena blocks that hold it, none on SSD.
    """

    key: _Key
    parent: _Key
    index: _Count
    part: _PartNumber
    shape_id: _Count
    runs: tuple[Run, ...]
    nbytes: _Count
    checksum: int
    tier: Tier = Tier.ARENA


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """This part is not present any more."""

    key: _Key
    part: _PartNumber
    tier: Tier = Tier.ARENA


Record = IndexHeader | Shape | Stored | Dropped
PartId = tuple[bytes, int, Tier]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class IndexDistrusted(Exception):
    """The index cannot be used; the message says why."""


class Placed(Protocol):
    """A part of a block somewhere in a prefix."""

    @property
    def index(self) -> int: ...
    @property
    def part(self) -> int: ...


def restore_order(placed: Placed) -> tuple[int, int]:
    """A sort key that puts parents before children, and KV before windows and states.

    The KV part, where a shape has one, is its part 0 (`CacheShape`).
    """
    return placed.part, placed.index


def part_checksum(views: Iterable[memoryview]) -> int:
    """The xxh3 (64 bit) of a part's bytes, in order."""
    digest = xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()


def encode_frame(payload: bytes) -> bytes:
    """Encode a payload as one frame. Raises ValueError when it exceeds MAX_RECORD_BYTES."""
    if len(payload) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(payload)} bytes: at most {MAX_RECORD_BYTES}")
    return _FRAME.pack(len(payload), xxh3_64_intdigest(payload)) + payload


def decode_frame(data: memoryview, start: int = 0) -> tuple[memoryview, int] | None:
    """The payload and the end of the frame at `start`; None when there is no whole frame."""
    if len(data) - start < _FRAME.size:
        return None
    length, checksum = _FRAME.unpack_from(data, start)
    end = start + _FRAME.size + length
    if length > MAX_RECORD_BYTES or end > len(data):
        return None
    payload = data[start + _FRAME.size : end]
    return (payload, end) if xxh3_64_intdigest(payload) == checksum else None


def encode_record(record: Record) -> bytes:
    """The record as one frame."""
    return encode_frame(_encoder.encode(record))


def decode_records(data: bytes) -> tuple[list[Record], int]:
    """The leading whole records, and their end. Data behind it is torn or damaged."""
    records: list[Record] = []
    view = memoryview(data)
    end = 0
    while (frame := decode_frame(view, end)) is not None:
        try:
            records.append(_decoder.decode(frame[0]))
        except msgspec.MsgspecError:
            break
        end = frame[1]
    return records, end


@dataclass(frozen=True, slots=True)
class IndexContents:
    """The contents of an index. `stored` is in restore order; `nbytes` of the file are whole."""

    shapes: dict[int, CacheShape]
    stored: list[Stored]
    num_records: int
    nbytes: int


def read_index(data: bytes, header: IndexHeader) -> IndexContents:
    """The valid contents of an index file of this arena. Raises IndexDistrusted."""
    records, end = decode_records(data)
    if not records or not isinstance(records[0], IndexHeader):
        raise IndexDistrusted("it has no header")
    if records[0] != header:
        raise IndexDistrusted(f"it is of another arena: {records[0]} instead of {header}")
    shapes: dict[int, CacheShape] = {}
    live: dict[PartId, Stored] = {}
    for record in records[1:]:
        match record:
            case Shape():
                shapes[record.shape_id] = record.shape
            case Stored():
                live[part_id(record)] = record
            case Dropped():
                live.pop(part_id(record), None)
            case IndexHeader():
                raise IndexDistrusted("it has a second header")
    _check_parts(live.values(), shapes, header)
    _check_overlaps(live.values())
    return IndexContents(shapes, sorted(live.values(), key=restore_order), len(records), end)


def part_id(record: Stored | Dropped) -> PartId:
    """The subject of a record. Of two records with one subject the later one is valid."""
    return record.key, record.part, record.tier


def _check_parts(
    stored: Iterable[Stored], shapes: dict[int, CacheShape], header: IndexHeader
) -> None:
    for record in stored:
        shape = shapes.get(record.shape_id)
        if shape is None or record.part >= len(shape.parts):
            raise IndexDistrusted(f"no part {record.part} of shape {record.shape_id} is known")
        if record.nbytes != shape.parts[record.part].nbytes:
            raise IndexDistrusted(f"a part {record.part} of {record.nbytes} bytes")
        if record.tier is Tier.ARENA:
            _check_runs(record.runs, record.nbytes, header)
        elif record.runs:
            raise IndexDistrusted(f"arena blocks of a part that is on {record.tier.name}")


def _check_runs(runs: Sequence[Run], nbytes: int, header: IndexHeader) -> None:
    try:
        end_block = BlockExtents(runs, header.block_bytes, nbytes).end_block
    except ValueError as error:
        raise IndexDistrusted(str(error)) from error
    if end_block > header.num_blocks:
        raise IndexDistrusted(f"blocks {runs} of an arena of {header.num_blocks}")


def _check_overlaps(stored: Iterable[Stored]) -> None:
    end = 0
    for run in sorted(run for record in stored for run in record.runs):
        if run.first < end:
            raise IndexDistrusted(f"two parts in block {run.first}")
        end = run.end
