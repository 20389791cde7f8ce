"""The monitor and what people see of it: history, report, metrics."""

from __future__ import annotations

import pytest
from fluid_link import FluidLink
from prometheus_client import generate_latest

from netmon.estimate import LinkCondition
from netmon.metrics import LinkMetrics
from netmon.monitor import LinkMonitor
from netmon.region_link import LinkPath, LinkView, RegionLink
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


def probe_s(size: float, bytes_per_s: float, rtt_s: float) -> float:
    """How long a probe takes whose connections double what they send at each round trip."""
    took_s, window = rtt_s, 4 * 10 * 1448.0
    while size > window and window < bytes_per_s * rtt_s:
        took_s, size, window = took_s + rtt_s, size - window, 2 * window
    return took_s + size / bytes_per_s


def idle(
    gbit: float, rtt_s: float, *, begins_at: float, seconds: int
) -> tuple[list[LinkView], float]:
    """What routing sees each second of an idle link that once carried the share `begins_at` of its
    rate, and the bytes/s that probes take.
    """
    rate, num_bytes = gbit * GBIT, 0.0
    fluid = FluidLink(rate, rtt_s, step_s=1.0)
    monitor, link, seen = LinkMonitor("a>b"), RegionLink("a", "b"), []
    for second in range(seconds):
        fluid.run(1.0)
        monitor.observe(fluid.sample("a>b"), fluid.now_s)
        if not second:
            measured = ProbeResult(acked_bytes=round(2 * begins_at * rate), duration_s=2.0)
            monitor.observe_probe(measured, fluid.now_s)
        elif size := monitor.due_probe_bytes(fluid.now_s):
            num_bytes += size
            took = ProbeResult(acked_bytes=size, duration_s=probe_s(size, rate, rtt_s))
            monitor.observe_probe(took, fluid.now_s)
        link.observe([LinkPath("a/1", "b/1", monitor.report(fluid.now_s), 0.0)], fluid.now_s)
        seen.append(link.now(fluid.now_s).view())
    return seen, num_bytes / seconds


@pytest.mark.parametrize(("gbit", "rtt_s"), [(0.1, 0.02), (1.0, 0.002), (10.0, 0.02), (100.0, 0.1)])
def test_an_idle_link_keeps_a_rate_and_is_found_to_have_recovered(
    gbit: float, rtt_s: float
) -> None:
    seen, probes_bytes_per_s = idle(gbit, rtt_s, begins_at=0.01, seconds=1500)
    assert all(view.available_bytes_per_s for view in seen)
    # Probes may be too short to say so. The old rate is then a floor, which counts as fast enough.
    rates = [0.0 if view.is_floor else view.available_bytes_per_s or 0.0 for view in seen]
    assert all(rate == 0 or rate > 0.5 * gbit * GBIT for rate in rates[620:])
    assert probes_bytes_per_s < 0.01 * gbit * GBIT


def test_an_idle_link_that_has_become_slow_is_known_to_be() -> None:
    seen, _ = idle(0.1, 0.02, begins_at=10.0, seconds=180)
    assert not seen[-1].is_floor
    assert seen[-1].available_bytes_per_s == pytest.approx(0.1 * GBIT, rel=0.5)
