"""A salt decides which tenants' cached KVCache a request may use."""

import string

from deploy.gateway.intake.cache_salts import CacheSalts

SALTS = CacheSalts({"team": ("ann", "bob"), "ann": ("eve",)})
ALONE = CacheSalts({})


def test_without_tenants_a_salt_is_the_clients_own() -> None:
    assert SALTS.salt("", None) is None
    assert SALTS.salt("", "s") == "s"


def test_no_two_tenants_have_a_salt_in_common() -> None:
    salts = [
        ALONE.salt(tenant, own)
        for tenant in ("a", "b", "ab", "group", "tenant")
        for own in (None, "a", "b", "ab", ALONE.salt("a", None), "\udc80", "tenant")
    ]
    assert len(set(salts)) == len(salts)
    assert ALONE.salt("a", None) == ALONE.salt("a", ""), "an empty salt is none"


def test_a_salt_is_one_that_engines_take() -> None:
    salt = ALONE.salt("a", "x/" * 10_000)
    assert salt is not None
    assert len(salt) == 64
    assert set(salt) <= set(string.hexdigits)


def test_those_of_one_group_share_and_nobody_else_does() -> None:
    assert SALTS.salt("ann", "s") == SALTS.salt("bob", "s") != SALTS.salt("bob", None)
    assert ALONE.salt("ann", None) != SALTS.salt("ann", None)
    assert SALTS.salt("eve", None) != ALONE.salt("ann", None), "a group may have a tenant's name"
    assert SALTS.salt("other", None) == ALONE.salt("other", None)
