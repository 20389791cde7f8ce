"""Between a host's name and its sockets: each address of a name is listened on, and tried.

A name may have several addresses, of IPv4 and IPv6, and some of them may lead to nobody. So whoever
dials tries the next one as well when an address does not answer at once, and begins with the one
that answered last. Knows no frame, no transfer and no TLS.
"""

from __future__ import annotations

import asyncio

# getaddrinfo loads this codec when it is first called. Without a free descriptor that import
# fails, and Python remembers the failure for good.
import encodings.idna  # noqa: F401
import errno
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

import aiohappyeyeballs

from transport.endpoint import Endpoint

logger = logging.getLogger("prfaas.transport")

SockAddress: TypeAlias = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
"""As getaddrinfo returns it; the last is that of a Python without IPv6."""
AddressInfo: TypeAlias = tuple[socket.AddressFamily, socket.SocketKind, int, str, SockAddress]
"""One result of getaddrinfo."""

HEAD_START_S: Final = 0.25
"""How long an address is tried alone, before the next one is tried as well (RFC 8305, 5)."""
MAX_TRIES: Final = 10
"""Tries to find one port that is free at all addresses of a name."""
# Linux, not named by Python.
IP_BIND_ADDRESS_NO_PORT: Final = 24
_NOT_HERE: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listen(at: Endpoint, *, reuse_port: bool = False) -> list[socket.socket]:
    """Listening sockets at each address of a host, all with one port. Raises OSError as `bind`."""
    sockets = bind(at, reuse_port=reuse_port)
    for sock in sockets:
        sock.listen(256)
    return sockets


def bind(at: Endpoint, *, reuse_port: bool = False) -> list[socket.socket]:
    """Sockets bound to each address of a host at one port; port 0: any that is free at all of them.
    "::" stands for all addresses of IPv4, too. Addresses that this machine does not have are left
    out, unless it has none of them. Raises OSError, whose `filename` is the endpoint.
    """
    flags = socket.AI_PASSIVE
    num_tries = MAX_TRIES if at.port == 0 else 1
    while True:
        try:
            found = socket.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM, flags=flags)
            return _bind_all(dict.fromkeys(found), at.port, reuse_port)
        except OSError as error:
            num_tries -= 1
            # A kernel without IPv6 has no "::", which can only mean 0.0.0.0 there.
            if at.host == "::" and error.errno in (errno.EAFNOSUPPORT, socket.EAI_ADDRFAMILY):
                return bind(Endpoint("0.0.0.0", at.port), reuse_port=reuse_port)
            # The free port of the first address may be taken at another one.
            if error.errno != errno.EADDRINUSE or not num_tries:
                raise type(error)(error.errno, error.strerror, str(at)) from error


def _bind_all(found: Iterable[AddressInfo], port: int, reuse_port: bool) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    away: OSError | None = None
    try:
        for info in found:
            try:
                sockets.append(_bound(info, port, reuse_port))
                port = sockets[0].getsockname()[1]
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                away = error
        if not sockets and away is not None:
            raise away
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _bound(info: AddressInfo, port: int, reuse_port: bool) -> socket.socket:
    family, kind, protocol, _, address = info
    sock = socket.socket(family, kind, protocol)
    try:
        # A restarted process must not wait for old connections of its port to leave TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        sock.bind((address[0], port, *address[2:]))
    except OSError:
        sock.close()
        raise
    return sock


def resolve(at: Endpoint, first: SockAddress | None = None) -> list[AddressInfo]:
    """All addresses of an endpoint, `first` before the others. Raises OSError."""
    try:
        found = socket.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"{at.host!r} is no name of a host: {error}") from error
    return _beginning_with(first, found)


def connect(
    found: Sequence[AddressInfo],
    timeout_s: float,
    prepare: Callable[[socket.socket], None],
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[socket.socket, SockAddress]:
    """Connect to the first address that answers. Returns the blocking socket and that address.

    `prepare` sets the options of each socket that is tried. Raises OSError when none answers within
    `timeout_s`, and soon after `is_over` has become true.
    """
    untried = list(found)
    pending: dict[int, tuple[socket.socket, SockAddress]] = {}
    poller = select.poll()
    last: OSError = TimeoutError(errno.ETIMEDOUT, "timed out")
    deadline_s = time.monotonic() + timeout_s
    try:
        while (untried or pending) and not is_over():
            if untried:
                info = untried.pop(0)
                try:
                    sock = _begin(info, prepare)
                except OSError as error:  # such as no IPv6, no route, or no descriptor
                    last = error
                    continue
                pending[sock.fileno()] = sock, info[4]
                poller.register(sock, select.POLLOUT)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            for descriptor, _ in poller.poll(1e3 * min(HEAD_START_S, left_s)):
                sock, address = pending.pop(descriptor)
                poller.unregister(descriptor)
                number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not number:
                    sock.setblocking(True)
                    return sock, address
                last = OSError(number, os.strerror(number))
                sock.close()
    finally:
        for sock, _ in pending.values():
            sock.close()
    raise last


def _begin(info: AddressInfo, prepare: Callable[[socket.socket], None]) -> socket.socket:
    family, kind, protocol, _, address = info
    sock = socket.socket(family, kind, protocol)
    try:
        prepare(sock)
        sock.setblocking(False)
        number = sock.connect_ex(address)
        if number not in (0, errno.EINPROGRESS):
            raise OSError(number, os.strerror(number))
    except BaseException:
        sock.close()
        raise
    return sock


def leave_from(sock: socket.socket, address: str) -> None:
    """Take this address of the host for a connection. One that is not this host's, as behind NAT,
    or of another family than the socket's is left to the kernel's choice.
    """
    # The port is chosen with the connection: else each would have one of its own.
    sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
    try:
        sock.bind((address, 0))
    except OSError as error:
        logger.debug("connections do not leave from %s: %s", address, error)


async def dial(at: Endpoint, first: SockAddress | None = None) -> socket.socket:
    """As `resolve` and `connect`, on an event loop; its owner sets the timeout. Raises OSError."""
    try:
        # An address needs no look-up, and so no thread.
        found = socket.getaddrinfo(
            at.host, at.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)
    # uvloop's own create_connection tries one address after the other.
    return await aiohappyeyeballs.start_connection(
        _beginning_with(first, found), happy_eyeballs_delay=HEAD_START_S
    )


def _beginning_with(first: SockAddress | None, found: Sequence[AddressInfo]) -> list[AddressInfo]:
    return sorted(dict.fromkeys(found), key=lambda info: info[4] != first)
