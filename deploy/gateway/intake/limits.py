"""How many requests the gateway holds at a time, and how much memory their bodies may take.

A body is charged as its bytes arrive, whatever its headers announce: what was only announced takes
no memory, and what was not announced takes as much. A body that goes beyond a limit is given up at
that byte, and its memory goes back at once.

Counts what is in flight; a request too many is told when to come back, and once the gateway drains
none is let in. Does not know what requests ask for, nor who sent them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from deploy.gateway.config import GatewayConfig
from deploy.gateway.errors import JSON_TYPE, ApiError
from deploy.gateway.intake.turnstile import Turnstile

SMALL_BODY_BYTES: Final = 64 << 10
"""An order to the gateway itself is far shorter. No more than a connection buffers anyway."""


@dataclass(slots=True)
class Held:
    """A request that was let in. `nbytes` of its body are charged; `is_served` once an engine was
    given it: only then the time it is held says when places fall free.
    """

    body: bytes = b""
    nbytes: int = 0
    is_served: bool = False


class Limits:
    """Of one gateway: what requests hold together, and whether another one may come in."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._turnstile = Turnstile(config.retry_after_s, config.scheduling.admission.max_retry_s)
        self._num_in_flight = 0
        self._num_body_bytes = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_in_flight(self) -> int:
        """Requests being served right now."""
        return self._num_in_flight

    @property
    def num_body_bytes(self) -> int:
        """What the bodies of requests in flight take, those still arriving included."""
        return self._num_body_bytes

    @property
    def is_draining(self) -> bool:
        """Whether no more requests are let in."""
        return self._is_draining

    def stop_accepting(self) -> None:
        """Let none in from now on; those in flight go on."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Until nothing is in flight."""
        await self._idle.wait()

    def check_accepting(self) -> None:
        """Raises `ApiError` 503 once the gateway drains."""
        if self._is_draining:
            raise ApiError(503, "shutting_down", "The gateway is shutting down.", retry_after_s=5)

    @asynccontextmanager
    async def received(self, request: web.Request) -> AsyncIterator[Held]:
        """A request with its whole body; both count towards the limits meanwhile.

        Raises `ApiError`: 415, 413 or 429 by its headers, 400, 408, 413 or 429 while it arrives.
        """
        self._let_in(request)
        held, started_s = Held(), time.monotonic()
        self._num_in_flight += 1
        self._idle.clear()
        try:
            held.body = await self._read(request, self._config.max_body_bytes, held)
            yield held
        finally:
            if held.is_served:
                self._turnstile.ended(time.monotonic() - started_s)
            self._num_body_bytes -= held.nbytes
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._idle.set()

    async def read_small(self, request: web.Request) -> bytes:
        """A body of at most `SMALL_BODY_BYTES`, counted nowhere. `ApiError` 400, 408 or 413."""
        return await self._read(request, SMALL_BODY_BYTES, None)

    async def _read(self, request: web.Request, max_bytes: int, held: Held | None) -> bytes:
        try:
            if request.content.is_eof():
                # All of it is here already: the usual case, and timers cost more than reading.
                return await self._read_all(request, max_bytes, held)
            async with asyncio.timeout(self._config.timeouts.body_s):
                return await self._read_all(request, max_bytes, held)
        except TimeoutError:
            message = f"The body did not arrive within {self._config.timeouts.body_s:g} s."
            raise ApiError(408, "body_timeout", message) from None
        except (web.RequestPayloadError, ValueError) as error:
            raise ApiError(400, "unreadable_body", f"The body cannot be read: {error}") from error

    async def _read_all(self, request: web.Request, max_bytes: int, held: Held | None) -> bytes:
        body = bytearray()
        while chunk := await request.content.readany():
            if len(body) + len(chunk) > max_bytes:
                raise _too_large(max_bytes, "max_body_bytes" if held is not None else "")
            if held is not None:
                self._charge(held, len(chunk))
            # One buffer and not a list of chunks: a list of tiny ones takes many times their bytes.
            body += chunk
        return bytes(body)

    def _charge(self, held: Held, nbytes: int) -> None:
        """Count bytes that have arrived. Raises `ApiError` 429 when all bodies take too much."""
        held.nbytes += nbytes
        self._num_body_bytes += nbytes
        self._check_memory(0)

    def _let_in(self, request: web.Request) -> None:
        """By what its headers say. Raises `ApiError`."""
        self.check_accepting()
        if request.content_type != JSON_TYPE:
            raise ApiError(415, "unsupported_media_type", f"Send the body as {JSON_TYPE}.")
        nbytes = request.content_length or 0
        if nbytes > self._config.max_body_bytes:
            raise _too_large(self._config.max_body_bytes, "max_body_bytes")
        if self._num_in_flight >= self._config.max_in_flight:
            message = (
                f"{self._num_in_flight} requests are being served, which is the limit here "
                "(max_in_flight)."
            )
            raise self._turned_away(message, 1 / self._num_in_flight)
        self._check_memory(nbytes)

    def _check_memory(self, nbytes: int) -> None:
        """Whether `nbytes` more may be buffered. Raises `ApiError` 429."""
        limit = self._config.max_buffered_bytes
        too_many_bytes = self._num_body_bytes + nbytes - limit
        if too_many_bytes <= 0:
            return
        message = (
            f"The bodies of the requests being served take all the memory set apart for them, "
            f"{limit} bytes (max_buffered_bytes)."
        )
        raise self._turned_away(message, too_many_bytes / self._num_body_bytes)

    def _turned_away(self, message: str, share: float) -> ApiError:
        retry_after_s = self._turnstile.turned_away(share, time.monotonic())
        message += f" Send it again after {retry_after_s} s."
        return ApiError(429, "too_many_requests", message, retry_after_s=retry_after_s)


def _too_large(max_bytes: int, setting: str) -> ApiError:
    named = f" ({setting})" if setting else ""
    message = f"The body is longer than {max_bytes} bytes, the limit here{named}. Send less."
    return ApiError(413, "body_too_large", message)
