"""One HTTP/1.1 answer of an engine: bytes go in, the bytes of its body come out.

httptools parses, which is Node's llhttp in its strict mode. On top of it stands what a gateway has
to know: whether the body is whole, whether the connection may be asked again, and limits for what
is no body. No sockets, no clock.
"""

from __future__ import annotations

from typing import Final

import httptools

MAX_HEAD_BYTES: Final = 32 << 10
"""The most in a row that is no body: heads, sizes of chunks with their extensions, trailers."""


class AnswerParser:
    """One answer. Once `error` is set, the rest of the connection's bytes mean nothing."""

    __slots__ = (
        "_body",
        "_bytes_without_body",
        "_head_bytes",
        "_is_interim",
        "_parser",
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
        self._body: list[bytes] = []
        self._bytes_without_body = 0
        self._head_bytes = 0
        self._is_interim = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body in `data`, which is what the connection received next."""
        if self._is_done():
            # Nobody has asked for these bytes, so nobody knows what the next answer would be.
            self.keeps_alive = self.keeps_alive and not data
            return b""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # The context is what a method below has raised.
            self._fail(str(error.__context__ or f"it is not HTTP/1.1: {error}"))
        body, self._body = self._body, []
        self._bytes_without_body = 0 if body else self._bytes_without_body + len(data)
        if self._bytes_without_body > MAX_HEAD_BYTES:
            self._fail(f"it has more than {MAX_HEAD_BYTES} bytes of heads or trailers")
        if self._is_done():
            # It holds this object's methods: without the cycle, both are freed at once.
            del self._parser
        return body[0] if len(body) == 1 else b"".join(body)

    def closed(self) -> None:
        """Note that the engine has closed the connection in good order."""
        if self.status and not self.is_framed and not self.error:
            self.is_over = True
        elif not self.is_over:
            self.error = self.error or "the connection was closed before the end of the answer"

    # What httptools calls.

    def on_message_begin(self) -> None:
        if self.is_over:
            self.keeps_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError(f"its head is longer than {MAX_HEAD_BYTES} bytes")
        # Trailers come here too, and are passed over.
        if not self.status:
            self.headers[name.decode("ascii")] = value.decode("utf-8", "surrogateescape")

    def on_headers_complete(self) -> None:
        if self.is_over:
            return
        status = self._parser.get_status_code()
        self._is_interim = status < 200
        if status == 101 or status < 100:
            raise ValueError(f"its status is {status}")
        if self._is_interim:
            self.headers = {}
            return
        self.status = status
        fields = {name.lower(): value for name, value in self.headers.items()}
        self.content_type = fields.get("content-type", "").partition(";")[0].strip().lower()
        coding = fields.get("transfer-encoding", "").lower()
        is_old = self._parser.get_http_version() == "1.0"
        # RFC 9112, 6.1: another coding is not known here, and a server of HTTP/1.0 may not know it.
        if coding and (coding != "chunked" or is_old):
            raise ValueError(f"its Transfer-Encoding {coding!r} is not usable")
        has_no_body = status in (204, 304)
        self.is_framed = has_no_body or bool(coding) or "content-length" in fields

    def on_body(self, body: bytes) -> None:
        if not self.is_over:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._is_interim or self.is_over:
            return
        self.is_over = True
        is_old = self._parser.get_http_version() == "1.0"
        self.keeps_alive = not is_old and self._parser.should_keep_alive()

    def _is_done(self) -> bool:
        return self.is_over or bool(self.error)

    def _fail(self, why: str) -> None:
        """The bytes are no answer, or, behind the end of one, nothing that was asked for."""
        self.keeps_alive = False
        if not self.is_over:
            self.error = why
