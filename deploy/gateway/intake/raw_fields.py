"""Questions to the undecoded fields of a JSON object. Pure; does not know what they mean."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, UnsetType


def optional(decoder: msgspec.json.Decoder[Any], value: Raw | UnsetType | None) -> Any:
    """The decoded field, or None when it is absent, null or of another type.

    What is checked must not pass for absent because it has another type: ask `is_set` as well.
    """
    if not isinstance(value, Raw):
        return None
    try:
        return decoder.decode(value)
    except msgspec.ValidationError:
        return None


def is_set(value: Raw | UnsetType | None) -> bool:
    """Whether the field is there and not null."""
    # Length first: the field may be megabytes long.
    return isinstance(value, Raw) and (len(value) != 4 or bytes(value) != b"null")


def is_one_of(value: Raw | UnsetType, *spellings: bytes) -> bool:
    """Whether the field is absent or is written like one of these."""
    return not isinstance(value, Raw) or bytes(memoryview(value)[:16]) in spellings


def starts_with(value: Raw | UnsetType | None, prefix: bytes) -> bool:
    """Whether the JSON of the field begins with this byte."""
    return isinstance(value, Raw) and bytes(memoryview(value)[:1]) == prefix


def num_bytes(value: Raw | UnsetType | None) -> int:
    """The length of the field's JSON; 0 where it is absent."""
    return len(value) if isinstance(value, Raw) else 0
