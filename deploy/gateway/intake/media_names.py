"""Names of media: engines take one `uuid` for one image, whoever sends it.

Their caches of media ask for nothing else. So a tenant that guessed the name of another's image
would be answered about that image, or have its own taken for it. Here each name that a client gives
becomes one of the tenant, by a salt. Media without one get a name made of their bytes and the salt,
which is the same at all sites: what engines make up themselves depends on where their model lies.

Pure; does not know tenants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec
from blake3 import blake3
from msgspec import Raw

from deploy.gateway.intake.conversation import STEP_ITEMS, Part
from deploy.gateway.intake.raw_fields import optional, starts_with
from kvmanager.token_ids import Steps

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
"""Begins a name made of bytes. No name that `own_name` makes begins like this."""
_STEP_BYTES: Final = 1 << 20
_object_decoder: Final = msgspec.json.Decoder(dict[str, Raw])


def own_name(name: Raw, salt: str | None) -> str:
    """The name, mixed with `salt`, of a part whose client gave it the `uuid` `name`."""
    return hashlib.sha256(_packed(salt) + bytes(name)).hexdigest()


def naming_by_content(parts: Sequence[Part], num_media: int, salt: str | None) -> Steps[bool]:
    """Give each medium in the parts of a chat or a response a `uuid` made of its bytes and `salt`.

    False, and nothing is changed, if these are not `num_media` or there is one whose bytes are
    elsewhere, that has a name, or that is written in a way unknown here.
    """
    names, prefix, nbytes = list[tuple[Part, str]](), _packed(salt), 0
    for part in parts:
        try:
            name = _content_name(part, prefix)
        except _Unnamed:
            return False
        if name is not None:
            names.append((part, name))
        # What is looked through costs its bytes, and something of its own.
        nbytes += part.nbytes + _STEP_BYTES // STEP_ITEMS
        if nbytes > _STEP_BYTES:
            nbytes = 0
            yield
    if len(names) != num_media:
        return False
    for part, name in names:
        part.fields["uuid"] = name
    return True


class _Unnamed(Exception):
    """A part cannot be named by its content."""


def _packed(salt: str | None) -> bytes:
    """The salt with its length: no other salt and name together have the same bytes."""
    told = (salt or "").encode("utf-8", "surrogatepass")
    return len(told).to_bytes(4, "little") + told


def _content_name(part: Part, prefix: bytes) -> str | None:
    """The name of a part's medium, made with `prefix`; None for a text. Raises `_Unnamed`."""
    kind, fields = part.type, part.fields
    if kind in _TEXTS and "uuid" not in fields:
        return None
    # With a name, engines guess the kind of a part by its fields, so there may be no others.
    field = _FIELD_OF_TYPE.get(kind)
    if field is None or fields.keys() - _MORE_FIELDS.get(kind, frozenset()) != {"type", field}:
        raise _Unnamed
    if field == "input_audio":
        audio = optional(_object_decoder, fields[field]) or {}
        if not starts_with(audio.get("data"), b'"'):
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
