"""Ports for processes that a test starts."""

import socket


def free_port() -> int:
    """A TCP port of loopback that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
