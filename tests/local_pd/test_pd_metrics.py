"""The gauges of a PD cluster's front."""

from prometheus_client import CollectorRegistry

from local_pd.metrics import PdMetrics


def test_a_front_is_asked_at_each_scrape() -> None:
    registry = CollectorRegistry()
    metrics = PdMetrics(registry)
    waiting = 2.0
    metrics.watch(
        "home",
        waiting_requests=lambda: waiting,
        running_requests=lambda: 5.0,
        held_slots=lambda: 1.0,
    )

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"prfaas_pd_{name}", {"cluster": "home"})

    assert (value("waiting_requests"), value("running_requests"), value("held_slots")) == (2, 5, 1)
    waiting = 0.0
    assert value("waiting_requests") == 0
