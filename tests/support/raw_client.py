"""A client that does with its connection what HTTP libraries do not: nothing, little, or slowly."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Self


class RawClient:
    """One connection to a gateway at `url`, from the loopback address `source`."""

    def __init__(self, url: str, source: str = "127.0.0.1") -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = host, int(port)
        self._source = source
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        sock = socket.socket()
        # A small buffer: what the kernel takes for a client that does not read is not read.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        sock.bind((self._source, 0))
        await asyncio.get_running_loop().sock_connect(sock, self._address)
        self.reader, self.writer = await asyncio.open_connection(sock=sock, limit=4096)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.transport.abort()

    async def post(
        self, path: str, headers: Mapping[str, str], *, announced: int, body: bytes = b""
    ) -> None:
        """Send the head of a request, and as much of its body as is given."""
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {announced}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        await self.send("\r\n".join([*lines, "", ""]).encode() + body)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def status(self, timeout_s: float = 30.0) -> int:
        """The status of the answer; 0 when the connection ends without one."""
        try:
            async with asyncio.timeout(timeout_s):
                words = (await self.reader.readline()).split()
        except ConnectionError:
            return 0
        return int(words[1]) if words else 0
