"""Addresses: the one at which a process listens, as text, and the network that one comes from."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple


class Endpoint(NamedTuple):
    """Where a receiver listens; `port` 0 asks the kernel for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        # RFC 3986, 3.2.2: an IPv6 address stands in brackets before a port.
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse "node-a:7100", "10.0.0.1:7100" or "[::1]:7100".

        Raises ValueError that says what is wrong with `text`.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host:
            raise ValueError(f"{text!r} is not host:port")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            # Without brackets nobody can tell the last group of an address from a port.
            raise ValueError(f"{text!r}: write an IPv6 address in brackets, such as [::1]:7100")
        # isdecimal() alone accepts digits of other scripts, which int() would read as well.
        if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
            raise ValueError(f"{text!r}: {port!r} is not a port; write host:port with 0 to 65535")
        return cls(host, int(port))


def network_of(address: str | None) -> str:
    """The address, or in IPv6 its network: a host may choose from 64 bits of addresses."""
    try:
        ip = ipaddress.ip_address(address or "")
    except ValueError:
        return "unknown"
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return f"{ipaddress.IPv6Address(int(ip) >> 64 << 64)}/64"
        ip = ip.ipv4_mapped
    return str(ip)
