"""Parses one HTTP/1.1 answer of an engine (RFC 9112): bytes go in, the bytes of its body come out.

    head      until its blank line; answers of status 1xx are passed over
    body      chunked, of a known length, or until the connection ends
    over      the last byte was there; what follows belongs to no answer

It is strict where the end of the body is at stake: of an answer whose end is ambiguous nothing is
known to be whole. Chunk extensions and trailers are passed over. No sockets, no clock.
"""

from __future__ import annotations

import re
from typing import Final

MAX_HEAD_BYTES: Final = 32 << 10
"""Also the most that the trailers of a body may take."""
_MAX_SIZE_LINE_BYTES: Final = 1024

_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [^\x00-\x08\x0a-\x1f\x7f]*)?")
_FIELD: Final = re.compile(
    rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*"
)
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_LENGTH: Final = re.compile(rb"\d{1,18}")

_CHUNKED, _UNTIL_CLOSE = -1, -2


class AnswerParser:
    """One answer. Once `error` is set, the rest of the connection's bytes mean nothing."""

    __slots__ = (
        "_chunk_bytes",
        "_head_bytes",
        "_is_in_trailers",
        "_left_bytes",
        "_pending",
        "_trailer_bytes",
        "content_type",
        "error",
        "headers",
        "is_framed",
        "is_over",
        "keeps_alive",
        "status",
    )

    def __init__(self) -> None:
        self.status = 0
        """0 until the head has arrived."""
        self.headers: dict[str, str] = {}
        """In the engine's spelling; of several with one name, the last."""
        self.content_type = ""
        """Without parameters, in lower case."""
        self.is_framed = False
        """Whether HTTP can tell the end of the body from a broken connection."""
        self.is_over = False
        self.keeps_alive = False
        """Whether the connection may be asked again after the answer."""
        self.error = ""
        """Why the bytes are no answer."""
        self._pending = b""
        """Bytes of an unfinished head, size line or trailer."""
        self._head_bytes = 0
        """Of all heads, those of interim answers included."""
        self._left_bytes = 0
        """Of a body of known length; otherwise `_CHUNKED` or `_UNTIL_CLOSE`."""
        self._chunk_bytes = 0
        """What is missing of the present chunk, with the two bytes behind its data."""
        self._is_in_trailers = False
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body in `data`, which is what the connection received next."""
        if self.error:
            return b""
        if not self.status:
            return self._head(data)
        if self.is_over:
            # Nobody has asked for these bytes, so nobody knows what the next answer would be.
            self.keeps_alive = self.keeps_alive and not data
            return b""
        if self._left_bytes == _CHUNKED:
            return self._chunks(data)
        if self._left_bytes == _UNTIL_CLOSE:
            return data
        body = data[: self._left_bytes]
        self._left_bytes -= len(body)
        if not self._left_bytes:
            self._end(surplus=len(data) > len(body))
        return body

    def closed(self) -> None:
        """Note that the engine has closed the connection in good order."""
        if self.status and self._left_bytes == _UNTIL_CLOSE:
            self.is_over = True
        elif not self.is_over:
            self.error = self.error or "the connection was closed before the end of the answer"

    def _head(self, data: bytes) -> bytes:
        while data and not self.status and not self.error:
            data = self._one_head(data)
        return self.feed(data) if data else b""

    def _one_head(self, data: bytes) -> bytes:
        """Read one head, which may be that of an interim answer. Returns what follows it."""
        pending = self._pending + data
        end = pending.find(b"\r\n\r\n")
        self._head_bytes += len(data) if end < 0 else end + 4 - len(self._pending)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._fail(f"its head is longer than {MAX_HEAD_BYTES} bytes")
            return b""
        if end < 0:
            self._pending = pending
            return b""
        self._pending = b""
        status, *lines = pending[:end].split(b"\r\n")
        match = _STATUS_LINE.fullmatch(status)
        if match is None or match[2] == b"101":
            self._fail("its status line is none of HTTP/1")
        elif not match[2].startswith(b"1") and (fields := self._fields(lines)) is not None:
            self.status = int(match[2])
            self._frame(match[1] == b"1", fields)
        return b"" if self.error else pending[end + 4 :]

    def _fields(self, lines: list[bytes]) -> dict[bytes, bytes] | None:
        """Keep the header fields, and return them by name in lower case; None if one is wrong."""
        fields: dict[bytes, bytes] = {}
        for line in lines:
            match = _FIELD.fullmatch(line)
            if match is None:
                self._fail("a header field is malformed")
                return None
            name, value = match[1].lower(), match[2]
            # Two of these could mean two ends of the body.
            if name in fields and name in (b"content-length", b"transfer-encoding"):
                self._fail(f"it has two fields of the name {name.decode()}")
                return None
            fields[name] = value
            self.headers[match[1].decode()] = value.decode("utf-8", "surrogateescape")
        return fields

    def _frame(self, is_http_1_1: bool, fields: dict[bytes, bytes]) -> None:
        """How the end of the body is found (RFC 9112, 6.3)."""
        kind = fields.get(b"content-type", b"").partition(b";")[0].strip()
        self.content_type = kind.decode("ascii", "replace").lower()
        self.keeps_alive = is_http_1_1 and b"close" not in fields.get(b"connection", b"").lower()
        coding, length = fields.get(b"transfer-encoding"), fields.get(b"content-length")
        if self.status in (204, 304):
            self.is_framed = self.is_over = True
        elif coding is not None:
            # Either of the two alone would end elsewhere, and another coding is not known here.
            if length is not None or coding.lower() != b"chunked" or not is_http_1_1:
                self._fail("its Transfer-Encoding is not usable")
            self._left_bytes, self.is_framed = _CHUNKED, True
        elif length is not None:
            if _LENGTH.fullmatch(length) is None:
                self._fail("its Content-Length is no number")
                return
            self._left_bytes, self.is_framed = int(length), True
            self.is_over = not self._left_bytes
        else:
            self._left_bytes, self.keeps_alive = _UNTIL_CLOSE, False

    def _chunks(self, data: bytes) -> bytes:
        """The data of the chunks in `data`."""
        if self._pending:
            data, self._pending = self._pending + data, b""
        elif not self._chunk_bytes and (match := _SIZE.match(data)) is not None:
            # Engines write one event as one chunk, which mostly arrives alone and whole.
            begin, size = match.end(), int(match[1], 16)
            is_alone = len(data) == begin + size + 2 and size > 0 and not self._is_in_trailers
            if is_alone and data.endswith(b"\r\n"):
                return data[begin:-2]
        pieces: list[bytes] = []
        at, end = 0, len(data)
        while at < end:
            left = self._chunk_bytes
            if not left:
                at = self._size(data, at)
                if at < 0 or self.is_over:
                    break
                continue
            if left > 2:
                pieces.append(data[at : at + left - 2])
                at += len(pieces[-1])
                left -= len(pieces[-1])
            if left <= 2:
                behind = data[at : at + left]
                # The last `left` of the two bytes, as far as they are here.
                if behind != b"\r\n"[2 - left :][: len(behind)]:
                    self._fail("a chunk is longer than it says")
                    break
                at += len(behind)
                left -= len(behind)
            self._chunk_bytes = left
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _size(self, data: bytes, at: int) -> int:
        """Read the size of the chunk, or the trailer line, at `at`. The index behind it, -1 if it
        is unfinished or wrong.
        """
        if self._is_in_trailers:
            return self._trailer(data, at)
        match = _SIZE.match(data, at)
        if match is None:
            line, has_end, _ = data[at:].partition(b"\n")
            if has_end or len(line) > _MAX_SIZE_LINE_BYTES:
                self._fail("the size of a chunk is no number")
            else:
                self._pending = line
            return -1
        size = int(match[1], 16)
        if size:
            self._chunk_bytes = size + 2
            return match.end()
        self._is_in_trailers = True
        return self._trailer(data, match.end())

    def _trailer(self, data: bytes, at: int) -> int:
        end = data.find(b"\r\n", at)
        if end < 0:
            self._pending = data[at:]
            self._trailer_bytes += len(self._pending)
        else:
            self._trailer_bytes += end - at
        if self._trailer_bytes > MAX_HEAD_BYTES:
            self._fail(f"its trailers are longer than {MAX_HEAD_BYTES} bytes")
            return -1
        if end < 0:
            return -1
        if end == at:
            self._end(surplus=len(data) > end + 2)
        return end + 2

    def _end(self, *, surplus: bool) -> None:
        self.is_over = True
        self.keeps_alive = self.keeps_alive and not surplus

    def _fail(self, why: str) -> None:
        self.error, self.keeps_alive = why, False
