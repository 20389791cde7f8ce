"""One prefill on one instance: open the outbox, run the engine, wait until the KVCache has landed.

It does not choose the instance, does not queue, and does not try again; it says whether another
try makes sense. If anything ends the run early, cancellation included, the runner closes the
connection of the engine's request, which aborts it, and cancels the outbox. The sender then tells
the landing, and whoever waits there for the KVCache learns at once that nothing will come.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from msgspec import structs

from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import OpenOutboxReply, TransferReport
from kvmanager.hashing import token_digest
from kvmanager.landing import producer_params
from kvmanager.token_ids import TokenIds
from kvmanager.tracing.spans import Attributes, begin
from prfaas.engines.client import EngineHttp, EnginePrefill
from prfaas.engines.errors import (
    EngineError,
    EngineRefused,
    PrefillCode,
    PrefillFailed,
)
from prfaas.engines.leases import keep_lease
from prfaas.engines.ownership import Cleanups
from prfaas.engines.service_time import Turn, Turns
from prfaas.jobs import PrefillJob, PrefillResult
from transport.rpc import RpcError

if TYPE_CHECKING:  # which needs the extra `traces`
    from kvmanager.tracing.export import Tracer

logger = logging.getLogger("prfaas.engines")

RPC_TIMEOUT_S: Final = 5.0
"""For an answer of a node agent, on top of what the call itself waits there."""
NIXL_PRODUCER: Final[dict[str, Any]] = {"do_remote_decode": True, "do_remote_prefill": False}
"""The `kv_transfer_params` with which vLLM's NixlConnector keeps a prompt's KVCache to be read."""


class AttemptFailed(PrefillFailed):
    """A try on one instance failed.

    `retryable`: another instance may succeed. `engine_lost` and `agent_lost`: the try proved that
    the engine, or the agent, is gone.
    """

    def __init__(
        self,
        code: PrefillCode,
        message: str,
        *,
        retryable: bool = False,
        engine_lost: bool = False,
        agent_lost: bool = False,
    ) -> None:
        super().__init__(code, message)
        self.retryable = retryable
        self.engine_lost = engine_lost
        self.agent_lost = agent_lost


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Time limits of one try.

    `stall_timeout_s` bounds the time after the prefill in which no byte is acknowledged.
    `verdict_grace_s`: when the transfer fails first, how long to wait whether the engine fails too.
    A dead engine often breaks its transfer first, and then the job may be tried elsewhere.
    """

    outbox_lease_s: float = 30.0
    """How long a sending agent keeps the transfer without a renewal, seconds."""
    prefill_timeout_s: float = 600.0
    await_slice_s: float = 5.0
    stall_timeout_s: float = 15.0
    verdict_grace_s: float = 0.25
    cleanup_timeout_s: float = 3.0


@dataclass(frozen=True, slots=True)
class PrefillPlace:
    """Where a try runs. `gone` is set when the engine or its agent is found to be gone."""

    instance: str
    http: EngineHttp
    agent: AgentClient
    gone: asyncio.Event
    model: str = ""


def check_job(job: PrefillJob) -> None:
    """Raise PrefillFailed("invalid") unless the landing was reserved for the prompt's tokens, and
    for an adapter if the job names one.
    """
    landing = job.landing
    if len(job.prompt_token_ids) != landing.num_tokens:
        raise PrefillFailed(
            "invalid",
            f"{len(job.prompt_token_ids)} prompt tokens for a landing of {landing.num_tokens}",
        )
    if token_digest(job.prompt_token_ids, job.media).hex() != landing.token_digest:
        raise PrefillFailed("invalid", "the landing was reserved for other tokens or media")
    if bool(job.media) != bool(job.chat):
        raise PrefillFailed("invalid", "a prompt with media needs its chat, and no other has one")
    if bool(job.adapter) != bool(landing.adapter):
        wanted = f"the adapter {job.adapter}" if job.adapter else "no adapter"
        raise PrefillFailed("invalid", f"{wanted}, but the landing was reserved for another")


