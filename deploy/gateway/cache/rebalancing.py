"""Keeps hot prefixes on more than one node: every few seconds a plan is made and carried out.

The plan is `scheduler.routing.cache_moves.plan_replication`'s; here are the clock, the directory
and the moves. Nothing waits for it, and whatever fails is tried again later, elsewhere, or never.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from deploy.gateway.cache.cached import CachedPrompt
from deploy.gateway.cache.moves import CacheMoves, Prefix, cache_shape
from kvmanager.agent.clients.cache import CacheMoveResult
from kvmanager.agent.messages import CacheModel
from kvmanager.directory.messages import NodeName, ResumeRule
from kvmanager.directory.reader import DirectoryReader
from scheduler.reports import ClusterReport
from scheduler.routing.cache_moves import (
    ByteBudget,
    Demote,
    HotPrefix,
    NodeLoad,
    Replicate,
    ReplicationLimits,
    ReplicationPlan,
    ReplicationState,
    plan_replication,
)
from scheduler.routing.prefix_demand import CachedPrefix, Demand, DemandTracker
from transport.rpc import RpcError

logger = logging.getLogger("prfaas.deploy.gateway")

MAX_CONSIDERED: Final = 32
"""Prefixes that one plan looks at, the hottest first."""
MAX_REPLICAS: Final = 256
"""Copies that are remembered, so that they can be dropped again."""
MAX_MODELS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalancingSettings:
    """`bytes_per_s`: what copies may use of the links, saved up to `burst_bytes`. A move that
    failed is not tried again for `retry_s`.
    """

    interval_s: float = 5.0
    retry_s: float = 60.0
    bytes_per_s: float = 100e6
    burst_bytes: float = 20e9
    limits: ReplicationLimits = field(default_factory=ReplicationLimits)


class Rebalancer:
    """See the module text. Use it on one event loop."""

    def __init__(
        self,
        moves: CacheMoves,
        directory: DirectoryReader,
        loads: Callable[[], Sequence[NodeLoad]],
        *,
        settings: RebalancingSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or RebalancingSettings()
        self._moves = moves
        self._directory = directory
        self._loads = loads
        self._clock = clock
        self._demand = DemandTracker()
        self._budget = ByteBudget(self.settings.bytes_per_s, self.settings.burst_bytes)
        self._models: dict[str, CacheModel] = {}
        self._barred_until_s: dict[tuple[bytes, tuple[str, str]], float] = {}
        self._replicas: dict[tuple[bytes, tuple[str, str]], CachedPrefix] = {}
        self._last_notes: tuple[str, ...] = ()
        self._task: asyncio.Task[None] | None = None

    def routed(self, cached: CachedPrompt) -> None:
        """A request was routed: it resumes from the longest prefix that any node has of it."""
        num_blocks = max((item.pool.usable_blocks for item in cached.coverage), default=0)
        if cached.keys is None or not num_blocks:
            return
        keys, model = cached.keys, cached.keys.model
        if model.namespace not in self._models and len(self._models) >= MAX_MODELS:
            return
        self._models[model.namespace] = model
        joined = b"".join(keys.blocks[:num_blocks])
        self._demand.observe(CachedPrefix(model.namespace, keys.root, joined), self._clock())

    def start(self) -> None:
        """Plan and act from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="rebalancing")

    async def close(self) -> None:
        """Stop; moves under way are `CacheMoves`'s to end. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def step(self) -> ReplicationPlan:
        """One plan, made and begun to be carried out."""
        now_s = self._clock()
        self._barred_until_s = {k: t for k, t in self._barred_until_s.items() if t > now_s}
        hot = [await self._looked_up(demand) for demand in self._considered(now_s)]
        self._forget_lost(hot)
        state = ReplicationState(
            budget_bytes=self._budget.available_bytes(now_s),
            moving=self._moves.moving,
            barred=self._barred_until_s.keys(),
            replicas=[(prefix, node) for (_, node), prefix in self._replicas.items()],
        )
        plan = plan_replication(hot, self._loads(), state, self.settings.limits)
        for replicate in plan.replicate:
            self._replicate(replicate)
        for demote in plan.demote:
            await self._demote(demote)
        if plan.notes != self._last_notes:
            self._last_notes = plan.notes
            logger.debug("no more copies: %s", "; ".join(plan.notes))
        return plan

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.settings.interval_s)
            try:
                await self.step()
            except Exception:
                # Copies ahead of need are a service to requests, not a condition of serving them.
                logger.exception("rebalancing failed")

    def _considered(self, now_s: float) -> list[Demand]:
        """The hottest prefixes, and those of copies that may have had their time."""
        everything = self._demand.hottest(len(self._demand), now_s)
        copied = {key for key, _ in self._replicas}
        tracked = {demand.prefix.key for demand in everything}
        hot = everything[:MAX_CONSIDERED]
        hot += [demand for demand in everything[MAX_CONSIDERED:] if demand.prefix.key in copied]
        forgotten = {p.key: p for p in self._replicas.values() if p.key not in tracked}
        return hot + [Demand(prefix, 0.0, 0.0) for prefix in forgotten.values()]

    async def _looked_up(self, demand: Demand) -> HotPrefix:
        shape = cache_shape(self._models[demand.prefix.model])
        coverage = await self._directory.match(ResumeRule.of(shape), demand.prefix.block_keys)
        usable = {(item.cluster, item.node): item.pool.usable_blocks for item in coverage}
        return HotPrefix(demand, shape, usable)

    def _forget_lost(self, hot: Sequence[HotPrefix]) -> None:
        """Forget cold copies that their nodes have given up: they are not looked for for ever."""
        limits, moving = self.settings.limits, self._moves.moving
        looked_up = {item.demand.prefix.key: item for item in hot}
        for name, prefix in list(self._replicas.items()):
            item = looked_up.get(prefix.key)
            if item is None or name in moving:
                continue
            is_cold = item.demand.per_s < limits.keep_share * limits.min_per_s
            if is_cold and item.usable_blocks.get(name[1], 0) < prefix.num_blocks:
                del self._replicas[name]

    def _replicate(self, order: Replicate) -> None:
        destination = NodeName(order.cluster, order.destination)
        name = order.prefix.key, destination
        task = self._moves.replicate(
            self._prefix(order.prefix),
            NodeName(order.cluster, order.source),
            destination,
            order.parts,
        )
        if task is None:
            return
        self._budget.spend(order.nbytes)
        logger.info("copying a prefix to %s: %s", destination, order.reason)
        while len(self._replicas) >= MAX_REPLICAS:
            del self._replicas[next(iter(self._replicas))]
        self._replicas[name] = order.prefix
        task.add_done_callback(lambda done: self._ended(name, done))

    def _ended(self, name: tuple[bytes, NodeName], task: asyncio.Task[CacheMoveResult]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._replicas.pop(name, None)
            self._barred_until_s[name] = self._clock() + self.settings.retry_s

    async def _demote(self, order: Demote) -> None:
        node = NodeName(order.cluster, order.node)
        self._replicas.pop((order.prefix.key, node), None)
        try:
            num_parts = await self._moves.drop(self._prefix(order.prefix), node, order.keep_blocks)
        except RpcError as error:
            logger.warning("a copy at %s is not dropped: %s", node, error)
            return
        logger.info("dropped %d parts of a copy at %s: %s", num_parts, node, order.reason)

    def _prefix(self, prefix: CachedPrefix) -> Prefix:
        return Prefix(self._models[prefix.model], prefix.root, tuple(prefix.block_keys))


def node_loads(reports: Iterable[ClusterReport | None]) -> list[NodeLoad]:
    """How busy each node's instances are: requests running, by the clusters' latest reports."""
    running: dict[NodeName, int] = {}
    healthy: dict[NodeName, bool] = {}
    for report in reports:
        for instance in report.instances if report is not None else ():
            if report is not None and instance.node:
                name = NodeName(report.name, instance.node_name or instance.node)
                running[name] = running.get(name, 0) + instance.running
                usable = instance.healthy and not instance.draining
                healthy[name] = healthy.get(name, False) or usable
    return [
        NodeLoad(cluster=name.cluster, node=name.node, load=load, is_healthy=healthy[name])
        for name, load in running.items()
    ]
