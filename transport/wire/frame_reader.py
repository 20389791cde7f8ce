"""An incremental reader for frames.

States of a `FrameReader`: HEADER (collects 48 bytes) -> BODY (collects `header.length` bytes) ->
HEADER. The reader names the memory that the next bytes go into (`buffers`), so that a receiver can
read a DATA body straight into its destination. The reader checks every limit when the header is
complete, before it stores any byte of the body. So a hostile peer cannot make it hold more than one
control body (64 KiB).

This file does not know what a transfer is, which frames may follow which, or where payload belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from xxhash import xxh3_64_intdigest

from transport.errors import PeerError
from transport.wire.frames import (
    BODY_LIMITS,
    HEADER_BYTES,
    HEADER_FIELDS,
    HEADER_SUM,
    MAX_CONTROL_BYTES,
    MAX_OFFSET,
    DataFlags,
    FrameHeader,
    FrameType,
    checksum,
)

_TYPES = {int(kind): kind for kind in FrameType}
_BEFORE_ESTABLISHED = {FrameType.HELLO, FrameType.WELCOME, FrameType.ERROR}


class Step(Enum):
    """What the bytes that `advance` took have completed."""

    PARTIAL = auto()
    HEADER = auto()
    FRAME = auto()


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

    def take_frame(self, data: memoryview) -> int:
        """Take a whole control frame from the start of `data` without copying it. Returns its
        length, or 0 if it is not whole or another frame has begun: then `buffers` must be filled.

        Raises as `advance` does.
        """
        if not self.at_boundary or data.nbytes < HEADER_BYTES:
            return 0
        header = self._parse_header(data)
        end = HEADER_BYTES + header.length
        if header.kind is FrameType.DATA or data.nbytes < end:
            return 0
        self.header = header
        self._body = [data[HEADER_BYTES:end]] if header.length else []
        return end

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
        header = self._parse_header(self._header_memory)
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

    def _parse_header(self, memory: memoryview) -> FrameHeader:
        (header_sum,) = HEADER_SUM.unpack_from(memory, HEADER_FIELDS.size)
        if xxh3_64_intdigest(memory[: HEADER_FIELDS.size]) != header_sum:
            # Something else (HTTP, TLS) on this port fails here first, so it gets the clear
            # message.
            if not self.established:
                raise PeerError("not_prfaas", "the peer does not speak the PrfaaS transport")
            raise PeerError("checksum", "frame header arrived damaged")
        fields = HEADER_FIELDS.unpack_from(memory)
        kind_value, flags, reserved, length, transfer_id, offset, body_sum = fields
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
        elif length > BODY_LIMITS.get(kind, MAX_CONTROL_BYTES) or offset:
            raise PeerError("protocol", f"{kind.name} with {length} bytes at {offset}")
