"""Frames on the wire, encoded and decoded. WIRE.md specifies the format.

This file does not know what a transfer is, which frames may follow which, or how frames are read
from a stream (`frame_reader`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from xxhash import xxh3_64, xxh3_64_intdigest

from transport.errors import PeerError
from transport.plain import printable
from transport.wire.ranges import Range

HEADER_BYTES = 48
MAX_CONTROL_BYTES = 64 * 1024
# Bounds of what a peer can make this side hold. A stranger, before the handshake, gets the least.
MAX_PREAUTH_BYTES = 256
MAX_MESSAGE_BYTES = 1024
MAX_CODE_BYTES = 32
# Offset plus length stays within a signed 64-bit integer.
MAX_OFFSET = 1 << 62
NO_TRANSFER = bytes(16)

HEADER_FIELDS = struct.Struct("<BBHI16sQQ")
HEADER_SUM = struct.Struct("<Q")
_OPEN = struct.Struct("<32s32sQI")
DIGEST_BYTES = 32
_RANGE = struct.Struct("<QQ")


class FrameType(IntEnum):
    """The wire value of each frame's type. WIRE.md has their directions and bodies."""

    HELLO = 1
    WELCOME = 2
    OPEN = 3
    OPENED = 4
    DATA = 5
    ACK = 6
    COMPLETE = 7
    FAIL = 8
    CANCEL = 9
    CANCELLED = 10
    ERROR = 11
    DIGEST = 12


class DataFlags:
    """Bits of the flags byte of a DATA frame."""

    CODEC = 0x0F
    """The codec of the body; 0: none."""
    MORE = 0x40
    """More DATA follows on this connection at once: the acknowledgement may wait for it."""
    NO_SUM = 0x80
    """The body has no checksum."""


OPEN_DIGEST = 1
"""OPEN flag: a DIGEST frame follows, and the transfer is complete only when it agrees."""

BODY_LIMITS = {
    FrameType.HELLO: MAX_PREAUTH_BYTES,
    FrameType.WELCOME: MAX_PREAUTH_BYTES,
    FrameType.OPEN: _OPEN.size,
    FrameType.COMPLETE: 0,
    FrameType.CANCELLED: 0,
    FrameType.DIGEST: DIGEST_BYTES,
    FrameType.FAIL: 1 + MAX_CODE_BYTES + MAX_MESSAGE_BYTES,
    FrameType.CANCEL: 1 + MAX_CODE_BYTES + MAX_MESSAGE_BYTES,
    FrameType.ERROR: 1 + MAX_CODE_BYTES + MAX_MESSAGE_BYTES,
}
MAX_RANGES_PER_FRAME = MAX_CONTROL_BYTES // _RANGE.size


# Not frozen, because a frozen one takes three times as long to make, and every frame needs one.
@dataclass(slots=True)
class FrameHeader:
    """A frame header that passed all checks. `offset` counts bytes of the transfer (DATA only)."""

    kind: FrameType
    transfer_id: bytes
    length: int
    offset: int
    body_sum: int
    flags: int = 0

    @property
    def codec(self) -> int:
        """Wire value of a DATA body's codec; 0: none."""
        return self.flags & DataFlags.CODEC

    @property
    def end(self) -> int:
        """The transfer's byte after a DATA body that is not coded."""
        return self.offset + self.length


def checksum(views: Sequence[memoryview | bytes | bytearray]) -> int:
    """xxh3_64 over the concatenation of `views`."""
    if len(views) == 1:
        (view,) = views
        return xxh3_64_intdigest(view)
    state = xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()


def encode_header(
    kind: FrameType,
    transfer_id: bytes,
    *,
    length: int,
    offset: int = 0,
    body_sum: int = 0,
    flags: int = 0,
) -> bytes:
    """The 48 header bytes of a frame whose body is `length` bytes with checksum `body_sum`."""
    head = HEADER_FIELDS.pack(kind, flags, 0, length, transfer_id, offset, body_sum)
    return head + HEADER_SUM.pack(xxh3_64_intdigest(head))


