"""Which parts of a cached prefix a move is about."""

from __future__ import annotations

from dataclasses import dataclass

from kvmanager.pool.records import BlockPart
from kvmanager.pool.shape import CacheShape
from kvmanager.transfers.records import BadRequest


@dataclass(frozen=True, slots=True)
class MovedParts:
    """The moved parts of one prefix. `keys` are the keys of its blocks, from block 0 on."""

    fingerprint: bytes
    shape: CacheShape
    root: bytes
    keys: tuple[bytes, ...]
    parts: tuple[BlockPart, ...]

    def __post_init__(self) -> None:
        """Raises BadRequest."""
        num_parts = len(self.shape.parts)
        if not self.parts or len(set(self.parts)) < len(self.parts):
            raise BadRequest(f"{len(self.parts)} parts, some of them twice or none at all")
        for index, part in self.parts:
            if not (0 <= index < len(self.keys) and 0 <= part < num_parts):
                raise BadRequest(f"part {part} of block {index}: there are {len(self.keys)} blocks")

    @property
    def nbytes(self) -> int:
        return sum(self.shape.parts[part].nbytes for _, part in self.parts)
