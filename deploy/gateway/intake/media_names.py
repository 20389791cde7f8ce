"""Names of media: engines take one `uuid` for one image, whoever sends it.

Their caches of media ask for nothing else. So a tenant that guessed the name of another's image
would be answered about that image, or have its own taken for it. Here each name that a client gives
becomes one of the tenant. Media without one get a name made of their bytes, which is the same at
all sites: what engines make up themselves depends on where their model lies.

Pure; does not know tenants.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
from blake3 import blake3

from deploy.gateway.intake.media_parts import with_parts

_TEXTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})
"""Types of parts that are text, and have no medium unless they have a name."""
_FIELD_OF_TYPE: Final = {
    "image_url": "image_url",
    "video_url": "video_url",
    "audio_url": "audio_url",
    "input_audio": "input_audio",
    "input_image": "image_url",
}
"""Types of parts with a medium, and the field with it."""
_MORE_FIELDS: Final = {"input_image": frozenset({"detail"})}
"""Fields beside these that engines leave alone."""
_CONTENT_NAME: Final = "content-"
"""Begins a name made of bytes. No name that `with_own_names` makes begins like this."""


def with_own_names(body: bytes, salt: str) -> bytes:
    """`body`, a JSON object, with the `uuid` of each part of its turns mixed with `salt`. All
    other values keep their bytes.
    """
    # The key may be written with escapes, and nearly no request has it.
    if b"uuid" not in body and b"\\u00" not in body:
        return body

    def own(_place: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        name = bytes(fields.get("uuid", b"null"))
        if name == b"null":
            return None
        return fields | {"uuid": hashlib.sha256(salt.encode() + name).hexdigest()}

    return with_parts(body, own)


def with_content_names(body: bytes) -> tuple[bytes, int]:
    """`body`, a chat or a response, with a `uuid` made of its bytes for each medium in it, and how
    many got one. 0 if there is one whose bytes are elsewhere, that has a name, or that is written
    in a way unknown here.
    """
    num_named = 0

    def named(_place: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal num_named
        name = _content_name(fields)
        if name is None:
            return None
        num_named += 1
        return fields | {"uuid": name}

    try:
        return with_parts(body, named), num_named
    except _Unnamed:
        return body, 0


class _Unnamed(Exception):
    """A part cannot be named by its content."""


def _content_name(fields: dict[str, Any]) -> str | None:
    """The name of a part's medium; None for a text. Raises `_Unnamed`."""
    kind = msgspec.json.decode(fields.get("type", b"null"))
    if not isinstance(kind, str):
        raise _Unnamed
    if kind in _TEXTS and "uuid" not in fields:
        return None
    # With a name, engines guess the kind of a part by its fields, so there may be no others.
    field = _FIELD_OF_TYPE.get(kind)
    if field is None or fields.keys() - _MORE_FIELDS.get(kind, frozenset()) != {"type", field}:
        raise _Unnamed
    medium = msgspec.json.decode(fields[field])
    if field != "input_audio":
        url = medium.get("url") if isinstance(medium, dict) else medium
        if not (isinstance(url, str) and url.startswith("data:")):
            raise _Unnamed
    elif not (isinstance(medium, dict) and isinstance(medium.get("data"), str)):
        raise _Unnamed
    digest = blake3(field.encode() + b"\0" + bytes(fields[field])).hexdigest()
    return _CONTENT_NAME + digest
