"""Redis on a host of its own: a real server, which others reach with TLS and a password."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from certificates import make_node
from hosts import Host
from redis_server import redis_binary

PORT, PLAIN_PORT = 6379, 6380


def redis_url(address: str, made: Path, password: str) -> str:
    """Where gateways find the server of the host at `address`."""
    return f"rediss://:{password}@{address}:{PORT}?ssl_ca_certs={made / 'ca.pem'}"


class Redis:
    """The server on `host`, with a certificate by the region's authority in `made`. It keeps
    nothing on disk.
    """

    def __init__(self, host: Host, made: Path, password: str) -> None:
        files = make_node(made, "redis", made / "ca.pem", addresses=[host.address])
        front = Path(__file__).with_name("tls_front.py")
        tls = (host.address, PORT, files.cert, files.key, PLAIN_PORT)
        server = ("--port", PLAIN_PORT, "--requirepass", password, "--save", "")
        self._commands = (
            [redis_binary(), *map(str, server), "--appendonly", "no"],
            [sys.executable, str(front), *map(str, tls)],
        )
        self._host = host
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start it, with nothing in it."""
        self._running = [
            subprocess.Popen(self._host.argv(command), stdout=subprocess.DEVNULL)
            for command in self._commands
        ]

    def stop(self) -> None:
        """Stop it; what is in it is lost."""
        # Only `nsenter` would be killed by its number, and not what it runs.
        self._host.power_off()
        for process in self._running:
            process.wait()
        self._running.clear()
        self._host.power_on()
