"""From an HTTP request to an `Exchange`: whose it is, whether there is room for it, what it asks.

Does not know routes, nor what becomes of the exchange.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from deploy.gateway.intake.auth import KeyRing
from deploy.gateway.intake.inbound import Kind, kind_of, parsing_request
from deploy.gateway.intake.limits import Limits
from deploy.gateway.intake.models import ServedModels
from deploy.gateway.metrics import GatewayMetrics
from deploy.gateway.serving.exchange import Exchange, open_exchange
from kvmanager.token_ids import in_turns


class Intake:
    """Takes requests for completions in."""

    def __init__(
        self,
        keys: KeyRing,
        limits: Limits,
        models: ServedModels,
        metrics: GatewayMetrics,
        *,
        template_tokens: int,
    ) -> None:
        """`template_tokens`: how many a chat template may add to a prompt."""
        self._keys = keys
        self._limits = limits
        self._models = models
        self._metrics = metrics
        self._template_tokens = template_tokens

    @asynccontextmanager
    async def received(
        self, request: web.Request, kind: Kind | None = None
    ) -> AsyncIterator[Exchange]:
        """`request` as an exchange; it counts towards the limits meanwhile.

        `kind` None: as the body has it. Raises `ApiError`.
        """
        started_s = time.monotonic()
        tenant = self._keys.check(request.headers.get("Authorization"))
        async with self._limits.received(request) as held:
            kind = kind or kind_of(held.body)
            inbound = await in_turns(
                parsing_request(kind, held.body, template_tokens=self._template_tokens)
            )
            # What is learnt of a model must not depend on whether clients bother to name it.
            model = self._models.resolve(inbound.model)
            exchange = open_exchange(
                msgspec.structs.replace(inbound, model=model),
                request.headers,
                metrics=self._metrics,
                started_s=started_s,
                tenant=tenant,
            )
            try:
                yield exchange
            finally:
                held.is_served = bool(exchange.record.decode_instance)
