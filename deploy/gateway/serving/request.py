"""Serves one request: plan, admit, open an answer, relay it, note how it ended.

Until the first byte has gone to the client one more try is made elsewhere. After it, a failure ends
the connection. This file does not know authentication, limits, how a route is chosen or how a
landing is filled.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Set
from dataclasses import replace
from functools import partial
from typing import Final

from aiohttp import web

from deploy.gateway.errors import (
    JSON_TYPE,
    ApiError,
    EngineLost,
    EngineTimeout,
    api_error_for,
    in_shape,
    refused_image,
)
from deploy.gateway.proxy.client_stream import STREAM_HEADERS, ClientGone, ClientStream
from deploy.gateway.proxy.engine import EngineAnswer
from deploy.gateway.proxy.sse import EventGate
from deploy.gateway.proxy.stream import TokenPace, forwarded_headers, relay_stream
from deploy.gateway.proxy.usage import in_answer, usage_part
from deploy.gateway.scheduling.admission import AdmittedRequest
from deploy.gateway.scheduling.feedback import Usage, usage_of
from deploy.gateway.serving.exchange import Exchange, Services
from deploy.gateway.serving.local_prefill import PrefillUnavailable, check_prefill
from deploy.gateway.serving.media import encode_media
from deploy.gateway.serving.offload import NotOffloaded, Offload, PrefillLost
from deploy.gateway.serving.planning import (
    RequestPlan,
    check_tenant,
    direct_target,
    note_travel,
    plan_request,
)
from deploy.gateway.serving.record_views import log_record, response_headers
from deploy.gateway.serving.records import Outcome
from deploy.gateway.serving.spilling import LostPds, spill_reason
from local_pd.errors import NoInstance, PdError
from scheduler.live.learning.prompt_length import BYTES_PER_TOKEN
from scheduler.routing.decision import Decision, Reason, fall_back
from scheduler.routing.short_term import RouteDecision

logger = logging.getLogger("prfaas.deploy.gateway")

# Codes with which an engine, or a server in front of it, says that it cannot answer now.
_WORTH_A_SECOND_TRY: Final = frozenset({500, 502, 503, 504})
_MOST_PER_EVENT: Final = 64.0
"""One model's engines put fewer tokens than this into an event of usual length."""


