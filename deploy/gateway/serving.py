"""Serves one request: decide, open an answer, try once more if that fails, relay it, note it down.

Before the first byte has gone to the client one more try is made elsewhere; after it, a failure
ends the connection. Does not know authentication, limits or how a landing is filled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import aiohttp
from aiohttp import web

from deploy.gateway.cached import CachedPrompt, CachePlaces
from deploy.gateway.config import TimeoutConfig
from deploy.gateway.errors import (
    JSON_TYPE,
    ApiError,
    EngineLost,
    EngineTimeout,
    api_error_for,
    is_openai_error,
)
from deploy.gateway.exchange import Exchange
from deploy.gateway.offload import NotOffloaded, Offload, PrefillLost, Services
from deploy.gateway.proxy.engine import EngineAnswer
from deploy.gateway.proxy.stream import End, forwarded_headers, relay_stream
from deploy.gateway.records import Outcome, RequestRecord
from deploy.gateway.rendering import NotRendered, render
from local_pd.messages import DirectTarget
from scheduler.routing import (
    Decision,
    Reason,
    RegionView,
    RequestShape,
    decide,
    decide_early,
    fall_back,
    one_engine,
)

logger = logging.getLogger("prfaas.deploy.gateway")

_WORTH_A_SECOND_TRY: Final = frozenset({500, 502, 503, 504})
_OUTCOME_OF_END: Final[dict[End, Outcome]] = {
    "whole": "ok",
    "engine_lost": "engine_lost",
    "client_gone": "client_gone",
}


@dataclass(slots=True)
class Plan:
    """What one request has learnt while it was tried: its route, ids, and what not to try again."""

    decision: Decision
    shape: RequestShape
    view: RegionView
    token_ids: list[int] | None = None
    cached: CachedPrompt = field(default_factory=CachedPrompt)
    tries_left: int = 1
    lost_clusters: set[str] = field(default_factory=set)
    lost_instances: set[str] = field(default_factory=set)

    def next_cluster(self) -> Decision | None:
        """The route to another prefill cluster, if a try is left and there is one."""
        if self.tries_left <= 0:
            return None
        decision = decide(
            self.shape, self.view, excluded=self.lost_clusters | {self.decision.target}
        )
        return decision if decision.route == "prefill_cluster" else None


class Serving:
    """Serves parsed requests with `services`; `view` gives the region as a model sees it, `places`
    where its prompts may be cached.
    """

    def __init__(
        self,
        services: Services,
        view: Callable[[str], RegionView],
        places: Callable[[str], CachePlaces],
    ) -> None:
        self._services = services
        self._timeouts: TimeoutConfig = services.timeouts
        self._view = view
        self._places = places

    async def serve(self, exchange: Exchange, request: web.Request) -> web.StreamResponse:
        """Answer `request`. Failures are answers too; only cancellation is raised."""
        record = exchange.record
        answer: EngineAnswer | None = None
        try:
            answer = await self._open(exchange)
            record.status = answer.status
            record.decode_instance = answer.instance
            record.first_byte(exchange.elapsed_s(), is_stream=answer.is_stream)
            headers = _response_headers(exchange)
            if not answer.is_stream:
                record.outcome = "ok" if answer.status == 200 else "engine_error"
                record.answer_bytes = len(answer.begun)
                return _whole_response(answer, exchange, headers)
            return await self._relay(exchange, request, answer, headers)
        except asyncio.CancelledError:
            record.outcome = "client_gone"
            raise
        except Exception as error:
            return self._failed(exchange, error)
        finally:
            if answer is not None:
                answer.close()
            record.total_s = exchange.elapsed_s()
            exchange.metrics.ended(record)
            exchange.let_go()
            _log(exchange)

    async def judge(self, exchange: Exchange) -> Plan:
        """The route that a request would take now, its prompt looked up whatever its length.
        Nothing is given to an engine but the rendering. Raises `NotRendered`.
        """
        return await self._look_up(exchange, await self._token_ids(exchange))

    async def _relay(
        self,
        exchange: Exchange,
        request: web.Request,
        answer: EngineAnswer,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            status=answer.status, headers=forwarded_headers(answer.headers) | headers
        )
        record = exchange.record
        try:
            await response.prepare(request)
        except (aiohttp.ClientError, OSError) as error:
            record.outcome, record.error = "client_gone", str(error)
            return response
        try:
            end = await relay_stream(
                answer, request, response, client_stall_s=self._timeouts.client_stall_s
            )
        except Exception as error:
            # The answer has begun: another one must not follow it on this connection.
            logger.exception("%s: relaying failed", exchange.request_id)
            record.outcome, record.error = "failed", repr(error)
            if request.transport is not None:
                request.transport.abort()
            return response
        record.outcome = _OUTCOME_OF_END[end.end]
        record.answer_bytes, record.error = end.nbytes, end.error
        return response

    def _failed(self, exchange: Exchange, error: Exception) -> web.Response:
        answer = api_error_for(error)
        if answer.status == 500:
            logger.error("%s failed", exchange.request_id, exc_info=error)
        exchange.record.outcome = "failed"
        exchange.record.status = answer.status
        exchange.record.error = str(error) or type(error).__name__
        return web.Response(
            status=answer.status,
            body=answer.body(),
            headers={
                "Content-Type": JSON_TYPE,
                **answer.headers,
                **_response_headers(exchange),
            },
        )

    async def _open(self, exchange: Exchange) -> EngineAnswer:
        """An answer that has begun, after at most one more try than the first.

        Raises what ended the last try. Cancelling gives everything back.
        """
        plan = await self._plan(exchange)
        while True:
            exchange.decided(plan.decision)
            try:
                return await self._try(exchange, plan)
            except NotOffloaded as error:
                # Not a second try: nothing has been given to an engine yet.
                plan.decision = fall_back(plan.decision, error.reason)
            except PrefillLost as error:
                plan.lost_clusters.add(error.target)
                plan.decision = decide(plan.shape, plan.view, excluded=plan.lost_clusters)
                self._count_retry(exchange, plan, Reason.PREFILL_FAILED)
            except EngineTimeout:
                raise
            except EngineLost as error:
                if plan.tries_left <= 0:
                    raise
                logger.warning("%s: trying elsewhere: %s", exchange.request_id, error)
                plan.lost_instances.add(error.instance)
                plan.decision = fall_back(plan.decision, Reason.DECODE_FAILED)
                self._count_retry(exchange, plan, Reason.DECODE_FAILED)

    async def _try(self, exchange: Exchange, plan: Plan) -> EngineAnswer:
        if not plan.decision.needs_landing or plan.token_ids is None:
            return _first_answer(await self._open_direct(exchange, plan), plan)
        offload = Offload(self._services, exchange, plan.decision, plan.token_ids, plan.cached)
        is_answered = False
        try:
            answer = await offload.open(lambda: plan.next_cluster() is not None)
            answer = _first_answer(answer, plan)
            is_answered = True
            return answer
        finally:
            offload.close(is_answered=is_answered)

    async def _open_direct(self, exchange: Exchange, plan: Plan) -> EngineAnswer:
        target = await self._one_engine(exchange, plan.lost_instances, plan.cached)
        exchange.record.decode_instance = target.instance
        return await self._services.door.open(
            target.instance,
            target.engine_url,
            exchange.path,
            exchange.inbound.body,
            exchange.headers,
        )

    async def _one_engine(
        self, exchange: Exchange, lost: set[str], cached: CachedPrompt
    ) -> DirectTarget:
        # No timeout of ours: an embedded front answers at once, a remote one has a deadline.
        return await self._services.pd.direct(
            exchange.request_id,
            model=exchange.inbound.model,
            exclude=tuple(sorted(lost)),
            prefer_nodes=cached.direct_nodes(),
        )

    async def _plan(self, exchange: Exchange) -> Plan:
        """Decide, rendering the prompt and looking it up only if its KVCache may have to move."""
        inbound = exchange.inbound
        view = self._view(inbound.model)
        early = decide_early(inbound.shape, view)
        if early is not None and not early.needs_landing:
            if inbound.token_ids is not None:
                exchange.record.num_prompt_tokens = len(inbound.token_ids)
            return Plan(early, inbound.shape, view, inbound.token_ids)
        try:
            token_ids = await self._token_ids(exchange)
        except NotRendered as error:
            return Plan(one_engine(inbound.shape, error.reason), inbound.shape, view)
        plan = await self._look_up(exchange, token_ids)
        if plan.cached.keys is not None:
            exchange.record.looked_up(plan.shape)
            exchange.metrics.looked_up(self._services.pd.name, plan.shape)
            if self._services.upkeep is not None:
                self._services.upkeep.looked_up(plan.cached)
        return plan

    async def _token_ids(self, exchange: Exchange) -> list[int]:
        """The prompt's ids, rendered unless the client sent them. Raises `NotRendered`."""
        token_ids = exchange.inbound.token_ids
        if token_ids is None:
            started_s = exchange.elapsed_s()
            target = await self._one_engine(exchange, set(), CachedPrompt())
            token_ids = await render(
                self._services.door, target.instance, target.engine_url, exchange
            )
            exchange.record.parts.render_s = exchange.elapsed_s() - started_s
        exchange.record.num_prompt_tokens = len(token_ids)
        return token_ids

    async def _look_up(self, exchange: Exchange, token_ids: list[int]) -> Plan:
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
        # Reports may have changed meanwhile.
        view = self._view(inbound.model)
        return Plan(decide(shape, view), shape, view, token_ids, cached)

    def _count_retry(self, exchange: Exchange, plan: Plan, reason: Reason) -> None:
        plan.tries_left -= 1
        exchange.record.num_retries += 1
        exchange.metrics.retried(reason.value)


