"""Keeps the latest report of every cluster, so that routing never waits for one.

A report that is too old counts as none. A node belongs to the cluster that was the first to report
its agent's address: a front that somebody has got hold of could otherwise have the caches of
another cluster sent to it. This file does not know requests or what reports are used for.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from deploy.gateway.cache.cached_prompt import CachePlaces, places_of
from deploy.gateway.config import GatewayConfig
from local_pd.cluster import PdCluster
from prfaas.cluster import PrefillCluster
from scheduler.live.snapshots import Reported
from scheduler.reports import ClusterReport, InstanceReport, decodes
from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.gateway")

INCOMPATIBLE: Final = "no PD cluster can use its KVCache, see `prfaas status`"


@dataclass(slots=True)
class _Latest:
    """A source of reports, its last report, and when that was asked for."""

    source: Callable[[], Awaitable[ClusterReport]]
    report: ClusterReport | None = None
    at_s: float = float("-inf")
    judged_from: tuple[ClusterReport | None, ...] = ()
    judged: ClusterReport | None = None
    """What `without_incompatible` made of the reports `judged_from`."""


class RegionWatcher:
    """Polls all clusters and keeps their last reports."""

    def __init__(
        self,
        config: GatewayConfig,
        pds: Sequence[PdCluster],
        prefill_clusters: Mapping[str, PrefillCluster],
        *,
        on_report: Callable[[ClusterReport], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_report` gets every report. A cluster is polled again only after it has returned."""
        self._config = config
        self._clock = clock
        self._on_report = on_report
        self._pds = {pd.name: _Latest(pd.report) for pd in pds}
        self._prefill = {
            name: _Latest(cluster.report) for name, cluster in prefill_clusters.items()
        }
        self._cluster_at: dict[str, str] = {}
        """The cluster that has the node agent at an address."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Poll every cluster once, then go on in the background."""
        sources = (*self._pds.values(), *self._prefill.values())
        # The nodes of PD clusters first: their caches have the KVCache of most prompts.
        await asyncio.gather(*(self._poll(source) for source in self._pds.values()))
        await asyncio.gather(*(self._poll(source) for source in self._prefill.values()))
        self._tasks = [
            start_task(self._keep_polling(source), "watching a cluster") for source in sources
        ]

    async def close(self) -> None:
        """Stop polling."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def pd_report(self, name: str) -> ClusterReport | None:
        """A PD cluster's last report; None if there is none, or if it is too old."""
        return self._fresh(self._pds[name])

    def pd_reports(self) -> dict[str, ClusterReport | None]:
        """The same for every PD cluster."""
        return {name: self._fresh(latest) for name, latest in self._pds.items()}

    def prefill_reports(self) -> dict[str, ClusterReport | None]:
        """The last report of every prefill cluster; None if there is none, or if it is too old.
        Instances whose KVCache nobody in a PD cluster can use are not healthy.
        """
        pds = tuple(self.pd_reports().values())
        return {name: self._judged(latest, pds) for name, latest in self._prefill.items()}

    def reports(self) -> list[ClusterReport | None]:
        """The last report of every cluster."""
        return list(self.by_name().values())

    def by_name(self) -> dict[str, ClusterReport | None]:
        """The same by the name of the cluster."""
        return self.pd_reports() | self.prefill_reports()

    def is_healthy(self) -> bool:
        """Whether a PD cluster can serve requests."""
        reports = self.pd_reports().values()
        return any(report is not None and report.healthy for report in reports)

    def reported_pds(self) -> list[Reported]:
        """Every PD cluster's report, and when it was asked for (on `clock`)."""
        return [
            Reported(name, self._fresh(latest), latest.at_s) for name, latest in self._pds.items()
        ]

    def reported_prefill(self) -> list[Reported]:
        """The same for every prefill cluster."""
        return [
            Reported(name, report, self._prefill[name].at_s)
            for name, report in self.prefill_reports().items()
        ]

    def cache_places(self, model: str, pd: str) -> CachePlaces:
        """Where prompts for `model` may be cached that a PD cluster will decode."""
        others = self.pd_reports()
        return places_of(
            others.pop(pd),
            self.prefill_reports(),
            model,
            is_only_model=len(self._config.models) == 1,
            other_pds=others.values(),
        )

    def _judged(
        self, latest: _Latest, pds: tuple[ClusterReport | None, ...]
    ) -> ClusterReport | None:
        # Every request asks, and takes another object for news of the cluster.
        heard = (self._fresh(latest), *pds)
        known = latest.judged_from
        if len(known) != len(heard) or not all(map(operator.is_, known, heard)):
            latest.judged_from, latest.judged = heard, without_incompatible(heard[0], pds)
        return latest.judged

    def _fresh(self, latest: _Latest) -> ClusterReport | None:
        is_fresh = self._clock() - latest.at_s <= self._config.report_stale_s
        return latest.report if is_fresh else None

    async def _poll(self, latest: _Latest) -> None:
        try:
            # The report counts from the time of the question, since it may lack what came
            # meanwhile.
            asked_s = self._clock()
            async with asyncio.timeout(self._config.timeouts.cluster_s):
                report = await latest.source()
            latest.report = self._with_own_nodes(report)
            latest.at_s = asked_s
            if self._on_report is not None:
                await self._on_report(latest.report)
        except Exception as error:
            # Whatever error a front's client raises, the last report stays and grows older.
            logger.warning("no report from a cluster: %s", error or type(error).__name__)

    def _with_own_nodes(self, report: ClusterReport) -> ClusterReport:
        """The report without the addresses of node agents that are another cluster's."""
        if not report.heard:
            return report
        reported = {item.node for item in report.instances if item.node}
        for node in [at for at, name in self._cluster_at.items() if name == report.name]:
            if node not in reported:
                del self._cluster_at[node]
        others = {
            at for at in reported if self._cluster_at.setdefault(at, report.name) != report.name
        }
        if not others:
            return report
        for at in others:
            logger.error(
                "%s reports the node agent at %s, which is %s's: it is not used for %s",
                *(report.name, at, self._cluster_at[at], report.name),
            )
        instances = tuple(
            structs.replace(item, node="", node_name="") if item.node in others else item
            for item in report.instances
        )
        return structs.replace(report, instances=instances)

    async def _keep_polling(self, latest: _Latest) -> None:
        while True:
            await asyncio.sleep(self._config.report_interval_s)
            await self._poll(latest)


def without_incompatible(
    report: ClusterReport | None, pds: Iterable[ClusterReport | None]
) -> ClusterReport | None:
    """A prefill cluster's report without the health of instances that have other weights or
    another KV layout than all those that decode their model.
    """
    if report is None:
        return None
    usable: dict[str, set[str]] = {}
    for item in (item for pd in pds if pd is not None for item in pd.instances):
        if decodes(item.role) and item.layout_fingerprint:
            usable.setdefault(item.model, set()).add(item.layout_fingerprint)

    def is_incompatible(item: InstanceReport) -> bool:
        # Before both have said what they have, a transfer that fails tells.
        known = usable.get(item.model, {""}) | {""}
        return len(known) > 1 and item.layout_fingerprint not in known

    if not any(item.healthy and is_incompatible(item) for item in report.instances):
        return report
    instances = tuple(
        structs.replace(item, healthy=False, compatible=False, reason=INCOMPATIBLE)
        if item.healthy and is_incompatible(item)
        else item
        for item in report.instances
    )
    healthy = report.healthy and any(item.healthy and not item.draining for item in instances)
    reason = report.reason if healthy else INCOMPATIBLE
    return structs.replace(report, instances=instances, healthy=healthy, reason=reason)
