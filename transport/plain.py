"""Texts and numbers of other processes, made harmless where they come in.

Texts go to terminals, logs and metrics, and numbers into sums that decide about requests.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

StructT = TypeVar("StructT", bound=msgspec.Struct)

LARGEST: Final = 2**53
"""No count, size or time of ours is larger, and floats are exact up to here."""
_SIGNED: Final = "priority"
"""The one number in replies that may be negative."""


def printable(text: str, *, lines: bool = False) -> str:
    """The text with "?" for characters that cannot be printed. `lines`: it may have line breaks."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c == "\n") else "?" for c in text)


def printable_message(message: StructT) -> StructT:
    """The message with all its texts printable."""
    # Most are, and to see that costs much less than to make a message anew.
    text = msgspec.json.encode(message)
    if text.isascii() and b"\\" not in text:
        return message
    return plain_message(message)


def plain_message(message: StructT) -> StructT:
    """The message with all its texts printable and all its numbers between 0 and `LARGEST`."""
    given = msgspec.to_builtins(message)
    plain = _plain(given)
    return message if plain == given else msgspec.convert(plain, type(message))


def _plain(value: Any, name: str = "") -> Any:
    if isinstance(value, str):
        return printable(value, lines=True)
    if isinstance(value, int | float) and not isinstance(value, bool):
        least = -LARGEST if name == _SIGNED else 0
        # No comparison holds for what is not a number.
        return value if least <= value <= LARGEST else type(value)(LARGEST if value > 0 else least)
    if isinstance(value, dict):
        return {_plain(key): _plain(item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
