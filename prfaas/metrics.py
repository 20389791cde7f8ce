"""Prometheus metrics of prefill clusters in this process, labelled by cluster.

It does not know how they are served.
"""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from prfaas.jobs import PrefillResult

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class PrefillMetrics:
    """One per registry; every cluster of the process shares it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.waiting = Gauge(
            "prfaas_prefill_waiting_jobs", "Jobs that wait.", ["cluster"], registry=registry
        )
        self.waiting_tokens = Gauge(
            "prfaas_prefill_waiting_tokens",
            "Uncached prompt tokens of jobs that wait.",
            ["cluster"],
            registry=registry,
        )
        self.running = Gauge(
            "prfaas_prefill_running_jobs", "Jobs on instances.", ["cluster"], registry=registry
        )
        self.healthy_instances = Gauge(
            "prfaas_prefill_healthy_instances", "Usable instances.", ["cluster"], registry=registry
        )
        self.jobs = Counter(
            "prfaas_prefill_jobs", "Jobs by outcome.", ["cluster", "outcome"], registry=registry
        )
        self.retries = Counter(
            "prfaas_prefill_retries", "Second tries.", ["cluster"], registry=registry
        )
        self.sent = Counter(
            "prfaas_prefill_kv_bytes", "KVCache bytes landed.", ["cluster"], registry=registry
        )
        self.seconds = Histogram(
            "prfaas_prefill_seconds",
            "Time of finished jobs by part: queue, prefill, transfer_tail.",
            ["cluster", "part"],
            buckets=_SECONDS,
            registry=registry,
        )

    def finished(self, cluster: str, result: PrefillResult) -> None:
        """Count one job that ended well."""
        self.jobs.labels(cluster, "ok").inc()
        self.sent.labels(cluster).inc(result.nbytes)
        self.seconds.labels(cluster, "queue").observe(result.queue_s)
        self.seconds.labels(cluster, "prefill").observe(result.prefill_s)
        self.seconds.labels(cluster, "transfer_tail").observe(result.transfer_tail_s)


_known: dict[CollectorRegistry, PrefillMetrics] = {}


def prefill_metrics(registry: CollectorRegistry = REGISTRY) -> PrefillMetrics:
    """The metrics object of `registry`, made on first use."""
    if registry not in _known:
        _known[registry] = PrefillMetrics(registry)
    return _known[registry]
