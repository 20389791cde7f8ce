"""One exposition for several processes: what is added up, and what is kept of those that ended."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deploy.gateway.processes.merged_metrics import MergedMetrics


class Process:
    """The metrics of one process, as a gateway has them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter("requests", "Requests.", ["route"], registry=self.registry)
        self.threshold = Gauge("threshold", "Tokens.", ["target"], registry=self.registry)
        self.seconds = Histogram("seconds", "Time.", buckets=(1, 2), registry=self.registry)

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()


def values(merged: MergedMetrics) -> dict[str, float]:
    """What a scrape sees, by name and labels."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(merged)
    text = generate_latest(registry).decode()
    return {
        f"{sample.name}{dict(sorted(sample.labels.items())) or ''}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def two_processes() -> tuple[Process, Process, MergedMetrics]:
    one, two, merged = Process(), Process(), MergedMetrics()
    one.requests.labels("local").inc(3)
    two.requests.labels("local").inc(4)
    two.requests.labels("prefill_cluster").inc()
    for process in (one, two):
        process.threshold.labels("far").set(1024)
        process.seconds.observe(1.5)
    merged.put("0", one.text)
    merged.put("1", two.text)
    return one, two, merged


def test_counters_and_histograms_are_added_up_and_gauges_are_told_apart() -> None:
    _, _, merged = two_processes()
    assert values(merged) == {
        "requests_total{'route': 'local'}": 7,
        "requests_total{'route': 'prefill_cluster'}": 1,
        "seconds_bucket{'le': '1.0'}": 0,
        "seconds_bucket{'le': '2.0'}": 2,
        "seconds_bucket{'le': '+Inf'}": 2,
        "seconds_count": 2,
        "seconds_sum": 3.0,
        "threshold{'process': '0', 'target': 'far'}": 1024,
        "threshold{'process': '1', 'target': 'far'}": 1024,
    }


def test_what_an_ended_process_counted_stays_and_its_gauges_go() -> None:
    _, _, merged = two_processes()
    merged.ended("0")
    assert values(merged)["requests_total{'route': 'local'}"] == 7
    assert not [name for name in values(merged) if "'process': '0'" in name]
    # Its successor counts from 0; several may follow each other.
    for total in (8, 9):
        again = Process()
        again.requests.labels("local").inc()
        merged.put("0", again.text)
        assert values(merged)["requests_total{'route': 'local'}"] == total
        merged.ended("0")
    assert values(merged)["seconds_count"] == 2


def test_one_that_was_never_scraped_ends_without_a_trace() -> None:
    _, _, merged = two_processes()
    before = values(merged)
    merged.ended("2")
    assert values(merged) == before


def test_counters_of_a_silent_process_stay_as_they_were() -> None:
    one, _, merged = two_processes()
    merged.silent("0")
    found = values(merged)
    assert found["requests_total{'route': 'local'}"] == 7
    assert "threshold{'process': '0', 'target': 'far'}" not in found
    one.requests.labels("local").inc()
    merged.put("0", one.text)
    found = values(merged)
    assert found["requests_total{'route': 'local'}"] == 8
    assert "threshold{'process': '0', 'target': 'far'}" in found
