"""Prometheus metrics of links, `prfaas_link_*`. They show the last reports and measure nothing. Any
thread may read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from netmon.estimate import Limit, LinkCondition, PathReport

_GAUGES: tuple[tuple[str, str, Callable[[PathReport], float | None]], ...] = (
    (
        "available_bytes_per_second",
        "What transfers would get together, as last measured.",
        lambda report: report.estimate.available_bytes_per_s,
    ),
    (
        "reference_bytes_per_second",
        "What the link carried in the last minutes when it carried most.",
        lambda report: report.reference_bytes_per_s,
    ),
    (
        "achieved_bytes_per_second",
        "What transfers get now.",
        lambda report: report.estimate.achieved_bytes_per_s,
    ),
    ("utilisation_ratio", "Achieved / available.", lambda report: report.estimate.utilisation),
    ("rtt_seconds", "Smoothed round trip.", lambda report: report.estimate.rtt_s),
    (
        "base_rtt_seconds",
        "Least round trip of the last minutes.",
        lambda report: report.estimate.base_rtt_s,
    ),
    (
        "queueing_delay_seconds",
        "What queues in the network add to the round trip.",
        lambda report: report.estimate.queueing_delay_s,
    ),
    ("backlog_bytes", "Waiting at the sender.", lambda report: report.estimate.backlog_bytes),
    (
        "backlog_seconds",
        "Time to send what waits at the sender.",
        lambda report: report.estimate.backlog_s,
    ),
    ("loss_ratio", "Retransmitted share.", lambda report: report.estimate.loss),
    (
        "stalled_seconds",
        "Bytes wait and none was acknowledged for so long.",
        lambda report: report.estimate.stalled_s,
    ),
    (
        "rate_age_seconds",
        "Since the available rate was measured.",
        lambda report: report.estimate.age_s,
    ),
    ("sample_age_seconds", "Since the last look.", lambda report: report.estimate.sample_age_s),
    ("condition_age_seconds", "Since the last change.", lambda report: report.condition_s),
)

_COUNTERS: tuple[tuple[str, str, Callable[[PathReport], int]], ...] = (
    ("acked_bytes", "Acknowledged, before coding.", lambda report: report.totals.acked_bytes),
    (
        "sent_bytes",
        "On the wire, retransmissions included.",
        lambda report: report.totals.sent_bytes,
    ),
    (
        "retransmitted_bytes",
        "Sent again by the kernel.",
        lambda report: report.totals.retransmitted_bytes,
    ),
    ("samples", "Looks at the link.", lambda report: report.totals.num_samples),
    (
        "ignored_samples",
        "Looks out of order or too close together.",
        lambda report: report.totals.num_ignored_samples,
    ),
)


class LinkMetrics(Collector):
    """Has a registry of its own unless told to use another one."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._reports: tuple[PathReport, ...] = ()
        self.registry.register(self)

    def show(self, reports: Sequence[PathReport]) -> None:
        """Show these reports from now on. Links that are not in them disappear; unknown numbers are
        left out.
        """
        self._reports = tuple(reports)

    def describe(self) -> list[Metric]:
        # An empty answer keeps a registry with `auto_describe` from collecting at registration.
        return []

    def collect(self) -> Iterator[Metric]:
        reports = self._reports
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(f"prfaas_link_{name}", text, labels=["link"])
            for report in reports:
                value = read(report)
                if value is not None:
                    gauge.add_metric([report.endpoint], value)
            yield gauge
        for name, text, count in _COUNTERS:
            counter = CounterMetricFamily(f"prfaas_link_{name}", text, labels=["link"])
            for report in reports:
                counter.add_metric([report.endpoint], count(report))
            yield counter
        yield _condition(reports)
        yield _limit(reports)
        yield _changes(reports)


def _condition(reports: Sequence[PathReport]) -> Metric:
    gauge = GaugeMetricFamily(
        "prfaas_link_condition",
        "1 for the condition that the link has.",
        labels=["link", "condition"],
    )
    for report in reports:
        for condition in LinkCondition:
            gauge.add_metric(
                [report.endpoint, condition.value], float(condition is report.condition)
            )
    return gauge


def _limit(reports: Sequence[PathReport]) -> Metric:
    gauge = GaugeMetricFamily(
        "prfaas_link_limited_by", "1 for what keeps the link from more.", labels=["link", "limit"]
    )
    for report in reports:
        for limit in Limit:
            is_it = limit is report.estimate.limited_by
            gauge.add_metric([report.endpoint, limit.value], float(is_it))
    return gauge


def _changes(reports: Sequence[PathReport]) -> Metric:
    counter = CounterMetricFamily(
        "prfaas_link_condition_changes",
        "Times that a condition was entered.",
        labels=["link", "condition"],
    )
    for report in reports:
        for condition, count in report.num_changes.items():
            counter.add_metric([report.endpoint, condition.value], count)
    return counter
