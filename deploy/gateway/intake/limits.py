"""How many requests the gateway serves at a time, and how much memory their bodies may take.

A body counts as its bytes arrive, whatever its headers announce. A body that goes beyond a limit is
given up at that byte, and its memory is free at once. A request beyond a limit is told when to come
back; once the gateway drains, none is let in. Bodies that take their time are bounded by tenant and
by address, and must keep up a rate, so that no client holds the places of all. This file does not
know what requests ask for.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from deploy.gateway.config import GatewayConfig
from deploy.gateway.errors import JSON_TYPE, ApiError
from transport.endpoint import network_of

SMALL_BODY_BYTES: Final = 64 << 10
"""The limit of a body that orders the gateway itself, bytes. One connection buffers as much
anyway.
"""


@dataclass(slots=True)
class AcceptedBody:
    """The body of a request that was let in. `nbytes` of it count towards the limits of all and of
    `tenant`, if it has one.

    `is_served` is set once an engine got the request. Only then the time it took says how soon
    other requests end. `client` is the address that it came from.
    """

    tenant: str = ""
    client: str = ""
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
        self._tenant_bytes: Counter[str] = Counter()
        self._uploads: Counter[str] = Counter()
        """Bodies that are arriving, by "tenant NAME" and by "address NETWORK"."""
        self.is_draining = False
        """Whether new requests are refused."""
        self._idle = asyncio.Event()
        self._idle.set()

    def use(self, config: GatewayConfig) -> None:
        """Other limits from now on. What is in flight stays and counts."""
        self._config = config

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
    async def received(self, request: web.Request, tenant: str = "") -> AsyncIterator[AcceptedBody]:
        """Read the whole body of `request`. Both count towards the limits until the context ends.

        Raises `ApiError` 413, 415, 429 or 503 by the headers, 400, 408, 413 or 429 while the body
        arrives.
        """
        # No await before the count below: requests at one moment must not pass the limit together.
        self._let_in(request)
        accepted, started_s = AcceptedBody(tenant, request.remote or ""), time.monotonic()
        self.num_in_flight += 1
        self._idle.clear()
        try:
            accepted.body = await self._read(request, self._config.max_body_bytes, accepted)
            yield accepted
        finally:
            if accepted.is_served:
                self._retry_after.ended(time.monotonic() - started_s)
            self.give_back(accepted)
            self.num_in_flight -= 1
            if not self.num_in_flight:
                self._idle.set()

    def buffer(self, accepted: AcceptedBody, nbytes: int) -> None:
        """Count bytes of it that have arrived. Raises `ApiError` 429 if all bodies, or those of the
        tenant, take too much now.
        """
        accepted.nbytes += nbytes
        self.num_body_bytes += nbytes
        self._tenant_bytes[accepted.tenant] += nbytes
        self._check_memory(0)
        if accepted.tenant:
            self._check_tenant_memory(accepted.tenant)

    def give_back(self, accepted: AcceptedBody) -> None:
        """The bytes of `accepted` do not count any more."""
        self.num_body_bytes -= accepted.nbytes
        _take(self._tenant_bytes, accepted.tenant, accepted.nbytes)
        accepted.nbytes = 0

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
            with self._upload(request, "" if accepted is None else accepted.tenant):
                return await self._read_arriving(request, max_bytes, accepted)
        except (web.RequestPayloadError, ValueError) as error:
            raise ApiError(400, "unreadable_body", f"The body cannot be read: {error}") from error

    async def _read_arriving(
        self, request: web.Request, max_bytes: int, accepted: AcceptedBody | None
    ) -> bytes:
        """As `_read_all`. Raises `ApiError` 408 when the body takes too long."""
        loop, config = asyncio.get_running_loop(), self._config
        started_s, timeouts = loop.time(), config.timeouts
        try:
            async with asyncio.timeout(self._patience_s(0)) as limit:
                return await self._read_all(
                    request,
                    max_bytes,
                    accepted,
                    lambda nbytes: limit.reschedule(started_s + self._patience_s(nbytes)),
                )
        except TimeoutError:
            message = f"The body did not arrive within {timeouts.body_s:g} s."
            if loop.time() - started_s < timeouts.body_s:
                per_s = config.min_client_bytes_per_s
                message = f"The body arrives with less than {per_s:g} bytes per second."
            raise ApiError(408, "body_timeout", message) from None

    def _patience_s(self, nbytes: int) -> float:
        """How long after its start a body may take until it has more than `nbytes`."""
        timeouts, per_s = self._config.timeouts, self._config.min_client_bytes_per_s
        return min(timeouts.body_s, timeouts.body_grace_s + nbytes / per_s)

    @contextmanager
    def _upload(self, request: web.Request, tenant: str) -> Iterator[None]:
        """Count a body that is not here yet. Raises `ApiError` 429 if its tenant or its address has
        too many of them.
        """
        config = self._config
        bounds = {f"address {network_of(request.remote)}": config.max_uploads_per_address}
        if tenant:
            bounds[f"tenant {tenant}"] = config.max_uploads_per_tenant
        for who, limit in bounds.items():
            if self._uploads[who] >= limit:
                message = f"{limit} bodies of {who} are arriving, which is the limit here."
                raise self._too_many(message, 1 / limit)
        self._uploads.update(bounds.keys())
        try:
            yield
        finally:
            for who in bounds:
                _take(self._uploads, who, 1)

    async def _read_all(
        self,
        request: web.Request,
        max_bytes: int,
        accepted: AcceptedBody | None,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> bytes:
        """The body; `on_bytes` is told how much of it has arrived."""
        body = bytearray()
        while chunk := await request.content.readany():
            if len(body) + len(chunk) > max_bytes:
                raise _too_large(max_bytes, "max_body_bytes" if accepted is not None else "")
            if accepted is not None:
                self.buffer(accepted, len(chunk))
            # Not a list of chunks: one of tiny chunks would take many times their bytes.
            body += chunk
            on_bytes(len(body))
        return bytes(body)

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
            f"The requests being served and their answers take all the memory set apart for them, "
            f"{limit} bytes (max_buffered_bytes)."
        )
        raise self._too_many(message, too_many_bytes / self.num_body_bytes)

    def _check_tenant_memory(self, tenant: str) -> None:
        """Raises `ApiError` 429 if the bodies of the tenant take more than its share."""
        config, nbytes = self._config, self._tenant_bytes[tenant]
        # One body is never too long for ever.
        limit = max(config.max_tenant_buffered_bytes, config.max_body_bytes)
        if nbytes > limit:
            message = (
                f"{tenant}'s requests and their answers take all the memory of one tenant, "
                f"{limit} bytes (max_tenant_buffered_bytes)."
            )
            raise self._too_many(message, (nbytes - limit) / nbytes)

    def _too_many(self, message: str, share: float) -> ApiError:
        retry_after_s = self._retry_after.refused(share, time.monotonic())
        message += f" Send it again after {retry_after_s} s."
        return ApiError(429, "too_many_requests", message, retry_after_s=retry_after_s)


def _take(counts: Counter[str], name: str, number: int) -> None:
    """Take `number` off a count, and forget it at nothing, so that no name stays."""
    counts[name] -= number
    if counts[name] <= 0:
        del counts[name]


def _too_large(max_bytes: int, setting: str) -> ApiError:
    named = f" ({setting})" if setting else ""
    message = f"The body is longer than {max_bytes} bytes, the limit here{named}. Send less."
    return ApiError(413, "body_too_large", message)
