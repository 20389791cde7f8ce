"""Names of media: engines take one `uuid` for one image, whoever sends it.

Their caches of media ask for nothing else. So a tenant that guessed the name of another's image
would be answered about that image, or have its own taken for it. Here each name that a client gives
becomes one of the tenant. Media without one get a name made of their bytes, which is the same at
all sites: what engines make up themselves depends on where their model lies.

Pure; does not know tenants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Set
from typing import Any, Final

import msgspec
from blake3 import blake3
from msgspec import Raw

_CHAT: Final = frozenset({"messages"})
_ALL: Final = _CHAT | {
    "input",
    "query",
    "queries",
    "documents",
    "items",
    "data_1",
    "data_2",
    "text_1",
    "text_2",
}
"""The fields of all endpoints that hold what has parts: turns of a conversation, and what is to be
compared.
"""
_MEDIA: Final = ("image_url", "video_url", "audio_url", "input_audio")
"""Types of parts of a chat, and the field with the medium in each."""
_CONTENT_NAME: Final = "content-"
"""Begins a name made of bytes. No name that `with_own_names` makes begins like this."""
_object_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_items_decoder: Final = msgspec.json.Decoder(list[Raw])


def with_own_names(body: bytes, salt: str) -> bytes:
    """`body`, a JSON object, with the `uuid` of each part in it mixed with `salt`. All other values
    keep their bytes. Raises what decoding raises.
    """
    # The key may be written with escapes, and nearly no request has it.
    if b"uuid" not in body and b"\\u00" not in body:
        return body
    return _with_parts(body, _ALL, lambda part: _with_own_name(part, salt))


def with_content_names(body: bytes) -> tuple[bytes, int]:
    """`body`, a chat, with a `uuid` made of its bytes for each medium in it, and how many got one.
    0 if there is one whose bytes are elsewhere, that has a name, or that is written in a way
    unknown here. Raises what decoding raises.
    """
    num_named = 0

    def changed(part: Raw) -> Raw | dict[str, Any]:
        nonlocal num_named
        named = _with_content_name(part)
        num_named += named is not part
        return named

    try:
        return _with_parts(body, _CHAT, changed), num_named
    except _Unnamed:
        return body, 0


class _Unnamed(Exception):
    """A part cannot be named by its content."""


def _with_parts(
    body: bytes, names: Set[str], changed: Callable[[Raw], Raw | dict[str, Any]]
) -> bytes:
    fields: dict[str, Any] = _object_decoder.decode(body)
    for name in names & fields.keys():
        try:
            several = _items_decoder.decode(fields[name])
        except msgspec.ValidationError:
            fields[name] = _changed(fields[name], changed)
        else:
            fields[name] = [_changed(one, changed) for one in several]
    return msgspec.json.encode(fields)


def _changed(value: Raw, changed: Callable[[Raw], Raw | dict[str, Any]]) -> Raw | dict[str, Any]:
    """`value` with the parts of its content changed, if it has any."""
    try:
        fields: dict[str, Any] = _object_decoder.decode(value)
        parts = _items_decoder.decode(fields.get("content", b"null"))
    except msgspec.ValidationError:
        return value
    return fields | {"content": [changed(part) for part in parts]}


def _with_content_name(part: Raw) -> Raw | dict[str, Any]:
    try:
        fields: dict[str, Any] = _object_decoder.decode(part)
    except msgspec.ValidationError:
        return part  # a text
    kind = msgspec.json.decode(fields.get("type", b"null"))
    if kind == "text":
        return part
    # With a name, engines guess the kind of a part by its fields, so there may be no others.
    if kind not in _MEDIA or fields.keys() != {"type", kind}:
        raise _Unnamed
    medium = msgspec.json.decode(fields[kind])
    if kind != "input_audio":
        url = medium.get("url") if isinstance(medium, dict) else medium
        if not (isinstance(url, str) and url.startswith("data:")):
            raise _Unnamed
    elif not (isinstance(medium, dict) and isinstance(medium.get("data"), str)):
        raise _Unnamed
    digest = blake3(kind.encode() + b"\0" + bytes(fields[kind])).hexdigest()
    return fields | {"uuid": _CONTENT_NAME + digest}


def _with_own_name(part: Raw, salt: str) -> Raw | dict[str, Any]:
    try:
        fields: dict[str, Any] = _object_decoder.decode(part)
    except msgspec.ValidationError:
        return part  # a text
    name = bytes(fields.get("uuid", b"null"))
    if name == b"null":
        return part
    return fields | {"uuid": hashlib.sha256(salt.encode() + name).hexdigest()}
