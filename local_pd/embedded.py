"""The front of a local PD cluster that runs inside its user's process.

It chooses instances (placement.py), reserves landings at their node agents (landings.py), and has
prompts prefilled on other instances (handoff.py). It does not know routing or clients.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from msgspec import structs

from kvmanager.agent.messages import Reserve
from kvmanager.load_times import LoadTimes
from kvmanager.logs import about_request
from kvmanager.tracing.spans import begin
from local_pd.errors import FrontUnreachable, NoInstance, NoLandingRoom, RoleRefused
from local_pd.handoff import HandOffWay, LocalHandoff
from local_pd.landings import Landings
from local_pd.messages import (
    DecodeSlot,
    DirectRequest,
    DirectTarget,
    LandingReport,
    ReserveRequest,
)
from local_pd.metrics import PdMetrics, pd_metrics
from local_pd.placement import (
    DEFAULT_AFFINITY_SLACK,
    Affinity,
    PdInstance,
    choose_direct,
    decode_order,
)
from prfaas.encoding.metrics import EncodeMetrics
from prfaas.encoding.stage import EncodeStage
from prfaas.encoding.values import EncodeDone, EncodeOrder, Media
from prfaas.engines.client import EngineLoad
from prfaas.engines.departures import Departures
from prfaas.engines.errors import PrefillFailed
from prfaas.engines.instance import Instance, InstanceSpec
from prfaas.engines.instances import Instances, InstancesConfig
from prfaas.engines.members import MemberOrder
from prfaas.engines.prefill_run import PrefillRunner, RunnerConfig
from prfaas.engines.timing import TimedPrefills, TimingOrder, time_prefills
from prfaas.engines.traced_job import traced_job
from prfaas.jobs import PrefillJob, PrefillResult
from scheduler.encoding.values import EncodeConfig
from scheduler.live.long_term.conversion import RoleChange, RoleStatus, applied
from scheduler.reports import ClusterReport, why_fixed
from transport.rpc import RpcError

if TYPE_CHECKING:  # which needs the extra `traces`
    from kvmanager.tracing.export import Tracer

logger = logging.getLogger("prfaas.local_pd")


@dataclass(frozen=True, slots=True)
class PdClusterConfig:
    """The settings of an embedded local PD cluster.

    `keep_leases` off: another process calls `renew`, as the gateways of a stand-alone front do.
    """

    lease_s: float = 30.0
    """How long memory for a landing is kept without a renewal, seconds."""
    drain_poll_interval_s: float = 0.5
    max_prefill_attempts: int = 2
    affinity_slack: int = DEFAULT_AFFINITY_SLACK
    """An instance whose node has part of the prompt cached is preferred while it has at most this
    many requests more than the least loaded one.
    """
    hand_off: HandOffWay = "auto"
    """The way of KVCache from a prefill to a decode instance. auto: within a node the prefill
    engine writes into the arena that both share; between nodes prfaas' transport. transport: that
    one within nodes, too. nixl: between nodes vLLM's NixlConnector, over RDMA where there is some;
    it neither encrypts nor authenticates.
    """
    keep_leases: bool = True
    instances: InstancesConfig = field(default_factory=lambda: InstancesConfig(poll_load=True))
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    encode: EncodeConfig = field(default_factory=EncodeConfig)


class EmbeddedPdCluster:
    """The front inside this process. `start` it on the event loop that will use it."""

    def __init__(
        self,
        name: str,
        instances: Sequence[InstanceSpec],
        config: PdClusterConfig | None = None,
        *,
        metrics: PdMetrics | None = None,
        encode_metrics: EncodeMetrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._config = config or PdClusterConfig()
        self._name = name
        self._metrics = metrics or pd_metrics()
        self._specs = tuple(instances)
        self._instances = Instances(name, instances, self._config.instances, self._instance_changed)
        self._tracer = tracer
        self._runner = PrefillRunner(self._config.runner, tracer)
        self._landings = Landings(
            name,
            self._instances,
            lease_s=self._config.lease_s,
            keep_leases=self._config.keep_leases,
        )
        self._stage = EncodeStage(
            name, self._instances, self._config.encode, metrics=encode_metrics, tracer=tracer
        )
        self._handoff = LocalHandoff(
            name,
            self._instances,
            self._runner,
            self._views,
            self._landings.node,
            self._stage,
            max_attempts=self._config.max_prefill_attempts,
            way=self._config.hand_off,
        )
        self.departures = Departures(self._instances, idle=self._until_idle, forget=self._forget)
        self._metrics.watch(
            name,
            waiting_requests=lambda: sum(item.num_waiting for item in self._loads()),
            running_requests=lambda: sum(item.num_running for item in self._loads()),
            held_slots=lambda: len(self._landings.slots),
        )
        self._leader = 0
        """The highest number of a leading gateway that gave an order."""
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def has_prefill_instances(self) -> bool:
        # Before `start` only the specs are known.
        if not self._instances.by_name:
            return any(spec.role == "prefill" for spec in self._specs)
        return any(item.role == "prefill" for item in self._instances.by_name.values())

    async def start(self) -> None:
        """Start supervised engines and probing; returns after the first probe of each instance."""
        await self._instances.start()

    async def wait_ready(
        self, timeout_s: float, progress: Callable[[str], None] | None = None
    ) -> None:
        """Wait until all instances are healthy; see `Instances.wait_ready` for errors."""
        await self._instances.wait_ready(timeout_s, progress)

    async def reserve(self, request: ReserveRequest) -> DecodeSlot:
        # Its own span ends here, and what the node records of the landing does not: both are below
        # the caller's.
        span = begin(self._tracer, "choose_landing", request.traceparent, time.monotonic())
        chosen = ""
        try:
            slot = await self._reserve(request)
            chosen = slot.instance
            return slot
        finally:
            attributes = {"prfaas.cluster": self._name, "prfaas.instance": chosen}
            span.end(time.monotonic(), attributes, error="" if chosen else "not_reserved")

    async def _reserve(self, request: ReserveRequest) -> DecodeSlot:
        wanted = Reserve(
            request.num_tokens,
            self._config.lease_s,
            token_digest=request.token_digest,
            tenant=request.tenant,
            block_keys=request.block_keys,
            grant=request.grant,
            traceparent=request.traceparent,
        )
        affinity = self._affinity(request.prefer_nodes)
        candidates = decode_order(
            self._views(),
            request.model,
            affinity,
            hands_off=request.hands_off,
            layouts=request.layouts,
            has_media=request.has_media,
        )
        if not candidates.names:
            raise NoInstance(f"{self._name}: {candidates.reason}")
        full: list[str] = []
        broken: list[str] = []
        asked: set[str] = set()
        for name in candidates.names:
            instance = self._instances.by_name.get(name)
            # It may have left while another one was asked. Instances of one node share its memory,
            # so one answer of its agent holds for all of them.
            if instance is None or instance.spec.agent in asked:
                continue
            asked.add(instance.spec.agent)
            try:
                slot = await self._landings.reserve(instance, wanted, request.adapter)
            except RpcError as error:
                with about_request(request.request_id):
                    logger.warning("%s: no landing at %s: %s", self._name, name, error)
                if error.code in ("UNAVAILABLE", "TIMEOUT"):
                    # Placement must not choose the node again before a probe reaches it.
                    self._instances.agent_lost(name, error.message)
                (full if error.code == "NO_ROOM" else broken).append(f"{name}: {error.message}")
                continue
            self._metrics.reservations.labels(self._name, "ok").inc()
            return structs.replace(slot, reason=candidates.reason)
        self._metrics.reservations.labels(self._name, "no_room" if full else "failed").inc()
        if full:
            raise NoLandingRoom(
                f"{self._name}: no room for the landing ({'; '.join(full + broken)})"
            )
        raise FrontUnreachable(f"{self._name}: no landing reserved ({'; '.join(broken)})")

    async def renew(self, transfer_id: str, instance: str) -> None:
        """Prolong a slot's lease. Raises RpcError (NOT_FOUND: there is none any more)."""
        await self._landings.renew(transfer_id, instance)

    async def await_landing(self, slot: DecodeSlot, timeout_s: float) -> LandingReport:
        return await self.await_landing_of(slot.landing.transfer_id, slot.instance, timeout_s)

    async def await_landing_of(
        self, transfer_id: str, instance: str, timeout_s: float
    ) -> LandingReport:
        """`await_landing` for a caller that knows only the ids."""
        return await self._landings.wait(transfer_id, instance, timeout_s)

    async def release(self, slot: DecodeSlot, reason: str) -> LoadTimes | None:
        return await self.release_landing(slot.landing.transfer_id, slot.instance, reason)

    async def release_landing(
        self, transfer_id: str, instance: str, reason: str
    ) -> LoadTimes | None:
        """`release` for a caller that knows only the ids."""
        return await self._landings.release(transfer_id, instance, reason)

    def request_ended(self, instance: str) -> None:
        if found := self._instances.by_name.get(instance):
            found.load.request_ended()

    async def direct(self, request: DirectRequest) -> DirectTarget:
        views, affinity = self._views(), self._affinity(request.prefer_nodes)
        left = [view for view in views if view.name not in request.exclude]
        choice = choose_direct(left, request.model, affinity, has_media=request.has_media)
        # No other engine is left, and an excluded one may serve the request all the same.
        if choice.name is None:
            choice = choose_direct(views, request.model, affinity, has_media=request.has_media)
        if choice.name is None:
            raise NoInstance(f"{self._name}: {choice.reason}")
        with about_request(request.request_id):
            logger.debug("%s: %s serves: %s", self._name, choice.name, choice.reason)
        instance = self._instances.by_name[choice.name]
        instance.load.given()
        return DirectTarget(
            instance=choice.name, engine_url=instance.spec.engine_url, reason=choice.reason
        )

    async def encode(self, order: EncodeOrder) -> EncodeDone:
        instance = self._instances.by_name.get(order.instance)
        # The instance decodes itself: to encode on another one that does would move work about.
        if instance is None or self._closed or not self._stage.is_apart:
            return EncodeDone()
        media = Media.whole(order, instance.spec.agent)
        encoded = await self._stage.bring(media, await self._stage.encode(media), instance)
        return EncodeDone(
            encode_s=encoded.seconds, media=encoded.counts, left_tokens=encoded.left_tokens
        )

    async def prefill_locally(self, job: PrefillJob) -> PrefillResult:
        with traced_job(self._tracer, self._name, job) as job:
            return await self._prefill_locally(job)

    async def _prefill_locally(self, job: PrefillJob) -> PrefillResult:
        try:
            result = await self._handoff.run(job)
        except PrefillFailed as error:
            self._metrics.local_prefills.labels(self._name, error.code).inc()
            raise
        except asyncio.CancelledError:
            self._metrics.local_prefills.labels(self._name, "cancelled").inc()
            raise
        self._metrics.local_prefills.labels(self._name, "ok").inc()
        self._metrics.hand_offs.labels(self._name, result.hand_off).inc()
        return result

    async def report(self) -> ClusterReport:
        """`running` counts the requests of all engines."""
        views = self._views()
        instances = tuple(
            self._instances.by_name[view.name].report(view.num_requests) for view in views
        )
        return ClusterReport(
            name=self._name,
            # A draining instance counts: it serves requests that no other one can.
            healthy=not self._closed
            and any(view.serves and view.role != "encode" for view in views),
            queue_depth=self._handoff.num_waiting,
            running=sum(view.num_requests for view in views),
            instances=instances,
            running_tokens=self._handoff.num_tokens,
            jobs=self._handoff.jobs(),
            encode=self._stage.report(),
        )

    async def drain(self, instance: str, *, leader: int = 0) -> None:
        self._check_leader(leader)
        found = self._instances.known(instance)
        self._instances.set_draining(instance, draining=True)
        try:
            await self._until_idle(found)
        finally:
            self._instances.drained(instance)
        if not found.serves:
            raise NoInstance(f"{self._name}: {instance} is not drained but gone: {found.reason}")

    async def resume(self, instance: str, *, leader: int = 0) -> None:
        self._check_leader(leader)
        self._instances.set_draining(instance, draining=False)

    async def set_role(self, instance: str, change: RoleChange, *, leader: int = 0) -> RoleStatus:
        self._check_leader(leader)
        found = self._instances.known(instance)
        if why := why_fixed(found.report(0), change.role):
            raise RoleRefused(f"{self._name}: {why}")
        now = RoleStatus(found.role, found.role_epoch)
        status = applied(now, change)
        if status is None:
            raise RoleRefused(
                f"{self._name}: the order of epoch {change.epoch} to make {instance} {change.role}"
                f" is too old; it is {now.role} since epoch {now.epoch}"
            )
        if status != now:
            self._instances.set_role(instance, status.role, status.epoch)
            logger.info("%s: %s is %s, epoch %d", self._name, instance, status.role, status.epoch)
        return replace(status, ready=not found.draining)

    async def change_members(self, order: MemberOrder) -> None:
        self.departures.order(order)

    async def time_prefills(self, order: TimingOrder) -> TimedPrefills:
        instance = self._instances.known(order.instance)
        if instance.role == "encode":
            return TimedPrefills(reason=f"{instance.name} encodes")
        if self._is_busy(instance):
            return TimedPrefills(reason=f"{instance.name} is busy")
        instance.load.given()
        try:
            return await time_prefills(instance, order)
        finally:
            instance.load.request_ended()

    async def finish(self) -> None:
        """Refuse new prefills, which engines that decode can compute, and return when none runs.
        All else goes on: landings need their leases renewed, and clients this cluster.
        """
        await self._handoff.finish()

    async def close(self) -> None:
        self._closed = True
        await self.departures.close()
        # Instances close last, because jobs that end and clean-ups still call engines and agents.
        await self._handoff.close()
        await self._stage.close()
        await self._landings.close()
        await self._runner.close()
        await self._instances.close()

    def _check_leader(self, leader: int) -> None:
        """Raises RoleRefused for an order of a gateway that leads no more."""
        if leader < self._leader:
            raise RoleRefused(
                f"{self._name}: another gateway leads since (number {self._leader}, not {leader})"
            )
        self._leader = leader

    async def _until_idle(self, instance: Instance) -> None:
        """Until the instance has nothing to do, or its engine is gone. Raises UnknownInstance when
        it left meanwhile.
        """
        # Only an engine's metrics show whether it has work, and nothing signals a change. A request
        # may be on its way while the engine looks idle, so two looks in a row must find it idle.
        num_idle = 0
        while instance.serves and num_idle < 2:
            await asyncio.sleep(self._config.drain_poll_interval_s)
            await self._instances.look(instance.name)
            num_idle = 0 if self._is_busy(instance) else num_idle + 1

    async def _forget(self, instance: Instance) -> None:
        self._stage.forget(instance.name)
        await self._handoff.forget(instance.name)
        self._landings.slots.forget(instance.name)
        self._count_usable()

    def _affinity(self, prefer_nodes: tuple[str, ...]) -> Affinity:
        return Affinity(prefer_nodes, self._config.affinity_slack)

    def _num_requests(self, instance: Instance) -> int:
        """All requests of an engine, including those that follow once their KVCache has landed."""
        num_awaited = self._landings.slots.num_awaited(instance.name, time.monotonic())
        return instance.load.num_requests + num_awaited

    def _is_busy(self, instance: Instance) -> bool:
        name = instance.name
        num_held = self._landings.slots.num_held(name, time.monotonic())
        num_given = self._handoff.given(name).num_jobs + self._stage.running_on(name)
        return bool(self._num_requests(instance) or num_held or num_given)

    def _views(self) -> list[PdInstance]:
        given = self._handoff.given
        return [
            PdInstance(
                name=item.name,
                node=item.spec.agent,
                role=item.role,
                model=item.spec.served_name,
                serves=item.serves,
                transfers=item.transfers,
                draining=item.draining,
                num_requests=self._num_requests(item),
                num_prefills=given(item.name).num_jobs,
                prefill_tokens=given(item.name).num_tokens,
                room=item.spec.room,
                layout_fingerprint=item.layout_fingerprint,
                layout=item.layout,
                text_only=item.text_only,
            )
            for item in self._instances.by_name.values()
        ]

    def _instance_changed(self, instance: Instance) -> None:
        self._stage.instance_changed(instance)
        self._count_usable()

    def _loads(self) -> Iterator[EngineLoad]:
        """What the engines whose metrics are read last said."""
        found = (item.engine_load for item in self._instances.by_name.values())
        return (load for load in found if load is not None)

    def _count_usable(self) -> None:
        usable = sum(
            item.serves and not item.draining and item.role != "encode"
            for item in self._instances.by_name.values()
        )
        self._metrics.healthy_instances.labels(self._name).set(usable)
