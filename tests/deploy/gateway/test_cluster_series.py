"""What clusters report, as series of the gateway."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from report_cases import cluster, instance

from deploy.gateway.series.clusters import ClusterSeries
from scheduler.reports import ClusterReport

HOME = cluster(
    "home",
    instance("p0", "prefill", num_waiting=1, num_running=2),
    instance("d0", "decode", num_waiting=4, num_running=8),
    instance("d1", "decode", draining=True),
    instance("d2", "decode", healthy=False, draining=True),
    queue_depth=3,
    running=5,
    queued_tokens=700,
)


def test_queues_and_instances_by_state() -> None:
    reports: dict[str, ClusterReport | None] = {
        "home": HOME,
        "old": None,
        "mute": cluster("mute", healthy=False, queue_depth=9, heard=False),
    }
    leads = True
    registry = CollectorRegistry()
    ClusterSeries(registry, lambda: reports, lambda: leads)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"prfaas_gateway_{name}", labels)

    assert value("waiting_requests", cluster="home", queue="front") == 3
    assert value("waiting_requests", cluster="home", queue="engine") == 5
    assert value("running_requests", cluster="home", queue="front") == 5
    assert value("running_requests", cluster="home", queue="engine") == 10
    assert value("waiting_tokens", cluster="home") == 700
    kinds = (("prefill", "usable"), ("decode", "usable"), ("decode", "draining"))
    for role, state in (*kinds, ("decode", "unhealthy")):
        labels = {"cluster": "home", "role": role, "model_name": "m", "state": state}
        assert value("instances", **labels) == 1
    # Nothing is claimed of clusters whose front does not answer, but that it does not.
    for name in ("old", "mute"):
        assert value("cluster_heard", cluster=name) == 0
        assert value("waiting_requests", cluster=name, queue="front") is None
    assert value("cluster_heard", cluster="home") == 1
    assert value("leader") == 1
    leads = False
    assert value("leader") == 0
