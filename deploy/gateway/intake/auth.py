"""API keys: checks an Authorization header, and tells the tenant and whether it is an operator.

Digests of keys are compared in constant time, and every key is compared, so that timing tells
nothing about their number, length or content. This file does not know which paths need a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from deploy.gateway.config import ApiKey
from deploy.gateway.errors import ApiError


class KeyRing:
    """The accepted API keys. Without keys every request is accepted."""

    def __init__(self, keys: Iterable[ApiKey], operators: Iterable[str] = ()) -> None:
        """`operators` are the tenants that pass `check_operator`. Without any, all tenants pass."""
        self._tenants = tuple((_digest(key.key.get_secret_value()), key.tenant) for key in keys)
        self._operators = frozenset(operators)

    def check(self, authorization: str | None) -> str:
        """The tenant whose key the header "Bearer KEY" has; "" if there are no keys.

        Raises `ApiError` 401 for anything else.
        """
        if not self._tenants:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(
                401, "missing_api_key", "Send an API key in the header: Authorization: Bearer KEY"
            )
        offered = _digest(key.strip())
        found = None
        # No early exit: the time must not depend on which key matches.
        for digest, tenant in self._tenants:
            found = tenant if hmac.compare_digest(offered, digest) else found
        if found is None:
            raise ApiError(401, "invalid_api_key", "The API key is not known here.")
        return found

    def check_operator(self, authorization: str | None) -> None:
        """Raises `ApiError` 401 as `check` does, and 403 if the tenant is no operator."""
        tenant = self.check(authorization)
        if self._operators and tenant not in self._operators:
            message = f"The API key of {tenant} is not an operator's; use one that is."
            raise ApiError(403, "not_an_operator", message)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
