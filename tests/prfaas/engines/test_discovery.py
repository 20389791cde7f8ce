"""What answers of a service discovery mean for the members of a cluster."""

import pytest
from pydantic import ValidationError

from prfaas.engines.discovery.found import Discovered, DiscoverySection, Found

SECTION = DiscoverySection(dns="_engine._tcp.east", agent_port=7101, role="prefill", model="m")
A, B = Found("a", "a.east", 8000), Found("b", "b.east", 8000)


def test_what_is_found_joins_and_what_is_missing_for_long_leaves() -> None:
    discovered = Discovered(SECTION, num_misses=3)
    (joining,) = discovered.heard([A]).joining
    assert (joining.name, joining.engine_url) == ("a", "http://a.east:8000")
    assert (joining.agent, joining.role, joining.served_name) == ("a.east:7101", "prefill", "m")
    assert [spec.name for spec in discovered.heard([B, A]).joining] == ["b"]
    assert [discovered.heard([B]).leaving for _ in range(2)] == [(), ()]
    assert discovered.heard([A, B]).leaving == ()  # it was there again
    assert [discovered.heard([B]).leaving for _ in range(4)] == [(), (), ("a",), ()]
    assert [discovered.heard([]).leaving for _ in range(3)] == [(), (), ("b",)]
    assert (discovered._known, dict(discovered._missed)) == ({}, {})


def test_one_that_moves_leaves_and_joins_again() -> None:
    discovered = Discovered(SECTION, num_misses=1)
    discovered.heard([A])
    changes = discovered.heard([Found("a", "elsewhere", 8000)])
    assert changes.leaving == ("a",)
    assert [spec.agent for spec in changes.joining] == ["elsewhere:7101"]


def test_engines_of_one_host_have_their_ports_as_names() -> None:
    discovered = Discovered(SECTION, num_misses=1)
    found = discovered.heard([A, Found("a", "a.east", 8001), A])
    assert [spec.name for spec in found.joining] == ["a-8000", "a-8001"]


def test_one_source_is_named() -> None:
    with pytest.raises(ValidationError, match="either dns or kubernetes"):
        DiscoverySection()
    with pytest.raises(ValidationError, match="either dns or kubernetes"):
        DiscoverySection(dns="a", kubernetes="ns/svc")
    with pytest.raises(ValidationError, match="kubernetes"):
        DiscoverySection(kubernetes="no-namespace")
