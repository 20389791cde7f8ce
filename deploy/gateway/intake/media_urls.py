"""The addresses of media in a body, and the body with the media themselves in their place.

Pure; does not know which addresses may be fetched, nor how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw

from deploy.gateway.intake.media_parts import with_parts
from deploy.gateway.intake.raw_fields import optional

MediumKind = Literal["image", "video", "audio"]

_FIELDS: Final[dict[str, MediumKind]] = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
}
"""The fields of a part with an address. What else a part has does not matter: with a name, engines
take such a field whatever the type of the part.
"""
_IMAGE: Final = "image"
"""The type of Anthropic's part with an image, which is in its field `source`."""
_object_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_str_decoder: Final = msgspec.json.Decoder(str)


@dataclass(frozen=True, slots=True)
class MediaAddress:
    """Where a medium is. `place` is the field of the body with the `url`."""

    place: str
    kind: MediumKind
    url: str


@dataclass(frozen=True, slots=True)
class Medium:
    """The bytes of a medium in base64, and their type, such as "image/png"."""

    content_type: str
    data: bytes

    @property
    def uri(self) -> Raw:
        """The medium as a data URI, in JSON."""
        return Raw(b'"data:%s;base64,%s"' % (self.content_type.encode(), self.data))


def media_addresses(body: bytes) -> tuple[MediaAddress, ...]:
    """Every address in the parts of `body`, a JSON object, that is no data URI. Raises what
    decoding raises.
    """
    # The keys may be written with escapes, and nearly no request has one.
    if b"_url" not in body and b'"source"' not in body and b"\\u00" not in body:
        return ()
    found: list[MediaAddress] = []

    def noted(place: str, fields: dict[str, Any]) -> None:
        found.extend(address for _, address in _addresses(place, fields))

    with_parts(body, noted)
    return tuple(found)


def with_media(body: bytes, media: Mapping[MediaAddress, Medium]) -> bytes:
    """`body` with the media at these addresses as data. All other values keep their bytes."""

    def replaced(place: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        changed: dict[str, Any] = {}
        for name, address in _addresses(place, fields):
            medium = media.get(address)
            if medium is not None:
                changed[name] = _with_medium(name, fields[name], medium)
        return fields | changed if changed else None

    return with_parts(body, replaced)


def _addresses(place: str, fields: dict[str, Any]) -> list[tuple[str, MediaAddress]]:
    """The addresses in a part, each with its field."""
    found: list[tuple[str, MediaAddress]] = []
    for name, kind in _FIELDS.items():
        if name in fields:
            holder = optional(_object_decoder, fields[name])
            url = _address(fields[name] if holder is None else holder.get("url"))
            if url is not None:
                found.append((name, MediaAddress(f"{place}.{name}", kind, url)))
    if "source" in fields and _text(fields.get("type")) == _IMAGE:
        source = optional(_object_decoder, fields["source"]) or {}
        if _text(source.get("type")) == "url" and (url := _address(source.get("url"))) is not None:
            found.append(("source", MediaAddress(f"{place}.source", "image", url)))
    return found


def _with_medium(name: str, value: Raw, medium: Medium) -> Any:
    # Raw: megabytes without a character that JSON escapes need not be searched for one.
    if name == "source":
        data = Raw(b'"%s"' % medium.data)
        return {"type": "base64", "media_type": medium.content_type, "data": data}
    holder: dict[str, Any] | None = optional(_object_decoder, value)
    return medium.uri if holder is None else holder | {"url": medium.uri}


def _address(value: Raw | None) -> str | None:
    """The text of a field unless it is a data URI, or no text."""
    # Not decoded to be looked at: it may have megabytes.
    if value is None or bytes(memoryview(value)[:6]).lower() == b'"data:':
        return None
    url = _text(value)
    # Engines read the first five characters in the same way.
    return None if url is None or url[:5].lower() == "data:" else url


def _text(value: Raw | None) -> str | None:
    text: str | None = optional(_str_decoder, UNSET if value is None else value)
    return text
