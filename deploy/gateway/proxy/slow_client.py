"""Cuts off clients that take an answer so slowly that they only hold its memory and its place.

Does not know what is sent.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, NamedTuple

import aiohttp
from aiohttp import web

logger = logging.getLogger("prfaas.deploy.gateway")

_BUFFERED_BYTES: Final = 32 << 10
"""Half of what a transport takes before its writers have to wait; heads come on top."""


class ClientPatience(NamedTuple):
    """A client must take `min_bytes_per_s`, on average over `stall_s`, while bytes wait for it. It
    is never left without a byte of its stream for longer than `keep_alive_s`; 0: it may be.
    """

    stall_s: float
    min_bytes_per_s: float
    keep_alive_s: float = 0.0


async def send_whole(
    request: web.Request, response: web.StreamResponse, patience: ClientPatience
) -> None:
    """Send a response that has been made and not been sent yet. A client that is gone, or is cut
    off, is no error.
    """
    if response.prepared or not isinstance(response, web.Response):
        return
    transport, num_bytes = request.transport, response.content_length or 0
    waiting_bytes = 0 if transport is None else transport.get_write_buffer_size()
    watch: SlowClientWatch | None = None
    # Less than this is buffered whatever the client does, so nobody waits for it.
    if waiting_bytes + num_bytes > _BUFFERED_BYTES:
        watch = SlowClientWatch(request, patience)
        watch.given(num_bytes)
    try:
        await response.prepare(request)
        await response.write_eof()
    except (aiohttp.ClientError, OSError) as error:
        logger.info("a client did not take its answer: %s", str(error) or type(error).__name__)
    finally:
        if watch is not None:
            watch.stop()


class SlowClientWatch:
    """Watches one answer from its making until `stop`.

    It has one timer instead of a timeout for each of thousands of writes, and notices a client
    after one to two times `stall_s`; the connection's end cancels the handler. What the kernel
    buffers counts as taken: that is bounded, and a client that lives from it runs out of it.
    """

    def __init__(self, request: web.Request, patience: ClientPatience) -> None:
        self._request = request
        self._patience = patience
        self._given_bytes = 0
        self._seen_bytes = 0
        self._was_waiting = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(patience.stall_s, self._look)

    def given(self, nbytes: int) -> None:
        """So many more bytes are for the client."""
        self._given_bytes += nbytes

    def stop(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _look(self) -> None:
        transport, patience = self._request.transport, self._patience
        if transport is None:
            return
        taken_bytes = self._given_bytes - transport.get_write_buffer_size()
        new_bytes, self._seen_bytes = taken_bytes - self._seen_bytes, taken_bytes
        # Bytes that wait at both ends of the time: the client, not the engine, is the slow one.
        is_waiting = transport.get_write_buffer_size() > 0
        was_waiting, self._was_waiting = self._was_waiting, is_waiting
        if is_waiting and was_waiting and new_bytes < patience.stall_s * patience.min_bytes_per_s:
            logger.info("cut off a client that read %d bytes in %g s", new_bytes, patience.stall_s)
            transport.abort()
            return
        self._timer = self._loop.call_later(patience.stall_s, self._look)
