"""API keys: checks an Authorization header, and tells the tenant and whether it is an operator.

Digests of keys are compared in constant time, and every key is compared, so that timing tells
nothing about their number, length or content. Keys may be replaced while requests run; those of a
key that is gone are cut off. This file does not know which paths need a key, or where keys come
from.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from deploy.gateway.api_keys import ApiKey
from deploy.gateway.errors import ApiError

logger = logging.getLogger("prfaas.deploy.gateway")

_Owned: TypeAlias = tuple[bytes, str]
"""The digest of a key, and the tenant whose it is."""


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """The Authorization header, or what it would be for a key in Anthropic's header X-Api-Key."""
    authorization, key = headers.get("Authorization"), headers.get("X-Api-Key")
    return f"Bearer {key}" if authorization is None and key else authorization


class KeyRing:
    """The accepted API keys. Without keys every request is accepted."""

    def __init__(
        self, keys: Iterable[ApiKey], operators: Iterable[str] = (), run_key: str = ""
    ) -> None:
        """`operators` are the tenants that pass `check_operator`. If they are none, a tenant
        passes that is the only one. `run_key`, if there is one, passes too and is no tenant's.
        """
        self._keys = _owned(keys)
        self._operators = frozenset(operators)
        self._run_digest = _digest(run_key) if run_key else None
        self._in_use: dict[_Owned, set[Callable[[], None]]] = {}

    def set_operators(self, operators: Iterable[str]) -> None:
        """Let these tenants pass `check_operator` from now on, as at the start."""
        self._operators = frozenset(operators)

    @property
    def has_keys(self) -> bool:
        """Whether a key is needed."""
        return bool(self._keys)

    def check(self, authorization: str | None) -> str:
        """The tenant whose key the header "Bearer KEY" has; "" if there are no keys.

        Raises `ApiError` 401 for anything else.
        """
        if not self._keys:
            return ""
        return self._owner(_offered(authorization))

    def check_operator(self, authorization: str | None) -> None:
        """Raises `ApiError` 401 as `check` does, and 403 if the tenant is no operator."""
        if not self._keys:
            return
        offered = _offered(authorization)
        if self._run_digest is not None and hmac.compare_digest(offered, self._run_digest):
            return
        tenant = self._owner(offered)
        # One tenant alone has nobody to hide from. Of several, none sees the others unless named.
        if tenant not in (self._operators or self._only_tenant()):
            message = f"The API key of {tenant} is not an operator's; use one that is."
            raise ApiError(403, "not_an_operator", message)

    def check_adding(self, authorization: str | None) -> None:
        """As `check_operator`, for orders to add an instance, which is sent prompts and the key of
        the engines. So without API keys `run_key` is asked for, if there is one.
        """
        if self._keys or self._run_digest is None:
            self.check_operator(authorization)
        elif not hmac.compare_digest(_offered(authorization), self._run_digest):
            message = "Send the key that `prfaas up` made for this run, operator.key."
            raise ApiError(401, "invalid_run_key", message)

    @contextmanager
    def using(self, authorization: str | None, cut_off: Callable[[], None]) -> Iterator[str]:
        """As `check`, and calls `cut_off` if the key is taken away before the context ends."""
        if not self._keys:
            yield ""
            return
        offered = _offered(authorization)
        tenant = self._owner(offered)
        users = self._in_use.setdefault((offered, tenant), set())
        users.add(cut_off)
        try:
            yield tenant
        finally:
            users.discard(cut_off)
            if not users:
                self._in_use.pop((offered, tenant), None)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Accept these keys from now on, and cut off who uses another one. No keys: ValueError, as
        that would let everybody in.
        """
        owned = _owned(keys)
        if not owned:
            raise ValueError("no API key is left")
        self._keys = owned
        for digest, tenant in self._in_use.keys() - set(owned):
            users = tuple(self._in_use[digest, tenant])
            logger.warning("cut off %d requests of a revoked key of %s", len(users), tenant)
            for cut_off in users:
                cut_off()

    def _only_tenant(self) -> frozenset[str]:
        """The tenant, if all keys are its keys."""
        tenants = frozenset(tenant for _, tenant in self._keys)
        return tenants if len(tenants) == 1 else frozenset()

    def _owner(self, offered: bytes) -> str:
        found = None
        # No early exit: the time must not depend on which key matches.
        for digest, tenant in self._keys:
            found = tenant if hmac.compare_digest(offered, digest) else found
        if found is None:
            raise ApiError(401, "invalid_api_key", "The API key is not known here.")
        return found


def _owned(keys: Iterable[ApiKey]) -> tuple[_Owned, ...]:
    return tuple((_digest(key.key.get_secret_value()), key.tenant) for key in keys)


def _offered(authorization: str | None) -> bytes:
    """The digest of the key in the header. Raises `ApiError` 401 if there is none."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise ApiError(
            401, "missing_api_key", "Send an API key in the header: Authorization: Bearer KEY"
        )
    return _digest(key.strip())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
