"""Splits floating-point elements into byte planes and joins them again.

The bytes of an element are separated by position, so that the ones which repeat (exponents) can be
compressed apart from the ones which do not (mantissas). The sign bit of an IEEE layout shares its
byte with the exponent; it is moved into the next lower plane, after the mantissa bits there:

    element of 2 bytes (bf16)  s eeeeeeee mmmmmmm  ->  plane 1: eeeeeeee   plane 0: mmmmmmm s
    element of 4 bytes (fp32)  planes 3 and 2 as above from the upper half, planes 1 and 0 unchanged

For fp16 plane 1 is the exponent (5 bits) and the first 3 bits of the mantissa. Knows nothing of
compression. NumPy releases the GIL in every pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.unsignedinteger]

BLOCK_ELEMENTS = 64 * 1024
"""Elements of one pass: few enough that its temporaries stay in the L2 cache."""

_HALF = np.dtype("<u2")
_WORDS: dict[int, np.dtype[np.unsignedinteger]] = {2: _HALF, 4: np.dtype("<u4")}

_local = threading.local()


def _temporaries(like: Words) -> tuple[Words, Words]:
    """Two arrays of the size and type of `like`, in memory that the thread keeps."""
    memory: Bytes | None = getattr(_local, "memory", None)
    if memory is None:
        memory = _local.memory = np.empty((2, max(_WORDS) * BLOCK_ELEMENTS), np.uint8)
    first, second = memory[:, : like.nbytes]
    return first.view(like.dtype), second.view(like.dtype)


def split(source: Bytes, planes: Bytes, at: int) -> None:
    """Write the elements of `source` to `planes[:, at:]`.

    `planes` has one row for each byte of an element (1, 2 or 4); `source` holds whole elements.
    """
    if len(planes) == 1:
        planes[0, at : at + source.size] = source
        return
    split_block = _SPLITS[len(planes)]
    for words, start, end in _blocks(source, len(planes), at):
        split_block(words, planes[:, start:end])


def join(planes: list[Bytes], at: int, destination: Bytes) -> None:
    """Write elements from `planes[...][at:]` until `destination` is full; inverse of `split`."""
    if len(planes) == 1:
        destination[:] = planes[0][at : at + destination.size]
        return
    join_block = _JOINS[len(planes)]
    for words, start, end in _blocks(destination, len(planes), at):
        join_block([plane[start:end] for plane in planes], words)


def _blocks(memory: Bytes, element_bytes: int, at: int) -> Iterator[tuple[Words, int, int]]:
    words = memory.view(_WORDS[element_bytes])
    for start in range(0, words.size, BLOCK_ELEMENTS):
        block = words[start : start + BLOCK_ELEMENTS]
        yield block, at + start, at + start + block.size


def _split_2(words: Words, planes: Bytes) -> None:
    shifted, sign = _temporaries(words)
    np.right_shift(words, 7, out=shifted)
    _narrow(shifted, planes[1])
    np.left_shift(words, 1, out=shifted)
    np.right_shift(words, 15, out=sign)
    np.bitwise_or(shifted, sign, out=shifted)
    _narrow(shifted, planes[0])


def _join_2(planes: list[Bytes], words: Words) -> None:
    sign, _ = _temporaries(words)
    np.copyto(words, planes[1])
    np.left_shift(words, 8, out=words)
    np.bitwise_or(words, planes[0], out=words)
    _rotate_right(words, sign)


def _split_4(words: Words, planes: Bytes) -> None:
    shifted, sign = _temporaries(words)
    _narrow(words, planes[0])
    np.right_shift(words, 8, out=shifted)
    _narrow(shifted, planes[1])
    np.right_shift(words, 23, out=shifted)
    _narrow(shifted, planes[3])
    np.right_shift(words, 15, out=shifted)
    np.bitwise_and(shifted, 0xFE, out=shifted)
    np.right_shift(words, 31, out=sign)
    np.bitwise_or(shifted, sign, out=shifted)
    _narrow(shifted, planes[2])


def _join_4(planes: list[Bytes], words: Words) -> None:
    upper, lower = _temporaries(words)
    halves = words.view(_HALF)
    half, sign = (array.view(_HALF)[: words.size] for array in (upper, lower))
    np.copyto(half, planes[3])
    np.left_shift(half, 8, out=half)
    np.bitwise_or(half, planes[2], out=half)
    _rotate_right(half, sign)
    halves[1::2] = half
    np.copyto(half, planes[1])
    np.left_shift(half, 8, out=half)
    np.bitwise_or(half, planes[0], out=half)
    halves[0::2] = half


def _rotate_right(words: Words, sign: Words) -> None:
    """Rotate 16-bit words by one bit in place; `sign` is a temporary of their size."""
    np.left_shift(words, 15, out=sign)
    np.right_shift(words, 1, out=words)
    np.bitwise_or(words, sign, out=words)


def _narrow(words: Words, plane: Bytes) -> None:
    """Write the lowest byte of each word to `plane`."""
    np.copyto(plane, words, casting="unsafe")


_SPLITS: dict[int, Callable[[Words, Bytes], None]] = {2: _split_2, 4: _split_4}
_JOINS: dict[int, Callable[[list[Bytes], Words], None]] = {2: _join_2, 4: _join_4}
