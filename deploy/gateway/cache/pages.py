"""The endpoints under /prfaas/cache: reads arguments, asks, and answers with JSON-ready values.

Authentication, limits and HTTP answers are the application's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from deploy.gateway.cache.api import (
    ORDERS,
    CacheOverview,
    Explanation,
    TopPrefixes,
    explanation,
    hot_prefixes,
    node_caches,
)
from deploy.gateway.cache.caches import Order, RegionCaches
from deploy.gateway.errors import ApiError
from deploy.gateway.serving.exchange import Exchange
from deploy.gateway.serving.planning import Planner
from deploy.gateway.serving.rendering import NotRendered
from scheduler.routing.decision import Reason

_MAX_PREFIXES = 1000


class CachePages:
    """What `caches`, if there are any, answer to operators."""

    def __init__(self, caches: RegionCaches | None) -> None:
        self._caches = caches

    async def overview(self) -> CacheOverview:
        """GET /prfaas/cache: what every node holds, and what the directory knows of it."""
        caches = self._needed()
        statuses, known = await asyncio.gather(caches.statuses(), caches.nodes())
        targets = {name: at for name, at in caches.targets.items() if name in statuses}
        return CacheOverview(node_caches(targets, statuses, known))

    async def top(self, query: Mapping[str, str]) -> TopPrefixes:
        """GET /prfaas/cache/top?limit=N&order=hits|size|recent. Raises `ApiError`."""
        caches = self._needed()
        limit, order = _limit(query), _order(query)
        listed = await caches.prefixes(limit, order)
        errors = {str(name): reply for name, reply in listed.items() if isinstance(reply, str)}
        return TopPrefixes(hot_prefixes(listed, order, limit), errors)

    async def explain(self, planner: Planner, exchange: Exchange) -> Explanation:
        """POST /prfaas/cache/explain: how the prompt would fare. Raises `ApiError`."""
        self._needed()
        try:
            judged = await planner.judge(exchange)
        except NotRendered as error:
            message = f"The prompt's tokens cannot be known ({error.reason.value})."
            status = 503 if error.reason is Reason.RENDER_UNAVAILABLE else 400
            raise ApiError(status, "not_rendered", message) from error
        return explanation(exchange.inbound.model, judged.shape, judged.cached, judged.decision)

    def _needed(self) -> RegionCaches:
        if self._caches is None:
            message = "This gateway was started without a directory of what is cached."
            raise ApiError(404, "no_cache_directory", message)
        return self._caches


def _limit(query: Mapping[str, str]) -> int:
    text = query.get("limit", "20")
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= _MAX_PREFIXES):
        message = f"limit must be a number from 1 to {_MAX_PREFIXES}."
        raise ApiError(400, "invalid_limit", message, param="limit")
    return int(text)


def _order(query: Mapping[str, str]) -> Order:
    wanted = query.get("order", "hits")
    for order in ORDERS:
        if order == wanted:
            return order
    message = f"order must be one of {', '.join(ORDERS)}."
    raise ApiError(400, "invalid_order", message, param="order")
