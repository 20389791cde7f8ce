"""What answers of a service discovery mean for the members of a cluster."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
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


ADDRESSES = [
    Found(f"p{n}", host, 8000, "node", f"uid-{n}")
    for n in range(3)
    for host in (f"10.0.0.{n}", f"fd00::{n}", f"192.168.0.{n}")
]
"""Three pods, each with an address in three slices."""


@given(
    st.lists(
        st.sets(st.sampled_from(ADDRESSES)).flatmap(lambda s: st.permutations(sorted(s, key=str))),
        max_size=8,
    )
)
def test_whatever_slices_come_in_whatever_order_what_runs_and_is_told_of_stays(
    answers: list[list[Found]],
) -> None:
    discovered, running = Discovered(SECTION, num_misses=1), dict[str, str]()
    for answer in answers:
        told = {item.name for item in answer}
        changes = discovered.heard(answer)
        assert set(changes.leaving) == running.keys() - told
        running = {name: url for name, url in running.items() if name in told}
        running |= {spec.name: spec.engine_url for spec in changes.joining}
        assert running.keys() == told


def test_one_whose_name_is_taken_is_tried_again_and_makes_nobody_leave() -> None:
    discovered = Discovered(SECTION, num_misses=1)
    discovered.heard([A, B])
    why = {"a": "the cluster has an instance a already"}
    assert discovered.refused(why) == [why["a"]]
    assert [spec.name for spec in discovered.heard([A, B]).joining] == ["a"]
    assert discovered.refused(why) == []  # it was told before
    assert discovered.heard([]).leaving == ("b",)


def test_one_source_is_named() -> None:
    with pytest.raises(ValidationError, match="either dns or kubernetes"):
        DiscoverySection()
    with pytest.raises(ValidationError, match="either dns or kubernetes"):
        DiscoverySection(dns="a", kubernetes="ns/svc")
    with pytest.raises(ValidationError, match="kubernetes"):
        DiscoverySection(kubernetes="no-namespace")
