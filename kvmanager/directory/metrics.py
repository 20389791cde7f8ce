"""Prometheus metrics of a directory. They show the last update, so any thread may read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmanager.directory.feed_client import FollowCounts
from kvmanager.directory.messages import NodeState


class DirectoryMetrics(Collector):
    """Has a registry of its own unless told to use another one."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        by_node = ["cluster", "node"]
        self._blocks = Gauge(
            "prfaas_directory_node_blocks",
            "Blocks known to be cached on a node.",
            by_node,
            registry=self.registry,
        )
        self._embeddings = Gauge(
            "prfaas_directory_node_embeddings",
            "Embeddings of media known to be on a node.",
            by_node,
            registry=self.registry,
        )
        self._age = Gauge(
            "prfaas_directory_node_age_seconds",
            "Since a node last said what it caches.",
            by_node,
            registry=self.registry,
        )
        self._lag = Gauge(
            "prfaas_directory_node_lag_seconds",
            "How old the oldest change of a node's last message with changes was.",
            by_node,
            registry=self.registry,
        )
        self._bytes = Gauge(
            "prfaas_directory_memory_bytes", "Memory of the table.", registry=self.registry
        )
        self._counts = FollowCounts()
        self.registry.register(self)

    def update(self, nodes: Sequence[NodeState], counts: FollowCounts, nbytes: int) -> None:
        """Show this from now on. Nodes that are no longer known disappear."""
        for gauge in (self._blocks, self._embeddings, self._age, self._lag):
            gauge.clear()
        for state in nodes:
            labels = (state.cluster, state.node)
            if state.num_blocks >= 0:
                self._blocks.labels(*labels).set(state.num_blocks)
            if state.num_embeddings >= 0:
                self._embeddings.labels(*labels).set(state.num_embeddings)
            self._age.labels(*labels).set(state.age_s)
            self._lag.labels(*labels).set(state.lag_s)
        self._bytes.set(nbytes)
        self._counts = counts

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        counter = CounterMetricFamily(
            "prfaas_directory_followed",
            "What came of nodes: events, snapshots, gaps, bad feeds, failed questions (failures).",
            labels=["what"],
        )
        for what in ("events", "snapshots", "gaps", "bad_feeds", "failures"):
            counter.add_metric([what], getattr(self._counts, what))
        yield counter
