"""Endpoints as people write them."""

from __future__ import annotations

import pytest

from transport import Endpoint
from transport.endpoint import network_of


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("10.0.0.1:7100", Endpoint("10.0.0.1", 7100)),
        ("node-a:0", Endpoint("node-a", 0)),
        ("[::1]:7100", Endpoint("::1", 7100)),
    ],
)
def test_an_endpoint_is_read_as_it_is_printed(text: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(text) == endpoint
    assert str(endpoint) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node-a", "'node-a' is not host:port"),
        (":7100", "':7100' is not host:port"),
        ("node-a:", "'' is not a port"),
        ("node-a:http", "'http' is not a port"),
        ("node-a:65536", "'65536' is not a port"),
        ("::1:7100", r"write an IPv6 address in brackets, such as \[::1\]:7100"),
    ],
)
def test_what_is_no_endpoint_is_explained(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Endpoint.parse(text)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("", "unknown"),
        (None, "unknown"),
    ],
)
def test_a_host_of_ipv6_counts_by_its_64_bits(address: str | None, network: str) -> None:
    assert network_of(address) == network
