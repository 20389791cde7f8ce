"""Keeps hot prefixes on more than one node: every few seconds it makes a plan and carries it out.

`scheduler.routing.replication.plan_replication` makes the plan; this module has the clock, the
directory and the moves. No request waits for a copy, so a failed copy is only logged and tried
again after `RETRY_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from deploy.gateway.cache.cached_prompt import CachedPrompt, PromptKeys
from deploy.gateway.cache.moves import CacheMoves
from kvmanager.agent.between_agents import CacheMoveResult
from kvmanager.agent.messages import CacheModel
from kvmanager.directory.messages import NodeName, ResumeRule, shape_of
from kvmanager.directory.reader import DirectoryReader
from scheduler.reports import ClusterReport
from scheduler.routing.prefix_demand import CachedPrefix, Demand, DemandTracker
from scheduler.routing.replication import (
    KEEP_PER_S,
    ByteBudget,
    Demote,
    HotPrefix,
    NodeLoad,
    Replicate,
    ReplicationPlan,
    ReplicationState,
    plan_evacuation,
    plan_replication,
)
from transport.rpc import RpcError
from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.gateway")

INTERVAL_S: Final = 5.0
AGAIN_S: Final = 0.2
"""The wait for a move to end where too many are under way."""
RETRY_S: Final = 60.0
"""A copy that failed is not tried again for so long."""
BYTES_PER_S: Final = 100e6
BURST_BYTES: Final = 20e9
"""Copies may use `BYTES_PER_S` of the links; unused bytes add up to `BURST_BYTES`."""
MAX_CONSIDERED: Final = 32
"""A plan looks at this many prefixes, the hottest ones."""
MAX_REPLICAS: Final = 256
"""This many copies are remembered, the latest ones; only a remembered copy can be dropped."""
MAX_MODELS: Final = 64
EVACUATED_BYTES: Final = 20_000_000_000
"""The most that is copied from a node that leaves."""


class PrefixPlacement:
    """Replicates the prefixes that requests ask for. `moves` carries the copies; requests use it,
    too. Runs on one event loop; `close` also closes `moves`.
    """

    def __init__(
        self,
        moves: CacheMoves,
        directory: DirectoryReader,
        loads: Callable[[], Sequence[NodeLoad]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.moves = moves
        self._directory = directory
        self._loads = loads
        self._clock = clock
        self._demand = DemandTracker()
        self._budget = ByteBudget(BYTES_PER_S, BURST_BYTES)
        self._models: dict[str, CacheModel] = {}
        self._barred_until_s: dict[tuple[bytes, tuple[str, str]], float] = {}
        self._replicas: dict[tuple[bytes, tuple[str, str]], CachedPrefix] = {}
        self._last_notes: tuple[str, ...] = ()
        self._task: asyncio.Task[None] | None = None

    def looked_up(self, cached: CachedPrompt) -> None:
        """Count a request for the longest prefix of this prompt that any node holds."""
        num_blocks = max((item.pool.usable_blocks for item in cached.coverage), default=0)
        if cached.keys is None or not num_blocks:
            return
        keys, model = cached.keys, cached.keys.model
        # Namespaces come from engines' reports; the bound keeps wrong ones from filling memory.
        if model.namespace not in self._models and len(self._models) >= MAX_MODELS:
            return
        self._models[model.namespace] = model
        joined = b"".join(keys.blocks[:num_blocks])
        self._demand.observe(CachedPrefix(model.namespace, keys.root, joined), self._clock())

    def start(self) -> None:
        """Replicate in the background from now on."""
        self._task = start_task(self._run(), "prefix placement")

    async def close(self) -> None:
        """Stop, and cancel all moves. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self.moves.close()

    async def step(self) -> ReplicationPlan:
        """Make one plan, start its copies and drop the copies that it gives up."""
        now_s = self._clock()
        self._barred_until_s = {k: t for k, t in self._barred_until_s.items() if t > now_s}
        hot = [await self._looked_up(demand) for demand in self._considered(now_s)]
        self._forget_lost(hot)
        state = ReplicationState(
            budget_bytes=self._budget.available_bytes(now_s),
            moving=self.moves.moving,
            barred=self._barred_until_s.keys(),
            replicas=[(prefix, node) for (_, node), prefix in self._replicas.items()],
        )
        plan = plan_replication(hot, self._loads(), state)
        for replicate in plan.replicate:
            self._replicate(replicate)
        for demote in plan.demote:
            await self._demote(demote)
        # Notes repeat every few seconds, so only new ones are logged.
        if plan.notes != self._last_notes:
            self._last_notes = plan.notes
            logger.debug("no more copies: %s", "; ".join(plan.notes))
        return plan

    async def copy_away(self, node: NodeName, limit_s: float) -> str:
        """Copy what a leaving node has of the hottest prefixes to others of its cluster, and say
        what was done. Takes at most `limit_s` and `EVACUATED_BYTES`; failed copies are logged.
        """
        hottest = self._demand.hottest(MAX_CONSIDERED, self._clock())
        plan = ReplicationPlan()
        num_copied = nbytes = 0
        try:
            async with asyncio.timeout(limit_s):
                hot = [await self._looked_up(demand) for demand in hottest]
                plan = plan_evacuation(hot, node, self._loads(), EVACUATED_BYTES)
                for order in plan.replicate:
                    if await self._copied_away(order):
                        num_copied, nbytes = num_copied + 1, nbytes + order.nbytes
        except TimeoutError:
            plan = ReplicationPlan(plan.replicate, notes=(*plan.notes, f"{limit_s:g} s are over"))
        said = f"{num_copied} of {len(plan.replicate)} prefixes, {nbytes} bytes"
        return "; ".join((said, *plan.notes))

    def forget_departed(self, known: Collection[NodeName]) -> None:
        """Forget the copies at nodes that no report names any more, and connections to these."""
        self._replicas = {k: v for k, v in self._replicas.items() if k[1] in known}
        self._barred_until_s = {k: v for k, v in self._barred_until_s.items() if k[1] in known}
        self.moves.forget_departed()

    async def _copied_away(self, order: Replicate) -> bool:
        source = NodeName(order.cluster, order.source)
        destination = NodeName(order.cluster, order.destination)
        keys = self._keys(order.prefix)
        # None: too many moves are under way, of which one will end.
        while (move := self.moves.begin(keys, source, destination, order.parts)) is None:
            if not self.moves.knows(source, destination):
                return False
            await asyncio.sleep(AGAIN_S)
        logger.info("copying a prefix to %s: %s", destination, order.reason)
        # Waited for, not awaited: its failure is logged by the move.
        await asyncio.wait({move})
        return not move.cancelled() and move.exception() is None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.step()
            except Exception:
                # Requests are served without copies, so the loop must outlive any failure.
                logger.exception("replicating hot prefixes failed")

    def _considered(self, now_s: float) -> list[Demand]:
        """The hottest prefixes, and every copied prefix: a copy may have to be dropped."""
        everything = self._demand.hottest(len(self._demand), now_s)
        copied = {key for key, _ in self._replicas}
        tracked = {demand.prefix.key for demand in everything}
        hot = everything[:MAX_CONSIDERED]
        hot += [demand for demand in everything[MAX_CONSIDERED:] if demand.prefix.key in copied]
        forgotten = {p.key: p for p in self._replicas.values() if p.key not in tracked}
        return hot + [Demand(prefix, 0.0) for prefix in forgotten.values()]

    async def _looked_up(self, demand: Demand) -> HotPrefix:
        shape = shape_of(self._models[demand.prefix.model])
        coverage = await self._directory.match(ResumeRule.of(shape), demand.prefix.block_keys)
        usable = {(item.cluster, item.node): item.pool.usable_blocks for item in coverage}
        return HotPrefix(demand, shape, usable)

    def _forget_lost(self, hot: Sequence[HotPrefix]) -> None:
        """Forget the cold copies that their nodes have evicted, so that they are not looked up for
        ever.
        """
        moving = self.moves.moving
        looked_up = {item.demand.prefix.key: item for item in hot}
        for name, prefix in list(self._replicas.items()):
            item = looked_up.get(prefix.key)
            if item is None or name in moving:
                continue
            is_cold = item.demand.per_s < KEEP_PER_S
            if is_cold and item.usable_blocks.get(name[1], 0) < prefix.num_blocks:
                del self._replicas[name]

    def _replicate(self, order: Replicate) -> None:
        destination = NodeName(order.cluster, order.destination)
        name = order.prefix.key, destination
        source = NodeName(order.cluster, order.source)
        task = self.moves.begin(self._keys(order.prefix), source, destination, order.parts)
        if task is None:
            return
        # Counted when the move begins: two plans in a row must not spend the same bytes.
        self._budget.spend(order.nbytes)
        logger.info("copying a prefix to %s: %s", destination, order.reason)
        # Insertion order is age, so the oldest copies are forgotten.
        while len(self._replicas) >= MAX_REPLICAS:
            del self._replicas[next(iter(self._replicas))]
        self._replicas[name] = order.prefix
        task.add_done_callback(lambda done: self._copied(name, done))

    def _copied(self, name: tuple[bytes, NodeName], task: asyncio.Task[CacheMoveResult]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._replicas.pop(name, None)
            self._barred_until_s[name] = self._clock() + RETRY_S

    async def _demote(self, order: Demote) -> None:
        node = NodeName(order.cluster, order.node)
        # Forgotten first: a copy that cannot be dropped is left to the eviction of its node.
        self._replicas.pop((order.prefix.key, node), None)
        try:
            num_parts = await self.moves.drop(self._keys(order.prefix), node, order.keep_blocks)
        except RpcError as error:
            logger.warning("could not drop a copy at %s: %s", node, error)
            return
        logger.info("dropped %d parts of a copy at %s: %s", num_parts, node, order.reason)

    def _keys(self, prefix: CachedPrefix) -> PromptKeys:
        return PromptKeys(self._models[prefix.model], prefix.root, tuple(prefix.block_keys))


def node_loads(reports: Iterable[ClusterReport | None]) -> list[NodeLoad]:
    """How many requests run on each node, by the clusters' latest reports."""
    running: dict[NodeName, int] = {}
    healthy: dict[NodeName, bool] = {}
    for report in reports:
        for instance in report.instances if report is not None else ():
            # Nothing is prefilled or decoded on a node that only encodes.
            if report is not None and instance.node and instance.role != "encode":
                name = NodeName(report.name, instance.node_name or instance.node)
                running[name] = running.get(name, 0) + instance.running
                usable = instance.healthy and not instance.draining
                healthy[name] = healthy.get(name, False) or usable
    return [
        NodeLoad(cluster=name.cluster, node=name.node, load=load, is_healthy=healthy[name])
        for name, load in running.items()
    ]
