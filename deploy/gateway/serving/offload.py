"""The life of one request whose KVCache moves: landing, prefill leg, decode leg.

    reserve a landing -> start the prefill leg -> wait until the KVCache has landed -> post the
    decode request -> its first bytes are the answer

The decode request is not posted earlier: an engine with a request that waits for its landing keeps
stepping, and takes a core from processes that prefill or transfer on the same host. The wait ends
with the first of these:

- The landing is whole, or the prefill leg says so. What becomes of the leg later does not matter.
  A leg may say that its engine keeps the KVCache for the decode engine to read; then nothing lands.
- The prefill leg fails, or the landing does and the leg has `result_grace_s` to say why. The
  landing is given back, and the request goes to another prefill cluster or, without its KVCache,
  to the decode engine, which computes the prompt itself.
- The state of the landing cannot be found out. The decode request is posted at once: the engine
  takes what has landed, waits for the rest, and computes the prompt itself when the landing is
  gone. Only in this case the leg is watched until the answer begins, and its failure gives the
  landing back.
- `engine_silence_s` is over.

`close` gives back whatever is still held: it cancels the prefill leg and releases the landing (a
landing that an engine has taken stays the engine's).

It does not choose routes and never touches the client's connection.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias

from deploy.gateway.errors import EngineTimeout
from deploy.gateway.grants import embedding_grant, granted_job, reservation_grant
from deploy.gateway.intake.inbound import with_kv_transfer_params
from deploy.gateway.proxy.engine import EngineAnswer
from deploy.gateway.proxy.usage import Correction
from deploy.gateway.serving.exchange import Exchange, Services
from deploy.gateway.serving.local_prefill import PrefillUnavailable
from deploy.gateway.serving.planning import RequestPlan
from kvmanager.hashing import token_digest
from kvmanager.landing import ReservedLanding, consumer_params
from kvmanager.token_ids import TokenIds
from local_pd.errors import NoLandingRoom, PdError
from local_pd.messages import DecodeSlot, LandingReport, ReserveRequest
from prfaas.engines.errors import PrefillFailed
from prfaas.jobs import PrefillJob, PrefillResult
from scheduler.reports import ClusterReport
from scheduler.routing.decision import HAND_OFF, Decision, Reason, fall_back
from scheduler.routing.prediction import Prediction
from scheduler.routing.short_term import RouteDecision
from transport.rpc import RpcError

logger = logging.getLogger("prfaas.deploy.gateway")

_Leg: TypeAlias = asyncio.Task[PrefillResult | PrefillFailed]
TryElsewhere: TypeAlias = Callable[[], RouteDecision | None]
"""The route to another prefill cluster; None if there is none, or no try is left."""


class NotOffloaded(Exception):
    """There is no landing for the request; `reason` says why."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PrefillLost(Exception):
    """The prefill leg failed early enough to try another prefill cluster, by `elsewhere`."""

    def __init__(self, target: str, error: PrefillFailed, elsewhere: RouteDecision) -> None:
        super().__init__(f"{target}: {error}")
        self.target = target
        self.elsewhere = elsewhere


