"""Names of processes: what can be read of a certificate, and what refuses whom."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import Identity, Role
from transport.access import ACCESS, callers_of
from transport.identity import ROLES, certificate_identities, identities_of, refusal

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", fullmatch=True)
roles = st.sampled_from(ROLES).map(lambda role: cast(Role, role))
identities = st.builds(Identity, names, roles, names)


@given(identities)
def test_a_name_survives_its_uri(identity: Identity) -> None:
    assert Identity.parse(str(identity)) == identity


@given(st.text() | st.text(alphabet="spife:/abc-").map(lambda text: "spiffe://" + text))
def test_whatever_parses_is_what_it_says(text: str) -> None:
    try:
        identity = Identity.parse(text)
    except ValueError:
        return
    assert str(identity) == text


@pytest.mark.parametrize(
    "text",
    [
        "spiffe://r/agent",
        "spiffe://r/agent/",
        "spiffe:///agent/a",
        "spiffe://r/king/a",
        "spiffe://r/agent/a/b",
        "spiffe://r/agent/a?x",
        "spiffe://r/agent/a\n",
        "SPIFFE://r/agent/a",
        "https://r/agent/a",
    ],
)
def test_other_uris_are_no_names(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Identity.parse(text)
    assert identities_of([text]) == ()


def test_only_the_uris_of_a_certificate_count() -> None:
    shown = {
        "subjectAltName": (
            ("DNS", "spiffe://r/gateway/g"),
            ("IP Address", "127.0.0.1"),
            ("URI", "https://example.org"),
            ("URI", "spiffe://r/agent/a"),
        )
    }
    assert certificate_identities(shown) == (Identity("r", "agent", "a"),)
    assert certificate_identities(None) == ()
    assert certificate_identities({}) == ()


@given(st.lists(identities, max_size=4), names, st.sets(roles))
def test_one_name_must_have_both_region_and_role(
    presented: list[Identity], region: str, needed: set[Role]
) -> None:
    may = any(one.region == region and one.role in needed for one in presented)
    assert (refusal(presented, region=region, roles=needed, what="it") is None) is may


def test_a_refusal_says_what_is_needed_and_what_was_shown() -> None:
    agent = Identity("r", "agent", "a")
    assert refusal([agent], region="r", roles={"gateway", "operator"}, what="calling X/Y") == (
        "calling X/Y needs role gateway or operator of region r; "
        "the other side shows spiffe://r/agent/a"
    )
    assert "shows no name" in str(refusal([], region="r", roles={"agent"}, what="it"))
    assert "needs role nobody" in str(refusal([agent], region="r", roles=set(), what="it"))


def test_the_table_names_roles_that_exist_and_refuses_what_it_does_not_know() -> None:
    for service, access in ACCESS.items():
        assert access.servers <= set(ROLES)
        for method, callers in access.callers.items():
            assert callers
            assert callers_of(service, method) == callers <= set(ROLES)
    assert callers_of("prfaas.NodeAgent", "Missing") == frozenset()
    assert callers_of("prfaas.Missing", "Status") == frozenset()


def test_agents_call_nobody_and_only_the_gateway_moves_caches() -> None:
    for access in ACCESS.values():
        assert not any("agent" in callers for callers in access.callers.values())
    for method in ("ReserveCacheMove", "SendCacheMove", "DropCached"):
        assert callers_of("prfaas.NodeAgent", method) == {"gateway"}
