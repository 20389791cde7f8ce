"""Splits a stream of server-sent events into whole events, and tells whether it is complete.

Bytes go in, and the same bytes come out in the same order once they may be forwarded. Only whole
events are let through: when an engine dies inside an event, the client gets no fragment before the
error event. An event with the usage stays here if only the gateway asked for it. Knows no sockets.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from msgspec import Raw

from deploy.gateway.errors import ErrorAnswer

MAX_PENDING_BYTES: Final = 16 << 20
"""An unfinished event that is longer than this is forwarded in parts, bytes."""

_DONE: Final = re.compile(rb"[\r\n]data: ?\[DONE\](?:\n\n|\r\n\r\n|\r\r)\Z")
_DONE_WINDOW_BYTES: Final = 24
_LAST_BYTES: Final = 4096
_FIRST_DATA: Final = re.compile(rb"(?:\A|[\r\n])data:[ ]?")
_OBJECT: Final = re.compile(rb"(?:\A|[\r\n])data:[ ]?(\{[^\r\n]*\})")
_OBJECT_ALONE: Final = re.compile(
    rb"(?:\A|(?<=\n\n)|(?<=\r\n\r\n))data:[ ]?(\{[^\r\n]*\})[ \t]*(?:\n\n|\r\n\r\n)"
)
_EVENT_NAME: Final = re.compile(rb"(?:\A|[\r\n])event:[ ]?([^\r\n]*)")
_NAMED_DATA: Final = re.compile(rb"(?:\A|[\r\n])event:[ ]?([^\r\n]*)\r?\ndata:[ ]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRules:
    """How an API writes its streams: the names of events that come before the first token, those
    with which a whole stream ends, and how the name of the event with the usage begins.

    Without `last` events have no names, and a whole stream ends with `data: [DONE]`. With
    `hides_usage` the client gets no event that has nothing but the usage.
    """

    errors: Literal["openai", "responses", "anthropic"] = "openai"
    before_first: frozenset[bytes] = frozenset()
    last: frozenset[bytes] = frozenset()
    usage: bytes = b""
    hides_usage: bool = False


ENDS_WITH_DONE: Final = StreamRules()


class EventGate:
    """Lets whole events through and remembers whether the last one ends a whole stream."""

    def __init__(self, rules: StreamRules = ENDS_WITH_DONE) -> None:
        self.rules = rules
        self._name = b""
        self._pending = bytearray()
        self._tail = b"\n"
        self._before = self._latest = b""
        self.is_done = False
        """The stream so far ends with its end mark: nothing of it is missing."""
        self.error: str | None = None
        """What an event says that tells of an error: the answer is none, even if it is whole."""
        self.num_events = 0
        """Whole events that were let through, comments and the end mark included."""
        self.num_bytes = 0
        """Number of bytes let through."""

    def feed(self, chunk: bytes) -> bytes:
        """The bytes that may be forwarded after `chunk`; empty while an event is unfinished."""
        if not self._pending and chunk.endswith(b"\n\n"):
            return self._passed(chunk)
        # A boundary of up to 4 bytes may span two chunks, so the last three bytes are searched
        # again.
        start = max(0, len(self._pending) - 3)
        self._pending += chunk
        cut = _last_boundary(self._pending, start)
        # An event this long must not hold memory and client up; its end is checked all the same.
        if len(self._pending) - cut > MAX_PENDING_BYTES:
            cut = len(self._pending)
        if not cut:
            return b""
        whole = bytes(self._pending[:cut])
        del self._pending[:cut]
        return self._passed(whole)

    @property
    def is_between_events(self) -> bool:
        """Whether what was let through ends with the end of an event."""
        return not self._latest or self._latest.endswith((b"\n\n", b"\r\n\r\n"))

    def rest(self) -> bytes:
        """The bytes of an event that never ended. Forward them only after a clean end."""
        rest = bytes(self._pending)
        self._pending.clear()
        return rest

    def last_data(self) -> bytes:
        """What follows `data:` in the last event before the end mark, which has the usage. Empty if
        there is no such event, or if it is longer than `_LAST_BYTES`. Where events have names, that
        of the last event which has the usage, however long.
        """
        if self.rules.last:
            return _last_named(self._before + self._latest, self.rules.usage)
        # The end mark often comes in a chunk of its own, so the chunk before is needed, too.
        *_, last, _ = [b"", b"", *(self._before + self._latest)[-_LAST_BYTES:].split(b"data:")]
        return last.strip()

    def _passed(self, data: bytes) -> bytes:
        self._before, self._latest = self._latest, data
        self.num_events += data.count(b"\n\n") + data.count(b"\r\n\r\n")
        self.num_bytes += len(data)
        # Quotes inside strings are escaped, so hardly any other event has this.
        if b'"error"' in data:
            told = (error_in(match[1]) for match in _OBJECT.finditer(data))
            self.error = next((error[1] for error in told if error is not None), self.error)
        if self.rules.last:
            self._note_name(data)
            return data
        # Long enough for the end mark with the line break before it, in any line ending.
        tail = data[-_DONE_WINDOW_BYTES:]
        if len(tail) < _DONE_WINDOW_BYTES:
            tail = (self._tail + tail)[-_DONE_WINDOW_BYTES:]
        self._tail = tail
        # Nearly every event fails the first test, which costs a tenth of the second.
        self.is_done = b"[DONE]" in tail and _DONE.search(tail) is not None
        if self.rules.hides_usage and b'"usage"' in data:
            return _OBJECT_ALONE.sub(_unless_usage, data)
        return data

    def _note_name(self, data: bytes) -> None:
        """Note the name of the last event, which may have begun in an earlier piece."""
        start = max(data.rfind(b"\nevent:"), data.rfind(b"\revent:"), 0)
        match = _EVENT_NAME.match(data, start)
        if match is not None:
            self._name = match[1]
        self.is_done = self._name in self.rules.last and data.endswith((b"\n\n", b"\r\n\r\n"))


def first_data(events: bytes, rules: StreamRules = ENDS_WITH_DONE) -> bytes | None:
    """What follows the first `data:` of `events`; None if there are only comments so far, or events
    that come before the first token.
    """
    if rules.last:
        named = _NAMED_DATA.finditer(events)
        return next((events[m.end() :] for m in named if m[1] not in rules.before_first), None)
    match = _FIRST_DATA.search(events)
    return events[match.end() :] if match else None


class _Told(msgspec.Struct):
    message: object = ""
    code: object = None


class _Response(msgspec.Struct):
    error: _Told | None = None


class _Event(_Told):
    type: object = None
    error: _Told | str | None = None
    response: _Response | None = None


def error_in(data: bytes) -> tuple[int, str] | None:
    """The status and the message of the error that an event with this JSON tells, as any of the
    APIs tells it; None if it tells none.
    """
    try:
        event = msgspec.json.decode(data, type=_Event)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    error = event.error or (event.response and event.response.error)
    if not error and event.type == "error":
        error = event
    if not error:
        return None
    told = _Told(error) if isinstance(error, str) else error
    status = told.code if isinstance(told.code, int) and 400 <= told.code < 600 else 500
    return status, str(told.message or "an error without a message")


class _Chunk(msgspec.Struct):
    choices: tuple[Raw, ...]
    usage: dict[str, Raw]


def _unless_usage(event: re.Match[bytes]) -> bytes:
    """The event, or nothing if it has the usage alone."""
    try:
        return event[0] if msgspec.json.decode(event[1], type=_Chunk).choices else b""
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return event[0]


def error_event(body: bytes, rules: StreamRules, sequence_number: int = 0) -> bytes:
    """An SSE event that tells an error, whose error object is `body`, as the API of the stream
    tells errors.
    """
    # Line breaks are nothing but space between the parts of JSON.
    data = b" ".join(body.splitlines())
    if rules.errors == "anthropic":
        return b"event: error\ndata: " + data + b"\n\n"
    if rules.errors == "responses":
        with suppress(msgspec.MsgspecError):
            error = msgspec.json.decode(data, type=ErrorAnswer).error
            told = {
                "type": "error",
                "code": error.code,
                "message": error.message,
                "param": error.param,
                "sequence_number": sequence_number,
            }
            data = msgspec.json.encode(told)
        return b"event: error\ndata: " + data + b"\n\n"
    return b"data: " + data + b"\n\n"


def _last_named(events: bytes, name: bytes) -> bytes:
    """The data of the last event whose name begins with `name`; empty if there is none."""
    found = [match for match in _NAMED_DATA.finditer(events) if match[1].startswith(name)]
    return events[found[-1].end() :].partition(b"\n")[0].strip() if found else b""


def _last_boundary(data: bytearray, start: int) -> int:
    """Index after the last blank line from `start` on, 0 if there is none."""
    return max(
        _after(data.rfind(b"\n\n", start), 2),
        _after(data.rfind(b"\r\n\r\n", start), 4),
    )


def _after(index: int, length: int) -> int:
    return index + length if index >= 0 else 0
