"""Prometheus metrics of one gateway (`prfaas_gateway_*`), in a registry of their own.

This file knows records, but not the steps that fill them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from deploy.gateway.serving.records import RequestRecord
from scheduler.routing.decision import Decision, RequestShape

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_LATENCY_BUCKETS_S: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
_ERROR_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2, 5, 10)
_TOKEN_BUCKETS: Final = tuple(2**power for power in range(5, 21))


class GatewayMetrics:
    """Counters and histograms. Each gateway has its own registry: a process may run several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        # The library's own look-up by labels takes a lock and builds strings at each call. Labels
        # come from configuration and code alone, so the cache is bounded.
        self._child: Callable[..., Any] = cache(lambda family, *labels: family.labels(*labels))
        prefix = "prfaas_gateway_"

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(prefix + name, text, labels, registry=self.registry)

        def histogram(
            name: str, text: str, *labels: str, buckets: tuple[float, ...] = _LATENCY_BUCKETS_S
        ) -> Histogram:
            return Histogram(prefix + name, text, labels, buckets=buckets, registry=self.registry)

        self._requests = counter(
            "requests_total", "Requests that ended.", "endpoint", "route", "outcome", "status"
        )
        self._decisions = counter(
            "decisions_total", "Routes taken, also after a failure.", "route", "reason"
        )
        self._homes = counter(
            "pd_requests_total",
            "Requests that ended, by home, the PD cluster that decoded, and why that is another.",
            "home",
            "cluster",
            "spill",
        )
        self._rejected = counter("rejected_total", "Requests refused before routing.", "code")
        self._retries = counter("retries_total", "Second tries before the first byte.", "reason")
        self._transfer_bytes = counter(
            "transfer_bytes_total", "KVCache bytes that reached a landing.", "target"
        )
        self._query_tokens = counter(
            "cache_query_tokens_total", "Tokens of prompts looked up in the directory."
        )
        self._cached_tokens = counter(
            "cached_tokens_total",
            "Tokens of these that a cluster need not compute (local, prefill) or get (landing).",
            "side",
            "cluster",
        )
        self._saved_bytes = counter(
            "transfer_saved_bytes_total", "KVCache bytes a landing did not need.", "target"
        )
        self._prefill_failures = counter(
            "prefill_failures_total", "Prefill legs that failed.", "target", "code"
        )
        self._seconds = histogram("request_seconds", "Arrival to last byte.", "route")
        self._ttft = histogram("ttft_seconds", "Arrival to first byte of the answer.", "route")
        self._parts = histogram("ttft_part_seconds", "Parts of the TTFT.", "route", "part")
        self._tokens = histogram(
            "prompt_tokens", "Counted prompt lengths.", "route", buckets=_TOKEN_BUCKETS
        )
        self._error = histogram(
            "ttft_prediction_error_ratio",
            "|predicted / measured - 1| of streams that went the way they were predicted.",
            "route",
            buckets=_ERROR_BUCKETS,
        )

    def watch(self, num_in_flight: Callable[[], int], num_settling: Callable[[], int]) -> None:
        """Add the gauges whose values these functions return at each scrape."""
        for name, text, value in (
            ("in_flight", "Requests being served.", num_in_flight),
            ("settling", "Answered requests whose landing is being given back.", num_settling),
        ):
            gauge = Gauge(f"prfaas_gateway_{name}_requests", text, registry=self.registry)
            gauge.set_function(value)

    def rejected(self, code: str) -> None:
        """Count a request that was refused before it was routed."""
        self._rejected.labels(code).inc()

    def decided(self, decision: Decision) -> None:
        """Count a route that was taken."""
        self._child(self._decisions, decision.route, decision.reason.value).inc()

    def retried(self, reason: str) -> None:
        """Count a second try."""
        self._retries.labels(reason).inc()

    def prefill_failed(self, target: str, code: str) -> None:
        """Count a prefill leg that ended without KVCache."""
        self._prefill_failures.labels(target, code).inc()

    def looked_up(self, pd_cluster: str, shape: RequestShape) -> None:
        """Count a prompt that was looked up in the directory."""
        self._query_tokens.inc(shape.num_prompt_tokens)
        cached: list[tuple[str, str, int]] = [
            ("local", pd_cluster, shape.local_cached_tokens),
            ("landing", pd_cluster, shape.landing_cached_tokens),
            *(("prefill", name, num) for name, num in shape.prefill_cached_tokens.items()),
        ]
        for side, cluster, num_tokens in cached:
            self._child(self._cached_tokens, side, cluster).inc(num_tokens)

    def transferred(self, target: str, nbytes: int, saved_bytes: int) -> None:
        """Count KVCache that arrived, and KVCache that was not sent."""
        self._transfer_bytes.labels(target).inc(nbytes)
        self._saved_bytes.labels(target).inc(saved_bytes)

    def predicted(self, route: str, predicted_s: float, measured_s: float) -> None:
        """Compare a stream's TTFT with what was predicted when it was routed."""
        if measured_s > 0 and predicted_s < math.inf:
            self._child(self._error, route).observe(abs(predicted_s / measured_s - 1))

    def ended(self, record: RequestRecord) -> None:
        """Count a request whose answer is over."""
        route = record.route or "none"
        self._child(
            self._requests, record.endpoint, route, record.outcome, str(record.status)
        ).inc()
        if record.cluster:
            self._child(self._homes, record.home, record.cluster, record.spill).inc()
        if record.total_s is not None:
            self._child(self._seconds, route).observe(record.total_s)
        if record.ttft_s is not None:
            self._child(self._ttft, route).observe(record.ttft_s)
        if record.num_prompt_tokens is not None:
            self._child(self._tokens, route).observe(record.num_prompt_tokens)

    def settled(self, record: RequestRecord) -> None:
        """Observe the TTFT parts of a request whose legs are over."""
        if record.first_route == "prefill_cluster":
            for part, seconds in record.parts.known().items():
                self._parts.labels(record.route, part).observe(seconds)

    def render(self) -> bytes:
        """The exposition text, with the metrics of embedded cluster fronts."""
        return generate_latest(self.registry) + generate_latest(REGISTRY)
