"""Names of media: engines take one `uuid` for one image, whoever sends it.

Their caches of media ask for nothing else. So a tenant that guessed the name of another's image
would be answered about that image, or have its own taken for it. Here each name that a client gives
becomes one of the tenant, by a salt. Media without one get a name made of their bytes and the salt,
which is the same at all sites: what engines make up themselves depends on where their model lies.

Pure; does not know tenants.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
from blake3 import blake3
from msgspec import Raw

from deploy.gateway.intake.media_parts import with_parts
from deploy.gateway.intake.raw_fields import optional

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
_object_decoder: Final = msgspec.json.Decoder(dict[str, Raw])


def with_own_names(body: bytes, salt: str | None) -> bytes:
    """`body`, a JSON object, with the `uuid` of each part in it mixed with `salt`. All other values
    keep their bytes. Raises what decoding raises.
    """
    # The key may be written with escapes, and nearly no request has it.
    if b"uuid" not in body and b"\\u00" not in body:
        return body
    prefix = _packed(salt)

    def own(_place: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        name = bytes(fields.get("uuid", b"null"))
        if name == b"null":
            return None
        return fields | {"uuid": hashlib.sha256(prefix + name).hexdigest()}

    return with_parts(body, own)


def with_content_names(body: bytes, salt: str | None) -> tuple[bytes, int]:
    """`body`, a chat or a response, with a `uuid` made of its bytes and `salt` for each medium in
    it, and how many got one. 0 if there is one whose bytes are elsewhere, that has a name, or that
    is written in a way unknown here. Raises what decoding raises.
    """
    num_named, prefix = 0, _packed(salt)

    def named(_place: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal num_named
        name = _content_name(fields, prefix)
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


def _packed(salt: str | None) -> bytes:
    """The salt with its length: no other salt and name together have the same bytes."""
    told = (salt or "").encode("utf-8", "surrogatepass")
    return len(told).to_bytes(4, "little") + told


def _content_name(fields: dict[str, Any], prefix: bytes) -> str | None:
    """The name of a part's medium, made with `prefix`; None for a text. Raises `_Unnamed`."""
    kind = msgspec.json.decode(fields.get("type", b"null"))
    if not isinstance(kind, str):
        raise _Unnamed
    if kind in _TEXTS and "uuid" not in fields:
        return None
    # With a name, engines guess the kind of a part by its fields, so there may be no others.
    field = _FIELD_OF_TYPE.get(kind)
    if field is None or fields.keys() - _MORE_FIELDS.get(kind, frozenset()) != {"type", field}:
        raise _Unnamed
    if field == "input_audio":
        audio = msgspec.json.decode(fields[field])
        if not (isinstance(audio, dict) and isinstance(audio.get("data"), str)):
            raise _Unnamed
        content = fields[field]
    else:
        content = _data_uri(fields[field])
    # Neither decoded nor copied: it may have megabytes.
    digest = blake3(prefix + field.encode() + b"\0").update(memoryview(content))
    return _CONTENT_NAME + digest.hexdigest()


def _data_uri(value: Raw) -> Raw:
    """The data URI in a field, however the APIs write it around. Raises `_Unnamed`."""
    holder = optional(_object_decoder, value)
    url = value if holder is None else holder.get("url")
    if url is None or bytes(memoryview(url)[:6]) != b'"data:':
        raise _Unnamed
    # Engines leave the wish for a detail alone. What else there is may count.
    return url if holder is None or holder.keys() <= {"url", "detail"} else value
