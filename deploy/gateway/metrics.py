"""Prometheus metrics of one gateway (`prfaas_gateway_*`), in a registry of their own.

This file knows records, but not the steps that fill them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from deploy.gateway.series.histograms import (
    INTER_TOKEN_LATENCY_S,
    REQUEST_LATENCY_S,
    REQUEST_TOKENS,
    TIME_TO_FIRST_TOKEN_S,
    Histograms,
    Observations,
)
from deploy.gateway.series.tenants import TenantSeries
from deploy.gateway.series.top_names import OTHER, TopCounts
from deploy.gateway.serving.records import RequestRecord
from scheduler.routing.decision import Decision, RequestShape

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_PREFIX: Final = "prfaas_gateway_"
_ERROR_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
_BY_ROUTE: Final = ("model_name", "route")


class GatewayMetrics:
    """Counters and histograms. Each gateway has its own registry: a process may run several.

    Names, labels and bounds are vLLM's where it measures the same: `model_name` is the served name,
    and latencies have its buckets.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        # The library's own look-up by labels takes a lock and builds strings at each call. Labels
        # come from configuration and code alone, so the cache is bounded.
        self._child: Callable[..., Any] = cache(lambda family, *labels: family.labels(*labels))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=self.registry)

        def by_route(name: str, text: str, bounds: tuple[float, ...], *more: str) -> Histograms:
            labels = (*_BY_ROUTE, *more)
            return Histograms(self.registry, _PREFIX + name, text, labels, bounds)

        self._requests = counter(
            "requests_total",
            "Requests that ended.",
            "model_name",
            "endpoint",
            "route",
            "outcome",
            "status",
        )
        self._decisions = counter(
            "decisions_total", "Routes taken, also after a failure.", *_BY_ROUTE, "reason"
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
            "cache_query_tokens_total",
            "Tokens of prompts looked up in the directory.",
            "model_name",
        )
        self._cached_tokens = counter(
            "cached_tokens_total",
            "Tokens of looked-up prompts that a cluster need not compute (local, prefill) or get "
            "(landing).",
            "model_name",
            "side",
            "cluster",
        )
        self._saved_bytes = counter(
            "transfer_saved_bytes_total", "KVCache bytes a landing did not need.", "target"
        )
        self._prefill_failures = counter(
            "prefill_failures_total", "Prefill legs that failed.", "target", "code"
        )
        self._prompt_tokens = counter(
            "prompt_tokens_total",
            "Tokens of the prompts of requests that an engine answered.",
            "model_name",
        )
        self._generation_tokens = counter(
            "generation_tokens_total", "Tokens that engines generated.", "model_name"
        )
        self._e2e = by_route(
            "e2e_request_latency_seconds", "Arrival to last byte.", REQUEST_LATENCY_S
        )
        self._ttft = by_route(
            "time_to_first_token_seconds",
            "Arrival to first byte of the answer, of streams.",
            TIME_TO_FIRST_TOKEN_S,
        )
        self._intervals = by_route(
            "inter_token_latency_seconds",
            "Time between two pieces of a stream, of which each has a token or several.",
            INTER_TOKEN_LATENCY_S,
        )
        self._per_token = by_route(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first of a whole stream.",
            INTER_TOKEN_LATENCY_S,
        )
        self._parts = by_route("ttft_part_seconds", "Parts of the TTFT.", REQUEST_LATENCY_S, "part")
        self._tokens = by_route("request_prompt_tokens", "Lengths of prompts.", REQUEST_TOKENS)
        self._output_tokens = by_route(
            "request_generation_tokens", "Lengths of answers.", REQUEST_TOKENS
        )
        self._error = by_route(
            "ttft_prediction_error_ratio",
            "|predicted / measured - 1| of streams that went the way they were predicted.",
            _ERROR_BUCKETS,
        )
        self._predicted_ttft = by_route(
            "ttft_predicted_seconds",
            "Predicted TTFT of streams that went the way they were predicted.",
            TIME_TO_FIRST_TOKEN_S,
        )
        self._measured_ttft = by_route(
            "ttft_measured_seconds",
            "Measured TTFT of the same streams as in ttft_predicted, without the time that their "
            "requests took to arrive.",
            TIME_TO_FIRST_TOKEN_S,
        )
        self._adapters = _AdapterRequests(self.registry)
        self.tenants = TenantSeries(self.registry)

    def watch(self, num_in_flight: Callable[[], int], num_settling: Callable[[], int]) -> None:
        """Add the gauges whose values these functions return at each scrape."""
        for name, text, value in (
            ("in_flight", "Requests being served.", num_in_flight),
            ("settling", "Answered requests whose landing is being given back.", num_settling),
        ):
            gauge = Gauge(f"{_PREFIX}{name}_requests", text, registry=self.registry)
            gauge.set_function(value)

    def rejected(self, code: str) -> None:
        """Count a request that was refused before it was routed."""
        self._rejected.labels(code).inc()

    def decided(self, model: str, decision: Decision) -> None:
        """Count a route that was taken for a request of `model`."""
        self._child(self._decisions, model, decision.route, decision.reason.value).inc()

    def retried(self, reason: str) -> None:
        """Count a second try."""
        self._retries.labels(reason).inc()

    def prefill_failed(self, target: str, code: str) -> None:
        """Count a prefill leg that ended without KVCache."""
        self._prefill_failures.labels(target, code).inc()

    def looked_up(self, model: str, pd_cluster: str, shape: RequestShape) -> None:
        """Count a prompt that was looked up in the directory."""
        self._child(self._query_tokens, model).inc(shape.num_prompt_tokens)
        cached: list[tuple[str, str, int]] = [
            ("local", pd_cluster, shape.local_cached_tokens),
            ("landing", pd_cluster, shape.landing_cached_tokens),
            *(("prefill", name, num) for name, num in shape.prefill_cached_tokens.items()),
        ]
        for side, cluster, num_tokens in cached:
            self._child(self._cached_tokens, model, side, cluster).inc(num_tokens)

    def transferred(self, target: str, nbytes: int, saved_bytes: int) -> None:
        """Count KVCache that arrived, and KVCache that was not sent."""
        self._transfer_bytes.labels(target).inc(nbytes)
        self._saved_bytes.labels(target).inc(saved_bytes)

    def predicted(self, model: str, route: str, predicted_s: float, measured_s: float) -> None:
        """Compare a stream's TTFT with what was predicted when it was routed."""
        if measured_s > 0 and predicted_s < math.inf:
            self._error.of(model, route).observe(abs(predicted_s / measured_s - 1))
            self._predicted_ttft.of(model, route).observe(predicted_s)
            self._measured_ttft.of(model, route).observe(measured_s)

    def intervals(self, record: RequestRecord) -> Observations:
        """Takes the times between two pieces of a request's stream."""
        return self._intervals.of(record.model, record.route or "none")

    def ended(self, record: RequestRecord, num_prompt_tokens: int) -> None:
        """Count a request whose answer is over. `num_prompt_tokens` is as its engine counted, or as
        it was estimated.
        """
        model, route = record.model, record.route or "none"
        self._child(
            self._requests, model, record.endpoint, route, record.outcome, str(record.status)
        ).inc()
        if record.cluster:
            self._child(self._homes, record.home, record.cluster, record.spill).inc()
        if record.adapter:
            self._adapters.ended(model, record.adapter)
        has_tokens = record.ttft_s is not None and record.status == 200
        if record.outcome != "refused":
            self.tenants.ended(
                record.tenant,
                prompt_tokens=num_prompt_tokens if has_tokens else 0,
                cached_tokens=_num_cached(record) if has_tokens else 0,
                generation_tokens=record.output_tokens,
            )
        if record.total_s is not None:
            self._e2e.of(model, route).observe(record.total_s)
        # An answer with an error has no token.
        if record.ttft_s is None or not has_tokens:
            return
        # An answer in one piece does not show when its first token was there.
        if record.is_stream:
            self._ttft.of(model, route).observe(record.ttft_s)
        self._child(self._prompt_tokens, model).inc(num_prompt_tokens)
        self._tokens.of(model, route).observe(num_prompt_tokens)
        num_output = record.output_tokens
        self._child(self._generation_tokens, model).inc(num_output)
        if record.outcome == "ok":
            self._output_tokens.of(model, route).observe(num_output)
            if record.is_stream and num_output > 1 and record.total_s is not None:
                per_token_s = (record.total_s - record.ttft_s) / (num_output - 1)
                self._per_token.of(model, route).observe(per_token_s)

    def settled(self, record: RequestRecord) -> None:
        """Observe the TTFT parts of a request whose legs are over."""
        if record.first_route == "prefill_cluster":
            for part, seconds in record.parts.known().items():
                self._parts.of(record.model, record.route, part).observe(seconds)

    def render(self) -> bytes:
        """The exposition text, with the metrics of embedded cluster fronts."""
        return generate_latest(self.registry) + generate_latest(REGISTRY)


def _num_cached(record: RequestRecord) -> int:
    """Tokens of the prompt that the engine which prefilled it had cached, as far as is known."""
    is_offloaded = record.route == "prefill_cluster"
    return (record.cached_tokens if is_offloaded else record.local_cached_tokens) or 0


class _AdapterRequests(Collector):
    """Requests by LoRA adapter, of which there may be thousands."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._by_model: dict[str, TopCounts] = {}
        registry.register(self)

    def ended(self, model: str, adapter: str) -> None:
        counts = self._by_model.get(model)
        if counts is None:
            counts = self._by_model[model] = TopCounts(1)
        counts.top.used(adapter)
        counts.add(adapter, (1,))

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            f"{_PREFIX}adapter_requests",
            f"Requests that ended by LoRA adapter; the less used ones are {OTHER!r} together.",
            labels=["model_name", "adapter"],
        )
        for model, counts in self._by_model.items():
            for adapter, (num,) in counts.shown(time.monotonic()).items():
                family.add_metric([model, adapter], num)
        yield family
