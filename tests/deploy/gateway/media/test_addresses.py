"""Every special range is refused, whatever this release of Python calls global."""

from ipaddress import ip_address

import pytest

from deploy.gateway.media.addresses import AddressRules, is_public, parsed

PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "9.255.255.255",
    "11.0.0.0",
    "100.63.255.255",
    "100.128.0.0",
    "126.255.255.255",
    "128.0.0.0",
    "169.253.255.255",
    "169.255.0.0",
    "172.15.255.255",
    "172.32.0.0",
    "192.0.1.0",
    "192.167.255.255",
    "192.169.0.0",
    "198.17.255.255",
    "198.20.0.0",
    "223.255.255.255",
    "168.63.129.15",
    "2000::1",
    "2001:200::1",
    "2606:4700:4700::1111",
    "2a00:1450:4001::1",
    "3ffe:ffff::1",
]
SPECIAL = {
    "0.0.0.0/8": ["0.0.0.0", "0.1.2.3", "0.255.255.255"],
    "RFC 1918": [
        "10.0.0.0",
        "10.255.255.255",
        "172.16.0.0",
        "172.31.255.255",
        "192.168.0.0",
        "192.168.255.255",
    ],
    "RFC 6598": ["100.64.0.0", "100.127.255.255", "100.100.100.200"],
    "loopback": ["127.0.0.1", "127.255.255.255", "::1"],
    "link-local": ["169.254.0.0", "169.254.169.254", "169.254.170.2", "fe80::1", "fe80::1%eth0"],
    "RFC 6890": ["192.0.0.0", "192.0.0.9", "192.0.0.192", "192.0.0.255"],
    "documentation": [
        "192.0.2.1",
        "198.51.100.1",
        "203.0.113.1",
        "2001:db8::1",
        "3fff::1",
        "3fff:fff::1",
    ],
    "benchmarks": ["198.18.0.0", "198.19.255.255", "2001:2::1"],
    "6to4 relays": ["192.88.99.1"],
    "multicast": ["224.0.0.1", "239.255.255.255", "ff02::1", "ff0e::1"],
    "reserved": ["240.0.0.0", "255.255.255.255"],
    "RFC 4193": ["fc00::1", "fd00::1", "fd00:ec2::254", "fdff:ffff::1", "fd20:ce::254"],
    "site-local": ["fec0::1"],
    "unspecified": ["::"],
    "other forms of IPv4": [
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "::ffff:0:7f00:1",
        "64:ff9b::7f00:1",
        "64:ff9b::808:808",
        "64:ff9b:1::1",
        "2002:7f00:1::",
        "2002:808:808::",
        "2001::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "::5efe:7f00:1",
    ],
    "protocols": ["2001:10::1", "2001:20::1", "2001:1ff::1", "100::1", "5f00::1", "4000::1"],
    "the host in Azure": ["168.63.129.16"],
}


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_are_allowed(text: str) -> None:
    assert is_public(ip_address(text))
    assert AddressRules().allow(ip_address(text))


@pytest.mark.parametrize(
    "text", [text for texts in SPECIAL.values() for text in texts], ids=lambda text: text
)
def test_special_addresses_are_refused(text: str) -> None:
    assert not is_public(ip_address(text))
    assert not AddressRules().allow(ip_address(text))


def test_an_operator_allows_and_refuses_networks() -> None:
    rules = AddressRules(private=("10.1.0.0/16", "fd12::/16"), refused=("8.8.8.0/24",))
    for text, is_allowed in {
        "10.1.2.3": True,
        "10.2.0.1": False,
        "fd12::1": True,
        "fd13::1": False,
        "8.8.8.8": False,
        "8.8.9.9": True,
        "::ffff:10.1.2.3": False,
        "64:ff9b::a01:203": False,
    }.items():
        assert rules.allow(ip_address(text)) is is_allowed, text


@pytest.mark.parametrize(
    "text",
    [
        "169.254.169.254",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "0.0.0.0",
        "224.0.0.1",
        "fd00:ec2::254",
        "fd20:ce::254",
        "fe80::1",
        "ff02::1",
        "::",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
    ],
)
def test_nobody_allows_metadata(text: str) -> None:
    rules = AddressRules(private=("0.0.0.0/0", "::/0"))
    assert not rules.allow(ip_address(text))
    assert rules.allow(ip_address("127.0.0.1"))


def test_both_of_an_address_and_the_one_that_it_carries_must_be_allowed() -> None:
    nat64 = AddressRules(private=("64:ff9b::/96",))
    assert nat64.allow(ip_address("64:ff9b::808:808"))
    assert not nat64.allow(ip_address("64:ff9b::a00:1"))
    assert not AddressRules(private=("10.0.0.0/8",)).allow(ip_address("64:ff9b::a00:1"))


@pytest.mark.parametrize("network", ["10.0.0.1/8", "example.org", "10.0.0.0/40"])
def test_what_is_no_network_is_an_error(network: str) -> None:
    with pytest.raises(ValueError, match=r"network|host bits"):
        AddressRules(private=(network,))


@pytest.mark.parametrize("text", ["example.org", "127.1", "2130706433", "0x7f000001", "0177.0.0.1"])
def test_what_only_some_parsers_take_for_an_address_is_a_name(text: str) -> None:
    assert parsed(text) is None
