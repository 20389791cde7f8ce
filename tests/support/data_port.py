"""Whether an agent's data port answers somebody who has no transfer, over TLS or in plain text."""

from __future__ import annotations

import socket
import ssl

from transport import TlsFiles
from transport.wire.frames import FrameType
from transport.wire.handshake import MAGIC, own_hello


def tls_context(files: TlsFiles, *, with_certificate: bool) -> ssl.SSLContext:
    """Trusts the authority of `files`, and shows their certificate or none."""
    context = ssl.create_default_context(cafile=files.ca)
    if with_certificate:
        context.load_cert_chain(files.cert, files.key)
    return context


def is_welcome(address: str, context: ssl.SSLContext | None) -> bool:
    """Whether the port answers a greeting as agents send it, in plain text without `context`."""
    greeting = own_hello(bytes(16), 1 << 20).encode(FrameType.HELLO)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10.0) as plain:
        try:
            peer = plain if context is None else context.wrap_socket(plain, server_hostname=host)
            with peer:
                peer.sendall(greeting)
                answer = b""
                while len(answer) < len(greeting) and (more := peer.recv(4096)):
                    answer += more
        except (ssl.SSLError, ConnectionError):
            return False
    return MAGIC in answer
