"""Codecs of DATA payloads: they encode one chunk of a transfer into fewer bytes and back. Pure.

Payload of the codecs other than RAW and FP8:

    element_bytes u8, then for each byte plane (see planes.py): packed u8, length u32;
    then the planes' bytes in that order, then the raw bytes after the last whole element

A plane is packed (1: an LZ4 block or a Zstandard frame, as the codec says) only where that saves at
least 1/32 of it, and stored (0) otherwise. LZ4 and ZSTD have one plane. An FP8 payload is one byte
for each bf16 element, then the odd byte if there is one. A RAW payload is the bytes themselves.

The decoder trusts nothing. It checks lengths before it reserves memory, and reserves no more than a
small multiple of the raw bytes that the caller expects. Damage that yields a well-formed payload is
left to the frame's checksum. Knows nothing of frames.

Zstandard and LZ4 release the GIL, and contexts and scratch memory are kept for each thread: up to
twice the largest chunk seen, plus 2 MiB.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from enum import IntEnum

import lz4.block
import numpy as np
import zstandard

from transport.codec import fp8
from transport.codec import planes as byte_planes
from transport.codec.planes import Bytes

_PLANE = struct.Struct("<BI")
_ELEMENT_BYTES = (1, 2, 4)
_STORED, _PACKED = 0, 1
_WINDOW_BYTES = 512 * 1024
_DIRECT_VIEW_BYTES = 32 * 1024
"""A smaller view is copied into one piece with its neighbours, which costs less than coding it
alone.
"""


class CodecError(ValueError):
    """The payload is malformed, or does not have the expected number of raw bytes."""


class Codec(IntEnum):
    """Wire values, 4 bits. Only FP8 loses anything."""

    RAW = 0
    LZ4 = 1
    ZSTD = 2
    LZ4_PLANES = 3
    ZSTD_PLANES = 4
    FP8 = 5

    @property
    def is_lossless(self) -> bool:
        return self is not Codec.FP8

    @property
    def has_planes(self) -> bool:
        return self in (Codec.LZ4_PLANES, Codec.ZSTD_PLANES)


class _Scratch:
    """Contexts and buffers that a thread keeps from chunk to chunk."""

    def __init__(self) -> None:
        self.zstd = _compressor()
        # A plane of exponents has no matches worth finding, only a skewed distribution. A table of
        # 64 entries and long matches skip the search: over twice as fast and 10% smaller.
        self.zstd_planes = _compressor(min_match=7, hash_log=6)
        self.unzstd = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        self._planes = np.empty(0, np.uint8)
        self._piece = np.empty(0, np.uint8)

    def planes(self, num_planes: int, num_elements: int) -> Bytes:
        """(num_planes, num_elements), with any content."""
        if self._planes.size < num_planes * num_elements:
            self._planes = np.empty(num_planes * num_elements, np.uint8)
        return self._planes[: num_planes * num_elements].reshape(num_planes, num_elements)

    def piece(self, num_bytes: int) -> Bytes:
        """`num_bytes` in one piece, with any content."""
        if self._piece.size < num_bytes:
            self._piece = np.empty(num_bytes, np.uint8)
        return self._piece[:num_bytes]


def _compressor(**parameters: int) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(
            1, window_log=_WINDOW_BYTES.bit_length() - 1, **parameters
        )
    )


_local = threading.local()


def _scratch() -> _Scratch:
    # Zstandard contexts must not be used by two threads at once, so each thread has its own.
    kept: _Scratch | None = getattr(_local, "scratch", None)
    if kept is None:
        kept = _local.scratch = _Scratch()
    return kept


def encode(codec: Codec, views: Sequence[memoryview], element_bytes: int) -> bytes | memoryview:
    """The payload for the concatenation of `views`: C-contiguous, at least one byte together.

    The first byte is the first of an element of `element_bytes` (1, 2 or 4; 2 for FP8, which takes
    elements as bf16). Where the payload is not shorter than the raw bytes, send those as RAW
    instead. A RAW payload of one view is that view.
    """
    if element_bytes not in _ELEMENT_BYTES:
        raise ValueError(f"elements of {element_bytes} bytes, expected 1, 2 or 4")
    views = [view for view in views if view.nbytes]
    raw_bytes = sum(view.nbytes for view in views)
    if raw_bytes == 0:
        raise ValueError("a chunk has at least one byte")
    if codec is Codec.RAW:
        return views[0] if len(views) == 1 else b"".join(views)
    if codec is Codec.FP8:
        if element_bytes != 2:
            raise ValueError("FP8 is defined for elements of 2 bytes (bf16)")
        return _encode_fp8(_gathered(views, 2), raw_bytes)
    num_planes = element_bytes if codec.has_planes else 1
    return _encode_planes(codec, _gathered(views, num_planes), num_planes, raw_bytes)


def decode(codec: Codec, payload: memoryview, raw_bytes: int, views: Sequence[memoryview]) -> None:
    """Write the `raw_bytes` that `payload` encodes into `views`, writable and together that long.

    Raises CodecError for a malformed payload; what the views then hold is undefined.
    """
    if sum(view.nbytes for view in views) != raw_bytes:
        raise ValueError(f"views do not hold {raw_bytes} bytes")
    views = [view for view in views if view.nbytes]
    source = np.frombuffer(payload, np.uint8)
    if codec is Codec.RAW or codec is Codec.FP8:
        unit = 2 if codec is Codec.FP8 else 1
        if source.size != raw_bytes // unit + raw_bytes % unit:
            raise CodecError(f"{codec.name} payload of {source.size} for {raw_bytes} bytes")
        planes = [source[: raw_bytes // unit]]
        tail = source[raw_bytes // unit :]
    else:
        planes, tail = _parse(codec, source, raw_bytes)
        unit = len(planes)
    pieces = _pieces(views, unit)
    targets = pieces if pieces is not None else [_scratch().piece(raw_bytes)]
    _fill(targets, codec, planes, tail)
    if pieces is None:
        _scatter(targets[0], views)


def _fill(targets: list[Bytes], codec: Codec, planes: list[Bytes], tail: Bytes) -> None:
    unit = 2 if codec is Codec.FP8 else len(planes)
    at = 0
    for target in targets:
        whole = target.size - target.size % unit
        if codec is Codec.FP8:
            fp8.widen(planes[0][at : at + whole // unit], target[:whole])
        else:
            byte_planes.join(planes, at, target[:whole])
        at += whole // unit
        if whole < target.size:
            target[whole:] = tail


def _encode_fp8(pieces: list[Bytes], raw_bytes: int) -> memoryview:
    payload = np.empty(raw_bytes // 2 + raw_bytes % 2, np.uint8)
    at = 0
    for piece in pieces:
        whole = piece.size - piece.size % 2
        fp8.narrow(piece[:whole], payload[at : at + whole // 2])
        at += whole // 2
    if raw_bytes % 2:
        payload[at] = pieces[-1][-1]
    return payload.data


def _encode_planes(
    codec: Codec, pieces: list[Bytes], num_planes: int, raw_bytes: int
) -> memoryview:
    planes = _split(pieces, num_planes, raw_bytes // num_planes)
    bodies = [_pack(codec, plane) for plane in planes]
    fields = [bytes([num_planes])]
    for plane, body in zip(planes, bodies, strict=True):
        fields.append(_PLANE.pack(_STORED if body is plane else _PACKED, body.size))
    tail = pieces[-1][pieces[-1].size - raw_bytes % num_planes :]
    parts = [np.frombuffer(b"".join(fields), np.uint8), *bodies, tail]
    # NumPy releases the GIL while it copies; bytes.join keeps it below 1 MiB.
    payload: Bytes = np.concatenate(parts)
    return payload.data


def _split(pieces: list[Bytes], num_planes: int, num_elements: int) -> list[Bytes]:
    if num_planes == 1 and len(pieces) == 1:
        return pieces
    planes = _scratch().planes(num_planes, num_elements)
    at = 0
    for piece in pieces:
        whole = piece.size - piece.size % num_planes
        byte_planes.split(piece[:whole], planes, at)
        at += whole // num_planes
    return list(planes)


def _pack(codec: Codec, plane: Bytes) -> Bytes:
    """The compressed plane, or the plane itself where compression saves too little."""
    if codec is Codec.LZ4 or codec is Codec.LZ4_PLANES:
        # The receiver knows the plane's length, so the block goes without a size of its own.
        packed = lz4.block.compress(plane.data, mode="fast", store_size=False)
    else:
        context = _scratch().zstd_planes if codec is Codec.ZSTD_PLANES else _scratch().zstd
        packed = context.compress(plane.data)
    if len(packed) > plane.size - plane.size // 32 - 1:
        return plane
    return np.frombuffer(packed, np.uint8)


def _parse(codec: Codec, source: Bytes, raw_bytes: int) -> tuple[list[Bytes], Bytes]:
    """The planes of a payload, unpacked, and the bytes after the last whole element."""
    num_planes = int(source[0]) if source.size else 0
    allowed = _ELEMENT_BYTES if codec.has_planes else (1,)
    if num_planes not in allowed or source.size < _header_bytes(num_planes):
        raise CodecError(f"{codec.name} payload of {source.size} bytes has no valid header")
    fields = list(_PLANE.iter_unpack(source[1 : _header_bytes(num_planes)].data))
    plane_bytes, tail_bytes = divmod(raw_bytes, num_planes)
    body_bytes = sum(length for _, length in fields)
    if _header_bytes(num_planes) + body_bytes + tail_bytes != source.size:
        raise CodecError(f"{codec.name} payload of {source.size} bytes announces another length")
    for packed, length in fields:
        fits = length < plane_bytes if packed == _PACKED else length == plane_bytes
        if packed not in (_STORED, _PACKED) or not fits:
            raise CodecError(f"{codec.name} payload with a plane of kind {packed}, {length} bytes")
    planes = []
    at = _header_bytes(num_planes)
    for packed, length in fields:
        body = source[at : at + length]
        planes.append(_unpack(codec, body, plane_bytes) if packed else body)
        at += length
    return planes, source[at:]


def _unpack(codec: Codec, body: Bytes, plane_bytes: int) -> Bytes:
    """Exactly `plane_bytes` bytes; CodecError where `body` does not hold so many."""
    try:
        if codec is Codec.LZ4 or codec is Codec.LZ4_PLANES:
            plane = lz4.block.decompress(body.data, uncompressed_size=plane_bytes)
        else:
            plane = _unpack_zstd(body, plane_bytes)
    except (lz4.block.LZ4BlockError, zstandard.ZstdError) as error:
        raise CodecError(f"{codec.name} plane of {body.size} bytes: {error}") from error
    if len(plane) != plane_bytes:
        raise CodecError(f"{codec.name} plane of {len(plane)} bytes, expected {plane_bytes}")
    return np.frombuffer(plane, np.uint8)


def _unpack_zstd(body: Bytes, plane_bytes: int) -> bytes:
    # The library reserves the size that the frame announces and ignores max_output_size, so a
    # hostile frame could exhaust the memory.
    frame = zstandard.get_frame_parameters(body.data)
    if frame.content_size != plane_bytes:
        raise CodecError(
            f"Zstandard frame announces {frame.content_size} bytes, expected {plane_bytes}"
        )
    return _scratch().unzstd.decompress(body.data, allow_extra_data=False)


def _header_bytes(num_planes: int) -> int:
    return 1 + num_planes * _PLANE.size


def _pieces(views: Sequence[memoryview], unit: int) -> list[Bytes] | None:
    """The views as arrays, or None where they are too small or cut an element before the end."""
    for view in views[:-1]:
        if view.nbytes % unit or view.nbytes < _DIRECT_VIEW_BYTES:
            return None
    return [np.frombuffer(view, np.uint8) for view in views]


def _gathered(views: Sequence[memoryview], unit: int) -> list[Bytes]:
    """The views as arrays that cut no element before the end, copied only if need be."""
    pieces = _pieces(views, unit)
    if pieces is not None:
        return pieces
    whole = _scratch().piece(sum(view.nbytes for view in views))
    at = 0
    for view in views:
        whole[at : at + view.nbytes] = np.frombuffer(view, np.uint8)
        at += view.nbytes
    return [whole]


def _scatter(whole: Bytes, views: Sequence[memoryview]) -> None:
    at = 0
    for view in views:
        np.frombuffer(view, np.uint8)[:] = whole[at : at + view.nbytes]
        at += view.nbytes
