"""What each tenant does, as Prometheus series of bounded number. It does not know requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deploy.gateway.api_keys import is_named
from deploy.gateway.series.top_names import TopCounts

UNNAMED: Final = "(unnamed)"
"""The label of all tenants without a name together. No tenant can have this name."""

_PREFIX: Final = "prfaas_gateway_tenant_"
_COUNTERS: Final = (
    ("requests", "Requests of a tenant that ended, without those that were refused."),
    ("refused_requests", "Requests of a tenant that limits or the load refused (429)."),
    ("prompt_tokens", "Prompt tokens of a tenant's requests."),
    ("cached_tokens", "Prompt tokens of a tenant that the prefilling engine had cached."),
    ("generation_tokens", "Tokens that were generated for a tenant."),
)


class TenantSeries(Collector):
    """Counts for one gateway, on one thread."""

    def __init__(
        self, registry: CollectorRegistry, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._in_flight: Callable[[], Mapping[str, int]] = dict
        self._clock = clock
        self._counts = TopCounts(len(_COUNTERS), {UNNAMED})
        self._with_keys: frozenset[str] | None = None
        registry.register(self)

    def watch(self, in_flight: Callable[[], Mapping[str, int]]) -> None:
        """Ask `in_flight` at each scrape for the requests of every tenant that has any."""
        self._in_flight = in_flight

    def show(self, tenants: Iterable[str]) -> None:
        """These tenants have series from now on, whatever they do: they have limits."""
        self._counts.always = frozenset({UNNAMED, *map(_name, tenants)})

    def keep(self, tenants: Iterable[str]) -> None:
        """Only these tenants have keys. The others' series go with their last requests."""
        self._with_keys = frozenset(tenants)

    def came(self, tenant: str) -> None:
        """Note that a tenant is active: the most active ones have series."""
        # Unnamed keys may be many, and their digests tell operators nothing.
        if is_named(tenant):
            self._counts.top.used(tenant)

    def refused(self, tenant: str) -> None:
        """Count a refused request."""
        self.came(tenant)
        self._counts.add(_name(tenant), (0, 1))

    def ended(
        self, tenant: str, *, prompt_tokens: int, cached_tokens: int, generation_tokens: int
    ) -> None:
        """Count a request that was not refused and is over."""
        numbers = (1, 0, prompt_tokens, cached_tokens, generation_tokens)
        self._counts.add(_name(tenant), numbers)

    def describe(self) -> list[Metric]:
        # An empty answer keeps the registry from collecting before there is anything to ask.
        return []

    def collect(self) -> Iterator[Metric]:
        now = self._in_flight()
        if self._with_keys is not None:
            self._counts.top.forget(set(self._counts.top) - self._with_keys - now.keys())
        shown = self._counts.shown(self._clock())
        in_flight = dict.fromkeys(shown, 0)
        for tenant, num in now.items():
            label = self._counts.label(_name(tenant))
            in_flight[label] = in_flight.get(label, 0) + num
        requests = GaugeMetricFamily(
            f"{_PREFIX}in_flight_requests",
            "Requests of a tenant that were let in and are not over.",
            labels=["tenant"],
        )
        for label, num in in_flight.items():
            requests.add_metric([label], num)
        yield requests
        for index, (name, text) in enumerate(_COUNTERS):
            family = CounterMetricFamily(_PREFIX + name, text, labels=["tenant"])
            for label, counts in shown.items():
                family.add_metric([label], counts[index])
            yield family


def _name(tenant: str) -> str:
    return tenant if is_named(tenant) else UNNAMED
