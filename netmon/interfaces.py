"""Finds the network interface that has an address, and reads its counters (psutil).

Answers None where the system does not tell. Knows no link.
"""

from __future__ import annotations

import psutil

from netmon.samples import InterfaceSample


def interface_of(address: str) -> str | None:
    """The name of the interface that has this address of the host; None where it cannot be known.

    That of a connection says which interface carries it. A host's name would not: it may have
    several addresses, and the connection goes to one of them.
    """
    address = address.partition("%")[0]
    try:
        interfaces = psutil.net_if_addrs()
    except OSError:
        return None
    for name, addresses in interfaces.items():
        # Link-local IPv6 addresses carry the interface as a zone: fe80::1%eth0.
        if any(known.address.partition("%")[0] == address for known in addresses):
            return name
    return None


def read_interface(name: str) -> InterfaceSample | None:
    """The interface's counters now; None when there is no such interface (any more)."""
    try:
        counters = psutil.net_io_counters(pernic=True, nowrap=False).get(name)
        stats = psutil.net_if_stats().get(name)
    except OSError:
        return None
    if counters is None:
        return None
    # Linux reports -1 or 65535 (a 16-bit -1) for an interface of unknown speed, as most virtual
    # ones are.
    mbit_per_s = stats.speed if stats is not None else 0
    return InterfaceSample(
        name=name,
        sent_bytes=counters.bytes_sent,
        bytes_per_s=mbit_per_s * 1e6 / 8 if 0 < mbit_per_s < 65535 else None,
        is_up=stats is None or stats.isup,
    )
