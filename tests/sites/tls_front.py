"""Puts TLS before a server on loopback: `tls_front.py HOST PORT CERT KEY TARGET_PORT`.

The Redis server of the tests is built without TLS, and gateways reach a Redis on another host with
TLS only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction until it ends."""
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def main(host: str, port: str, cert: str, key: str, target_port: str) -> None:
    """Serve until killed."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target = await asyncio.open_connection("127.0.0.1", int(target_port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(carry(reader, target[1]), carry(target[0], writer))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server = await asyncio.start_server(connected, host, int(port), ssl=context)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
