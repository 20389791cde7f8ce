"""Prometheus metrics of an event loop. Does not measure: it shows what a LoopWatch counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmanager.loop.gaps import LoopGaps


class LoopCollector(Collector):
    """`<prefix>_loop_gap_seconds` and `<prefix>_loop_longest_own_gap_seconds`."""

    def __init__(
        self, prefix: str, gaps: LoopGaps, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`prefix` is "prfaas_" and the kind of process; `clock_s` is the clock of the gaps."""
        self._prefix = prefix
        self._gaps = gaps
        self._clock_s = clock_s

    def collect(self) -> Iterator[Metric]:
        histogram = HistogramMetricFamily(
            f"{self._prefix}_loop_gap_seconds",
            "Stretches of 10 ms or more in which the event loop ran nothing that was due: the "
            "process's own part and that of the machine (no core free, process stopped).",
            labels=["part"],
        )
        for part, counted in (("own", self._gaps.own), ("machine", self._gaps.machine)):
            histogram.add_metric([part], list(counted.buckets()), counted.sum_s)
        yield histogram
        longest = GaugeMetricFamily(
            f"{self._prefix}_loop_longest_own_gap_seconds",
            "Longest own part of a gap, within the last minute and since the start.",
            labels=["within"],
        )
        longest.add_metric(["minute"], self._gaps.longest_own_lately_s(self._clock_s()))
        longest.add_metric(["start"], self._gaps.longest_own_s)
        yield longest
