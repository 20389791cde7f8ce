"""Lets instances join and leave the region's clusters, for one gateway.

A front carries an order out: it probes instances that join, and drains those that leave. This file
says which may join, since only the gateway sees all clusters. Before the front may forget an
instance that leaves, the hottest prefixes of its node are copied to other nodes of the cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, TypeAlias

from msgspec import structs

from deploy.gateway.cache.placement import PrefixPlacement
from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import EngineStatus
from kvmanager.directory.messages import NodeName
from local_pd.cluster import PdCluster
from prfaas.cluster import PrefillCluster
from prfaas.engines.errors import UnknownInstance
from prfaas.engines.members import Join, Leave, LetGo, MemberRefused
from scheduler.reports import ClusterReport, InstanceReport, decodes, engine_report, unlike
from transport.rpc import RpcError
from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.gateway")

COPY_LIMIT_S: Final = 60.0
"""How long the prefixes of a leaving node are copied at most, seconds."""
STATUS_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 2.0
"""The wait before a front that did not answer is told again, seconds."""

Front: TypeAlias = PrefillCluster | PdCluster


class MemberKeeper:
    """The members of all clusters. Runs on one event loop; `close` it."""

    def __init__(
        self,
        pd_clusters: Mapping[str, PdCluster],
        prefill_clusters: Mapping[str, PrefillCluster],
        open_agent: Callable[[str], AgentClient] | None,
        placement: Callable[[], PrefixPlacement | None],
    ) -> None:
        """The fronts by cluster. `open_agent` makes a client of an agent, to be closed here;
        without it engines are not compared before they join.
        """
        self._decoding = frozenset(pd_clusters)
        self._fronts: dict[str, Front] = {**prefill_clusters, **pd_clusters}
        self._open_agent = open_agent
        self._placement = placement
        self._leaving: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._heard: dict[str, ClusterReport] = {}
        self.copied: dict[tuple[str, str], str] = {}
        """How much was copied away from instances that are leaving, by cluster and name."""

    def heard(self, report: ClusterReport) -> None:
        """Take in a cluster's report: help its instances to leave, and forget those that have."""
        if not report.heard:
            return
        self._heard[report.name] = report
        leaving = {item.name for item in report.instances if item.leaving}
        for key in [k for k in self._leaving if k[0] == report.name and k[1] not in leaving]:
            self._leaving.pop(key).cancel()
            self.copied.pop(key, None)
        for item in report.instances:
            if item.leaving and (report.name, item.name) not in self._leaving:
                work = self._copy_and_let_go(report.name, item)
                task = start_task(work, f"{item.name} leaves {report.name}")
                self._leaving[report.name, item.name] = task
        placement = self._placement()
        if placement is not None:
            placement.forget_departed({_node(r.name, i) for r, i in self.instances()})

    def instances(self) -> list[tuple[ClusterReport, InstanceReport]]:
        """All instances of fronts that have answered, by their last reports."""
        return [(r, item) for r in self._heard.values() for item in r.instances]

    async def join(self, cluster: str, order: Join) -> None:
        """Have an instance join a cluster. Raises MemberRefused, UnknownCluster, RpcError."""
        front = self._front(cluster)
        if self._open_agent is not None:
            agent = self._open_agent(order.agent)
            try:
                status = await agent.status(STATUS_TIMEOUT_S)
            except RpcError as error:
                message = f"the node agent at {order.agent} cannot be used: {error.message}"
                raise MemberRefused(message) from error
            finally:
                await agent.close()
            if order.spec().encodes_only:
                _check_connected(order, [one.instance for one in status.encoders])
            else:
                self._check(order, status.engines)
        await front.change_members(order)

    async def leave(self, cluster: str, order: Leave, *, force: bool) -> None:
        """Have an instance leave. Unless forced, the last usable one that decodes a model stays.

        Raises MemberRefused, UnknownCluster, UnknownInstance, RpcError.
        """
        front = self._front(cluster)
        report = self._heard.get(cluster)
        for own in () if report is None else report.instances:
            if own.name == order.name and not own.leaving and not force:
                self._check_not_last(cluster, own)
        await front.change_members(order)

    async def close(self) -> None:
        """Stop copying. Fronts keep what leaves until their limit. Idempotent."""
        tasks, self._leaving = list(self._leaving.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _front(self, cluster: str) -> Front:
        try:
            return self._fronts[cluster]
        except KeyError:
            raise UnknownCluster(cluster, self._fronts) from None

    def _check(self, order: Join, engines: Iterable[EngineStatus]) -> None:
        known = {item.instance: item for item in engines}
        _check_connected(order, known)
        found = known[order.name]
        new = structs.replace(engine_report(found), model=order.model)
        for _, item in self.instances():
            if item.healthy and (why := unlike(new, item)):
                raise MemberRefused(why)

    def _check_not_last(self, cluster: str, own: InstanceReport) -> None:
        if not decodes(own.role) or cluster not in self._decoding:
            return
        others = (
            item
            for report, item in self.instances()
            if item is not own and report.name in self._decoding
        )
        if not any(_decodes(item, own.model) for item in others):
            model = f" for {own.model}" if own.model else ""
            raise MemberRefused(f"{own.name} is the last usable instance that decodes{model}")

    async def _copy_and_let_go(self, cluster: str, instance: InstanceReport) -> None:
        """Copy the hottest prefixes of a leaving instance's node away, then let the instance go."""
        key, node = (cluster, instance.name), _node(cluster, instance)
        placement = self._placement()
        stay = [r for r, i in self.instances() if _node(r.name, i) == node and not i.leaving]
        if placement is not None and instance.node and not stay:
            try:
                self.copied[key] = await placement.copy_away(node, COPY_LIMIT_S)
            except Exception:
                # The copies only save time; an instance must leave without them.
                logger.exception("copying the prefixes of %s failed", node)
            logger.info("%s leaves %s; copied away: %s", *reversed(key), self.copied.get(key, "-"))
        while True:
            try:
                await self._fronts[cluster].change_members(LetGo(name=instance.name))
                return
            except UnknownInstance:
                return
            except RpcError as error:
                logger.warning("%s: %s cannot go yet: %s", cluster, instance.name, error.message)
            await asyncio.sleep(RETRY_S)


class UnknownCluster(LookupError):
    """The region has no cluster of this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"The region has no cluster `{name[:200]}`. There: {', '.join(known)}.")


def _check_connected(order: Join, engines: Collection[str]) -> None:
    """Raises MemberRefused if the instance that joins is none of the engines at its agent."""
    if order.name not in engines:
        names = ", ".join(engines) or "none"
        message = f"no engine called {order.name} is connected to {order.agent}; there: {names}"
        raise MemberRefused(message)


def _node(cluster: str, instance: InstanceReport) -> NodeName:
    return NodeName(cluster, instance.node_name or instance.node)


def _decodes(instance: InstanceReport, model: str) -> bool:
    is_usable = instance.healthy and not instance.draining
    return is_usable and decodes(instance.role) and instance.model == model
