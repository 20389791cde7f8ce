"""Holds an address for the processes of one gateway, and lets each of them listen there.

With SO_REUSEPORT (Linux 3.9, socket(7)) several processes of one user may listen on one address.
So nothing would keep a second gateway from taking half of the first one's connections by mistake.
The address is therefore bound without the option, which fails where anybody else has it, and the
option is set afterwards. The socket that holds it never listens, so it gets no connection.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from transport import Endpoint


@dataclass(frozen=True, slots=True)
class HeldAddress:
    """An address that nobody but this user's processes can listen on until `close`."""

    endpoint: Endpoint
    sockets: tuple[socket.socket, ...]

    def close(self) -> None:
        """Give the address up. Who listens there goes on."""
        for sock in self.sockets:
            sock.close()


def hold(at: Endpoint) -> HeldAddress:
    """Hold all addresses of a host at one port; port 0: any free one. OSError if one is taken."""
    sockets: list[socket.socket] = []
    port = at.port
    infos = socket.getaddrinfo(
        at.host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    try:
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            if family == socket.AF_INET6:
                # As event loops bind: the same port of IPv4 is a socket of its own.
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # For the bind alone, since connections in TIME_WAIT are nobody's.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address[0], port, *address[2:]))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            port = sock.getsockname()[1]
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return HeldAddress(Endpoint(at.host, port), tuple(sockets))
