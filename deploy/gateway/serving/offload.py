"""The life of one request whose KVCache moves: landing, prefill leg, decode leg.

    reserve a landing -> start the prefill leg -> wait until the KVCache has landed -> post the
    decode request -> its first bytes are the answer

The decode request is not posted earlier, because an engine that holds a request which waits for
its landing keeps stepping: that takes a core from whoever prefills or transfers on the same host.
The wait ends with the first of these:

- The landing is whole, or the prefill leg says so. What becomes of the leg later does not matter.
- The prefill leg fails, or the landing does and the leg has `result_grace_s` to say why. The
  landing is given back, and the request goes to another prefill cluster or, without its KVCache,
  to the decode engine, which computes the prompt itself.
- Nobody can say how the landing is doing. The decode request is posted at once: the engine takes
  what has landed, waits for what will, and computes the prompt itself when the landing is gone.
  Only then the leg is watched until the answer begins, and its failure gives the landing back.
- `engine_silence_s` is over.

`close` gives back whatever is still held: it cancels the prefill leg and releases the landing (one
that an engine took over stays the engine's).

Does not choose routes and never touches the client's connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from deploy.gateway.cache.cached import CachedPrompt
from deploy.gateway.errors import EngineTimeout
from deploy.gateway.intake.inbound import with_kv_transfer_params
from deploy.gateway.proxy.engine import EngineAnswer
from deploy.gateway.proxy.usage import Correction
from deploy.gateway.serving.exchange import Exchange
from deploy.gateway.serving.services import Services
from kvmanager.hashing import token_digest
from kvmanager.token_ids import TokenIds
from local_pd.errors import NoRoom, PdError
from local_pd.messages import DecodeSlot, LandingReport
from prfaas.engines.errors import PrefillFailed
from prfaas.jobs import PrefillJob, PrefillResult
from scheduler.routing.decision import HAND_OFF, Decision, Reason, RequestShape, fall_back
from scheduler.routing.prediction import Prediction
from scheduler.routing.short_term import RouteDecision
from transport.rpc import RpcError

logger = logging.getLogger("prfaas.deploy.gateway")

_Leg: TypeAlias = asyncio.Task[PrefillResult | PrefillFailed]


class NotOffloaded(Exception):
    """No landing could be had; `reason` names the obstacle."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PrefillLost(Exception):
    """The prefill leg failed early enough to try another prefill cluster."""

    def __init__(self, target: str, error: PrefillFailed) -> None:
        super().__init__(f"{target}: {error}")
        self.target = target


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """A prompt's token ids, its shape, and what is `cached` of it: that is left out of transfers,
    and says which nodes to prefer.
    """

    token_ids: TokenIds
    shape: RequestShape
    cached: CachedPrompt


