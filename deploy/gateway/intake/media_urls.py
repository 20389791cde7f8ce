"""The addresses of media in the parts of a conversation, and the media themselves in their place.

Pure; does not know which addresses may be fetched, nor how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw

from deploy.gateway.intake.conversation import Part, unreadable
from deploy.gateway.intake.raw_fields import is_set, optional

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


def addresses_in(part: Part) -> list[tuple[str, MediaAddress]]:
    """Every address in a part that is no data URI, with its field. Raises `ApiError` 400 for one
    that cannot be read.
    """
    found: list[tuple[str, MediaAddress]] = []
    for name, kind in _FIELDS.items():
        value = part.fields.get(name)
        if value is None:
            continue
        place = f"{part.place}.{name}"
        holder = optional(_object_decoder, value)
        url = _address(place, value if holder is None else holder.get("url"))
        if url is not None:
            found.append((name, MediaAddress(place, kind, url)))
    if part.type == _IMAGE and is_set(part.fields.get("source")):
        place = f"{part.place}.source"
        source = optional(_object_decoder, part.fields["source"])
        if source is None:
            raise unreadable(place, "an object")
        if optional(_str_decoder, source.get("type")) == "url":
            url = _address(place, source.get("url"))
            if url is not None:
                found.append(("source", MediaAddress(place, "image", url)))
    return found


def put_media(part: Part, media: Mapping[MediaAddress, Medium]) -> None:
    """Put the media at the part's addresses in the place of these."""
    for name, address in addresses_in(part):
        medium = media.get(address)
        if medium is not None:
            part.fields[name] = _with_medium(name, part.fields[name], medium)


def _with_medium(name: str, value: Raw, medium: Medium) -> Raw:
    # Raw: megabytes without a character that JSON escapes need not be searched for one.
    if name == "source":
        data = Raw(b'"%s"' % medium.data)
        source = {"type": "base64", "media_type": medium.content_type, "data": data}
        return Raw(msgspec.json.encode(source))
    holder: dict[str, Any] | None = optional(_object_decoder, value)
    return medium.uri if holder is None else Raw(msgspec.json.encode(holder | {"url": medium.uri}))


def _address(place: str, value: Raw | None) -> str | None:
    """The text of a field unless it is a data URI, or not set."""
    # Not decoded to be looked at: it may have megabytes.
    if not is_set(value) or bytes(memoryview(value)[:6]).lower() == b'"data:':  # type: ignore[arg-type]
        return None
    url: str | None = optional(_str_decoder, value)
    if url is None:
        raise unreadable(place, "an address or an object with one")
    # Engines read the first five characters in the same way.
    return None if url[:5].lower() == "data:" else url
