"""Plans a request: its prompt counted and looked up where its KVCache may move, and its route.

Counting costs a round trip to an engine and looking up one to the directory, so that neither is
done for a prompt which is certain to stay. Knows neither the client nor how a plan is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace

from deploy.gateway.cache.cached import CachedPrompt, CachePlaces
from deploy.gateway.serving.exchange import Exchange
from deploy.gateway.serving.rendering import NotRendered, render
from deploy.gateway.serving.services import Services
from kvmanager.token_ids import TokenIds
from local_pd.messages import DirectTarget
from scheduler.routing.decision import Decision, RequestShape, one_engine
from scheduler.routing.short_term import RouteDecision


@dataclass(slots=True)
class Plan:
    """What one request has learnt while it was tried: its route, ids, and what not to try again."""

    decision: Decision
    shape: RequestShape
    token_ids: TokenIds | None = None
    cached: CachedPrompt = field(default_factory=CachedPrompt)
    tries_left: int = 1
    lost_clusters: set[str] = field(default_factory=set)
    lost_instances: set[str] = field(default_factory=set)


class Planner:
    """Of one gateway; `places` says where a model's prompts may be cached."""

    def __init__(self, services: Services, places: Callable[[str], CachePlaces]) -> None:
        self._services = services
        self._scheduler = services.scheduler
        self._places = places

    async def plan(self, exchange: Exchange) -> Plan:
        """Decide, rendering the prompt and looking it up only if its KVCache may have to move."""
        inbound = exchange.inbound
        shape = self._services.feedback.likely(inbound.model, inbound.shape, inbound.content)
        early = self._scheduler.route_early(inbound.model, shape, priority=inbound.priority)
        if early is not None:
            if inbound.token_ids is not None:
                exchange.record.num_prompt_tokens = len(inbound.token_ids)
            return Plan(early, shape, inbound.token_ids)
        try:
            token_ids = await self._token_ids(exchange)
        except NotRendered as error:
            return Plan(one_engine(shape, error.reason), shape)
        plan = await self._look_up(exchange, token_ids)
        if plan.cached.keys is not None:
            self._note_looked_up(exchange, plan)
        return plan

    async def judge(self, exchange: Exchange) -> Plan:
        """The route that a request would take now, its prompt looked up whatever its length.
        Nothing is given to an engine but the rendering. Raises `NotRendered`.
        """
        return await self._look_up(exchange, await self._token_ids(exchange))

    def route(self, exchange: Exchange, plan: Plan, excluded: Set[str]) -> RouteDecision:
        """The route of a plan as things are now, passing over the clusters in `excluded`."""
        inbound = exchange.inbound
        return self._scheduler.route(
            inbound.model, plan.shape, excluded=excluded, priority=inbound.priority
        )

    async def one_engine(
        self,
        exchange: Exchange,
        lost: Set[str] = frozenset(),
        prefer_nodes: tuple[str, ...] = (),
    ) -> DirectTarget:
        """An engine that serves the request alone, not one of the instances in `lost`."""
        # No timeout of ours: an embedded front answers at once, a remote one has a deadline.
        return await self._services.pd.direct(
            exchange.request_id,
            model=exchange.inbound.model,
            exclude=tuple(sorted(lost)),
            prefer_nodes=prefer_nodes,
        )

    async def _token_ids(self, exchange: Exchange) -> TokenIds:
        """The prompt's ids, rendered unless the client sent them. Raises `NotRendered`."""
        token_ids = exchange.inbound.token_ids
        if token_ids is None:
            started_s = exchange.elapsed_s()
            target = await self.one_engine(exchange)
            try:
                token_ids = await render(
                    self._services.door, target.instance, target.engine_url, exchange
                )
            finally:
                self._services.tell_ended(target.instance)
            inbound = exchange.inbound
            self._services.feedback.counted(inbound.model, inbound.content, len(token_ids))
            exchange.record.parts.render_s = exchange.elapsed_s() - started_s
        exchange.record.num_prompt_tokens = len(token_ids)
        return token_ids

    async def _look_up(self, exchange: Exchange, token_ids: TokenIds) -> Plan:
        """The route of a counted prompt, by what is cached of it."""
        inbound, caches = exchange.inbound, self._services.caches
        cached = CachedPrompt()
        if caches is not None:
            cached = await caches.look_up(
                self._places(inbound.model), token_ids, inbound.cache_salt or ""
            )
        shape = cached.shape(
            replace(inbound.shape, num_prompt_tokens=len(token_ids), is_exact=True)
        )
        decision = self._scheduler.route(inbound.model, shape, priority=inbound.priority)
        return Plan(decision, shape, token_ids, cached)

    def _note_looked_up(self, exchange: Exchange, plan: Plan) -> None:
        exchange.record.looked_up(plan.shape)
        exchange.metrics.looked_up(self._services.pd.name, plan.shape)
        if self._services.upkeep is not None:
            self._services.upkeep.looked_up(plan.cached)
