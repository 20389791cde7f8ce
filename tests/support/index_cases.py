"""An index of cached parts in an arena of its own, for the tests of the index."""

from kvmanager.arena import Arena
from kvmanager.pool.index import PoolIndex
from kvmanager.pool.index_records import (
    INDEX_VERSION,
    IndexHeader,
    Record,
    Shape,
    Stored,
    encode_record,
    read_index,
)
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from kvmanager.transfers.blocks import Run

BLOCK = 4096
SHAPE = CacheShape(
    64,
    (
        PartShape(PartKind.KV, 5000, groups=(0,)),
        PartShape(PartKind.WINDOW, 4096, 512, (1,)),
        PartShape(PartKind.STATE, 100, groups=(2,)),
    ),
)
HEADER = IndexHeader(INDEX_VERSION, device=1, inode=2, num_blocks=1000, block_bytes=BLOCK)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def stored(index: int, part: int = 0, *runs: tuple[int, int], checksum: int = 0) -> Stored:
    """Part `part` of block `index`; without runs it lies at block 10 * index + 3 * part."""
    where = tuple(Run(*run) for run in runs) or (Run(10 * index + 3 * part, 2 - (part > 0)),)
    parent = key(index - 1) if index else bytes(16)
    nbytes = SHAPE.parts[part].nbytes
    return Stored(key(index), parent, index, part, 0, where, nbytes, checksum)


def encoded(*records: Record) -> bytes:
    return b"".join(map(encode_record, (HEADER, Shape(0, SHAPE), *records)))


def opened(arena: Arena) -> tuple[PoolIndex, list[Stored]]:
    assert arena.index_path is not None
    return PoolIndex.open(arena.index_path, IndexHeader.of(arena))


def read_now(arena: Arena) -> list[Stored]:
    """What a next agent would find if this one were killed now."""
    assert arena.index_path is not None
    return read_index(arena.index_path.read_bytes(), IndexHeader.of(arena)).stored
