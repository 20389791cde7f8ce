"""Makes the salt that the cache keys of a prompt begin with: it bounds whose KVCache is found.

Every request of a tenant gets a salt made of the tenant and of the client's own `cache_salt`, in
the body that engines get, too. So no client can ask for what another tenant cached, whatever salt
it sends. Tenants of one group share. Pure; does not know bodies or engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence


class CacheSalts:
    """The salts of one region. All its gateways make the same ones, now and after a restart."""

    def __init__(self, shared: Mapping[str, Sequence[str]]) -> None:
        """`shared`: by the name of a group, the tenants in it."""
        self._owners = {
            tenant: ("group", name) for name, tenants in shared.items() for tenant in tenants
        }

    def salt(self, tenant: str, own: str | None) -> str | None:
        """The salt for a request of `tenant` that came with the salt `own`. Without tenants (""),
        where nobody needs a key, everybody shares, and `own` is the salt.
        """
        if not tenant:
            return own
        owner = self._owners.get(tenant, ("tenant", tenant))
        parts = [part.encode("utf-8", "surrogatepass") for part in (*owner, own or "")]
        framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hashlib.blake2b(framed, digest_size=32, person=b"prfaas-salt").hexdigest()