class Serving:
    """Serves `exchange`. Call `answer` once."""

    def __init__(self, services: Services, exchange: Exchange) -> None:
        self._services = services
        self._feedback = services.feedback
        self._exchange = exchange
        self._inbound = exchange.inbound
        self._tries_left = 1
        self._lost_clusters: set[str] = set()
        self._lost_pds = LostPds(services, exchange)
        self._lost_instances: set[tuple[str, str]] = set()  # PD cluster, instance
        self._end_admission: AdmittedRequest | None = None
        self._num_prompt_tokens = 0
        self._is_landed = False
        """Whether the answer began on a route with a landing: all of its waits are known only when
        that is given back.
        """

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer `request`. Failures are answers too; only cancellation is raised."""
        exchange = self._exchange
        answer: EngineAnswer | None = None
        client = ClientStream(request, exchange.endpoint.stream, self._services.patience)
        try:
            if self._inbound.is_stream:
                client.keep_alive(partial(response_headers, exchange.record))
            answer = await self._open()
            exchange.answered(answer)
            if not self._is_landed:
                self._teach_first_token()
            if answer.is_stream:
                return await self._relay(answer, client)
            return await client.whole(await self._whole_response(answer))
        except asyncio.CancelledError as cut:
            # Who cancels because of the client gives no reason.
            self._left(answer, client, str(cut.args[0]) if cut.args else "")
            raise
        except Exception as error:
            return await client.whole(self._failed(error))
        finally:
            client.stop()
            self._over(answer)

    async def _open(self) -> EngineAnswer:
        """An answer that has begun, after at most one more try than the first.

        Raises what ended the last try. Cancelling gives everything back.
        """
        # Fetching media costs memory and rendering an engine's time: who may not be served gets
        # none.
        self._end_admission = check_tenant(self._services, self._exchange)
        await self._exchange.fetch_media(self._services.media)
        self._inbound = self._exchange.inbound
        plan = await plan_request(self._services, self._exchange)
        await self._admit(plan)
        # What is no prompt to generate from is no demand either.
        is_refused = not self._exchange.endpoint.is_routed
        try:
            answer = await self._open_planned(plan)
            is_refused = is_refused or 400 <= answer.status < 500
            return answer
        finally:
            # What engines refuse is no demand: who asks for it must not shape thresholds and
            # roles. A request that was given up, or whose engine died, is demand all the same.
            if not is_refused:
                home = self._exchange.record.home
                self._feedback.arrived(self._inbound.model, plan.shape, home=home)

    async def _admit(self, plan: RequestPlan) -> None:
        """Let the request in, or raise `ApiError` 429."""
        decision, model = plan.decision, self._inbound.model
        predicted = decision.predicted if isinstance(decision, RouteDecision) else None
        num_tokens = self._num_prompt_tokens = plan.shape.num_prompt_tokens
        admission, tenant = self._services.admission, self._exchange.record.tenant
        work_tokens = self._inbound.work_tokens(num_tokens)
        reserved = await admission.reserve(tenant, work_tokens)
        self._end_admission = admission.admit(
            tenant,
            model,
            num_tokens,
            predicted,
            pd=decision.pd,
            work_tokens=work_tokens,
            checked=self._end_admission,
            reserved=reserved,
        )
        self._exchange.number = self._end_admission.number

    async def _open_planned(self, plan: RequestPlan) -> EngineAnswer:
        decision, was_remote = plan.decision, False
        while True:
            if self._services.refuses_local_prefill:
                check_prefill(decision, was_remote=was_remote)
                was_remote = was_remote or decision.route == "prefill_cluster"
            self._exchange.decided(decision, spill_reason(self._exchange, decision))
            if plan.shape.media is not None:
                note_travel(self._services, self._exchange, decision, plan.shape)
            try:
                return await self._try(decision, plan)
            except NotOffloaded as error:
                # This is no second try: no engine has been given anything yet.
                decision = fall_back(decision, error.reason)
            except PrefillLost as error:
                self._lost_clusters.add(error.target)
                decision = error.elsewhere
                self._retried(Reason.PREFILL_FAILED)
            except PdError as error:
                decision = self._lost_pds.elsewhere(decision, error, lambda: self._route(plan))
            except EngineTimeout:
                # The client has waited so long that no time is left for another try.
                raise
            except EngineLost as error:
                if self._tries_left <= 0:
                    raise
                logger.warning("trying elsewhere: %s", error)
                self._lost_instances.add((decision.pd, error.instance))
                decision = fall_back(decision, Reason.DECODE_FAILED)
                self._retried(Reason.DECODE_FAILED)

    async def _try(self, decision: Decision, plan: RequestPlan) -> EngineAnswer:
        planned = plan
        plan = self._at(plan, decision.pd)
        # Until an instance has the request, others are predicted and let in beside it.
        self._services.scheduler.taken(
            self._exchange.number,
            self._inbound.model,
            plan.shape,
            decision,
            priority=self._inbound.priority,
        )
        # Here and not before: a second route may move another prefix.
        plan = await self._with_moved_cache(decision, plan)
        if plan.token_ids is None or not (
            isinstance(decision, RouteDecision) and decision.needs_landing
        ):
            return await self._open_direct(plan, decision.pd)
        offload = Offload(self._services, self._exchange, decision, plan, plan.token_ids)
        is_answered = False
        try:
            answer = await offload.open(lambda: self._another_cluster(decision, planned))
            self._check_first_answer(answer)
            is_answered = self._is_landed = True
            return answer
        finally:
            offload.close(self._teach_first_token if is_answered else None)

    def _at(self, plan: RequestPlan, pd: str) -> RequestPlan:
        """The plan with what is cached in the PD cluster that decodes."""
        if pd == self._exchange.record.home:
            return plan
        found = plan.at(pd)
        if plan.cached.keys is not None:
            self._exchange.record.looked_up(found.shape)
        return found

    async def _with_moved_cache(self, decision: Decision, plan: RequestPlan) -> RequestPlan:
        """The plan after the cached prefix that the route moves has come, if there is one."""
        placement = self._services.placement
        if placement is None or not isinstance(decision, RouteDecision):
            return plan
        started_s = self._exchange.elapsed_s()
        cached = await placement.moves.bring(plan.cached, decision)
        if decision.move.pays:
            self._exchange.moved_cache(self._exchange.elapsed_s() - started_s)
        if not cached.coverage:
            return plan
        return replace(plan, cached=cached, shape=cached.shape(plan.shape))

    def _another_cluster(self, failed: Decision, plan: RequestPlan) -> RouteDecision | None:
        """The route to another prefill cluster; None if there is none, or no try is left."""
        if self._tries_left <= 0:
            return None
        found = self._route(plan, {failed.target})
        return found if found.route == "prefill_cluster" else None

    async def _open_direct(self, plan: RequestPlan, pd: str) -> EngineAnswer:
        """The answer of an engine of a PD cluster that serves the request alone."""
        services, feedback, exchange = self._services, self._feedback, self._exchange
        nodes = plan.cached.direct_nodes()
        lost = {instance for cluster, instance in self._lost_instances if cluster == pd}
        target = await direct_target(services, exchange, pd, lost, nodes)
        if target.instance in lost and self._lost_pds.may_leave(pd):
            services.pds[pd].request_ended(target.instance)
            raise NoInstance(f"{pd}: the only engine left has failed this request")
        # The front counts it from now on, too, so that a report has it at most once.
        was_full = feedback.given(pd, target.instance, exchange.number)
        exchange.given(target.instance, target.reason, was_full=was_full)
        try:
            done = await encode_media(services, exchange, plan, pd, target)
        except BaseException:
            self._leave(pd, target.instance)
            raise
        # Taken before the request is sent: the engine may answer before `open` returns.
        begun_s = services.scheduler.clock()
        key = feedback.direct_begun(pd, target.instance, plan.shape)
        try:
            answer = await services.engines.open(
                target.instance,
                target.engine_url,
                exchange.path,
                self._inbound.body,
                exchange.decoding(),
                services.expected(exchange),
            )
            self._check_first_answer(answer)
        except BaseException:
            self._leave(pd, target.instance)
            raise
        finally:
            feedback.direct_over(key)
        if answer.is_stream and answer.status == 200:
            seconds = feedback.direct_answered(pd, target.instance, begun_s)
            # A prompt that was not looked up may be cached, and one at a full engine waited for a
            # slot. Neither says how long a prefill takes.
            is_looked_up = plan.cached.keys is not None or self._is_cached_nowhere()
            if is_looked_up and not exchange.was_full:
                feedback.direct_took(
                    self._inbound.model,
                    plan.shape,
                    seconds,
                    pd=pd,
                    left_tokens=done.left_tokens,
                )
        return answer

    def _check_first_answer(self, answer: EngineAnswer) -> None:
        """Raises `EngineLost` for a server error if a try is left: the engine may be dying. Raises
        `ApiError` 400 if it is the request's own fault all the same.
        """
        refused = None
        if answer.status == 500 and self._inbound.content.media:
            refused = refused_image(answer.status, answer.begun)
        if refused is not None:
            answer.close()
            raise refused
        if answer.status in _WORTH_A_SECOND_TRY and self._tries_left > 0:
            answer.close()
            raise EngineLost(answer.instance, f"answered with HTTP {answer.status}")

    def _route(self, plan: RequestPlan, excluded: Set[str] = frozenset()) -> RouteDecision:
        """The route as things are now, without the clusters that failed and those in `excluded`."""
        return self._services.scheduler.route(
            self._inbound.model,
            plan.shape,
            home=self._exchange.record.home,
            excluded=self._lost_clusters | self._lost_pds.names | excluded,
            priority=self._inbound.priority,
        )

    def _retried(self, reason: Reason) -> None:
        self._tries_left -= 1
        self._exchange.retried(reason)

    def _teach_first_token(self) -> None:
        """Compare the TTFT with its prediction, so that later predictions are better."""
        exchange = self._exchange
        record, predicted = exchange.record, exchange.predicted
        ttft_s = record.ttft_s if record.is_stream and record.status == 200 else None
        # A prompt that was not looked up may be cached, which no prediction knew.
        is_looked_up = record.local_cached_tokens is not None or self._is_cached_nowhere()
        if predicted is None or ttft_s is None or not is_looked_up:
            return
        # How long the client takes to send its body, and hosts of media to send them, does not
        # depend on the route.
        ttft_s -= (record.parts.read_s or 0.0) + (record.parts.media_s or 0.0)
        self._feedback.first_token(
            self._inbound.model,
            record.target,
            predicted,
            ttft_s,
            was_full=exchange.was_full,
            pd=record.cluster,
            has_media=self._inbound.content.has_media,
            parts=record.parts,
            prompt=(record.num_prompt_tokens or 0, int(record.numbers.get("cached_tokens", 0))),
        )
        exchange.metrics.predicted(record.model, record.route, predicted.ttft_s, ttft_s)

    def _is_cached_nowhere(self) -> bool:
        """Whether nothing of any prompt can be cached, so that a prompt that was not looked up
        teaches as much as one that was.
        """
        services, record = self._services, self._exchange.record
        if services.caches is None:
            return True
        return services.places(self._inbound.model, record.home).caches_nothing

    def _teach_length(self, usage: Usage) -> None:
        """Learn the length of a prompt that was not counted from the usage of its answer."""
        if not usage.prompt_tokens or not self._exchange.endpoint.is_routed:
            return
        self._num_prompt_tokens = usage.prompt_tokens
        if self._exchange.record.num_prompt_tokens is None:
            model, content = self._inbound.model, self._inbound.content
            self._feedback.counted(model, content, usage.prompt_tokens)

    async def _whole_response(self, answer: EngineAnswer) -> web.Response:
        """The engine's body as it came; an error that is no error object of the API becomes one."""
        # They say what is known now.
        headers = response_headers(self._exchange.record)
        if answer.correction is not None and (places := in_answer(answer.begun)):
            answer.begun = await answer.correction.apply(answer.begun, places)
        body, status = answer.begun, answer.status
        usage = usage_of(usage_part(body))
        passed = forwarded_headers(answer.headers)
        shape = self._exchange.endpoint.errors
        if status >= 300 and (told := in_shape(status, body, shape)) is not None:
            body = told
        elif status >= 300:
            # A redirect, or a 401 or 403 from an engine, is no answer for this client.
            if status < 400 or status in (401, 403):
                status = 502
            text = body[:500].decode("utf-8", "replace")
            message = f"The engine answered {answer.status}: {text}"
            body = ApiError(status, "engine_error", message).body(shape)
            passed = {"Content-Type": JSON_TYPE}
        self._exchange.record.ended(
            "ok" if answer.status == 200 else "engine_error",
            status=status,
            nbytes=len(answer.begun),
            output_tokens=usage.completion_tokens,
        )
        self._teach_length(usage)
        return web.Response(status=status, body=body, headers=passed | headers)

    async def _relay(self, answer: EngineAnswer, client: ClientStream) -> web.StreamResponse:
        """Stream the engine's answer to the client."""
        record = self._exchange.record
        # What is known now, since relaying may take long.
        headers = forwarded_headers(answer.headers) | STREAM_HEADERS | response_headers(record)
        try:
            response = await client.start(answer.status, headers)
        except ClientGone as error:
            record.ended("client_gone", error=str(error))
            return web.StreamResponse()
        try:
            pace = TokenPace(self._exchange.metrics.intervals(record), self._inbound.kind)
            end = await relay_stream(answer, client, pace)
        except Exception as error:
            # The answer has begun, so an error response must not follow it on this connection.
            logger.exception("relaying failed")
            record.ended("failed", error=repr(error))
            if client.request.transport is not None:
                client.request.transport.abort()
            return response
        usage = usage_of(end.last_data)
        if usage.completion_tokens:
            self._teach_event(answer.gate, usage.completion_tokens)
        record.ended(
            end.outcome,
            error=end.error,
            nbytes=end.nbytes,
            output_tokens=usage.completion_tokens or self._streamed_tokens(answer.gate),
        )
        self._teach_length(usage)
        return response

    def _left(self, answer: EngineAnswer | None, client: ClientStream, reason: str) -> None:
        """Note that the client has gone, or why the gateway has given it up."""
        record, gate = self._exchange.record, None if answer is None else answer.gate
        record.ended(
            "failed" if reason else "client_gone",
            error=reason,
            error_code="cut_off" if reason else "",
            nbytes=client.num_bytes,
            output_tokens=self._streamed_tokens(gate),
        )
        if reason:
            client.break_off(ApiError(503, "cut_off", reason))

    def _failed(self, error: Exception) -> web.Response:
        answer, record = api_error_for(error), self._exchange.record
        if answer.status == 500:
            logger.error("failed", exc_info=error)
        outcome: Outcome = "refused" if answer.status == 429 else "failed"
        if isinstance(error, PrefillUnavailable):
            # The route before it came to nothing, and no other one is taken.
            record.reason = error.reason.value
        record.ended(
            outcome,
            status=answer.status,
            error=str(error) or type(error).__name__,
            error_code=answer.code,
        )
        body = answer.body(self._exchange.endpoint.errors)
        headers = {"Content-Type": JSON_TYPE, **answer.headers, **response_headers(record)}
        return web.Response(status=answer.status, body=body, headers=headers)

    def _over(self, answer: EngineAnswer | None) -> None:
        """Give back what the answer held, and tell the scheduler that the request is over."""
        exchange = self._exchange
        if answer is not None:
            answer.close()
            self._leave(exchange.record.cluster, answer.instance)
        for transfer_id in exchange.transfer_ids:
            self._feedback.answer_over(transfer_id)
        if self._end_admission is not None:
            self._end_admission(self._used_tokens(answer))
        exchange.over(self._num_prompt_tokens)
        num_answers = self._inbound.num_choices * self._inbound.shape.num_prompts
        self._feedback.ended(self._inbound.model, exchange.record, num_answers)
        log_record(exchange.record)

    def _used_tokens(self, answer: EngineAnswer | None) -> int | None:
        """The work that the request was; None if nobody knows how much was computed."""
        record = self._exchange.record
        gate = None if answer is None else answer.gate
        output_tokens = record.output_tokens or self._streamed_tokens(gate)
        if output_tokens:
            return self._inbound.work_of(self._num_prompt_tokens, output_tokens)
        if record.outcome == "engine_error" and self._is_refusal(answer):
            return 0
        if record.outcome in ("engine_error", "failed"):
            return self._inbound.work_of(self._num_prompt_tokens, 0)
        return None

    def _is_refusal(self, answer: EngineAnswer | None) -> bool:
        """Whether an engine refused the request before anybody computed anything."""
        return answer is not None and 400 <= answer.status < 500 and not self._exchange.transfer_ids

    def _streamed_tokens(self, gate: EventGate | None) -> int:
        """The tokens of a stream without usage, since it was left before its end: as many in each
        event as there were before, or what the text takes if the client asked for longer events.
        """
        if gate is None:
            return 0
        # The end mark is one more event, and so is an error, which may be the end mark.
        is_told = gate.error is not None and not gate.rules.last
        num_events = gate.num_events - gate.is_done - is_told
        if self._inbound.has_long_events:
            return max(num_events, int(gate.num_bytes / BYTES_PER_TOKEN))
        per_event = self._services.tokens_per_event.get(self._inbound.model, 1.0)
        return math.ceil(max(0, num_events) * per_event)

    def _teach_event(self, gate: EventGate | None, num_tokens: int) -> None:
        """Learn how many tokens an event has where engines speculate or gather tokens."""
        if gate is None or self._inbound.has_long_events:
            return
        per_event = self._services.tokens_per_event
        # The end mark and the usage are events, too.
        found = min(max(1.0, num_tokens / max(1, gate.num_events - 2)), _MOST_PER_EVENT)
        known = per_event.get(self._inbound.model, found)
        per_event[self._inbound.model] = known + (found - known) / 8

    def _leave(self, pd: str, instance: str) -> None:
        """Tell the scheduler and the PD front that `instance` is done with the request."""
        self._feedback.over(pd, instance)
        self._services.pds[pd].request_ended(instance)
