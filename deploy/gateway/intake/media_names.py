"""Names that clients give media: engines take one `uuid` for one image, whoever sends it.

Their caches of media ask for nothing else. So a tenant that guessed the name of another's image
would be answered about that image, or have its own taken for it. Here each name becomes one of the
tenant. Pure; does not know tenants.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
from msgspec import Raw

_TURNS: Final = ("messages", "input")
"""The fields with the turns of a conversation, in the APIs."""
_object_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_objects_decoder: Final = msgspec.json.Decoder(list[dict[str, Raw]])
_items_decoder: Final = msgspec.json.Decoder(list[Raw])


def with_own_names(body: bytes, salt: str) -> bytes:
    """`body`, a JSON object, with the `uuid` of each part of its turns mixed with `salt`. All
    other values keep their bytes.
    """
    # The key may be written with escapes, and nearly no request has it.
    if b"uuid" not in body and b"\\u00" not in body:
        return body
    fields: dict[str, Any] = _object_decoder.decode(body)
    for name in _TURNS:
        try:
            turns = _objects_decoder.decode(fields.get(name, b"null"))
        except msgspec.ValidationError:
            continue  # a text, or engines refuse it
        fields[name] = [_renamed(turn, salt) for turn in turns]
    return msgspec.json.encode(fields)


def _renamed(message: dict[str, Any], salt: str) -> dict[str, Any]:
    try:
        parts = _items_decoder.decode(message.get("content", b"null"))
    except msgspec.ValidationError:
        return message  # a text
    return message | {"content": [_with_own_name(part, salt) for part in parts]}


def _with_own_name(part: Raw, salt: str) -> Raw | dict[str, Any]:
    try:
        fields: dict[str, Any] = _object_decoder.decode(part)
    except msgspec.ValidationError:
        return part  # a text
    name = bytes(fields.get("uuid", b"null"))
    if name == b"null":
        return part
    return fields | {"uuid": hashlib.sha256(salt.encode() + name).hexdigest()}
