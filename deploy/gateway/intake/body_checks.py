"""What a body must be before any of it is decoded: strict UTF-8, and few enough values.

Engines decode bodies with other parsers than the gateway. Bytes that only one of the two can read
would hide from it what the other one finds. And a body of some megabytes may have millions of
objects, each of which costs more than its bytes. Numbers are not counted: a prompt of ids has many,
and nothing makes objects of them one by one. This file does not know what fields mean.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

from deploy.gateway.errors import ApiError
from kvmanager.token_ids import Steps

MOST_VALUES: Final = 1 << 17
"""Texts (keys included), lists and objects in one body."""
MOST_ITEMS: Final = 1 << 13
"""Prompts, tools, turns of conversations, or parts of all turns together, in one body."""
_STEP_BYTES: Final = 1 << 16
_FEW_BYTES: Final = 2 * MOST_VALUES
"""A body this short cannot have many more values: each takes two bytes and a comma or a colon."""
_HALF_OF_PAIR: Final = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2}))"
)
"""An escape that is one half of a surrogate pair without the other half."""


def checking_body(body: bytes) -> Steps[None]:
    """Raises `ApiError` 400 for bytes that are no UTF-8, and for too many values."""
    if len(body) <= _FEW_BYTES:
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise _no_utf8(error, error.start) from None
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_values = num_quotes = start = 0
    while start < len(body):
        end = _end_of_step(body, start)
        step = body[start:end]
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(step, final=end == len(body))
        except UnicodeDecodeError as error:
            raise _no_utf8(error, start - pending + error.start) from None
        # Without escaped ones every quote begins or ends a text, and what lies outside of texts is
        # every second piece. All of this is done in C, whatever the bytes are.
        if b"\\" in step and rb"\"" in step:  # the first is found much faster
            step = step.replace(rb"\\", b"  ").replace(rb"\"", b"  ")
        pieces = step.split(b'"')
        outside = b"".join(pieces[num_quotes % 2 :: 2])
        num_values += outside.count(b"{") + outside.count(b"[")
        num_quotes += len(pieces) - 1
        if num_values + num_quotes // 2 > MOST_VALUES:
            raise too_many("the body", MOST_VALUES, "texts, lists and objects")
        start = end
        yield


def too_many(name: str, limit: int, what: str, param: str | None = None) -> ApiError:
    """The error for more of something in a body than is taken here."""
    message = f"{name[:1].upper()}{name[1:]} has more than {limit} {what}, the limit here."
    return ApiError(400, "too_many_items", f"{message} Send fewer in one request.", param=param)


def half_of_pair(body: bytes) -> Steps[str | None]:
    """The first escape in `body` that is half of a surrogate pair, and where it is, in words."""
    for start in range(0, len(body), _STEP_BYTES):
        # A pair is looked at whole, and taken where it begins.
        found = _HALF_OF_PAIR.search(body, start, start + _STEP_BYTES + 12)
        if found is not None and found.start() < start + _STEP_BYTES:
            half = found[1].decode()
            return f"{half} is half of a character (byte {found.start(1)}); send both halves"
        yield
    return None


def _end_of_step(body: bytes, start: int) -> int:
    """Where a step that begins at `start` ends, so that no escape is cut in two."""
    end = start + _STEP_BYTES
    step = body[start:end]
    is_cut = (len(step) - len(step.rstrip(b"\\"))) % 2
    return min(end + is_cut, len(body))


def _no_utf8(error: UnicodeDecodeError, position: int) -> ApiError:
    message = f"The body is not UTF-8: {error.reason} (byte {position})."
    return ApiError(400, "invalid_json", message)
