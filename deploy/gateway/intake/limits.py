"""How many requests the gateway serves at a time, and how much memory their bodies may take.

A body counts as its bytes arrive, whatever its headers announce. A body that goes beyond a limit is
given up at that byte, and its memory is free at once. A request beyond a limit is told when to come
back; once the gateway drains, none is let in. This file does not know what requests ask for or who
sent them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from deploy.gateway.config import GatewayConfig
from deploy.gateway.errors import JSON_TYPE, ApiError

SMALL_BODY_BYTES: Final = 64 << 10
"""The limit of a body that orders the gateway itself, bytes. One connection buffers as much
anyway.
"""


@dataclass(slots=True)
class AcceptedBody:
    """The body of a request that was let in. `nbytes` of it count towards the limits.

    `is_served` is set once an engine got the request. Only then the time it took says how soon
    other requests end.
    """

    body: bytes = b""
    nbytes: int = 0
    is_served: bool = False


class RetryAfter:
    """When clients that are refused for want of room may come back, in seconds.

    By Little's law requests end at a rate of (those in flight) / (the mean time that one takes).
    Clients are told to come back one after another at that rate, so that they do not all return at
    once for a single place. `min_s` and `max_s` bound the wait. Time is an argument.
    """

    GAIN = 0.05

    def __init__(self, min_s: float, max_s: float) -> None:
        if not 0 < min_s < math.inf:
            raise ValueError(f"min_s is {min_s!r}; it must be above 0")
        self._min_s = min_s
        self._max_s = max(min_s, max_s)
        self._mean_s = 0.0
        self._num_ended = 0
        self._last_s = -math.inf

    def ended(self, took_s: float) -> None:
        """Note that a request which an engine served is over."""
        self._num_ended += 1
        gain = max(self.GAIN, 1 / self._num_ended)
        self._mean_s += gain * (took_s - self._mean_s)

    def refused(self, share: float, now_s: float) -> int:
        """The whole seconds after which the client that is refused now may come back.

        `share` is the share of what is in use now that must be free again for it.
        """
        free_s = self._mean_s * share
        # Each refused client gets the next place in line; a later one comes back later.
        self._last_s = min(max(self._last_s, now_s) + free_s, now_s + self._max_s)
        return math.ceil(max(self._last_s - now_s, self._min_s))


class Limits:
    """What all requests of one gateway use together, and whether another one may come in."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._retry_after = RetryAfter(
            config.retry_after_s, config.scheduling.admission.max_retry_s
        )
        self.num_in_flight = 0
        """Requests being served right now."""
        self.num_body_bytes = 0
        """Bytes of the bodies of all requests in flight, those still arriving included."""
        self.is_draining = False
        """Whether new requests are refused."""
        self._idle = asyncio.Event()
        self._idle.set()

    def stop_accepting(self) -> None:
        """Refuse new requests from now on; those in flight go on."""
        self.is_draining = True

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def check_accepting(self) -> None:
        """Raises `ApiError` 503 once the gateway drains."""
        if self.is_draining:
            raise ApiError(503, "shutting_down", "The gateway is shutting down.", retry_after_s=5)

    @asynccontextmanager
    async def received(self, request: web.Request) -> AsyncIterator[AcceptedBody]:
        """Read the whole body of `request`. Both count towards the limits until the context ends.

        Raises `ApiError` 413, 415, 429 or 503 by the headers, 400, 408, 413 or 429 while the body
        arrives.
        """
        # No await before the count below: requests at one moment must not pass the limit together.
        self._let_in(request)
        accepted, started_s = AcceptedBody(), time.monotonic()
        self.num_in_flight += 1
        self._idle.clear()
        try:
            accepted.body = await self._read(request, self._config.max_body_bytes, accepted)
            yield accepted
        finally:
            if accepted.is_served:
                self._retry_after.ended(time.monotonic() - started_s)
            self.num_body_bytes -= accepted.nbytes
            self.num_in_flight -= 1
            if not self.num_in_flight:
                self._idle.set()

    async def read_small(self, request: web.Request) -> bytes:
        """Read a body of at most `SMALL_BODY_BYTES`, which does not count towards the limits.

        Raises `ApiError` 400, 408 or 413.
        """
        return await self._read(request, SMALL_BODY_BYTES, None)

    async def _read(
        self, request: web.Request, max_bytes: int, accepted: AcceptedBody | None
    ) -> bytes:
        try:
            if request.content.is_eof():
                # Usually the whole body is here already, and a timer costs more than reading it.
                return await self._read_all(request, max_bytes, accepted)
            async with asyncio.timeout(self._config.timeouts.body_s):
                return await self._read_all(request, max_bytes, accepted)
        except TimeoutError:
            message = f"The body did not arrive within {self._config.timeouts.body_s:g} s."
            raise ApiError(408, "body_timeout", message) from None
        except (web.RequestPayloadError, ValueError) as error:
            raise ApiError(400, "unreadable_body", f"The body cannot be read: {error}") from error

    async def _read_all(
        self, request: web.Request, max_bytes: int, accepted: AcceptedBody | None
    ) -> bytes:
        body = bytearray()
        while chunk := await request.content.readany():
            if len(body) + len(chunk) > max_bytes:
                raise _too_large(max_bytes, "max_body_bytes" if accepted is not None else "")
            if accepted is not None:
                self._charge(accepted, len(chunk))
            # Not a list of chunks: one of tiny chunks would take many times their bytes.
            body += chunk
        return bytes(body)

    def _charge(self, accepted: AcceptedBody, nbytes: int) -> None:
        """Count bytes that have arrived. Raises `ApiError` 429 if all bodies take too much now."""
        accepted.nbytes += nbytes
        self.num_body_bytes += nbytes
        self._check_memory(0)

    def _let_in(self, request: web.Request) -> None:
        """Raises `ApiError` if the headers alone say that there is no room for the request."""
        self.check_accepting()
        if request.content_type != JSON_TYPE:
            raise ApiError(415, "unsupported_media_type", f"Send the body as {JSON_TYPE}.")
        nbytes = request.content_length or 0
        if nbytes > self._config.max_body_bytes:
            raise _too_large(self._config.max_body_bytes, "max_body_bytes")
        if self.num_in_flight >= self._config.max_in_flight:
            message = (
                f"{self.num_in_flight} requests are being served, which is the limit here "
                "(max_in_flight)."
            )
            raise self._too_many(message, 1 / self.num_in_flight)
        self._check_memory(nbytes)

    def _check_memory(self, nbytes: int) -> None:
        """Raises `ApiError` 429 if `nbytes` more must not be buffered."""
        limit = self._config.max_buffered_bytes
        too_many_bytes = self.num_body_bytes + nbytes - limit
        if too_many_bytes <= 0:
            return
        message = (
            f"The bodies of the requests being served take all the memory set apart for them, "
            f"{limit} bytes (max_buffered_bytes)."
        )
        raise self._too_many(message, too_many_bytes / self.num_body_bytes)

    def _too_many(self, message: str, share: float) -> ApiError:
        retry_after_s = self._retry_after.refused(share, time.monotonic())
        message += f" Send it again after {retry_after_s} s."
        return ApiError(429, "too_many_requests", message, retry_after_s=retry_after_s)


def _too_large(max_bytes: int, setting: str) -> ApiError:
    named = f" ({setting})" if setting else ""
    message = f"The body is longer than {max_bytes} bytes, the limit here{named}. Send less."
    return ApiError(413, "body_too_large", message)
