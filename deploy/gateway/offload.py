"""The life of one request whose KVCache moves: landing, prefill leg, decode leg.

    reserve a landing -> start the prefill leg and the decode request at once -> the decode engine
    waits for the landing by itself -> its first bytes are the answer

If the prefill leg fails, the landing is given back; that makes the decode engine compute the prompt
itself, so the decode request goes on. `close` gives back whatever is still held: it cancels the
prefill leg and releases the landing (one that an engine took over stays the engine's).

Does not choose routes and never touches the client's connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.gateway.background import Background
from deploy.gateway.config import TimeoutConfig
from deploy.gateway.exchange import Exchange
from deploy.gateway.inbound import with_kv_transfer_params
from deploy.gateway.metrics import GatewayMetrics
from deploy.gateway.proxy.engine import EngineAnswer, EngineDoor
from kvmanager.engines.errors import PrefillFailed
from kvmanager.engines.jobs import PrefillJob, PrefillResult
from kvmanager.hashing import token_digest
from kvmanager.rpc import RpcError
from local_pd.cluster import PdCluster
from local_pd.errors import NoRoom, PdError
from local_pd.messages import DecodeSlot
from prfaas.cluster import PrefillCluster
from scheduler.routing import HAND_OFF, Decision, Reason, fall_back

logger = logging.getLogger("prfaas.deploy.gateway")


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
class Services:
    """What every request needs and none owns."""

    pd: PdCluster
    prefill_clusters: dict[str, PrefillCluster]
    door: EngineDoor
    metrics: GatewayMetrics
    background: Background
    timeouts: TimeoutConfig


class Offload:
    """One try to serve `exchange` with moved KVCache, on the route `decision`.

    `open` once, then `close` exactly once, whatever `open` did.
    """

    def __init__(
        self,
        services: Services,
        exchange: Exchange,
        decision: Decision,
        prompt_token_ids: Sequence[int],
    ) -> None:
        self._services = services
        self._exchange = exchange
        self.decision = decision
        # The decode engine recomputes the last token and samples from it.
        self._prefix = prompt_token_ids[:-1]
        self._slot: DecodeSlot | None = None
        self._is_released = False
        self._leg: asyncio.Task[PrefillResult | PrefillFailed] | None = None
        exchange.hold()

    async def open(self, try_elsewhere: Callable[[], bool]) -> EngineAnswer:
        """The decode engine's answer, once it has begun.

        When the prefill leg fails first and `try_elsewhere()` holds, `PrefillLost` is raised;
        otherwise the decode engine is left to prefill by itself and `decision` changes to say so.
        Raises `NotOffloaded`, `EngineLost`.
        """
        slot = await self._reserve()
        self._leg = self._services.background.spawn(
            self._prefill(slot), f"prefill leg {self._exchange.request_id}"
        )
        opening = self._services.background.spawn(
            self._services.door.open(
                slot.instance,
                slot.engine_url,
                self._exchange.path,
                with_kv_transfer_params(self._exchange.inbound.body, slot.kv_transfer_params),
                self._exchange.headers,
            ),
            f"decode leg {self._exchange.request_id}",
        )
        try:
            await asyncio.wait((opening, self._leg), return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                self._leg_ended(slot, self._leg.result(), try_elsewhere)
            return await opening
        except BaseException:
            _abandon(opening)
            raise

    def close(self, *, is_answered: bool) -> None:
        """Give everything back, in the background: callers may be in the middle of a cancellation.

        With `is_answered` the decode engine's answer has begun, so that nothing is needed any more;
        the prefill leg then gets a moment to report its numbers, since the engine may have taken
        the landing before the leg heard that it was complete.
        """
        self._services.background.spawn(
            self._give_back(is_answered=is_answered), f"settle {self._exchange.request_id}"
        )

    def _leg_ended(
        self,
        slot: DecodeSlot,
        result: PrefillResult | PrefillFailed,
        try_elsewhere: Callable[[], bool],
    ) -> None:
        if not isinstance(result, PrefillFailed):
            return
        if self.decision.target != HAND_OFF and try_elsewhere():
            raise PrefillLost(self.decision.target, result)
        self.decision = fall_back(self.decision, Reason.PREFILL_FAILED)
        self._exchange.decided(self.decision)
        self._services.background.spawn(
            self._release(slot, f"prefill failed: {result}"),
            f"release {self._exchange.request_id}",
        )

    async def _reserve(self) -> DecodeSlot:
        started_s = self._exchange.elapsed_s()
        try:
            async with asyncio.timeout(self._services.timeouts.cluster_s):
                slot = self._slot = await self._services.pd.reserve(
                    num_tokens=len(self._prefix),
                    token_digest=token_digest(self._prefix).hex(),
                    request_id=self._exchange.request_id,
                    model=self._exchange.inbound.model,
                )
        except (TimeoutError, PdError, RpcError, OSError) as error:
            reason = Reason.NO_LANDING_ROOM if isinstance(error, NoRoom) else Reason.RESERVE_FAILED
            logger.info("%s: no landing: %s", self._exchange.request_id, error)
            raise NotOffloaded(reason, str(error) or "no answer in time") from error
        self._exchange.record.parts.reserve_s = self._exchange.elapsed_s() - started_s
        self._exchange.record.decode_instance = slot.instance
        return slot

    async def _prefill(self, slot: DecodeSlot) -> PrefillResult | PrefillFailed:
        """Run the prefill leg; failures are results, since the decode leg outlives them."""
        job = PrefillJob(
            request_id=self._exchange.request_id,
            prompt_token_ids=self._prefix,
            landing=slot.landing,
            cache_salt=self._exchange.inbound.cache_salt,
            priority=self._exchange.inbound.priority,
            traceparent=self._exchange.headers["traceparent"],
            model=self._exchange.inbound.model,
        )
        target = self.decision.target
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
        self._services.metrics.transferred(target, result.nbytes)
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


def _abandon(opening: asyncio.Task[EngineAnswer]) -> None:
    """Close what `opening` has opened or may still open."""
    if not opening.done():
        opening.cancel()
    elif not opening.cancelled() and opening.exception() is None:
        opening.result().close()
