"""Which IP addresses media may be fetched from. Pure.

The tables say what the registries of special addresses say (IANA, RFC 6890, after RFC 1918, 4193,
6598 and others). `ipaddress.is_global` differs between releases of Python, knows no forms that
carry another address, and calls public what only a cloud's own machines reach.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_NOT_PUBLIC: Final = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared by the customers of a carrier
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
_PUBLIC_V6: Final = IPv6Network("2000::/3")
"""Addresses that are given out as public. Everything else is loopback, local, multicast, not
assigned, or carries an IPv4 address.
"""
_NOT_PUBLIC_V6: Final = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments, with Teredo and benchmarks
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
)
_NEVER: Final[tuple[Network, ...]] = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8",
        "224.0.0.0/4",
        "255.255.255.255/32",
        "::/128",
        "ff00::/8",
        "169.254.0.0/16",  # metadata of most clouds, and other link-local addresses
        "fe80::/10",
        "fd00:ec2::/32",  # metadata of AWS
        "fd20:ce::/32",  # metadata of Google's cloud
        "100.100.100.200/32",  # metadata of Alibaba's cloud
        "168.63.129.16/32",  # the host's own services in Azure
        "192.0.0.192/32",  # metadata of Oracle's cloud
    )
)
"""Refused even where an operator allows a network around them."""
_NAT64: Final = IPv6Network("64:ff9b::/96")
_V4_BITS: Final = (1 << 32) - 1


def parsed(text: str) -> Address | None:
    """The IP address that `text` is; None if it is a name."""
    try:
        return ip_address(text)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Whether everybody on the internet reaches the same host at this address."""
    if isinstance(address, IPv4Address):
        return not _in(address, (*_NOT_PUBLIC, *_NEVER))
    # An address with a zone is one of a link of this host.
    if address.scope_id is not None or address not in _PUBLIC_V6:
        return False
    return not _in(address, (*_NOT_PUBLIC_V6, *_NEVER))


class AddressRules:
    """The rules of an operator: networks that may be fetched from though they are not public, and
    networks that may not be though they are.
    """

    def __init__(self, private: Iterable[str] = (), refused: Iterable[str] = ()) -> None:
        """Raises `ValueError` for what is no network."""
        self._private = tuple(map(ip_network, private))
        self._refused = tuple(map(ip_network, refused))

    def allow(self, address: Address) -> bool:
        """Whether media may be fetched from `address`."""
        # Where one address stands for another, both must be allowed.
        inner = _carried(address)
        if inner is not None and not self.allow(inner):
            return False
        if _in(address, (*_NEVER, *self._refused)):
            return False
        return is_public(address) or _in(address, self._private)


def _in(address: Address, networks: Iterable[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


def _carried(address: Address) -> IPv4Address | None:
    """The IPv4 address that an IPv6 address stands for."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & _V4_BITS)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (None if teredo is None else teredo[1])
