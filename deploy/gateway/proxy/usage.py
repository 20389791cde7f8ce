"""`usage.prompt_tokens_details.cached_tokens` of an answer: where it is, and how it is corrected.

A decode engine counts what a transfer brought as cached. Nobody had cached that: it was computed
elsewhere for this very request. Only the number's own bytes change; everything around it stays as
the engine wrote it. Does not know how many tokens were cached where they were computed.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

_MARK: Final = b'"cached_tokens"'
_EVENT: Final = re.compile(rb"^data: ?(\{[^\n]*\})[ \t]*\r?$", re.MULTILINE)
_NUMBER: Final = re.compile(rb"\d+")


class _Answer(msgspec.Struct):
    usage: Raw | UnsetType = UNSET


class _Usage(msgspec.Struct):
    prompt_tokens_details: Raw | UnsetType = UNSET


class _Details(msgspec.Struct):
    cached_tokens: Raw | UnsetType = UNSET


_LEVELS: Final = tuple(
    (kind.__struct_fields__[0], msgspec.json.Decoder(kind)) for kind in (_Answer, _Usage, _Details)
)


class CachedTokens(NamedTuple):
    """The number, and the bytes `[start, end)` that spell it."""

    num_tokens: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Correction:
    """For the answer of an engine that was given a landing of `num_landed` tokens.

    `cached` waits for what was cached where they were computed; None: the engine did it after all.
    """

    num_landed: int
    cached: Callable[[], Awaitable[int | None]]

    async def apply(self, data: bytes, places: Iterable[CachedTokens]) -> bytes:
        """`data` with the right number at `places`, where it is wrong."""
        # An engine that did not take the landing reports less: what its own cache held.
        wrong = [place for place in places if place.num_tokens >= self.num_landed]
        if not wrong or (num_tokens := await self.cached()) is None:
            return data
        return replaced(data, wrong, num_tokens)


def in_answer(body: bytes) -> list[CachedTokens]:
    """The number of a whole answer, a JSON object; none when it has none."""
    return list(_found(body, 0, len(body))) if _MARK in body else []


def in_events(events: bytes) -> list[CachedTokens]:
    """The numbers of whole server-sent events, in order; mostly the last chunk has the only one."""
    if _MARK not in events:
        return []
    return [item for event in _EVENT.finditer(events) for item in _found(events, *event.span(1))]


def replaced(data: bytes, places: Iterable[CachedTokens], num_tokens: int) -> bytes:
    """`data` with `num_tokens` at each of these places, which were found in it in order."""
    parts, begun = [], 0
    for place in places:
        parts += [data[begun : place.start], b"%d" % num_tokens]
        begun = place.end
    return b"".join((*parts, data[begun:]))


def _found(data: bytes, start: int, end: int) -> Iterator[CachedTokens]:
    """In the JSON object `data[start:end]`, going down one member at a time."""
    for name, decoder in _LEVELS:
        try:
            value = getattr(decoder.decode(memoryview(data)[start:end]), name)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return
        if value is UNSET:
            return
        begin = _position(data, start, end, name.encode(), bytes(value))
        if begin < 0:
            return
        start, end = begin, begin + len(bytes(value))
    if _NUMBER.fullmatch(data, start, end):
        yield CachedTokens(int(data[start:end]), start, end)


def _position(data: bytes, start: int, end: int, name: bytes, value: bytes) -> int:
    """Where the member's value begins, -1 when it cannot be told.

    A decoder says what a value is and not where it stands. Inside a string quotes are escaped, so
    the name in quotes, a colon and these very bytes are the member, or one that is spelled alike
    further in; vLLM writes usage behind the choices, so the last one is it.
    """
    pattern = re.compile(rb'"%s"[ \t\r\n]*:[ \t\r\n]*' % re.escape(name))
    found = [match.end() for match in pattern.finditer(data, start, end)]
    return next((at for at in reversed(found) if data.startswith(value, at)), -1)
