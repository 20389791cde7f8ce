"""One exposition for all processes of a gateway, which never goes backwards.

A scrape reaches one process, and another one the next time. So what is shown has the numbers of
all: counters and histograms are added up, those of processes that have ended included, under the
names and labels that a gateway of one process has. Gauges get the label `process`: the sum of, for
example, thresholds means nothing.

What a process counted after the last scrape before its end is lost. Pure: it is given texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL: Final = "process"
_ADDED: Final = ("counter", "histogram", "summary")

_Labels = tuple[tuple[str, str], ...]
_Sums = dict[str, tuple[Metric, dict[tuple[str, _Labels], float]]]
"""By name of the family: its description, and its samples by name and labels."""


class MergedMetrics(Collector):
    """The metrics of the processes of one gateway, for a registry."""

    def __init__(self) -> None:
        self._latest: dict[str, list[Metric]] = {}
        """By process: what it said last."""
        self._silent: set[str] = set()
        self._ended: _Sums = {}
        """What processes that have ended had counted."""

    def put(self, process: str, text: str) -> None:
        """Take in what a process exposes now. ValueError if it is no exposition."""
        families = list(text_string_to_metric_families(text))
        # When a counter was made says nothing of a sum.
        self._latest[process] = [f for f in families if not f.name.endswith("_created")]
        self._silent.discard(process)

    def silent(self, process: str) -> None:
        """A process does not answer: its counters stay, and its gauges are not known."""
        self._silent.add(process)

    def ended(self, process: str) -> None:
        """A process has ended. A new one of its name begins with new counters."""
        _add(self._ended, self._latest.pop(process, ()))
        self._silent.discard(process)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, each family once."""
        sums: _Sums = {name: (like, dict(samples)) for name, (like, samples) in self._ended.items()}
        for families in self._latest.values():
            _add(sums, families)
        for like, samples in sums.values():
            metric = Metric(like.name, like.documentation, like.type)
            for (name, labels), value in samples.items():
                metric.add_sample(name, dict(labels), value)
            yield metric
        yield from self._gauges().values()

    def _gauges(self) -> Mapping[str, Metric]:
        found: dict[str, Metric] = {}
        for process, families in self._latest.items():
            for family in families:
                if family.type in _ADDED or process in self._silent:
                    continue
                new = Metric(family.name, family.documentation, family.type)
                metric = found.setdefault(family.name, new)
                for sample in family.samples:
                    metric.add_sample(sample.name, sample.labels | {LABEL: process}, sample.value)
        return found


def _add(sums: _Sums, families: list[Metric] | tuple[()]) -> None:
    for family in families:
        if family.type not in _ADDED:
            continue
        _, samples = sums.setdefault(family.name, (family, {}))
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            samples[key] = samples.get(key, 0.0) + sample.value
