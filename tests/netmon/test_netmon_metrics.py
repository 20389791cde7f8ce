"""What people see of a link: its report, and the metrics made of it."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from watched_link import GBIT, FluidWatched

from netmon.estimate import LinkCondition
from netmon.metrics import LinkMetrics
from netmon.monitor import LinkMonitor


def test_a_report_joins_what_the_parts_know() -> None:
    watched = FluidWatched(LinkMonitor("paris>oslo"))
    watched.run(3.0, 1.05 * GBIT)
    watched.fluid.bytes_per_s = GBIT / 20
    watched.run(2.0, GBIT)
    report = watched.monitor.report(watched.now_s)
    assert (report.endpoint, report.condition) == ("paris>oslo", LinkCondition.CONGESTED)
    assert "Mbit/s" in report.reason
    assert 0 < report.condition_s < 2
    assert report.num_changes[LinkCondition.CONGESTED] == 1
    assert report.reference_bytes_per_s > 15 * report.estimate.available_bytes_per_s
    assert report.estimate.retransmitted_bytes > 0


def test_metrics_show_the_last_reports() -> None:
    watched = FluidWatched(LinkMonitor("paris>oslo"))
    watched.run(3.0, 1.05 * GBIT)
    report = watched.monitor.report(watched.now_s)
    metrics = LinkMetrics()
    assert b"paris" not in generate_latest(metrics.registry)
    metrics.show([report, LinkMonitor("b>c").report(0.0)])

    def value(name: str, link: str = "paris>oslo", **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"prfaas_link_{name}", {"link": link, **labels})

    assert value("available_bytes_per_second") == pytest.approx(GBIT, rel=0.05)
    assert value("reference_bytes_per_second") == report.reference_bytes_per_s
    assert value("rate_age_seconds") == 0
    assert value("rate_age_seconds", "b>c") is None  # not known is not 0
    assert value("acked_bytes_total") == report.estimate.acked_bytes
    assert value("samples_total") == 15
    for condition in LinkCondition:
        is_it = float(condition is report.condition)
        assert value("condition", condition=condition.value) == is_it
    assert value("limited_by", limit="link") == 1
    assert value("limited_by", limit="idle") == 0
    assert value("condition_changes_total", condition="down") == 0
    assert b'limit="receiver_window"' in generate_latest(metrics.registry)
    metrics.show([])
    assert value("available_bytes_per_second") is None
