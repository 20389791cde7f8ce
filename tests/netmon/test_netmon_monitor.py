"""The monitor and what people see of it: history, report, metrics."""

from __future__ import annotations

import pytest
from fluid_link import FluidLink
from prometheus_client import generate_latest

from netmon.estimate import LinkCondition
from netmon.metrics import LinkMetrics
from netmon.monitor import LinkMonitor
from netmon.samples import ProbeResult

MB = 1_000_000
GBIT = 125 * MB


def watched(
    seconds: float, offer_bytes_per_s: float = 1.05 * GBIT
) -> tuple[FluidLink, LinkMonitor]:
    fluid, monitor = FluidLink(GBIT), LinkMonitor("paris>oslo")
    watch(fluid, monitor, seconds, offer_bytes_per_s)
    return fluid, monitor


def watch(fluid: FluidLink, monitor: LinkMonitor, seconds: float, rate: float) -> None:
    for _ in range(round(seconds / 0.2)):
        fluid.offer(rate * 0.2)
        fluid.run(0.2)
        monitor.observe(fluid.sample("paris>oslo"), fluid.now_s)


def test_a_report_before_the_first_sample_says_so() -> None:
    report = LinkMonitor("a>b").report(7.0)
    assert (report.condition, report.condition_s) == (LinkCondition.CLEAR, 0)
    assert report.reason == "nothing was observed yet"
    assert report.estimate.sample_age_s is None


def test_a_report_joins_what_the_parts_know() -> None:
    fluid, monitor = watched(3.0)
    fluid.bytes_per_s = GBIT / 20
    watch(fluid, monitor, 2.0, GBIT)
    report = monitor.report(fluid.now_s)
    assert (report.endpoint, report.condition) == ("paris>oslo", LinkCondition.CONGESTED)
    assert "Mbit/s" in report.reason
    assert 0 < report.condition_s < 2
    assert report.num_changes[LinkCondition.CONGESTED] == 1
    assert report.reference_bytes_per_s > 15 * report.estimate.available_bytes_per_s
    assert report.totals.retransmitted_bytes > 0


def test_an_idle_link_is_probed_and_the_result_counts() -> None:
    fluid, monitor = watched(3.0)
    size = None
    while size is None:
        watch(fluid, monitor, 1.0, 0)
        assert fluid.now_s < 60
        size = monitor.due_probe_bytes(fluid.now_s)
    assert fluid.now_s > 13
    assert monitor.due_probe_bytes(fluid.now_s) is None
    monitor.observe_probe(ProbeResult(acked_bytes=size, duration_s=1.0), fluid.now_s)
    estimate = monitor.estimate(fluid.now_s)
    assert (estimate.available_bytes_per_s, estimate.age_s) == (size, 0)


def test_metrics_show_the_last_report() -> None:
    fluid, monitor = watched(3.0)
    metrics = LinkMetrics()
    assert b"paris" not in generate_latest(metrics.registry)
    metrics.show([monitor.report(fluid.now_s), LinkMonitor("b>c").report(0.0)])

    def value(name: str, link: str = "paris>oslo", **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"prfaas_link_{name}", {"link": link, **labels})

    assert value("available_bytes_per_second") == pytest.approx(GBIT, rel=0.05)
    assert value("rate_age_seconds") == 0
    assert value("rate_age_seconds", "b>c") is None  # not known is not 0
    assert value("acked_bytes_total") == monitor.report(fluid.now_s).totals.acked_bytes
    assert value("samples_total") == 15
    condition = monitor.report(fluid.now_s).condition
    for other in LinkCondition:
        assert value("condition", condition=other.value) == float(other is condition)
    assert value("limited_by", limit="link") == 1
    assert value("limited_by", limit="idle") == 0
    assert value("condition_changes_total", condition="down") == 0
    metrics.show([])
    assert value("available_bytes_per_second") is None
