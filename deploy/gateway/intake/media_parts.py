"""The parts of conversations that may hold media, wherever the APIs have them.

Pure; does not know what is done with a part. All values that are not changed keep their bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

_FIELDS: Final = (
    "messages",
    "input",
    "query",
    "queries",
    "documents",
    "items",
    "text_1",
    "text_2",
    "data_1",
    "data_2",
)
"""The fields with the turns of a conversation, or with what is to be scored or ranked."""
_CONTENTS: Final = ("content", "output")
"""The fields of a turn with its parts: `output` is what a tool answered, in OpenAI's responses."""
_Turn = dict[str, Raw]
_turns_decoder: Final = msgspec.json.Decoder(_Turn | list[_Turn | list[_Turn] | str])
"""Engines take several conversations, in lists, in one request for embeddings."""
_object_decoder: Final = msgspec.json.Decoder(_Turn)
_items_decoder: Final = msgspec.json.Decoder(list[Raw])
_str_decoder: Final = msgspec.json.Decoder(str)

Change = Callable[[str, dict[str, Any]], dict[str, Any] | None]
"""Gets the place of a part in the body, such as "messages[0].content[1]", and its undecoded fields.
Returns its new fields; None: it stays.
"""


def with_parts(body: bytes, change: Change) -> bytes:
    """`body`, a JSON object, with its parts changed. Raises what decoding raises."""
    fields: dict[str, Any] = _object_decoder.decode(body)
    is_changed = False
    for name in _FIELDS:
        # What is no list of turns, such as one of token ids, ends at its first item.
        value = _decoded(_turns_decoder, fields.get(name, UNSET))
        found = None if value is None else _turns(name, value, change)
        if found is not None:
            fields[name], is_changed = found, True
    return msgspec.json.encode(fields) if is_changed else body


def _turns(place: str, value: Any, change: Change) -> Any:
    """A turn, or turns in lists, with their parts changed; None: nothing of it changes."""
    if isinstance(value, str):
        return None
    if isinstance(value, list):
        return _each(value, lambda index, item: _turns(f"{place}[{index}]", item, change))
    is_changed = False
    for name in _CONTENTS:
        parts = _decoded(_items_decoder, value.get(name, UNSET))
        if parts is not None and (found := _parts(f"{place}.{name}", parts, change)) is not None:
            value[name], is_changed = found, True
    return value if is_changed else None


def _parts(place: str, parts: list[Raw], change: Change) -> list[Any] | None:
    return _each(parts, lambda index, part: _part(f"{place}[{index}]", part, change))


def _inner(place: str, parts: list[Raw], change: Change) -> list[Any] | None:
    return _each(parts, lambda i, part: _part(f"{place}[{i}]", part, change, is_inner=True))


def _part(
    place: str, part: Raw, change: Change, *, is_inner: bool = False
) -> dict[str, Any] | None:
    fields: dict[str, Any] | None = _decoded(_object_decoder, part)
    if fields is None:
        return None  # a text
    # The type may be written with escapes. Engines look for media one level down, and no further.
    if not is_inner and _decoded(_str_decoder, fields.get("type", UNSET)) == "tool_result":
        inner = _decoded(_items_decoder, fields.get("content", UNSET))
        found = None if inner is None else _inner(f"{place}.content", inner, change)
        if found is not None:
            fields["content"] = found
            return change(place, fields) or fields
    return change(place, fields)


def _each(items: list[Any], changed: Callable[[int, Any], Any]) -> list[Any] | None:
    found = [changed(index, item) for index, item in enumerate(items)]
    if all(item is None for item in found):
        return None
    return [old if new is None else new for old, new in zip(items, found, strict=True)]


def _decoded(decoder: msgspec.json.Decoder[Any], value: Raw | UnsetType) -> Any:
    """The decoded field, or None when it is absent, null or of another type."""
    if not isinstance(value, Raw):
        return None
    try:
        return decoder.decode(value)
    except msgspec.ValidationError:
        return None
