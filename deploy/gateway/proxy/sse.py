"""Splits a stream of server-sent events into whole events, and tells whether it is complete.

Bytes go in, and the same bytes come out in the same order once they may be forwarded. Only whole
events are let through: when an engine dies inside an event, the client gets no fragment before the
error event. Does not parse events and knows no sockets.
"""

from __future__ import annotations

import re
from typing import Final

MAX_PENDING_BYTES: Final = 16 << 20
"""An unfinished event that is longer than this is forwarded in parts, bytes."""

_DONE: Final = re.compile(rb"[\r\n]data: ?\[DONE\](?:\n\n|\r\n\r\n|\r\r)\Z")
_DONE_WINDOW_BYTES: Final = 24
_LAST_BYTES: Final = 4096
_FIRST_DATA: Final = re.compile(rb"(?:\A|[\r\n])data:[ ]?")


class EventGate:
    """Lets whole events through and remembers whether the last one was `data: [DONE]`."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._tail = b"\n"
        self._before = self._latest = b""
        self.is_done = False
        """The stream so far ends with `data: [DONE]`: the answer is whole."""
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

    def rest(self) -> bytes:
        """The bytes of an event that never ended. Forward them only after a clean end."""
        rest = bytes(self._pending)
        self._pending.clear()
        return rest

    def last_data(self) -> bytes:
        """What follows `data:` in the last event before the end mark, which has the usage. Empty if
        there is no such event, or if it is longer than `_LAST_BYTES`.
        """
        # The end mark often comes in a chunk of its own, so the chunk before is needed, too.
        *_, last, _ = [b"", b"", *(self._before + self._latest)[-_LAST_BYTES:].split(b"data:")]
        return last.strip()

    def _passed(self, data: bytes) -> bytes:
        self._before, self._latest = self._latest, data
        # Long enough for the end mark with the line break before it, in any line ending.
        tail = data[-_DONE_WINDOW_BYTES:]
        if len(tail) < _DONE_WINDOW_BYTES:
            tail = (self._tail + tail)[-_DONE_WINDOW_BYTES:]
        self._tail = tail
        # Nearly every event fails the first test, which costs a tenth of the second.
        self.is_done = b"[DONE]" in tail and _DONE.search(tail) is not None
        self.num_events += data.count(b"\n\n") + data.count(b"\r\n\r\n")
        self.num_bytes += len(data)
        return data


def first_data(events: bytes) -> bytes | None:
    """What follows the first `data:` of `events`; None if there are only comments so far."""
    match = _FIRST_DATA.search(events)
    return events[match.end() :] if match else None


def error_event(error_body: bytes) -> bytes:
    """An SSE event that carries an OpenAI error object."""
    return b"data: " + error_body + b"\n\n"


def _last_boundary(data: bytearray, start: int) -> int:
    """Index after the last blank line from `start` on, 0 if there is none."""
    return max(
        _after(data.rfind(b"\n\n", start), 2),
        _after(data.rfind(b"\r\n\r\n", start), 4),
    )


def _after(index: int, length: int) -> int:
    return index + length if index >= 0 else 0
