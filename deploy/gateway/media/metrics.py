"""Prometheus metrics of media that the gateway fetches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from deploy.gateway.media.urls import Refusal

_PREFIX: Final = "prfaas_gateway_media_"


class MediaMetrics:
    """Counters of one gateway, and a gauge of what `num_fetching` returns."""

    def __init__(self, registry: CollectorRegistry, num_fetching: Callable[[], int]) -> None:
        self._fetched = Counter(
            f"{_PREFIX}fetches_total",
            "Images, videos and audio fetched from their addresses.",
            registry=registry,
        )
        self._bytes = Counter(
            f"{_PREFIX}fetched_bytes_total",
            "Bytes of media that arrived, also of those that were given up.",
            registry=registry,
        )
        self._refused = Counter(
            f"{_PREFIX}refused_requests_total",
            "Requests refused because of the address of a medium, or because it did not come.",
            ["reason"],
            registry=registry,
        )
        gauge = Gauge(
            f"{_PREFIX}running_fetches", "Media that are being fetched.", registry=registry
        )
        gauge.set_function(num_fetching)

    def arrived(self, nbytes: int) -> None:
        """Count bytes."""
        self._bytes.inc(nbytes)

    def fetched(self) -> None:
        """Count a medium that is here."""
        self._fetched.inc()

    def refused(self, reason: Refusal) -> None:
        """Count a request that is refused."""
        self._refused.labels(reason.value).inc()
