"""Finds and corrects the number of cached tokens in the usage of an engine's answer.

It is `usage.prompt_tokens_details.cached_tokens` in completions and chat, and
`usage.input_tokens_details.cached_tokens` in responses, which their streams have in `response`.

A decode engine counts the tokens that a transfer brought as cached, although another engine
computed them for this very request. Only the bytes of the number change; all others stay as the
engine wrote them. This file does not know how many tokens the prefill engine found cached.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

_MARK: Final = b'"cached_tokens"'
_EVENT: Final = re.compile(rb"^data: ?(\{[^\n]*\})[ \t]*\r?$", re.MULTILINE)
_NUMBER: Final = re.compile(rb"\d+")
_CACHED: Final = re.compile(rb'"cached_tokens":(\d+)')
_USAGE_MARK: Final = b'"usage":{'
_LONG_BYTES: Final = 1 << 20
_USAGE_BYTES: Final = 4096


class _Answer(msgspec.Struct):
    usage: Raw | UnsetType = UNSET
    response: Raw | UnsetType = UNSET


class _Usage(msgspec.Struct):
    prompt_tokens_details: Raw | UnsetType = UNSET
    input_tokens_details: Raw | UnsetType = UNSET


class _Details(msgspec.Struct):
    cached_tokens: Raw | UnsetType = UNSET


_ANSWER, _USAGE, _DETAILS = (msgspec.json.Decoder(kind) for kind in (_Answer, _Usage, _Details))
_LEVELS: Final = (
    (("usage", "response"), _ANSWER),
    (("prompt_tokens_details", "input_tokens_details"), _USAGE),
    (("cached_tokens",), _DETAILS),
)
"""The members of which one leads to the number, from the outside in."""


class CachedTokens(NamedTuple):
    """The number, and the bytes `[start, end)` that spell it."""

    num_tokens: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Correction:
    """Corrects the answer of an engine that was given a landing of `num_landed` tokens.

    `cached` waits for the number of tokens that the prefill engine found cached. It returns None if
    the decode engine computed the prompt itself.
    """

    num_landed: int
    cached: Callable[[], Awaitable[int | None]]

    async def apply(self, data: bytes, places: Iterable[CachedTokens]) -> bytes:
        """`data` with the right number at those `places` where it is wrong."""
        # An engine that did not take the landing reports fewer: the tokens in its own cache.
        wrong = [place for place in places if place.num_tokens >= self.num_landed]
        if not wrong or (num_tokens := await self.cached()) is None:
            return data
        return replaced(data, wrong, num_tokens)


def in_answer(body: bytes) -> list[CachedTokens]:
    """The number in a whole answer (a JSON object); empty if it has none."""
    part = usage_part(body)
    if part is not body:
        start = body.rfind(_USAGE_MARK)
        match = _CACHED.search(body, start, start + len(part))
        return [] if match is None else [CachedTokens(int(match[1]), *match.span(1))]
    return list(_found(body, 0, len(body))) if _MARK in body else []


def usage_part(body: bytes) -> bytes:
    """A long answer without all but its usage, as reading tens of megabytes would hold up the event
    loop; the answer itself if it is short, or has no usage in the spelling of vLLM.
    """
    start = body.rfind(_USAGE_MARK) if len(body) > _LONG_BYTES else -1
    if start < 0:
        return body
    text = body[start + len(_USAGE_MARK) - 1 : start + _USAGE_BYTES].decode("utf-8", "replace")
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return body
    return b'{"usage":' + text[:end].encode() + b"}"


def in_events(events: bytes) -> list[CachedTokens]:
    """The numbers in whole server-sent events, in order. Mostly only the last chunk has one."""
    if _MARK not in events:
        return []
    return [item for event in _EVENT.finditer(events) for item in _found(events, *event.span(1))]


def replaced(data: bytes, places: Iterable[CachedTokens], num_tokens: int) -> bytes:
    """`data` with `num_tokens` at each of these places, which must be in order."""
    parts, begun = [], 0
    for place in places:
        parts += [data[begun : place.start], b"%d" % num_tokens]
        begun = place.end
    return b"".join((*parts, data[begun:]))


def _found(data: bytes, start: int, end: int) -> Iterator[CachedTokens]:
    """The number in the JSON object `data[start:end]`, searched one level at a time."""
    levels = list(_LEVELS)
    while levels:
        names, decoder = levels[0]
        try:
            level = decoder.decode(memoryview(data)[start:end])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return
        name = next((name for name in names if getattr(level, name) is not UNSET), "")
        if not name:
            return
        value = bytes(getattr(level, name))
        begin = _position(data, start, end, name.encode(), value)
        if begin < 0:
            return
        start, end = begin, begin + len(value)
        # The response in an event is an answer itself.
        if name != "response":
            levels.pop(0)
    if _NUMBER.fullmatch(data, start, end):
        yield CachedTokens(int(data[start:end]), start, end)


def _position(data: bytes, start: int, end: int, name: bytes, value: bytes) -> int:
    """The index at which the member's value begins, -1 if it is not found.

    A decoder tells the value of a member, but not its position. Inside a string quotes are escaped,
    so the name in quotes, a colon and the bytes of the value can only be this member or a nested
    one of the same name. vLLM writes usage behind the choices, so the last match is the member.
    """
    pattern = re.compile(rb'"%s"[ \t\r\n]*:[ \t\r\n]*' % re.escape(name))
    found = [match.end() for match in pattern.finditer(data, start, end)]
    return next((at for at in reversed(found) if data.startswith(value, at)), -1)