class Offload:
    """One try to serve `exchange` with moved KVCache, on the route `decision`.

    `open` once, then `close` exactly once, whatever `open` did.
    """

    def __init__(
        self,
        services: Services,
        exchange: Exchange,
        decision: RouteDecision,
        plan: RequestPlan,
        token_ids: TokenIds,
    ) -> None:
        self._services = services
        self._pd = services.pds[decision.pd]
        self._feedback = services.feedback
        self._timeouts = services.timeouts
        self._exchange = exchange
        self._inbound = exchange.inbound
        self.decision: Decision = decision
        self._routed = decision
        self._shape = plan.shape
        self._cached = plan.cached
        # The decode engine recomputes the last token and samples from it, so the prefill leaves
        # it out.
        self._prefix, self._last_token = token_ids[:-1], token_ids[-1:]
        self._media = plan.media
        self._slot: DecodeSlot | None = None
        self._is_released = False
        self._leg: _Leg | None = None
        exchange.hold()

    async def open(self, try_elsewhere: TryElsewhere) -> EngineAnswer:
        """The decode engine's answer, once it has begun.

        If the prefill leg fails before and `try_elsewhere()` gives a route to another prefill
        cluster, raises `PrefillLost`.
        Otherwise the decode engine prefills by itself, and `decision` changes to say so. Also
        raises `NotOffloaded`, `EngineLost`, `EngineTimeout`.
        """
        slot = await self._reserve()
        leg = self._leg = self._begin(slot)
        landing = await self._await_landing(slot, leg)
        if landing.state == "failed":
            self._lost(slot, await self._failure(leg, landing), try_elsewhere)
            return await self._compute_there(slot, self._decode(slot, self._inbound.body))
        params = self._consumer_params(slot, leg)
        decoding = self._decode(slot, with_kv_transfer_params(self._inbound.body, params))
        # A landing that is complete cannot fail any more: the leg need not be watched.
        if landing.state == "landed":
            answer = await decoding
        else:
            answer = await self._decode_beside(decoding, slot, leg, try_elsewhere)
        answer.correction = Correction(len(self._prefix), partial(self._cached_tokens, leg))
        return answer

    def close(self, answered: Callable[[], None] | None) -> None:
        """Give everything back in the background: callers may be in the middle of a cancellation.

        With `answered` the decode engine's answer has begun. The prefill leg then gets a moment to
        report its numbers: the engine may have taken the landing before the leg heard that it was
        complete. `answered` is called when they are known.
        """
        if self._slot is not None and answered is None:
            self._feedback.over(self.decision.pd, self._slot.instance)
        self._services.background.spawn(
            self._give_back(answered), f"settle {self._exchange.request_id}"
        )

    async def _reserve(self) -> DecodeSlot:
        started_s = self._exchange.elapsed_s()
        places = self._services.adapter_places(self._inbound, self._routed.pd)
        adapter = places.identity_for(self._routed.target, self._cached.keys)
        if adapter is None:
            message = f"{self._inbound.adapter} is not known to be the same adapter at both ends"
            raise NotOffloaded(Reason.ADAPTER_DIFFERS, message)
        digest = token_digest(self._prefix, self._media).hex()
        block_keys = self._cached.block_keys
        granter = self._services.granter
        request = ReserveRequest(
            num_tokens=len(self._prefix),
            token_digest=digest,
            request_id=self._exchange.request_id,
            model=self._inbound.model,
            block_keys=block_keys,
            prefer_nodes=self._cached.landing_nodes(),
            tenant=self._exchange.record.tenant,
            grant=reservation_grant(
                granter,
                len(self._prefix),
                digest,
                block_keys,
                self._services.receivers(self._pd.name),
            ),
            hands_off=self._routed.target == HAND_OFF,
            adapter=adapter,
            layouts=self._services.scheduler.layouts_at(self._routed.target, self._inbound.model),
            traceparent=self._exchange.span.traceparent,
            has_media=bool(self._media),
        )
        try:
            async with asyncio.timeout(self._timeouts.cluster_s):
                slot = self._slot = await self._pd.reserve(request)
        except (TimeoutError, PdError, RpcError, OSError) as error:
            is_full = isinstance(error, NoLandingRoom)
            reason = Reason.NO_LANDING_ROOM if is_full else Reason.RESERVE_FAILED
            logger.info("%s: no landing: %s", self._exchange.request_id, error)
            self._exchange.not_reserved(self._exchange.elapsed_s() - started_s, reason)
            raise NotOffloaded(reason, str(error) or "no answer in time") from error
        reserve_s = self._exchange.elapsed_s() - started_s
        if not _is_for(slot.landing, request):
            message = f"{self._pd.name} reserved a landing for another prompt"
            self._exchange.not_reserved(reserve_s, Reason.RESERVE_FAILED)
            raise NotOffloaded(Reason.RESERVE_FAILED, message)
        was_full = self._feedback.given(self.decision.pd, slot.instance, self._exchange.number)
        self._exchange.given(slot.instance, slot.reason, was_full=was_full)
        self._exchange.reserved(slot, reserve_s, self._saved_bytes(slot))
        return slot

    def _begin(self, slot: DecodeSlot) -> _Leg:
        """Start the prefill leg. Until it is over, predictions for other requests count on it."""
        self._feedback.leg_begun(
            self._inbound.model,
            slot,
            self._shape,
            self._routed.target,
            self._routed.predicted or Prediction(),
            priority=self._inbound.priority,
            pd=self._routed.pd,
        )
        span = self._exchange.leg_begun()
        leg = self._services.background.spawn(
            self._prefill(slot, span.traceparent), f"prefill leg {self._exchange.request_id}"
        )

        def over(leg: _Leg) -> None:
            self._feedback.leg_over(slot.landing)
            is_given_up = leg.cancelled() or leg.exception() is not None
            result = None if is_given_up else leg.result()
            self._exchange.leg_over(span, self._routed.target, result)

        leg.add_done_callback(over)
        return leg

    async def _prefill(self, slot: DecodeSlot, traceparent: str) -> PrefillResult | PrefillFailed:
        """Run the prefill leg. Returns failures, since the decode leg goes on without it."""
        target = self._routed.target
        report = self._encoding_report()
        names = [one.identifier for one in self._media]
        keys, grant = embedding_grant(self._services.granter, report, names)
        job = PrefillJob(
            request_id=self._exchange.request_id,
            prompt_token_ids=self._prefix,
            landing=slot.landing,
            cache_salt=self._inbound.cache_salt,
            tenant=self._exchange.record.tenant,
            priority=self._inbound.priority,
            traceparent=traceparent,
            model=self._inbound.model,
            adapter=self._inbound.adapter,
            cached_tokens=self._cached.computing_tokens(target),
            pd=self._routed.pd,
            last_token=self._last_token,
            num_choices=self._shape.num_choices,
            media=self._media,
            chat=self._inbound.body if self._media else b"",
            api="responses" if self._inbound.kind == "responses" else "chat",
            embedding_keys=keys,
            embedding_grant=grant,
            embedding_nodes=await self._services.embedding_nodes(report, names),
            wait_s=self._predicted_wait_s(),
        )
        try:
            if target == HAND_OFF:
                job = granted_job(self._services.granter, job)
                result = await self._pd.prefill_locally(job)
            else:
                result = await self._services.prefill_clusters[target].submit(job)
        except PrefillFailed as error:
            return self._prefill_failed(error)
        except (PdError, RpcError, OSError) as error:
            return self._prefill_failed(PrefillFailed("unreachable", str(error)))
        # The decode engine can still compute the prompt, so no error here may fail the request.
        except Exception as error:
            logger.exception("%s: the prefill leg broke", self._exchange.request_id)
            return self._prefill_failed(PrefillFailed("engine_failed", repr(error)))
        # Only the decode engine's own cluster may say from where it reads KVCache.
        if result.hand_off == "nixl" and not (target == HAND_OFF and result.is_kept_by_nixl):
            message = f"its KVCache is kept where no engine of {self._routed.pd} may read it"
            return self._prefill_failed(PrefillFailed("engine_failed", message))
        self._exchange.prefilled(target, result, self._saved_bytes(slot))
        self._feedback.prefilled(
            self._inbound.model,
            target,
            len(self._prefix),
            result,
            pd=self._routed.pd,
            shape=self._shape,
        )
        return result

    def _encoding_report(self) -> ClusterReport | None:
        """The report of the cluster that encodes the media of this prompt; None without media."""
        if not self._media:
            return None
        target, services = self._routed.target, self._services
        reports = services.reports() if target == HAND_OFF else services.prefill_reports()
        return reports.get(self._routed.pd if target == HAND_OFF else target)

    def _predicted_wait_s(self) -> float:
        """How long the prefill is expected to wait for an instance."""
        predicted = self._routed.predicted
        wait_s = 0.0 if predicted is None else predicted.queue_s
        return wait_s if math.isfinite(wait_s) else 0.0

    def _prefill_failed(self, error: PrefillFailed) -> PrefillFailed:
        target = self._routed.target
        logger.warning("%s: prefill at %s: %s", self._exchange.request_id, target, error)
        self._exchange.prefill_failed(target, error)
        return error

    async def _await_landing(self, slot: DecodeSlot, leg: _Leg) -> LandingReport:
        """How the landing ended, or what the end of the leg says about it.

        The state "unknown" leaves it open. Raises `EngineTimeout`.
        """
        started_s, silence_s = self._exchange.elapsed_s(), self._timeouts.engine_silence_s
        asking = self._services.background.begin(
            self._landing_ended(slot), f"landing of {self._exchange.request_id}"
        )
        try:
            await asyncio.wait(
                (asking, leg), timeout=silence_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            # Only the question ends: the leg goes on.
            asking.cancel()
            self._exchange.waited_for_landing(self._exchange.elapsed_s() - started_s)
        landing = asking.result() if asking.done() else None
        # The end of the leg is news of the landing, too, and may arrive first.
        if leg.done() and (landing is None or landing.state != "landed"):
            result = leg.result()
            if isinstance(result, PrefillFailed):
                return LandingReport(state="failed", error=str(result))
            return LandingReport(state="landed")
        if landing is not None:
            return landing
        raise EngineTimeout(slot.instance, f"nothing landed in {silence_s:g} s")

    async def _landing_ended(self, slot: DecodeSlot) -> LandingReport:
        while True:
            # One question waits for at most this long, so that a front that has died is noticed.
            report = await self._pd.await_landing(slot, self._timeouts.cluster_s)
            if report.state != "open":
                return report

    async def _failure(self, leg: _Leg, landing: LandingReport) -> PrefillFailed:
        """Why nothing will land: the leg's reason if it comes soon, else the landing's."""
        await asyncio.wait((leg,), timeout=self._timeouts.result_grace_s)
        if leg.done() and isinstance(result := leg.result(), PrefillFailed):
            return result
        leg.cancel()
        return self._prefill_failed(PrefillFailed("transfer_failed", f"landing {landing.error}"))

    def _lost(self, slot: DecodeSlot, error: PrefillFailed, try_elsewhere: TryElsewhere) -> None:
        """Give the landing back and fall back; raises `PrefillLost` to go elsewhere instead."""
        # Prefill instances of the same cluster are no other place, so the decode engine computes.
        # Other clusters would refuse the same media, and the client is to hear why from an engine.
        if self._routed.target != HAND_OFF and not (self._media and error.code == "rejected"):
            if (elsewhere := try_elsewhere()) is not None:
                raise PrefillLost(self._routed.target, error, elsewhere)
            if self._services.refuses_local_prefill:
                raise PrefillUnavailable(Reason.PREFILL_FAILED)
        self.decision = fall_back(self.decision, Reason.PREFILL_FAILED)
        self._exchange.decided(self.decision)
        self._services.background.spawn(
            self._release(slot, f"prefill failed: {error}"),
            f"release {self._exchange.request_id}",
        )

    def _consumer_params(self, slot: DecodeSlot, leg: _Leg) -> dict[str, Any]:
        """The parameters with which the decode engine loads the KVCache: from the landing, or from
        an engine of the same cluster, which keeps it (`_prefill` has checked that).
        """
        result = leg.result() if leg.done() else None
        if not isinstance(result, PrefillResult) or result.hand_off != "nixl":
            return consumer_params(
                slot.landing.transfer_id,
                adapter=slot.landing.adapter,
                # vLLM makes a request of its own of each choice.
                num_requests=self._shape.num_choices,
            )
        # Nothing will land, so the memory is for others at once.
        self._services.background.spawn(
            self._release(slot, "handed over by nixl"), f"release {self._exchange.request_id}"
        )
        return result.kv_transfer_params

    async def _decode(self, slot: DecodeSlot, body: bytes) -> EngineAnswer:
        return await self._services.engines.open(
            slot.instance,
            slot.engine_url,
            self._exchange.path,
            body,
            self._exchange.decoding(),
            self._services.expected(self._exchange),
        )

    async def _decode_beside(
        self,
        decoding: Coroutine[Any, Any, EngineAnswer],
        slot: DecodeSlot,
        leg: _Leg,
        try_elsewhere: TryElsewhere,
    ) -> EngineAnswer:
        """The answer of `decoding`; if `leg` fails before it begins, the landing is given back."""
        opening = self._services.background.begin(
            decoding, f"decode leg {self._exchange.request_id}"
        )
        try:
            await asyncio.wait((opening, leg), return_when=asyncio.FIRST_COMPLETED)
            # Once the answer has begun, the KVCache was there and a late failure means nothing.
            if not opening.done() and isinstance(result := leg.result(), PrefillFailed):
                self._lost(slot, result, try_elsewhere)
                return await self._compute_there(slot, opening)
            return await opening
        except BaseException:
            # Nobody will read this answer, so its connection must not stay open.
            if not opening.done():
                opening.cancel()
            elif not opening.cancelled() and opening.exception() is None:
                opening.result().close()
            raise

    async def _compute_there(
        self, slot: DecodeSlot, decoding: Awaitable[EngineAnswer]
    ) -> EngineAnswer:
        """The answer of a decode engine that computes the prompt itself.

        Until it begins, the prompt counts as work ahead of others at that engine.
        """
        begun_s = self._services.scheduler.clock()
        key = self._feedback.direct_begun(self.decision.pd, slot.instance, self._shape)
        try:
            answer = await decoding
        finally:
            self._feedback.direct_over(key)
        if answer.is_stream and answer.status == 200:
            self._feedback.direct_answered(self.decision.pd, slot.instance, begun_s)
        return answer

    async def _cached_tokens(self, leg: _Leg) -> int | None:
        """How many tokens the prefill leg's engine found cached; None if the decode engine had to
        compute the prompt. 0 if the leg does not say in time: clients are not told of a hit without
        a report.
        """
        if self.decision is not self._routed:
            return None
        # The KVCache lands before the end of the leg is reported.
        await asyncio.wait((leg,), timeout=self._timeouts.result_grace_s)
        result = leg.result() if leg.done() and not leg.cancelled() else None
        return result.cached_tokens if isinstance(result, PrefillResult) else 0

    async def _give_back(self, answered: Callable[[], None] | None) -> None:
        leg = self._leg
        try:
            if leg is not None:
                # The leg's numbers of an answered request are worth a moment; a given up request
                # has none.
                if answered is not None and not leg.done():
                    await asyncio.wait((leg,), timeout=self._timeouts.result_grace_s)
                leg.cancel()
                await asyncio.wait((leg,), timeout=self._timeouts.cluster_s)
            if self._slot is not None:
                await self._release(self._slot, "given up" if answered is None else "answered")
            if answered is not None:
                answered()
                self._feedback.measured(self._inbound.model, self._exchange.record)
        finally:
            self._exchange.release()

    async def _release(self, slot: DecodeSlot, reason: str) -> None:
        """Release the landing once. If this fails, its lease releases it."""
        # Set before the await: `_lost` and `_give_back` may both come here.
        if self._is_released:
            return
        self._is_released = True
        try:
            async with asyncio.timeout(self._timeouts.cluster_s):
                times = await self._pd.release(slot, reason)
        except (TimeoutError, PdError, RpcError, OSError) as error:
            logger.warning("%s: landing not released: %s", self._exchange.request_id, error)
        else:
            self._exchange.loaded(times)

    def _saved_bytes(self, slot: DecodeSlot) -> int:
        """The bytes that are not sent because the landing has them already."""
        return self._cached.kv_bytes(slot.landing.cached_tokens)


def _is_for(landing: ReservedLanding, asked: ReserveRequest) -> bool:
    """Whether a front has reserved what it was asked for."""
    same = landing.num_tokens == asked.num_tokens and landing.token_digest == asked.token_digest
    return same and landing.adapter == asked.adapter