class Offload:
    """One try to serve `exchange` with moved KVCache, on the route `decision`.

    `open` once, then `close` exactly once, whatever `open` did.
    """

    def __init__(
        self,
        services: Services,
        exchange: Exchange,
        decision: RouteDecision,
        prompt: CountedPrompt,
    ) -> None:
        self._services = services
        self._exchange = exchange
        self.decision: Decision = decision
        self._routed = decision
        self._shape = prompt.shape
        # The decode engine recomputes the last token and samples from it.
        self._prefix = prompt.token_ids[:-1]
        self._cached = prompt.cached
        self._slot: DecodeSlot | None = None
        self._is_released = False
        self._leg: _Leg | None = None
        exchange.hold()

    async def open(self, try_elsewhere: Callable[[], bool]) -> EngineAnswer:
        """The decode engine's answer, once it has begun.

        When the prefill leg fails first and `try_elsewhere()` holds, `PrefillLost` is raised;
        otherwise the decode engine is left to prefill by itself and `decision` changes to say so.
        Raises `NotOffloaded`, `EngineLost`, `EngineTimeout`.
        """
        moved_to = await self._bring_cache()
        slot = await self._reserve()
        leg = self._leg = self._begin(slot, moved_to)
        landing = await self._await_landing(slot, leg)
        if landing.state == "failed":
            self._lost(slot, await self._verdict(leg, landing), try_elsewhere)
            decoding = self._decode(slot, self._exchange.inbound.body)
            return await self._computed_there(slot, decoding)
        decoding = self._decode(
            slot, with_kv_transfer_params(self._exchange.inbound.body, slot.kv_transfer_params)
        )
        if landing.state == "landed":
            answer = await decoding
        else:
            answer = await self._decode_beside(decoding, slot, leg, try_elsewhere)
        answer.correction = Correction(len(self._prefix), partial(self._cached_where_computed, leg))
        return answer

    def close(self, *, is_answered: bool) -> None:
        """Give everything back, in the background: callers may be in the middle of a cancellation.

        With `is_answered` the decode engine's answer has begun, so that nothing is needed any more;
        the prefill leg then gets a moment to report its numbers, since the engine may have taken
        the landing before the leg heard that it was complete. The answer itself ends later.
        """
        if self._slot is not None and not is_answered:
            self._services.feedback.over(self._slot.instance)
        self._services.background.spawn(
            self._give_back(is_answered=is_answered), f"settle {self._exchange.request_id}"
        )

    async def _cached_where_computed(self, leg: _Leg) -> int | None:
        """What the prefill leg's engine found cached; None when the decode engine was left to
        compute the prompt. The KVCache is here before the leg's end is heard of, so wait for that.

        0 when the leg does not say in time: clients are not told of a hit that nobody reported.
        """
        if self.decision is not self._routed:
            return None
        await asyncio.wait((leg,), timeout=self._services.timeouts.result_grace_s)
        result = leg.result() if leg.done() and not leg.cancelled() else None
        return result.cached_tokens if isinstance(result, PrefillResult) else 0

    async def _bring_cache(self) -> str | None:
        """Move a longer cached prefix to the prefill cluster, where that may be and pays: the node
        agent that it went to. Never raises but when cancelled.
        """
        services = self._services
        if services.upkeep is None:
            return None
        if not services.scheduler.moves_caches(self._routed):
            return None
        return await services.upkeep.before_prefill(self._cached, self._routed.target)

    async def _await_landing(self, slot: DecodeSlot, leg: _Leg) -> LandingReport:
        """How the landing ended, or what the leg's end says about it; "unknown" leaves it open.

        Raises `EngineTimeout`.
        """
        started_s, timeouts = self._exchange.elapsed_s(), self._services.timeouts
        asking = self._services.background.spawn(
            self._landing_ended(slot), f"landing of {self._exchange.request_id}"
        )
        try:
            await asyncio.wait(
                (asking, leg),
                timeout=timeouts.engine_silence_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            asking.cancel()
            self._exchange.record.landing_wait_s = self._exchange.elapsed_s() - started_s
        landing = asking.result() if asking.done() else None
        if leg.done() and (landing is None or landing.state != "landed"):
            return _landing_by(leg.result())
        if landing is not None:
            return landing
        raise EngineTimeout(slot.instance, f"nothing landed in {timeouts.engine_silence_s:g} s")

    async def _landing_ended(self, slot: DecodeSlot) -> LandingReport:
        while True:
            report = await self._services.pd.await_landing(slot, self._services.timeouts.cluster_s)
            if report.state != "open":
                return report

    async def _verdict(self, leg: _Leg, landing: LandingReport) -> PrefillFailed:
        """Why nothing will land: in the leg's words if they come soon; it is over either way."""
        await asyncio.wait((leg,), timeout=self._services.timeouts.result_grace_s)
        if leg.done() and isinstance(result := leg.result(), PrefillFailed):
            return result
        leg.cancel()
        return self._prefill_failed(
            self.decision.target, PrefillFailed("transfer_failed", f"landing {landing.error}")
        )

    def _lost(
        self, slot: DecodeSlot, error: PrefillFailed, try_elsewhere: Callable[[], bool]
    ) -> None:
        """Give the landing back and fall back; raises `PrefillLost` to go elsewhere instead."""
        if self.decision.target != HAND_OFF and try_elsewhere():
            raise PrefillLost(self.decision.target, error)
        self.decision = fall_back(self.decision, Reason.PREFILL_FAILED)
        self._exchange.decided(self.decision)
        self._services.background.spawn(
            self._release(slot, f"prefill failed: {error}"),
            f"release {self._exchange.request_id}",
        )

    async def _decode(self, slot: DecodeSlot, body: bytes) -> EngineAnswer:
        return await self._services.door.open(
            slot.instance, slot.engine_url, self._exchange.path, body, self._exchange.headers
        )

    async def _decode_beside(
        self,
        decoding: Coroutine[Any, Any, EngineAnswer],
        slot: DecodeSlot,
        leg: _Leg,
        try_elsewhere: Callable[[], bool],
    ) -> EngineAnswer:
        """The answer of `decoding`; if `leg` fails before it begins, the landing is given back."""
        opening = self._services.background.spawn(
            decoding, f"decode leg {self._exchange.request_id}"
        )
        try:
            await asyncio.wait((opening, leg), return_when=asyncio.FIRST_COMPLETED)
            if not opening.done() and isinstance(result := leg.result(), PrefillFailed):
                self._lost(slot, result, try_elsewhere)
                return await self._computed_there(slot, opening)
            return await opening
        except BaseException:
            _abandon(opening)
            raise

    async def _computed_there(
        self, slot: DecodeSlot, decoding: Awaitable[EngineAnswer]
    ) -> EngineAnswer:
        """The answer of a decode engine that computes the prompt itself. Until it begins, the
        prompt counts as work ahead of others at that engine.
        """
        feedback = self._services.feedback
        begun_s = self._services.scheduler.clock()
        key = feedback.direct_begun(slot.instance, self._shape)
        try:
            answer = await decoding
        finally:
            feedback.direct_over(key)
        if answer.is_stream and answer.status == 200:
            feedback.direct_answered(slot.instance, begun_s)
        return answer

    def _begin(self, slot: DecodeSlot, moved_to: str | None) -> _Leg:
        """Start the prefill leg; what is predicted for others counts on it until it is over."""
        feedback, landing = self._services.feedback, slot.landing
        self._exchange.transfer_ids.append(landing.transfer_id)
        feedback.leg_begun(
            self._exchange.inbound.model,
            landing,
            self._shape,
            self._routed.target,
            self._routed.predicted or Prediction(),
            priority=self._exchange.inbound.priority,
        )
        leg = self._services.background.spawn(
            self._prefill(slot, moved_to), f"prefill leg {self._exchange.request_id}"
        )
        leg.add_done_callback(lambda _: feedback.leg_over(landing))
        return leg

    async def _reserve(self) -> DecodeSlot:
        started_s = self._exchange.elapsed_s()
        try:
            async with asyncio.timeout(self._services.timeouts.cluster_s):
                slot = self._slot = await self._services.pd.reserve(
                    num_tokens=len(self._prefix),
                    token_digest=token_digest(self._prefix).hex(),
                    request_id=self._exchange.request_id,
                    model=self._exchange.inbound.model,
                    block_keys=self._cached.block_keys,
                    prefer_nodes=self._cached.landing_nodes(),
                )
        except (TimeoutError, PdError, RpcError, OSError) as error:
            reason = Reason.NO_LANDING_ROOM if isinstance(error, NoRoom) else Reason.RESERVE_FAILED
            logger.info("%s: no landing: %s", self._exchange.request_id, error)
            raise NotOffloaded(reason, str(error) or "no answer in time") from error
        self._exchange.record.parts.reserve_s = self._exchange.elapsed_s() - started_s
        self._exchange.was_full = self._services.feedback.given(slot.instance)
        saved_bytes = self._cached.kv_bytes(slot.landing.cached_tokens)
        self._exchange.record.reserved(slot, saved_bytes)
        return slot

    async def _prefill(
        self, slot: DecodeSlot, moved_to: str | None
    ) -> PrefillResult | PrefillFailed:
        """Run the prefill leg, best at the node agent that a prefix was `moved_to`; failures are
        results, since the decode leg outlives them.
        """
        target = self.decision.target
        cached_tokens = self._cached.computing_tokens(target)
        if moved_to is not None:
            cached_tokens[moved_to] = self._cached.longest_tokens
        job = PrefillJob(
            request_id=self._exchange.request_id,
            prompt_token_ids=self._prefix,
            landing=slot.landing,
            cache_salt=self._exchange.inbound.cache_salt,
            priority=self._exchange.inbound.priority,
            traceparent=self._exchange.headers["traceparent"],
            model=self._exchange.inbound.model,
            cached_tokens=cached_tokens,
        )
        try:
            if target == HAND_OFF:
                result = await self._services.pd.prefill_locally(job)
            else:
                result = await self._services.prefill_clusters[target].submit(job)
        except PrefillFailed as error:
            return self._prefill_failed(target, error)
        except (PdError, RpcError, OSError) as error:
            return self._prefill_failed(target, PrefillFailed("unreachable", str(error)))
        except Exception as error:
            logger.exception("%s: the prefill leg broke", self._exchange.request_id)
            return self._prefill_failed(target, PrefillFailed("engine_failed", repr(error)))
        self._exchange.record.prefilled(result)
        model, num_tokens = self._exchange.inbound.model, len(self._prefix)
        self._services.feedback.prefilled(model, target, num_tokens, result)
        if (upkeep := self._services.upkeep) is not None:
            upkeep.prefilled(target, num_tokens - result.cached_tokens, result.prefill_s)
        saved_bytes = self._cached.kv_bytes(slot.landing.cached_tokens)
        self._services.metrics.transferred(target, result.nbytes, saved_bytes)
        return result

    def _prefill_failed(self, target: str, error: PrefillFailed) -> PrefillFailed:
        logger.warning("%s: prefill at %s: %s", self._exchange.request_id, target, error)
        self._exchange.record.prefill_error = str(error)
        self._services.metrics.prefill_failed(target, error.code)
        return error

    async def _give_back(self, *, is_answered: bool) -> None:
        timeouts, leg = self._services.timeouts, self._leg
        try:
            if leg is not None:
                if is_answered and not leg.done():
                    await asyncio.wait((leg,), timeout=timeouts.result_grace_s)
                leg.cancel()
                await asyncio.wait((leg,), timeout=timeouts.cluster_s)
            if self._slot is not None:
                await self._release(self._slot, "answered" if is_answered else "given up")
        finally:
            self._exchange.let_go()

    async def _release(self, slot: DecodeSlot, reason: str) -> None:
        """Release the landing, once; the lease does it if this fails."""
        if self._is_released:
            return
        self._is_released = True
        try:
            async with asyncio.timeout(self._services.timeouts.cluster_s):
                await self._services.pd.release(slot, reason)
        except TimeoutError as error:
            logger.warning("%s: landing not released: %s", self._exchange.request_id, error)


def _landing_by(result: PrefillResult | PrefillFailed) -> LandingReport:
    """What the end of the prefill leg says about its landing."""
    if isinstance(result, PrefillFailed):
        return LandingReport(state="failed", error=str(result))
    return LandingReport(state="landed")


def _abandon(opening: asyncio.Task[EngineAnswer]) -> None:
    """Close what `opening` has opened or may still open."""
    if not opening.done():
        opening.cancel()
    elif not opening.cancelled() and opening.exception() is None:
        opening.result().close()
