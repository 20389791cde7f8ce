"""Connections of the gateway to engines: nothing is said on them for as long as a prompt queues."""

import asyncio
import socket
from typing import Any

from open_sockets import open_sockets


async def test_a_connection_to_a_silent_engine_is_kept_alive(region: Any) -> None:
    """A host that is gone is noticed within a minute, and a NAT keeps its entry."""
    engine = next(iter(region.pds["home"].engines.values()))
    engine.next_token.clear()
    engine.first_token.clear()
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
    asking = asyncio.create_task(region.post(body))
    await region.until(lambda: engine.num_serving)
    port = int(engine.url.rpartition(":")[2])
    (sock,) = (each.dup() for each in open_sockets(port) if each.getpeername()[1] == port)
    with sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle_s, interval_s, probes = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert idle_s <= 30
    assert idle_s + interval_s * probes <= 60
    engine.first_token.set()
    engine.next_token.set()
    await asking
