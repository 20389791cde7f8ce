"""Prometheus metrics of links, `prfaas_link_*`. They show the last reports and measure nothing. Any
thread may read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from netmon.estimate import Limit, LinkCondition, PathReport

_PREFIX: Final = "prfaas_link_"
_Sample: TypeAlias = tuple[Sequence[str], float]
"""Values of the labels, and the value."""

# Metric, field of the report or of its estimate, help.
_GAUGES: Final = (
    ("available_bytes_per_second", "available_bytes_per_s",
     "What transfers would get together, as last measured."),
    ("reference_bytes_per_second", "reference_bytes_per_s",
     "What the link carried in the last minutes when it carried most."),
    ("achieved_bytes_per_second", "achieved_bytes_per_s", "What transfers get now."),
    ("utilisation_ratio", "utilisation", "Achieved / available."),
    ("rtt_seconds", "rtt_s", "Smoothed round trip."),
    ("base_rtt_seconds", "base_rtt_s", "Least round trip of the last minutes."),
    ("queueing_delay_seconds", "queueing_delay_s",
     "What queues in the network add to the round trip."),
    ("backlog_bytes", "backlog_bytes", "Waiting at the sender."),
    ("backlog_seconds", "backlog_s", "Time to send what waits at the sender."),
    ("loss_ratio", "loss", "Retransmitted share."),
    ("stalled_seconds", "stalled_s", "Bytes wait and none was acknowledged for so long."),
    ("rate_age_seconds", "age_s", "Since the available rate was measured."),
    ("sample_age_seconds", "sample_age_s", "Since the last look."),
    ("condition_age_seconds", "condition_s", "Since the last change."),
)  # fmt: skip
_COUNTERS: Final = (
    ("acked_bytes", "acked_bytes", "Acknowledged, before coding."),
    ("sent_bytes", "sent_bytes", "On the wire, retransmissions included."),
    ("retransmitted_bytes", "retransmitted_bytes", "Sent again by the kernel."),
    ("samples", "num_samples", "Looks at the link."),
    ("ignored_samples", "num_ignored_samples", "Looks out of order or too close together."),
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

    def collect(self) -> Iterator[Metric]:
        reports = self._reports
        for name, field, text in _GAUGES:
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["link"])
            yield _filled(gauge, _numbers(reports, field))
        for name, field, text in _COUNTERS:
            counter = CounterMetricFamily(_PREFIX + name, text, labels=["link"])
            yield _filled(counter, _numbers(reports, field))
        text, labels = "1 for the condition that the link has.", ["link", "condition"]
        gauge = GaugeMetricFamily(_PREFIX + "condition", text, labels=labels)
        conditions = ((report.endpoint, report.condition) for report in reports)
        yield _filled(gauge, _chosen(conditions, LinkCondition))
        text = "1 for what keeps the link from more."
        gauge = GaugeMetricFamily(_PREFIX + "limited_by", text, labels=["link", "limit"])
        limits = ((report.endpoint, report.estimate.limited_by) for report in reports)
        yield _filled(gauge, _chosen(limits, Limit))
        text = "Times that a condition was entered."
        counter = CounterMetricFamily(_PREFIX + "condition_changes", text, labels=labels)
        changes = ((report.endpoint, report.num_changes.items()) for report in reports)
        yield _filled(counter, (((at, key), num) for at, items in changes for key, num in items))


def _numbers(reports: Iterable[PathReport], field: str) -> Iterator[_Sample]:
    for report in reports:
        value = getattr(report if hasattr(report, field) else report.estimate, field)
        if value is not None:
            yield (report.endpoint,), value


def _chosen(links: Iterable[tuple[str, StrEnum]], options: type[StrEnum]) -> Iterator[_Sample]:
    for endpoint, chosen in links:
        for option in options:
            yield (endpoint, option), float(option is chosen)


def _filled(
    metric: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[_Sample]
) -> GaugeMetricFamily | CounterMetricFamily:
    for labels, value in samples:
        metric.add_metric(labels, value)
    return metric
