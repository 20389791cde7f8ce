"""Prometheus metrics of the encode stages of this process, labelled by cluster.

It does not know how they are served.
"""

from collections.abc import Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from scheduler.encoding.values import MediumEnd
from scheduler.reports import EncodeReport

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class EncodeMetrics:
    """One per registry; every front of the process shares it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.waiting = Gauge(
            "prfaas_encode_waiting_media",
            "Images and other media that wait for an instance that encodes.",
            ["cluster"],
            registry=registry,
        )
        self.waiting_tokens = Gauge(
            "prfaas_encode_waiting_tokens",
            "Prompt tokens of the media that wait.",
            ["cluster"],
            registry=registry,
        )
        self.running = Gauge(
            "prfaas_encode_running_media",
            "Media that instances encode now.",
            ["cluster"],
            registry=registry,
        )
        self.media = Counter(
            "prfaas_encode_media",
            "Media of prompts by what became of them. Those that are not encoded, shared or found"
            " are left to the instance that prefills.",
            ["cluster", "outcome"],
            registry=registry,
        )
        self.seconds = Histogram(
            "prfaas_encode_seconds",
            "Time of the media of one prompt in the encode stage.",
            ["cluster"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.pulled_bytes = Counter(
            "prfaas_encode_pulled_bytes",
            "Bytes of embeddings that were moved to the node of the prefill.",
            ["cluster"],
            registry=registry,
        )

    def stands(self, cluster: str, report: EncodeReport) -> None:
        """Show the stage as it is now."""
        self.waiting.labels(cluster).set(report.waiting_media)
        self.waiting_tokens.labels(cluster).set(report.waiting_tokens)
        running = sum(one.running_media for one in report.instances)
        self.running.labels(cluster).set(running)

    def ended(self, cluster: str, ends: Iterable[MediumEnd], seconds: float) -> None:
        """Count the media of one request."""
        for end in ends:
            self.media.labels(cluster, end.reason.value).inc()
        self.seconds.labels(cluster).observe(seconds)


_known: dict[CollectorRegistry, EncodeMetrics] = {}


def encode_metrics(registry: CollectorRegistry = REGISTRY) -> EncodeMetrics:
    """The metrics object of `registry`, made on first use."""
    if registry not in _known:
        _known[registry] = EncodeMetrics(registry)
    return _known[registry]
