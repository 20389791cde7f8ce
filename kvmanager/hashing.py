"""Digests of token sequences, by which processes identify a prompt or a prefix.

A block key identifies a whole prefix: the key of block i is a BLAKE3 digest over the key of block
i - 1, the token ids of block i, and everything else that its KVCache depends on. The key before
block 0 is a digest of the cache namespace (weights, KV layout), the LoRA adapter and the tenant, so
that prefixes of different tenants never have a key in common.

Knows nothing of pools, models or engines: other things that a prefix depends on come in as bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from blake3 import blake3

from kvmanager.media_items import MediaItem, packed
from kvmanager.token_ids import TokenIds

KEY_BYTES = 16
_MEDIA_CONTEXT: Final = "PrfaaS 2026-11-24 digest of token ids and media"


def token_digest(token_ids: Sequence[int] | TokenIds, media: Sequence[MediaItem] = ()) -> bytes:
    """BLAKE3 of the token ids as little-endian unsigned 32-bit integers, 32 bytes. `media` are all
    media of the prompt; with any, it is a keyed digest of the ids' digest and them.

    Raises `ValueError` for an id that is negative or does not fit 32 bits.
    """
    digest = blake3(_packed(token_ids)).digest()
    if not media:
        return digest
    # With a context of its own, so that no prompt of text has token ids with the same digest.
    return blake3(digest + packed(media), derive_key_context=_MEDIA_CONTEXT).digest()


def root_key(namespace: bytes, *, tenant: str = "", lora: str = "") -> bytes:
    """The key to which the key of block 0 is chained. `tenant` is the request's `cache_salt`, and
    `lora` identifies its adapter.
    """
    parts = (namespace, lora.encode(), tenant.encode())
    # With their lengths, so that ("ab", "c") and ("a", "bc") have different keys.
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return blake3(framed).digest(KEY_BYTES)


def block_keys(
    token_ids: Sequence[int] | TokenIds,
    block_tokens: int,
    root: bytes,
    extras: Mapping[int, bytes] | None = None,
    first_block: int = 0,
) -> list[bytes]:
    """The key, of `KEY_BYTES`, of every full block of `block_tokens` tokens.

    `extras`: by block index, other inputs of that block (digests of multimodal inputs).
    `first_block` is the index of the first block of `token_ids`. Raises `ValueError` for an id that
    is negative or does not fit 32 bits.
    """
    num_blocks = len(token_ids) // block_tokens
    data = _packed(token_ids[: num_blocks * block_tokens])
    size = 4 * block_tokens
    keys: list[bytes] = []
    key = root
    for index in range(num_blocks):
        # One call on one string takes half the time of three calls that avoid the copy.
        told = key + data[index * size : (index + 1) * size]
        if extras and first_block + index in extras:
            told += extras[first_block + index]
        key = blake3(told).digest(KEY_BYTES)
        keys.append(key)
    return keys


def join_keys(keys: Sequence[bytes]) -> bytes:
    """Join keys to one byte string for a message."""
    return b"".join(keys)


def split_keys(joined: bytes) -> list[bytes]:
    """Undo `join_keys`. Raises `ValueError` for a length that is no multiple of a key's."""
    if len(joined) % KEY_BYTES:
        raise ValueError(f"{len(joined)} bytes are no sequence of {KEY_BYTES} byte keys")
    return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]


def _packed(token_ids: Sequence[int] | TokenIds) -> bytes:
    ids = token_ids if isinstance(token_ids, TokenIds) else TokenIds.of(token_ids)
    return ids.packed
