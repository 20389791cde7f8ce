"""How many requests the gateway holds at a time, and how long their bodies may be.

Counts what is in flight; a request too many is told when to come back, and once the gateway drains
none is let in. Does not know what requests ask for, nor who sent them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from deploy.gateway.config import GatewayConfig
from deploy.gateway.errors import JSON_TYPE, ApiError
from deploy.gateway.turnstile import Turnstile


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
    async def received(self, request: web.Request) -> AsyncIterator[bytes]:
        """The body of a request, which counts towards the limits meanwhile. Raises `ApiError`."""
        self._let_in(request)
        nbytes, started_s = request.content_length or 0, time.monotonic()
        self._count(+1, nbytes)
        try:
            body = await self.read_body(request)
            self._num_body_bytes += len(body) - nbytes
            nbytes = len(body)
            yield body
        finally:
            self._turnstile.ended(time.monotonic() - started_s)
            self._count(-1, -nbytes)

    async def read_body(self, request: web.Request) -> bytes:
        """A body, counted nowhere. Raises `ApiError` 400, 408 or 413."""
        try:
            if request.content.is_eof():
                # All of it is here already: the usual case, and timers cost more than reading.
                return await request.read()
            async with asyncio.timeout(self._config.timeouts.body_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except TimeoutError:
            raise ApiError(408, "body_timeout", "The body did not arrive in time.") from None
        except (web.RequestPayloadError, ValueError) as error:
            raise ApiError(400, "unreadable_body", f"The body cannot be read: {error}") from error

    def _let_in(self, request: web.Request) -> None:
        """By what its headers say. Raises `ApiError`."""
        self.check_accepting()
        if request.content_type != JSON_TYPE:
            raise ApiError(415, "unsupported_media_type", f"Send the body as {JSON_TYPE}.")
        nbytes = request.content_length or 0
        if nbytes > self._config.max_body_bytes:
            raise self._too_large()
        self._check_room(nbytes)

    def _check_room(self, nbytes: int) -> None:
        too_many_bytes = self._num_body_bytes + nbytes - self._config.max_buffered_bytes
        if self._num_in_flight >= self._config.max_in_flight:
            message = f"{self._num_in_flight} requests are being served, which is the limit here."
            share = 1 / self._num_in_flight
        elif too_many_bytes > 0:
            message = "The bodies of the requests being served take all the memory set apart."
            share = too_many_bytes / self._num_body_bytes
        else:
            return
        retry_after_s = self._turnstile.turned_away(share, time.monotonic())
        raise ApiError(429, "too_many_requests", message, retry_after_s=retry_after_s)

    def _count(self, num_requests: int, nbytes: int) -> None:
        self._num_in_flight += num_requests
        self._num_body_bytes += nbytes
        if self._num_in_flight:
            self._idle.clear()
        else:
            self._idle.set()

    def _too_large(self) -> ApiError:
        limit = self._config.max_body_bytes
        return ApiError(413, "body_too_large", f"The body is longer than {limit} bytes.")
