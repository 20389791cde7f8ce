"""Images, clips and other media of a prompt, as far as block keys and digests depend on them.

The token ids of a prompt only say where a medium lies: all its positions have the same placeholder.
What lies there is named by an identifier that an engine makes of the medium's content.

Knows neither engines nor requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One medium: `length` tokens from `offset` on are its placeholders. Engines may make other
    KVCache of the same tokens only if `identifier` is another (vLLM's `MultiModalFeatureSpec`).
    """

    identifier: str
    offset: int
    length: int


def block_extras(media: Iterable[MediaItem], block_tokens: int) -> dict[int, bytes]:
    """For each block that media touch: their identifiers, and where each begins.

    A block may hold the end of a medium that began long before it, so the beginning counts from the
    block's first token and may be negative (vLLM's `generate_block_hash_extra_keys`). The order of
    `media` does not matter.
    """
    extras: dict[int, bytes] = {}
    for item in _in_order(media):
        last = (item.offset + max(1, item.length) - 1) // block_tokens
        for block in range(item.offset // block_tokens, last + 1):
            begin = item.offset - block * block_tokens
            extra = repr((item.identifier, begin)).encode()
            extras[block] = extras.get(block, b"") + len(extra).to_bytes(4, "little") + extra
    return extras


def packed(media: Iterable[MediaItem]) -> bytes:
    """All of `media` as bytes; equal for the same items in any order, and different for others."""
    parts = bytearray()
    for item in _in_order(media):
        name = item.identifier.encode()
        for number in (item.offset, item.length, len(name)):
            parts += number.to_bytes(8, "little")
        parts += name
    return bytes(parts)


def _in_order(media: Iterable[MediaItem]) -> list[MediaItem]:
    return sorted(media, key=lambda item: (item.offset, item.length, item.identifier))
