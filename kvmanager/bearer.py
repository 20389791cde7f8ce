"""Compares the key in an Authorization header (RFC 6750) with the one that is right.

Digests are compared in constant time, so that timing tells nothing about the key or its length.
"""

from __future__ import annotations

import hashlib
import hmac


def key_digest(key: bytes) -> bytes:
    """The digest of a key, kept to compare others with."""
    return hashlib.sha256(key).digest()


def shows_key(authorization: bytes, digest: bytes) -> bool:
    """Whether the header is "Bearer KEY" with the key of this digest."""
    scheme, _, key = authorization.partition(b" ")
    offered = key_digest(key.strip())
    return scheme.lower() == b"bearer" and hmac.compare_digest(offered, digest)
