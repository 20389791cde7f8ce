"""Cache messages taken apart and put together: what in one is impossible whatever the cache holds.

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
"""Most of a frame that slots may fill."""

_SLOT_BYTES: Final = 16
_RUN_BYTES: Final = 16


def keys_of(joined: bytes) -> tuple[bytes, ...]:
    """The keys of a message; raises ProtocolError."""
    try:
        return tuple(split_keys(joined))
    except ValueError as error:
        raise ProtocolError(str(error)) from error


def check_reserve(message: CacheReserve, shape: CacheShape, keys: tuple[bytes, ...]) -> None:
    """Raises ProtocolError for what no prompt of this shape has."""
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
    """As many of the leading slots as one message holds."""

    def fitting() -> Iterator[WireSlot]:
        nbytes = 0
        for slot in slots:
            nbytes += _SLOT_BYTES + _RUN_BYTES * len(slot.runs)
            if nbytes > MAX_SLOT_BYTES:
                return
            yield slot.index, slot.part, [(first, length) for first, length in slot.runs]

    return list(fitting())
