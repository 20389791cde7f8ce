"""Prometheus metrics of a node agent, and the small HTTP server that shows them.

It does not measure anything itself: gauges are read from a snapshot when Prometheus asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmanager.agent.messages import StatusReply, TransferReport

_DURATION_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class AgentMetrics:
    """Counters of one agent. Has a registry of its own, so several agents fit in one process."""

    def __init__(self, status: Callable[[], StatusReply]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_StatusCollector(status))
        self.transfers = Counter(
            "prfaas_agent_transfers",
            "Transfers that are over, by end and outcome.",
            ["kind", "outcome"],
            registry=self.registry,
        )
        self.transferred = Counter(
            "prfaas_agent_transferred_bytes",
            "Bytes of complete transfers.",
            ["kind"],
            registry=self.registry,
        )
        self.resent = Counter(
            "prfaas_agent_resent_bytes",
            "Bytes sent again after a lost connection.",
            registry=self.registry,
        )
        self.refused_senders = Counter(
            "prfaas_agent_refused_senders",
            "Transfers turned away at the receiver, by reason.",
            ["code"],
            registry=self.registry,
        )
        self.refused_requests = Counter(
            "prfaas_agent_refused_requests",
            "Control plane requests not granted, by method and code.",
            ["method", "code"],
            registry=self.registry,
        )
        self.transfer_s = Histogram(
            "prfaas_agent_outbox_seconds",
            "Complete outboxes: first byte sent until verified by the receiver.",
            buckets=_DURATION_BUCKETS_S,
            registry=self.registry,
        )
        self.tail_s = Histogram(
            "prfaas_agent_transfer_tail_seconds",
            "Complete outboxes: end of prefill until verified by the receiver.",
            buckets=_DURATION_BUCKETS_S,
            registry=self.registry,
        )

    def ended(self, report: TransferReport) -> None:
        """Count the end of one end of a transfer."""
        self.transfers.labels(report.kind, report.state).inc()
        if report.kind == "outbox":
            self.resent.inc(report.resent_bytes)
        if report.state != "complete":
            return
        self.transferred.labels(report.kind).inc(report.nbytes)
        if report.kind == "outbox":
            self.transfer_s.observe(report.first_sent_to_complete_s)
            self.tail_s.observe(report.prefill_end_to_complete_s)


class _StatusCollector(Collector):
    def __init__(self, status: Callable[[], StatusReply]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        return []  # nothing to read before the agent runs

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for name, text, value in (
            ("arena_bytes", "Size of the arena.", status.arena_bytes),
            ("arena_free_bytes", "Free blocks of the arena.", status.free_bytes),
            ("landing_bytes", "Blocks held by landings.", status.landing_bytes),
            ("outbox_bytes", "Blocks held by outboxes.", status.outbox_bytes),
            (
                "received_connections",
                "Data connections from senders.",
                status.num_received_connections,
            ),
        ):
            yield GaugeMetricFamily(f"prfaas_agent_{name}", text, value)
        for kind, counts in (
            ("landings", status.num_landings),
            ("outboxes", status.num_outboxes),
        ):
            gauge = GaugeMetricFamily(
                f"prfaas_agent_{kind}", f"Known {kind} by state.", labels=["state"]
            )
            for state, count in counts.items():
                gauge.add_metric([state], count)
            yield gauge
        engines = GaugeMetricFamily(
            "prfaas_agent_engine_connections", "Engine connections.", labels=["instance"]
        )
        for engine in status.engines:
            engines.add_metric([engine.instance], engine.num_connections)
        yield engines


class MetricsServer:
    """Serves /metrics and /health."""

    def __init__(self, metrics: AgentMetrics, host: str, port: int) -> None:
        self._metrics = metrics
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """The real port. Raises OSError when it is taken."""
        app = web.Application()
        app.router.add_get("/metrics", self._show)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _show(self, _: web.Request) -> web.Response:
        text = generate_latest(self._metrics.registry)
        return web.Response(body=text, content_type="text/plain", charset="utf-8")

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")
