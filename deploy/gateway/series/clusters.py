"""What clusters last reported, as Prometheus series: their instances and their queues.

Computed at each scrape, as is whether this gateway leads. It does not know how reports come.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.reports import ClusterReport, InstanceReport

_PREFIX: Final = "prfaas_gateway_"


class ClusterSeries(Collector):
    """The clusters of one gateway."""

    def __init__(
        self,
        registry: CollectorRegistry,
        reports: Callable[[], Mapping[str, ClusterReport | None]],
        leads: Callable[[], bool],
    ) -> None:
        """`reports` gives the last report of every cluster by name, None if it is too old. `leads`
        says whether this gateway acts on the long term.
        """
        self._reports, self._leads = reports, leads
        registry.register(self)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        heard = _gauge("cluster_heard", "1 while the front of a cluster answers.", "cluster")
        instances = _gauge(
            "instances",
            "Instances of a cluster as its front reports them; state: usable, draining, unhealthy.",
            "cluster",
            "role",
            "model_name",
            "state",
        )
        waiting = _gauge(
            "waiting_requests",
            "Requests that wait: in the queue of a front, or in its engines for room in a batch.",
            "cluster",
            "queue",
        )
        running = _gauge(
            "running_requests",
            "Requests that a front has given to instances, and those in the engines' batches.",
            "cluster",
            "queue",
        )
        tokens = _gauge(
            "waiting_tokens", "Uncached prompt tokens in the queue of a front.", "cluster"
        )
        for name, report in self._reports().items():
            is_heard = report is not None and report.heard
            heard.add_metric([name], float(is_heard))
            if report is None or not is_heard:
                continue
            for labels, num in Tally(map(_kind, report.instances)).items():
                instances.add_metric([name, *labels], num)
            waiting.add_metric([name, "front"], report.queue_depth)
            waiting.add_metric([name, "engine"], sum(i.num_waiting for i in report.instances))
            running.add_metric([name, "front"], report.running)
            running.add_metric([name, "engine"], sum(i.num_running for i in report.instances))
            tokens.add_metric([name], report.queued_tokens)
        leader = _gauge("leader", "1 while this gateway acts on the long term.")
        leader.add_metric([], float(self._leads()))
        yield from (heard, instances, waiting, running, tokens, leader)


def _kind(instance: InstanceReport) -> tuple[str, str, str]:
    state = "unhealthy"
    if instance.healthy:
        state = "draining" if instance.draining else "usable"
    return instance.role, instance.model, state


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, labels=labels)
