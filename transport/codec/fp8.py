"""bf16 to OCP FP8 E4M3 and back by tables. Lossy: relative rms error about 2.7% of normal values.

E4M3 has 4 exponent bits (bias 7), 3 mantissa bits, no infinity, one NaN of each sign, and ends at
448. Values are rounded to nearest, ties to even, without a scale; what lies beyond 448 and
infinities become +-448, NaN stays NaN, and magnitudes of at most 2^-10 become zero. Fits values
about 2^-6 to 448; below that the error is absolute (at most 2^-10). Source: OCP 8-bit Floating
Point Specification (OFP8) 1.0, section 5. Knows nothing of payloads.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from transport.codec.planes import BLOCK_ELEMENTS, Bytes

_NAN = 0x7F
_LARGEST = 0x7E
_SIGN = 0x80


def narrow(source: Bytes, codes: Bytes) -> None:
    """Encode the bf16 elements of `source` (whole elements) into one byte each."""
    _look_up(_codes_of_bf16(), source.view("<u2"), codes)


def widen(codes: Bytes, destination: Bytes) -> None:
    """Decode one byte each into the bf16 elements of `destination`."""
    _look_up(_bf16_of_codes(), codes, destination.view("<u2"))


def _look_up(
    table: NDArray[np.unsignedinteger],
    indices: NDArray[np.unsignedinteger],
    out: NDArray[np.unsignedinteger],
) -> None:
    # Blocks bound the memory of the indices, which NumPy widens to 8 bytes. No index can lie
    # outside the table; mode "clip" only spares take() a buffered copy of its output.
    for start in range(0, indices.size, BLOCK_ELEMENTS):
        end = start + BLOCK_ELEMENTS
        np.take(table, indices[start:end], out=out[start:end], mode="clip")


def _magnitudes() -> NDArray[np.float64]:
    """The values of codes 0 to 0x7E."""
    codes = np.arange(_LARGEST + 1)
    exponents, mantissas = codes >> 3, codes & 7
    normal = (1 + mantissas / 8) * np.exp2(exponents - 7.0)
    # Exponent 0 marks subnormals: no hidden 1, and steps of 2^-9.
    return np.where(exponents == 0, mantissas * 2.0**-9, normal)


@cache
def _bf16_of_codes() -> NDArray[np.uint16]:
    # Every E4M3 value is a bf16 value: dropping the lower half of the float32 loses nothing.
    values = _magnitudes().astype(np.float32).view(np.uint32) >> 16
    half = np.append(values, 0x7FC0).astype(np.uint16)
    return np.concatenate([half, half | np.uint16(0x8000)])


@cache
def _codes_of_bf16() -> Bytes:
    patterns = np.arange(0x8000, dtype=np.uint32)
    is_nan = patterns > 0x7F80
    values = np.where(is_nan, 0, patterns << 16).view(np.float32).astype(np.float64)
    magnitudes = _magnitudes()
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = np.searchsorted(middles, values)
    # Round half to even, as OFP8 says: a value in the middle goes to the neighbour with the even
    # code.
    at_middle = values == middles[np.minimum(codes, len(middles) - 1)]
    codes += at_middle & (codes % 2 == 1)
    half = np.where(is_nan, _NAN, codes).astype(np.uint8)
    return np.concatenate([half, half | np.uint8(_SIGN)])