def encode_data_header(
    transfer_id: bytes,
    offset: int,
    body: Sequence[memoryview | bytes],
    *,
    codec: int = 0,
    with_sum: bool = True,
    more: bool = False,
) -> bytes:
    """The header of a DATA frame with this body; `offset` counts bytes before coding."""
    return encode_header(
        FrameType.DATA,
        transfer_id,
        length=sum(map(len, body)),
        offset=offset,
        body_sum=checksum(body) if with_sum else 0,
        flags=codec | (0 if with_sum else DataFlags.NO_SUM) | (DataFlags.MORE if more else 0),
    )


def encode_frame(kind: FrameType, transfer_id: bytes = NO_TRANSFER, body: bytes = b"") -> bytes:
    """A whole control frame."""
    return (
        encode_header(
            kind, transfer_id, length=len(body), body_sum=checksum((body,)) if body else 0
        )
        + body
    )


def encode_open(
    transfer_id: bytes, *, token: bytes, fingerprint: bytes, nbytes: int, digest: bool = False
) -> bytes:
    flags = OPEN_DIGEST if digest else 0
    return encode_frame(FrameType.OPEN, transfer_id, _OPEN.pack(token, fingerprint, nbytes, flags))


def decode_open(body: bytes) -> tuple[bytes, bytes, int, bool]:
    """(token, fingerprint, nbytes, digest) of an OPEN body; PeerError when malformed."""
    if len(body) != _OPEN.size:
        raise PeerError("protocol", f"OPEN body has {len(body)} bytes, expected {_OPEN.size}")
    token, fingerprint, nbytes, flags = _OPEN.unpack(body)
    if nbytes > MAX_OFFSET:
        raise PeerError("protocol", f"OPEN announces {nbytes} bytes")
    if flags & ~OPEN_DIGEST:
        raise PeerError("protocol", f"OPEN with unknown flags {flags:#x}")
    return token, fingerprint, nbytes, bool(flags & OPEN_DIGEST)


def decode_digest(body: bytes) -> bytes:
    """The digest of a DIGEST body; PeerError when malformed."""
    if len(body) != DIGEST_BYTES:
        raise PeerError("protocol", f"DIGEST of {len(body)} bytes, expected {DIGEST_BYTES}")
    return body


def encode_ranges(kind: FrameType, transfer_id: bytes, ranges: Iterable[Range]) -> bytes:
    """One or more frames (ACK, OPENED) that list `ranges`; always at least one frame."""
    packed = [_RANGE.pack(start, end - start) for start, end in ranges]
    frames = [
        encode_frame(kind, transfer_id, b"".join(packed[at : at + MAX_RANGES_PER_FRAME]))
        for at in range(0, len(packed), MAX_RANGES_PER_FRAME)
    ]
    return b"".join(frames) if frames else encode_frame(kind, transfer_id)


def decode_ranges(body: bytes) -> list[Range]:
    """The ranges of an ACK or OPENED body; PeerError when malformed."""
    if len(body) % _RANGE.size:
        raise PeerError("protocol", f"range list of {len(body)} bytes")
    ranges: list[Range] = []
    for start, length in _RANGE.iter_unpack(body):
        if length == 0 or start + length > MAX_OFFSET:
            raise PeerError("protocol", f"range of {length} bytes at {start}")
        ranges.append((start, start + length))
    return ranges


def encode_reason(
    kind: FrameType, code: str, message: str, transfer_id: bytes = NO_TRANSFER
) -> bytes:
    """A FAIL, CANCEL or ERROR frame; code and message are cut to the format's limits."""
    code_bytes = code.encode("ascii", "replace")[:MAX_CODE_BYTES]
    text = message.encode("utf-8")[:MAX_MESSAGE_BYTES]
    return encode_frame(kind, transfer_id, bytes([len(code_bytes)]) + code_bytes + text)


def decode_reason(body: bytes) -> tuple[str, str]:
    """(code, message) of a FAIL, CANCEL or ERROR body, made printable; PeerError when malformed."""
    if not body or body[0] > MAX_CODE_BYTES or len(body) < 1 + body[0]:
        raise PeerError("protocol", "malformed reason")
    code = body[1 : 1 + body[0]].decode("ascii", "replace")
    text = body[1 + body[0] :].decode("utf-8", "replace")
    return printable(code), printable(text)