class PrefillRunner:
    """Runs the tries of one front, and cleans up after those that failed."""

    def __init__(self, config: RunnerConfig | None = None, tracer: Tracer | None = None) -> None:
        self._config = config or RunnerConfig()
        self._tracer = tracer
        self._cleanups = Cleanups()
        self._turns = Turns()

    async def run(
        self,
        job: PrefillJob,
        place: PrefillPlace,
        *,
        queue_s: float = 0.0,
        attempt: int = 1,
        reason: str = "",
        by_transport: bool = False,
    ) -> PrefillResult:
        """Run the whole try. Raises AttemptFailed. Afterwards the try holds nothing.

        `queue_s`, `attempt` and `reason` (why this place) are passed on in the result. Where agent
        and landing are of one node the engine fills the landing itself, unless `by_transport`.
        """
        begun_s = time.monotonic()
        opening = asyncio.create_task(
            place.agent.open_outbox(
                job.landing,
                self._config.outbox_lease_s,
                RPC_TIMEOUT_S,
                tenant=job.tenant,
                grant=job.grant,
                by_transport=by_transport,
                instance=place.instance,
                traceparent=job.traceparent,
            )
        )
        landed = False
        try:
            grant = await self._opened(place, opening)
            started_s = time.monotonic()
            turn = self._turns.start(place.instance, started_s)
            prefill, report, landed_s = await self._fill(job, place, grant, turn)
            landed = True
        finally:
            if not landed:
                await self._cleanups.finish(self._discard(job, place, opening))
        # The news of the end may come late here, and the agent has a clock of its own.
        took_s = min(landed_s - started_s, report.opened_to_complete_s or math.inf)
        prefill_s = max(0.0, took_s - report.prefill_end_to_complete_s)
        result = PrefillResult(
            instance=place.instance,
            queue_s=queue_s,
            prefill_s=prefill_s,
            service_s=turn.service_s(started_s, prefill_s),
            open_s=started_s - begun_s,
            engine_queue_s=max(0.0, prefill_s - report.prefill_s) if report.prefill_s else None,
            progress=report.progress,
            transfer_tail_s=report.prefill_end_to_complete_s,
            transfer_s=report.first_sent_to_complete_s,
            nbytes=report.nbytes,
            sent_share_at_prefill_end=report.sent_bytes_at_prefill_end / max(1, report.nbytes),
            cached_tokens=prefill.cached_tokens,
            num_attempts=attempt,
            reason=reason,
            hand_off=report.hand_off,
        )
        self._trace(job, result, begun_s)
        return result

    async def run_nixl(
        self,
        job: PrefillJob,
        place: PrefillPlace,
        *,
        queue_s: float = 0.0,
        attempt: int = 1,
        reason: str = "",
    ) -> PrefillResult:
        """Run a prefill whose KVCache vLLM's NixlConnector keeps until the engine that decodes has
        read it, or its lease there is over. The landing of `job` is left alone. Raises
        AttemptFailed.
        """
        if not job.last_token:
            raise AttemptFailed("invalid", "NIXL prefills whole prompts; the last token is missing")
        # The engine that decodes asks for the blocks of the whole prompt.
        token_ids = TokenIds(job.prompt_token_ids.packed + job.last_token.packed)
        started_s = time.monotonic()
        turn = self._turns.start(place.instance, started_s)
        prefill = self._start_prefill(job, place, turn, token_ids, NIXL_PRODUCER)
        async with self._bounded(place, prefill):
            done = await prefill
        prefill_s = time.monotonic() - started_s
        if not done.kv_transfer_params:
            message = f"{place.instance} did not keep the KVCache; has it vLLM's NixlConnector?"
            raise AttemptFailed("engine_failed", message, retryable=True)
        return PrefillResult(
            instance=place.instance,
            queue_s=queue_s,
            prefill_s=prefill_s,
            service_s=turn.service_s(started_s, prefill_s),
            transfer_tail_s=0.0,
            nbytes=0,
            sent_share_at_prefill_end=0.0,
            cached_tokens=done.cached_tokens,
            num_attempts=attempt,
            reason=reason,
            hand_off="nixl",
            kv_transfer_params=done.kv_transfer_params,
        )

    async def close(self) -> None:
        """Wait for clean-ups under way; each is bounded by `cleanup_timeout_s`."""
        await self._cleanups.close()

    async def _opened(
        self, place: PrefillPlace, opening: asyncio.Task[OpenOutboxReply]
    ) -> OpenOutboxReply:
        # Shielded: a call cut off half-way could open the outbox after our cancel of it.
        try:
            return await asyncio.shield(opening)
        except RpcError as error:
            if error.code == "NO_ROOM":
                raise AttemptFailed("outbox_no_room", error.message, retryable=True) from error
            # The agent notices a dead engine at once, by its closed socket. The landing is still
            # untouched, and another instance can fill it.
            if error.code == "NOT_FOUND":
                raise AttemptFailed(
                    "engine_failed", error.message, retryable=True, engine_lost=True
                ) from error
            _agent_trouble("cannot open an outbox", error)

    async def _fill(
        self, job: PrefillJob, place: PrefillPlace, grant: OpenOutboxReply, turn: Turn
    ) -> tuple[EnginePrefill, TransferReport, float]:
        params = producer_params(job.landing, grant, checks_prompt=bool(job.chat))
        # A drafter's KVCache of a token depends on the next token, and behind the prompt without
        # its last token that would be the sampled one.
        next_token = job.last_token.tolist()[0] if grant.draft and job.last_token else None
        prefill = self._start_prefill(job, place, turn, job.prompt_token_ids, params, next_token)
        transfer = asyncio.create_task(self._landed(job, place, prefill))
        transfer_id, wanted_s = job.landing.transfer_id, self._config.outbox_lease_s
        # A lost lease shows as the end of the transfer, which `_landed` reports.
        renewing = asyncio.create_task(
            keep_lease(
                f"outbox {transfer_id}",
                grant.lease_s,
                lambda: place.agent.renew(transfer_id, wanted_s, RPC_TIMEOUT_S),
            )
        )
        ending = asyncio.create_task(self._outcome(prefill, transfer))
        async with self._bounded(place, ending, prefill, transfer, renewing):
            return await ending

    @asynccontextmanager
    async def _bounded(
        self, place: PrefillPlace, ending: asyncio.Task[Any], *others: asyncio.Task[Any]
    ) -> AsyncIterator[None]:
        """Wait for `ending`, and enter the block when it is over. Raises AttemptFailed when the
        place is gone before, or after the time for a prefill. In the end all tasks are over.
        """
        gone = asyncio.create_task(place.gone.wait())
        tasks = (ending, *others, gone)
        try:
            async with asyncio.timeout(self._config.prefill_timeout_s):
                await asyncio.wait({ending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                raise AttemptFailed(
                    "engine_failed",
                    f"{place.instance} or its node agent does not answer any more",
                    retryable=True,
                )
            yield
        except TimeoutError as error:
            patience_s = self._config.prefill_timeout_s
            raise AttemptFailed("timeout", f"not over after {patience_s:g} s") from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _outcome(
        self,
        prefill: asyncio.Task[EnginePrefill],
        transfer: asyncio.Task[tuple[TransferReport, float]],
    ) -> tuple[EnginePrefill, TransferReport, float]:
        await asyncio.wait({prefill, transfer}, return_when=asyncio.FIRST_COMPLETED)
        if transfer.done() and transfer.exception() is not None:
            # The engine's own failure, if there is one, explains more.
            await asyncio.wait({prefill}, timeout=self._config.verdict_grace_s)
            if prefill.done():
                prefill.result()
            transfer.result()
        done = await prefill
        return done, *(await transfer)

    def _start_prefill(
        self,
        job: PrefillJob,
        place: PrefillPlace,
        turn: Turn,
        token_ids: TokenIds,
        params: dict[str, Any],
        next_token: int | None = None,
    ) -> asyncio.Task[EnginePrefill]:
        span = begin(self._tracer, "engine", job.traceparent, time.monotonic(), "client")
        job = structs.replace(job, traceparent=span.traceparent)

        def answered(task: asyncio.Task[EnginePrefill]) -> None:
            now_s = time.monotonic()
            self._turns.end(turn, now_s)
            error = None if task.cancelled() else task.exception()
            code = error.code if isinstance(error, AttemptFailed) else "engine_failed"
            failed = "given_up" if task.cancelled() else code if error is not None else ""
            span.end(now_s, {"prfaas.instance": place.instance}, error=failed)

        prefill = asyncio.create_task(self._prefill(job, place, token_ids, params, next_token))
        # The turn ends with the engine's answer, which follows its last forward pass at once; news
        # of the landing comes later. A callback, because a task that is cancelled before its first
        # step runs none of its own code.
        prefill.add_done_callback(answered)
        return prefill

    def _trace(self, job: PrefillJob, result: PrefillResult, begun_s: float) -> None:
        """Record the parts of a try that began at `begun_s`, as its result has them."""
        started_s = begun_s + result.open_s
        computing_s = started_s + (result.engine_queue_s or 0.0)
        ended_s = started_s + result.prefill_s
        steps: list[tuple[str, float, float, Attributes]] = [("open", begun_s, started_s, {})]
        if result.engine_queue_s is not None:
            steps.append(("engine_queue", started_s, computing_s, {}))
        computed = {
            "gen_ai.usage.input_tokens": len(job.prompt_token_ids),
            "prfaas.cached_tokens": result.cached_tokens,
        }
        steps.append(("prefill", computing_s, ended_s, computed))
        steps.append(("transfer_tail", ended_s, ended_s + result.transfer_tail_s, {}))
        for name, from_s, until_s, attributes in steps:
            begin(self._tracer, name, job.traceparent, from_s).end(until_s, attributes)

    async def _prefill(
        self,
        job: PrefillJob,
        place: PrefillPlace,
        token_ids: TokenIds,
        params: dict[str, Any],
        next_token: int | None = None,
    ) -> EnginePrefill:
        try:
            return await place.http.prefill(
                job.request_id,
                job.chat or token_ids,
                params,
                api=job.api,
                # An engine knows an adapter as one more model.
                model=job.adapter or place.model or job.model,
                cache_salt=job.cache_salt,
                traceparent=job.traceparent,
                next_token=next_token,
                timeout_s=self._config.prefill_timeout_s + 5.0,
            )
        except EngineRefused as error:
            # A 4xx is about the request itself: every other instance would refuse it too. Only the
            # adapter is not, while engines are restarted one by one with another list of adapters.
            if error.status < 500:
                is_absent = error.status == 404 and bool(job.adapter)
                raise AttemptFailed(
                    "rejected", f"{place.instance}: {error}", retryable=is_absent
                ) from error
            raise AttemptFailed(
                "engine_failed", f"{place.instance}: {error}", retryable=True
            ) from error
        except EngineError as error:
            raise AttemptFailed(
                "engine_failed", f"{place.instance}: {error}", retryable=True, engine_lost=True
            ) from error

    async def _landed(
        self, job: PrefillJob, place: PrefillPlace, prefill: asyncio.Task[EnginePrefill]
    ) -> tuple[TransferReport, float]:
        """Wait until the transfer is complete, and say when (monotonic seconds).

        Raises AttemptFailed when it ends otherwise.
        """
        config = self._config
        acked_bytes, progress_s = -1, time.monotonic()
        while True:
            try:
                report = await place.agent.wait(
                    job.landing.transfer_id,
                    "outbox",
                    wait_s=config.await_slice_s,
                    timeout_s=RPC_TIMEOUT_S,
                )
            except RpcError as error:
                _agent_trouble("lost sight of the transfer", error)
            if report.state == "complete":
                return report, time.monotonic()
            if report.state != "open":
                raise AttemptFailed("transfer_failed", f"{report.state}: {report.error}")
            if report.acked_bytes != acked_bytes or not prefill.done():
                acked_bytes, progress_s = report.acked_bytes, time.monotonic()
            elif time.monotonic() - progress_s >= config.stall_timeout_s:
                raise AttemptFailed(
                    "transfer_failed",
                    f"{acked_bytes} of {report.nbytes} bytes confirmed and none for"
                    f" {config.stall_timeout_s:g} s after the prefill",
                )

    async def _discard(
        self, job: PrefillJob, place: PrefillPlace, opening: asyncio.Task[OpenOutboxReply]
    ) -> None:
        timeout_s = self._config.cleanup_timeout_s
        await asyncio.wait({opening}, timeout=timeout_s)
        opening.cancel()
        (opened,) = await asyncio.gather(opening, return_exceptions=True)
        # Nothing was opened, and a cancel would also end a landing at the same agent.
        if isinstance(opened, RpcError) and opened.code == "NOT_FOUND":
            return
        try:
            await place.agent.cancel(job.landing.transfer_id, "prefill did not finish", timeout_s)
        except RpcError as error:
            logger.warning(
                "%s: outbox %s not cancelled, its lease will end it: %s",
                place.instance,
                job.landing.transfer_id,
                error,
            )


def _agent_trouble(what: str, error: RpcError) -> NoReturn:
    raise AttemptFailed(
        "agent_failed",
        f"node agent: {what}: {error.message}",
        retryable=True,
        agent_lost=error.code in ("UNAVAILABLE", "TIMEOUT"),
    ) from error
