"""Checks and converts the fields of cache messages, independent of what the cache holds.

It does not know the pool, engines or handles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from kvmanager.agent.engines.protocol import MAX_CACHE_BLOCKS, CacheReserve, ProtocolError
from kvmanager.agent.engines.protocol import Slot as WireSlot
from kvmanager.hashing import KEY_BYTES, split_keys
from kvmanager.pool.records import Slot
from kvmanager.pool.shape import CacheShape

MAX_SLOT_BYTES: Final = 3 << 20
"""Most bytes of slots in a frame, which leaves room for its other fields (MAX_FRAME_BYTES)."""

_SLOT_BYTES: Final = 16
_RUN_BYTES: Final = 16


def keys_of(joined: bytes) -> tuple[bytes, ...]:
    """Split the keys of a message. Raises ProtocolError."""
    try:
        return tuple(split_keys(joined))
    except ValueError as error:
        raise ProtocolError(str(error)) from error


def check_reserve(message: CacheReserve, shape: CacheShape, keys: tuple[bytes, ...]) -> None:
    """Raise ProtocolError for blocks or parts that no prompt of this shape has."""
    if message.first_block + len(keys) > MAX_CACHE_BLOCKS:
        raise ProtocolError(f"{message.first_block + len(keys)} blocks: at most {MAX_CACHE_BLOCKS}")
    if len(message.replaces) not in (0, KEY_BYTES):
        raise ProtocolError(f"a key of {len(message.replaces)} bytes")
    for index, part in message.parts:
        if index >= len(keys) or part >= len(shape.parts):
            raise ProtocolError(
                f"part {part} of block {index}: there are {len(keys)} keys, "
                f"{len(shape.parts)} parts"
            )
    if len(set(message.parts)) != len(message.parts) or len(set(keys)) != len(keys):
        raise ProtocolError("a part or key was named twice")


def slots_on_wire(slots: Iterable[Slot]) -> list[WireSlot]:
    """The leading slots in wire form, as many as one message holds."""

    def fitting() -> Iterator[WireSlot]:
        nbytes = 0
        for slot in slots:
            nbytes += _SLOT_BYTES + _RUN_BYTES * len(slot.runs)
            if nbytes > MAX_SLOT_BYTES:
                return
            yield slot.index, slot.part, [(first, length) for first, length in slot.runs]

    return list(fitting())
