"""Puts the media at the addresses in a request into its body, or refuses the request.

An address is fetched once for all parts of a request, and once for requests of one tenant that
come together. What arrives counts as bytes of bodies (`Limits`), and so does the body that it
becomes part of. This file does not know how a medium is fetched, nor what becomes of the request.
"""

from __future__ import annotations

import asyncio
import logging
from binascii import b2a_base64
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from deploy.gateway.errors import ApiError
from deploy.gateway.intake.inbound import InboundRequest, with_fetched_media
from deploy.gateway.intake.limits import AcceptedBody, Limits
from deploy.gateway.intake.media_urls import MediaAddress, Medium, MediumKind
from deploy.gateway.media.config import MediaSection
from deploy.gateway.media.fetch import Fetch, Resolve
from deploy.gateway.media.metrics import MediaMetrics
from deploy.gateway.media.turns import Turns
from deploy.gateway.media.urls import Refusal, Refused
from kvmanager.token_ids import in_turns
from transport.endpoint import network_of

logger = logging.getLogger("prfaas.deploy.gateway")


@dataclass(slots=True)
class _Fetching:
    """A fetch that requests wait for, and its bytes, which count until the last has let go."""

    task: asyncio.Task[Medium]
    buffered: AcceptedBody
    num_waiting: int = 0


class MediaFetcher:
    """Fetches the media of one gateway's requests. `close` it in the end."""

    def __init__(
        self,
        config: MediaSection,
        limits: Limits,
        registry: CollectorRegistry,
        *,
        max_body_bytes: int,
        resolve: Resolve | None = None,
    ) -> None:
        self._config = config
        self._limits = limits
        self._max_body_bytes = max_body_bytes
        turns = Turns(config)
        self._fetch = Fetch(config, turns, resolve)
        self._metrics = MediaMetrics(registry, lambda: turns.num_running)
        self._fetching: dict[tuple[str, MediumKind, str], _Fetching] = {}

    async def complete(self, inbound: InboundRequest, accepted: AcceptedBody) -> InboundRequest:
        """`inbound` with its media in the body, as the settings say. Raises `ApiError` 400 that
        names the part and the reason, and 429 where there is no room.
        """
        addresses = inbound.media_addresses
        if not addresses:
            return inbound
        self._check(addresses)
        if self._config.fetch == "engine":
            return inbound
        async with AsyncExitStack() as stack:
            media = await self._all(addresses, inbound, accepted, stack)
            before = len(inbound.body)
            inbound = await in_turns(with_fetched_media(inbound, media))
            self._limits.buffer(accepted, len(inbound.body) - before)
            accepted.body = inbound.body
        return inbound

    def close(self) -> None:
        """Fetch nothing more."""
        for fetching in self._fetching.values():
            fetching.task.cancel()
        self._fetch.close()

    def _check(self, addresses: Sequence[MediaAddress]) -> None:
        """Raises `ApiError` if an address may not be fetched, as far as it says itself."""
        most = self._config.max_per_request
        for index, address in enumerate(addresses):
            try:
                if self._config.fetch == "refuse":
                    message = "addresses are not fetched here; send it as a data URI"
                    raise Refused(Refusal.FETCH, message)
                if index >= most:
                    message = f"a request may have {most} media at addresses here"
                    raise Refused(Refusal.TOO_MANY, message)
                self._fetch.check(address.url)
            except Refused as refused:
                raise self._answer(address, refused) from refused

    async def _all(
        self,
        addresses: Sequence[MediaAddress],
        inbound: InboundRequest,
        accepted: AcceptedBody,
        stack: AsyncExitStack,
    ) -> dict[MediaAddress, Medium]:
        """The media at all addresses. The first that does not come ends the wait for the others."""
        num_parts = Counter((address.kind, address.url) for address in addresses)
        first = {(address.kind, address.url): address for address in reversed(addresses)}
        room = self._max_body_bytes - len(inbound.body)
        found: dict[tuple[MediumKind, str], Medium] = {}

        async def one(key: tuple[MediumKind, str], address: MediaAddress) -> None:
            nonlocal room
            try:
                found[key] = medium = await stack.enter_async_context(
                    self._medium(address, accepted)
                )
                room -= num_parts[key] * len(medium.data)
                if room < 0:
                    message = f"with it the body is longer than {self._max_body_bytes} bytes"
                    raise Refused(Refusal.BODY_TOO_LARGE, message + ", the limit here")
            except Refused as refused:
                raise self._answer(address, refused) from refused

        try:
            async with asyncio.TaskGroup() as group:
                for key, address in first.items():
                    group.create_task(one(key, address))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return {address: found[address.kind, address.url] for address in addresses}

    @asynccontextmanager
    async def _medium(self, address: MediaAddress, accepted: AcceptedBody) -> AsyncIterator[Medium]:
        """A medium. Its bytes count until the context ends. Raises `Refused`, `ApiError`."""
        # Of one tenant only: how long a fetch takes would tell others that it is under way.
        who = accepted.tenant or network_of(accepted.client)
        key = (who, address.kind, address.url)
        fetching = self._fetching.get(key)
        if fetching is None:
            buffered = AcceptedBody(accepted.tenant, accepted.client)
            task = asyncio.create_task(self._fetched(address, who, buffered))
            fetching = self._fetching[key] = _Fetching(task, buffered)
            task.add_done_callback(lambda task: self._over(key, task))
        fetching.num_waiting += 1
        try:
            # Shielded: others may wait for it, too.
            yield await asyncio.shield(fetching.task)
        finally:
            fetching.num_waiting -= 1
            if not fetching.num_waiting:
                self._over(key, fetching.task)
                fetching.task.cancel()
                self._limits.give_back(fetching.buffered)

    def _over(self, key: tuple[str, MediumKind, str], task: asyncio.Task[Medium]) -> None:
        """Later requests fetch anew."""
        fetching = self._fetching.get(key)
        if fetching is not None and fetching.task is task:
            del self._fetching[key]
        if task.done() and not task.cancelled():
            task.exception()  # looked at, if nobody waits for it any more

    async def _fetched(self, address: MediaAddress, who: str, buffered: AcceptedBody) -> Medium:
        def arrived(nbytes: int) -> None:
            self._metrics.arrived(nbytes)
            self._limits.buffer(buffered, nbytes)

        content_type, raw = await self._fetch.get(address.url, address.kind, who, arrived)
        self._metrics.fetched()
        data = b2a_base64(raw, newline=False)
        self._limits.buffer(buffered, len(data) - len(raw))
        return Medium(content_type, data)

    def _answer(self, address: MediaAddress, refused: Refused) -> ApiError:
        self._metrics.refused(refused.reason)
        logger.info("%s is not fetched (%s)", address.place, refused.reason.value)
        message = f"{address.place}: the {address.kind} is not fetched: {refused}."
        if refused.reason is Refusal.BUSY:
            return ApiError(429, "media_busy", message, param=address.place, retry_after_s=1)
        # A name that nobody knows must look like one that leads to an internal address.
        shown = refused.reason
        if shown is Refusal.UNRESOLVED:
            shown = Refusal.ADDRESS
        return ApiError(400, f"media_{shown.value}", message, param=address.place)
