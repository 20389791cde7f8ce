"""The media in a client's body, and the chat with which an engine encodes one of them.

A medium goes with its name (`uuid`), of which an engine makes the same identifier as of the same
name in the client's body. Pure; does not know engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import Raw

_DATA_URI: Final = "data:"
_TURNS: Final = ("messages", "input")
"""The fields with the turns of a conversation: a chat's, a response's."""
_CONTENTS: Final = ("content", "output")
"""The fields of a turn with its parts. `output` is what a tool answered."""
_URL_FIELDS: Final = {
    "image_url": "image_url",
    "video_url": "video_url",
    "audio_url": "audio_url",
    "input_image": "image_url",
}
"""Types of parts whose medium is a URL, and the field with it."""

_body_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_turns_decoder: Final = msgspec.json.Decoder(list[dict[str, Raw]])
_parts_decoder: Final = msgspec.json.Decoder(list[Raw])
_part_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_INVALID: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def named_media(body: bytes) -> dict[str, bytes]:
    """The media of a chat or a response that have a name and bring their bytes: parts of a chat by
    their names, in the order in which they come. Empty for what is neither.
    """
    found: dict[str, bytes] = {}
    for part in _parts(body):
        named = _named(part)
        if named is not None:
            found.setdefault(*named)
    return found


def chat_of(part: bytes) -> bytes:
    """The body of a chat about one medium alone, without a model."""
    message = {"role": "user", "content": [Raw(part)]}
    return msgspec.json.encode({"messages": [message]})


def _parts(body: bytes) -> Iterator[Raw]:
    try:
        fields = _body_decoder.decode(body)
    except _INVALID:
        return
    for name in _TURNS:
        try:
            turns = _turns_decoder.decode(fields.get(name, b"[]"))
        except _INVALID:
            continue  # a text
        for turn in turns:
            for content in _CONTENTS:
                try:
                    yield from _parts_decoder.decode(turn.get(content, b"[]"))
                except _INVALID:
                    continue  # a text


def _named(part: Raw) -> tuple[str, bytes] | None:
    """The name of a medium and its part of a chat; None for a part without a name, or whose bytes
    are elsewhere.
    """
    try:
        fields = _part_decoder.decode(part)
        name = msgspec.json.decode(fields.get("uuid", b"null"))
        kind = msgspec.json.decode(fields.get("type", b"null"))
        if not (isinstance(name, str) and name and isinstance(kind, str)):
            return None
        field = _URL_FIELDS.get(kind, kind)
        medium: Any = msgspec.json.decode(fields.get(field, b"null"))
    except _INVALID:
        return None
    if kind == "input_audio":
        has_bytes = isinstance(medium, dict) and isinstance(medium.get("data"), str)
        return (name, bytes(part)) if has_bytes else None
    url = medium.get("url") if isinstance(medium, dict) else medium
    if kind not in _URL_FIELDS or not (isinstance(url, str) and url.startswith(_DATA_URI)):
        return None
    if kind == field:
        return name, bytes(part)
    # Engines make this part of a chat of it.
    of_chat = {"type": field, field: {"url": url}, "uuid": name}
    return name, msgspec.json.encode(of_chat)
