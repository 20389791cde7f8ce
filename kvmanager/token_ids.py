"""Token ids of a prompt as packed 32-bit integers, and their JSON in short steps.

A packed prompt of 128K tokens takes half a megabyte, and is hashed, cut and sent in this form.
Python integers would take milliseconds to make and to iterate over, in every process that the
prompt passes. Only JSON, of requests and for engines, cannot be read or written without them. That
is done in steps of `STEP_TOKENS`, so that an event loop can do other work in between. A thread
would not help, because code that makes Python integers holds the interpreter's lock.

Knows neither tokenizers nor requests.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Generator, Sequence
from typing import Final, TypeAlias, TypeVar

import msgspec

STEP_TOKENS: Final = 4096
"""Tokens of one step, which takes less than half a millisecond."""

_STEP_BYTES: Final = 6 * STEP_TOKENS
_ID_BYTES: Final = 4

_decoder: Final = msgspec.json.Decoder(list[int])

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]
"""Work that yields after every short step, and returns its result."""


class TokenIds(msgspec.Struct, frozen=True, array_like=True):
    """Ids in `[0, 2**32)`: `packed` are little-endian unsigned 32-bit integers."""

    packed: bytes = b""

    def __post_init__(self) -> None:
        if len(self.packed) % _ID_BYTES:
            raise ValueError(f"{len(self.packed)} bytes are no sequence of 32-bit token ids")

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> TokenIds:
        """Raises `ValueError` for an id that is negative or does not fit 32 bits."""
        try:
            # For a list of a hundred thousand ids this takes half the time of numpy.
            return cls(_little_endian(array("I", token_ids)))
        except OverflowError as error:
            raise ValueError(
                f"token ids must lie in [0, 2**32), got {min(token_ids)}..{max(token_ids)}"
            ) from error

    def __len__(self) -> int:
        return len(self.packed) // _ID_BYTES

    def __getitem__(self, where: slice) -> TokenIds:
        """A contiguous part."""
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise ValueError(f"a step of {step}: only contiguous parts can be taken")
        return TokenIds(self.packed[_ID_BYTES * start : _ID_BYTES * stop])

    def tolist(self) -> list[int]:
        """As Python integers."""
        ids = array("I", self.packed)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tolist()


def parsing(text: bytes) -> Steps[TokenIds]:
    """The ids of a flat JSON array. `text` is valid JSON; `ValueError` when it is anything else."""
    ids = array("I")
    if not (text.startswith(b"[") and text.endswith(b"]")):
        raise ValueError("token ids are a JSON array of integers")
    begin, end = 1, len(text) - 1
    while begin < end:
        comma = text.find(b",", begin + _STEP_BYTES, end)
        stop = end if comma < 0 else comma
        try:
            # In a flat array every comma is between two ids. Any other JSON gives a piece here that
            # does not decode as a list of ids.
            ids += array("I", _decoder.decode(b"[%b]" % text[begin:stop]))
        except (msgspec.MsgspecError, OverflowError, RecursionError) as error:
            raise ValueError(f"token ids are integers in [0, 2**32): {error}") from error
        begin = stop + 1
        if begin < end:
            yield
    return TokenIds(_little_endian(ids))


def writing(token_ids: TokenIds) -> Steps[bytes]:
    """The ids as a JSON array."""
    text = bytearray(b"[")
    for start in range(0, len(token_ids), STEP_TOKENS):
        if start:
            yield
            text += b","
        piece = token_ids[start : start + STEP_TOKENS]
        text += memoryview(msgspec.json.encode(piece.tolist()))[1:-1]
    text += b"]"
    return bytes(text)


async def in_turns(steps: Steps[T]) -> T:
    """The result of `steps`. Between two steps the event loop runs other tasks."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


def _little_endian(ids: array[int]) -> bytes:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