def _first_answer(answer: EngineAnswer, plan: Plan) -> EngineAnswer:
    """`answer`, unless it is a server error and a try is left: the engine may be dying."""
    if answer.status in _WORTH_A_SECOND_TRY and plan.tries_left > 0:
        answer.close()
        raise EngineLost(answer.instance, f"answered with HTTP {answer.status}")
    return answer


def _whole_response(
    answer: EngineAnswer, exchange: Exchange, headers: dict[str, str]
) -> web.Response:
    """The engine's body as it came; what is not an OpenAI error object becomes one."""
    body = answer.begun
    passed = forwarded_headers(answer.headers)
    if answer.status >= 300 and not is_openai_error(body):
        text = body[:500].decode("utf-8", "replace")
        is_client_error = 400 <= answer.status < 500 and answer.status not in (401, 403)
        status = answer.status if is_client_error or answer.status >= 500 else 502
        error = ApiError(status, "engine_error", f"The engine answered {answer.status}: {text}")
        exchange.record.status = status
        return web.Response(
            status=status, body=error.body(), headers={"Content-Type": JSON_TYPE, **headers}
        )
    return web.Response(status=answer.status, body=body, headers=passed | headers)


def _response_headers(exchange: Exchange) -> dict[str, str]:
    record = exchange.record
    headers = {"x-request-id": record.request_id}
    if record.route:
        numbers = "".join(f"; {key}={value}" for key, value in record.numbers.items())
        headers["x-prfaas-route"] = record.route
        headers["x-prfaas-reason"] = record.reason + numbers
    if record.local_cached_tokens is not None:
        headers["x-prfaas-cached-tokens"] = _cached_tokens(record)
    if record.transfer_bytes is not None:
        headers["x-prfaas-transfer-bytes"] = str(record.transfer_bytes)
    if record.ttft_s is not None:
        parts = record.parts.known().items()
        headers["x-prfaas-ttft"] = ", ".join(f"{name}={value:.6f}" for name, value in parts)
    return headers


def _cached_tokens(record: RequestRecord) -> str:
    """Of the prefill clusters the one that was chosen counts, or else the best."""
    by_cluster = record.prefill_cached_tokens
    numbers = {
        "local": record.local_cached_tokens,
        "prefill": by_cluster.get(record.target, max(by_cluster.values(), default=0)),
        "landing": record.landing_cached_tokens,
    }
    return ", ".join(f"{side}={num_tokens}" for side, num_tokens in numbers.items())


def _log(exchange: Exchange) -> None:
    record = exchange.record
    level = logging.INFO if record.outcome in ("ok", "client_gone") else logging.WARNING
    if logger.isEnabledFor(level):
        logger.log(
            level,
            "%s %s route=%s target=%s reason=%s status=%d outcome=%s ttft_s=%s total_s=%.3f %s",
            record.request_id,
            record.endpoint,
            record.route,
            record.target,
            record.reason,
            record.status,
            record.outcome,
            None if record.ttft_s is None else f"{record.ttft_s:.3f}",
            record.total_s or 0.0,
            record.error,
        )
