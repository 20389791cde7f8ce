"""The media in a client's chat, and the chat with which an engine encodes one of them.

A part of a message is passed on as it came, with its name (`uuid`). So an engine makes the same
identifier of it as it makes of the same part in the client's chat. Pure; does not know engines.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw

_DATA_URI: Final = "data:"
_TYPES_WITH_URL: Final = ("image_url", "video_url", "audio_url")


class _Chat(msgspec.Struct):
    messages: list[dict[str, Raw]] = []


_chat_decoder: Final = msgspec.json.Decoder(_Chat)
_parts_decoder: Final = msgspec.json.Decoder(list[Raw])
_part_decoder: Final = msgspec.json.Decoder(dict[str, Raw])


def named_media(chat: bytes) -> dict[str, bytes]:
    """The media of a chat that have a name and bring their bytes, by their names in the order in
    which they come. Empty for what is no chat.
    """
    try:
        messages = _chat_decoder.decode(chat).messages
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return {}
    found: dict[str, bytes] = {}
    for message in messages:
        try:
            parts = _parts_decoder.decode(message.get("content", b"null"))
        except msgspec.MsgspecError:
            continue  # a text
        for part in parts:
            name = _name(part)
            if name:
                found.setdefault(name, bytes(part))
    return found


def chat_of(part: bytes) -> bytes:
    """The body of a chat about one medium alone, without a model."""
    message = {"role": "user", "content": [Raw(part)]}
    return msgspec.json.encode({"messages": [message]})


def _name(part: Raw) -> str:
    """The name of a part that has one and brings its bytes, or ""."""
    try:
        fields = _part_decoder.decode(part)
        name = msgspec.json.decode(fields.get("uuid", b"null"))
        kind = msgspec.json.decode(fields.get("type", b"null"))
        medium: Any = msgspec.json.decode(fields.get(kind, b"null"))
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError):
        return ""
    if not isinstance(name, str):
        return ""
    if kind in _TYPES_WITH_URL:
        url = medium.get("url") if isinstance(medium, dict) else medium
        return name if isinstance(url, str) and url.startswith(_DATA_URI) else ""
    if kind == "input_audio" and isinstance(medium, dict):
        return name if isinstance(medium.get("data"), str) else ""
    return ""
