"""Serves one request: plan, open an answer, try once more if that fails, relay it, note it down.

Before the first byte has gone to the client one more try is made elsewhere; after it, a failure
ends the connection. Does not know authentication, limits, how a route is chosen or how a landing
is filled.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import aiohttp
from aiohttp import web

from deploy.gateway.config import TimeoutConfig
from deploy.gateway.errors import (
    JSON_TYPE,
    ApiError,
    EngineLost,
    EngineTimeout,
    api_error_for,
    is_openai_error,
)
from deploy.gateway.proxy.engine import EngineAnswer
from deploy.gateway.proxy.stream import End, forwarded_headers, relay_stream
from deploy.gateway.proxy.usage import in_answer
from deploy.gateway.scheduling.feedback import Usage, usage_of
from deploy.gateway.serving.exchange import Exchange
from deploy.gateway.serving.offload import (
    CountedPrompt,
    NotOffloaded,
    Offload,
    PrefillLost,
)
from deploy.gateway.serving.planning import Plan, Planner
from deploy.gateway.serving.records import Outcome, RequestRecord
from deploy.gateway.serving.services import Services
from scheduler.routing.decision import Reason, fall_back
from scheduler.routing.short_term import RouteDecision

logger = logging.getLogger("prfaas.deploy.gateway")

_WORTH_A_SECOND_TRY: Final = frozenset({500, 502, 503, 504})
_OUTCOME_OF_END: Final[dict[End, Outcome]] = {
    "whole": "ok",
    "engine_lost": "engine_lost",
    "client_gone": "client_gone",
}


class Serving:
    """Serves the parsed requests of one gateway, as `planner` plans them."""

    def __init__(self, services: Services, planner: Planner) -> None:
        self._services = services
        self._scheduler = services.scheduler
        self._feedback = services.feedback
        self._timeouts: TimeoutConfig = services.timeouts
        self.planner = planner

    async def serve(self, exchange: Exchange, request: web.Request) -> web.StreamResponse:
        """Answer `request`. Failures are answers too; only cancellation is raised."""
        record = exchange.record
        answer: EngineAnswer | None = None
        try:
            answer = await self._open(exchange)
            record.status = answer.status
            record.decode_instance = answer.instance
            record.first_byte(exchange.elapsed_s(), is_stream=answer.is_stream)
            self._first_token(exchange)
            headers = _response_headers(exchange)
            if not answer.is_stream:
                if answer.correction is not None and (places := in_answer(answer.begun)):
                    answer.begun = await answer.correction.apply(answer.begun, places)
                record.outcome = "ok" if answer.status == 200 else "engine_error"
                record.answer_bytes = len(answer.begun)
                usage = usage_of(answer.begun)
                record.output_tokens = usage.completion_tokens
                self._prompt_counted(exchange, usage)
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
                self._feedback.over(answer.instance)
                self._services.tell_ended(answer.instance)
            for transfer_id in exchange.transfer_ids:
                self._feedback.answer_over(transfer_id)
            record.total_s = exchange.elapsed_s()
            exchange.release_admission()
            self._feedback.ended(exchange.inbound.model, record)
            exchange.metrics.ended(record)
            exchange.let_go()
            _log(exchange)

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
        usage = usage_of(end.last_data)
        # Without usage: an event is a token, and the end mark is one more.
        record.output_tokens = usage.completion_tokens or max(0, end.num_events - 1)
        self._prompt_counted(exchange, usage)
        return response

    def _failed(self, exchange: Exchange, error: Exception) -> web.Response:
        answer = api_error_for(error)
        if answer.status == 500:
            logger.error("%s failed", exchange.request_id, exc_info=error)
        exchange.record.outcome = "refused" if answer.status == 429 else "failed"
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
        plan = await self.planner.plan(exchange)
        self._admit(exchange, plan)
        is_refused = False
        try:
            answer = await self._open_planned(exchange, plan)
            is_refused = 400 <= answer.status < 500
            return answer
        finally:
            # What the engine refuses costs no prefill: it must not shape thresholds and roles. A
            # request that was given up, or whose engine died, is demand all the same.
            if not is_refused:
                self._feedback.arrived(exchange.inbound.model, plan.shape)

    async def _open_planned(self, exchange: Exchange, plan: Plan) -> EngineAnswer:
        while True:
            exchange.decided(plan.decision)
            try:
                return await self._try(exchange, plan)
            except NotOffloaded as error:
                # Not a second try: nothing has been given to an engine yet.
                plan.decision = fall_back(plan.decision, error.reason)
            except PrefillLost as error:
                plan.lost_clusters.add(error.target)
                plan.decision = self.planner.route(exchange, plan, plan.lost_clusters)
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
        decision, token_ids = plan.decision, plan.token_ids
        if token_ids is None or not (
            isinstance(decision, RouteDecision) and decision.needs_landing
        ):
            return await self._open_direct(exchange, plan)
        prompt = CountedPrompt(token_ids, plan.shape, plan.cached)
        offload = Offload(self._services, exchange, decision, prompt)
        is_answered = False
        try:
            answer = await offload.open(lambda: self._has_another_cluster(exchange, plan))
            answer = _first_answer(answer, plan)
            is_answered = True
            return answer
        finally:
            offload.close(is_answered=is_answered)

    def _has_another_cluster(self, exchange: Exchange, plan: Plan) -> bool:
        """Whether a try is left and another prefill cluster would take it."""
        if plan.tries_left <= 0:
            return False
        excluded = plan.lost_clusters | {plan.decision.target}
        return self.planner.route(exchange, plan, excluded).route == "prefill_cluster"

    def _admit(self, exchange: Exchange, plan: Plan) -> None:
        """Let the request in, or raise `ApiError` 429."""
        decision, model = plan.decision, exchange.inbound.model
        predicted = decision.predicted if isinstance(decision, RouteDecision) else None
        exchange.admitted = self._services.admission.admit(
            exchange.tenant, model, plan.shape.num_prompt_tokens, predicted
        )

    def _prompt_counted(self, exchange: Exchange, usage: Usage) -> None:
        """An answer that is over says how long its prompt was."""
        if usage.prompt_tokens and exchange.record.num_prompt_tokens is None:
            inbound = exchange.inbound
            self._feedback.counted(inbound.model, inbound.content, usage.prompt_tokens)

    def _first_token(self, exchange: Exchange) -> None:
        record, predicted = exchange.record, exchange.predicted
        ttft_s = record.ttft_s if record.is_stream and record.status == 200 else None
        # A prompt that nobody looked up may be cached, which no prediction knew.
        is_looked_up = self._services.caches is None or record.local_cached_tokens is not None
        if predicted is None or ttft_s is None or not is_looked_up:
            return
        # How long a client takes to send its body is no matter of a route.
        ttft_s -= record.parts.read_s or 0.0
        self._feedback.first_token(
            exchange.inbound.model, record.target, predicted, ttft_s, was_full=exchange.was_full
        )
        exchange.metrics.predicted(record.route, predicted.ttft_s, ttft_s)

    async def _open_direct(self, exchange: Exchange, plan: Plan) -> EngineAnswer:
        inbound, cached = exchange.inbound, plan.cached
        target = await self.planner.one_engine(exchange, plan.lost_instances, cached.direct_nodes())
        exchange.record.decode_instance = target.instance
        begun_s = self._scheduler.clock()
        key = self._feedback.direct_begun(target.instance, plan.shape)
        exchange.was_full = self._feedback.given(target.instance)
        try:
            answer = await self._services.door.open(
                target.instance,
                target.engine_url,
                exchange.path,
                exchange.inbound.body,
                exchange.headers,
            )
            answer = _first_answer(answer, plan)
        except BaseException:
            self._feedback.over(target.instance)
            self._services.tell_ended(target.instance)
            raise
        finally:
            self._feedback.direct_over(key)
        if answer.is_stream and answer.status == 200:
            seconds = self._feedback.direct_answered(target.instance, begun_s)
            is_looked_up = self._services.caches is None or cached.keys is not None
            if is_looked_up and not exchange.was_full:
                self._feedback.direct_took(inbound.model, plan.shape, seconds)
        return answer

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
