"""Prometheus metrics of local PD clusters in this process, labelled by cluster.

It does not know how they are served.
"""

from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge


class PdMetrics:
    """One per registry; every cluster of the process shares it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.healthy_instances = Gauge(
            "prfaas_pd_healthy_instances", "Usable instances.", ["cluster"], registry=registry
        )
        self._in_engines = {
            name: Gauge(f"prfaas_pd_{name}", text, ["cluster"], registry=registry)
            for name, text in (
                ("waiting_requests", "Requests that wait in engines for room in a batch."),
                ("running_requests", "Requests in the batches of engines."),
                ("held_slots", "Landings that are held for requests."),
            )
        }
        self.reservations = Counter(
            "prfaas_pd_reservations",
            "Landings asked for, by outcome.",
            ["cluster", "outcome"],
            registry=registry,
        )
        self.local_prefills = Counter(
            "prfaas_pd_local_prefills",
            "Prompts prefilled on another instance of the cluster, by outcome.",
            ["cluster", "outcome"],
            registry=registry,
        )
        self.hand_offs = Counter(
            "prfaas_pd_hand_offs",
            "Prompts whose KVCache came from another instance of the cluster, by its way.",
            ["cluster", "hand_off"],
            registry=registry,
        )

    def watch(self, cluster: str, **values: Callable[[], float]) -> None:
        """Ask these at each scrape for the gauges of their names (`waiting_requests`,
        `running_requests`, `held_slots`).
        """
        for name, value in values.items():
            self._in_engines[name].labels(cluster).set_function(value)


_known: dict[CollectorRegistry, PdMetrics] = {}


def pd_metrics(registry: CollectorRegistry = REGISTRY) -> PdMetrics:
    """The metrics object of `registry`, made on first use."""
    if registry not in _known:
        _known[registry] = PdMetrics(registry)
    return _known[registry]
