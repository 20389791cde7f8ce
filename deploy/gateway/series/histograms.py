"""Histograms for one event loop: an observation takes a third of a microsecond.

prometheus_client's own histogram compares the value with one bound after the other and takes two
locks, which is too much for every token of every stream. These are for one thread; a scrape runs on
the same event loop. They do not know what is observed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

TIME_TO_FIRST_TOKEN_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
"""vLLM's bounds (`vllm.v1.metrics.buckets`), as the next three, so that quantiles compare. A test
holds them equal to those of the installed vLLM."""
INTER_TOKEN_LATENCY_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_LATENCY_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
REQUEST_TOKENS: Final = tuple(
    float(digit * 10**power) for power in range(7) for digit in (1, 2, 5) if power < 6 or digit < 2
)
"""vLLM's for a model of a million tokens."""


class Observations:
    """The observations of one series."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the upper bounds of buckets, ascending."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def sum(self) -> float:
        """The sum of all values."""
        return self._sum

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulated counts by upper bound, as the exposition format has them."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


class Histograms(Collector):
    """One histogram metric with its series by label values."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        text: str,
        labels: Iterable[str],
        bounds: Sequence[float],
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = bounds
        self._series: dict[tuple[str, ...], Observations] = {}
        registry.register(self)

    def of(self, *values: str) -> Observations:
        """The series with these label values. Their number must be bounded."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Observations(self._bounds)
        return found

    def describe(self) -> list[Metric]:
        return [self._family()]

    def collect(self) -> Iterator[Metric]:
        family = self._family()
        for values, found in self._series.items():
            family.add_metric(values, found.buckets(), found.sum)
        yield family

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._text, labels=self._labels)
