"""Frames on the wire, and an incremental reader for them. WIRE.md specifies the format.

States of a `FrameReader`: HEADER (collects 48 bytes) -> BODY (collects `header.length` bytes) ->
HEADER. The reader names the memory that the next bytes go into (`buffers`), so that a receiver can
read a DATA body straight into its destination. The reader checks every limit when the header is
complete, before it stores any byte of the body. So a hostile peer cannot make it hold more than one
control body (64 KiB).

This file does not know what a transfer is, which frames may follow which, or where payload belongs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, auto

from xxhash import xxh3_64, xxh3_64_intdigest

from transport.errors import PeerError
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

_FIELDS = struct.Struct("<BBHI16sQQ")
_SUM = struct.Struct("<Q")
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

_TYPES = {int(kind): kind for kind in FrameType}
_BODY_LIMITS = {
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


@dataclass(frozen=True, slots=True)
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


class Step(Enum):
    """What the bytes that `advance` took have completed."""

    PARTIAL = auto()
    HEADER = auto()
    FRAME = auto()


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
    head = _FIELDS.pack(kind, flags, 0, length, transfer_id, offset, body_sum)
    return head + _SUM.pack(xxh3_64_intdigest(head))


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
    return _printable(code), _printable(text)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


class FrameReader:
    """Collects frames from bytes that the caller puts into `buffers()`.

    After the `Step.HEADER` of a DATA frame the caller must call `place` or `discard`, to say where
    the body goes.
    """

    def __init__(self, max_data_bytes: int) -> None:
        self.max_data_bytes = max_data_bytes
        self.data_flags = 0
        """Flags that DATA may carry besides MORE and a codec. The session judges the codec."""
        self.established = False
        """Whether the handshake is done. Before, only short HELLO, WELCOME and ERROR frames are
        allowed.
        """
        self.header: FrameHeader | None = None
        """The header of the frame whose body is being read, or that was just completed."""
        self._header_memory = memoryview(bytearray(HEADER_BYTES))
        self._wanted: list[memoryview] = [self._header_memory]
        self._missing = HEADER_BYTES
        self._in_header = True
        self._body: list[memoryview]  # from the first header on
        self._sink: memoryview | None = None

    @property
    def at_boundary(self) -> bool:
        """Whether no byte of an unfinished frame has been taken."""
        return self._in_header and self._missing == HEADER_BYTES

    @property
    def in_body(self) -> bool:
        return not self._in_header

    def buffers(self) -> list[memoryview]:
        """The memory for the next bytes, in order; never empty. Valid until the next `advance`."""
        return self._wanted

    def advance(self, num_bytes: int) -> Step:
        """Take `num_bytes` bytes that now lie at the start of `buffers()`.

        Raises PeerError("not_prfaas" | "protocol") for a header that is damaged or over a limit.
        """
        self._missing -= num_bytes
        if self._missing:
            self._wanted = self._rest_after(num_bytes)
            return Step.PARTIAL
        if self._in_header:
            return self._finish_header()
        self._expect_header()
        return Step.FRAME

    def place(self, views: list[memoryview]) -> None:
        """Read the body of the current DATA frame into `views` (exactly `header.length` bytes)."""
        assert self.header is not None
        if sum(map(len, views)) != self.header.length:
            raise ValueError("views do not have the length of the frame")
        self._body = views
        self._wanted = views

    def discard(self, sink: memoryview) -> None:
        """Read the body of the current DATA frame piece by piece into `sink` and forget it."""
        self._sink = sink
        self._wanted = [sink[: self._missing]]

    def control_body(self) -> bytes:
        """The body of the control frame just completed; PeerError("checksum") if damaged."""
        body = b"".join(self._body)
        self._verify((body,) if body else ())
        self._body = []
        return body

    def verify_data(self) -> None:
        """Check the body of the DATA frame just completed, and drop the views of its memory.

        Raises PeerError("checksum") if it is damaged.
        """
        body, self._body = self._body, []
        self._verify(body)

    def forget(self) -> None:
        """Drop all views of memory. The reader cannot be used any more."""
        self._body = []
        self._wanted = []
        self._sink = None

    def _verify(self, body: Sequence[memoryview | bytes]) -> None:
        assert self.header is not None
        if self.header.flags & DataFlags.NO_SUM:
            return
        if (checksum(body) if body else 0) != self.header.body_sum:
            raise PeerError(
                "checksum",
                f"{self.header.kind.name} body of {self.header.length} bytes at offset "
                f"{self.header.offset} arrived damaged",
            )

    def _rest_after(self, num_bytes: int) -> list[memoryview]:
        if self._sink is not None:
            return [self._sink[: self._missing]]
        rest: list[memoryview] = []
        for view in self._wanted:
            if num_bytes >= view.nbytes:
                num_bytes -= view.nbytes
            else:
                rest.append(view[num_bytes:] if num_bytes else view)
                num_bytes = 0
        return rest

    def _expect_header(self) -> None:
        self._in_header = True
        self._missing = HEADER_BYTES
        self._sink = None
        self._wanted = [self._header_memory]

    def _finish_header(self) -> Step:
        header = self._parse_header()
        self.header = header
        self._body = []
        if header.length == 0:
            self._expect_header()
            return Step.FRAME
        self._in_header = False
        self._missing = header.length
        if header.kind is FrameType.DATA:
            self._wanted = []
        else:
            self._body = [memoryview(bytearray(header.length))]
            self._wanted = self._body
        return Step.HEADER

    def _parse_header(self) -> FrameHeader:
        memory = self._header_memory
        (header_sum,) = _SUM.unpack_from(memory, _FIELDS.size)
        if xxh3_64_intdigest(memory[: _FIELDS.size]) != header_sum:
            # Something else (HTTP, TLS) on this port fails here first, so it gets the clear
            # message.
            if not self.established:
                raise PeerError("not_prfaas", "the peer does not speak the PrfaaS transport")
            raise PeerError("checksum", "frame header arrived damaged")
        kind_value, flags, reserved, length, transfer_id, offset, body_sum = _FIELDS.unpack_from(
            memory
        )
        kind = _TYPES.get(kind_value)
        allowed = 0
        if kind is FrameType.DATA:
            allowed = self.data_flags | DataFlags.CODEC | DataFlags.MORE
        if kind is None or flags & ~allowed or reserved:
            raise PeerError("protocol", f"unknown frame type {kind_value} or flags {flags:#x}")
        self._check_limits(kind, length, offset)
        return FrameHeader(kind, transfer_id, length, offset, body_sum, flags)

    def _check_limits(self, kind: FrameType, length: int, offset: int) -> None:
        if not self.established and kind not in _BEFORE_ESTABLISHED:
            raise PeerError("protocol", f"{kind.name} before the handshake")
        if kind is FrameType.DATA:
            if not 0 < length <= self.max_data_bytes or offset > MAX_OFFSET:
                raise PeerError(
                    "protocol",
                    f"DATA of {length} bytes at {offset}, allowed 1 to {self.max_data_bytes} bytes",
                )
        elif length > _BODY_LIMITS.get(kind, MAX_CONTROL_BYTES) or offset:
            raise PeerError("protocol", f"{kind.name} with {length} bytes at {offset}")


_BEFORE_ESTABLISHED = {FrameType.HELLO, FrameType.WELCOME, FrameType.ERROR}
