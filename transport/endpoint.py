"""Addresses: the one at which a process listens, as text, and the network that one comes from."""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple

_LABEL: Final = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME: Final = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
_NUMBER: Final = re.compile(r"(.*\.)?([0-9]+|0[xX][0-9A-Fa-f]*)")
"""Names that end in a number: resolvers take them for addresses of IPv4 (inet_aton(3))."""
_DRESSED: Final = re.compile(r"([A-Za-z0-9+.-]+://)?(\[[^\]]+\]|[^:/\[\]]+)(:[0-9]*)?(/.*)?")
"""A host in a URL, in brackets, or before a port."""


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
        elif _is_ipv6(host) or _is_ipv6(text):
            # Without brackets nobody can tell the last group of an address from a port.
            raise ValueError(f"{text!r}: write an IPv6 address in brackets, such as [::1]:7100")
        # isdecimal() alone accepts digits of other scripts, which int() would read as well.
        if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
            raise ValueError(f"{text!r}: {port!r} is not a port; write host:port with 0 to 65535")
        return cls(check_host(host), int(port))


def check_host(text: str) -> str:
    """The name or the address of a host, in its usual spelling; IPv6 has no brackets.

    Raises ValueError that says what to write instead. The form says nothing about who answers.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return _check_name(text)
    if isinstance(address, ipaddress.IPv6Address) and address.is_link_local:
        raise ValueError(
            f"{text!r} needs a zone, which means another interface on each host; give the host an "
            "address that is the same for all"
        )
    return str(address)


def _check_name(text: str) -> str:
    if _NAME.fullmatch(text):
        if _NUMBER.fullmatch(text):
            raise ValueError(f"{text!r} is no address: IPv4 has four numbers from 0 to 255")
        return text
    hint = "names have letters, digits, '-', '_' and dots, and IPv6 stands without brackets"
    dressed = _DRESSED.fullmatch(text)
    bare = dressed[2].strip("[]").rstrip(".") if dressed else text
    if not bare.isascii():
        try:
            bare = bare.encode("idna").decode()
        except UnicodeError:
            bare = text
    if bare != text:
        hint = f"write {check_host(bare)}"
    raise ValueError(f"{text!r} is no name or address of a host; {hint}")


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of a host, at which one listens and nobody connects."""
    return host in ("0.0.0.0", "::")


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


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
