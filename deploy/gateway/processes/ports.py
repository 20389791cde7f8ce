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
from transport.addresses import bind


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
    sockets = bind(at)
    for sock in sockets:
        # Needed for the bind alone, since connections in TIME_WAIT are nobody's.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return HeldAddress(Endpoint(at.host, sockets[0].getsockname()[1]), tuple(sockets))
