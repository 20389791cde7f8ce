"""Cached prefixes kept where they are needed: moved before a prefill, copied when many want them.

Joins the two that do it, `CacheMoves` and `Rebalancer`, to the life of a gateway and its requests.
Decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry

from deploy.gateway.cache.cached import CachedPrompt
from deploy.gateway.cache.caches import RegionCaches
from deploy.gateway.cache.moves import CacheMoves, MoveMetrics
from deploy.gateway.cache.rebalancing import Rebalancer, node_loads
from deploy.gateway.serving.background import Background
from scheduler.reports import ClusterReport


class CacheUpkeep:
    """Of one gateway. `start` it on the loop that serves requests; `close` it before `caches`."""

    def __init__(
        self,
        caches: RegionCaches,
        background: Background,
        registry: CollectorRegistry,
        reports: Callable[[], Iterable[ClusterReport | None]],
    ) -> None:
        """`reports` gives the latest report of every cluster."""
        self._moves = CacheMoves(
            lambda: caches.targets, caches.open_control, background, MoveMetrics(registry)
        )
        self._rebalancer = Rebalancer(self._moves, caches.directory, lambda: node_loads(reports()))

    def start(self) -> None:
        """Copy hot prefixes from now on."""
        self._rebalancer.start()

    def looked_up(self, cached: CachedPrompt) -> None:
        """A request with this prompt was routed."""
        self._rebalancer.routed(cached)

    async def before_prefill(self, cached: CachedPrompt, target: str) -> str | None:
        """Bring a longer prefix to where the route's target computes, if that pays: the node agent
        that the job should go to then. Never raises but when cancelled.
        """
        return await self._moves.before_prefill(cached, target)

    def prefilled(self, target: str, num_tokens: int, prefill_s: float) -> None:
        """That many uncached tokens took that long to compute."""
        self._moves.prefilled(target, num_tokens, prefill_s)

    async def close(self) -> None:
        """End what is under way. Idempotent."""
        await self._rebalancer.close()
        await self._moves.close()
