"""API keys: whether an Authorization header names one of them.

Keys are compared as digests in constant time, and every key is compared, so that timing tells
nothing about their number, length or content. Does not know which paths need a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from deploy.gateway.errors import ApiError


class KeyRing:
    """The accepted API keys. Without keys everything is accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def check(self, authorization: str | None) -> None:
        """Raise `ApiError` 401 unless `authorization` is "Bearer <one of the keys>"."""
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(
                401, "missing_api_key", "Send an API key in the header: Authorization: Bearer KEY"
            )
        offered = _digest(key.strip())
        is_known = False
        for digest in self._digests:
            is_known |= hmac.compare_digest(offered, digest)
        if not is_known:
            raise ApiError(401, "invalid_api_key", "The API key is not known here.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
