"""Prometheus series of what scheduling rests on, computed when they are scraped.

Labels are clusters, places and served models, so their number is bounded by the configuration. What
is not known yet has no sample. This file does not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from deploy.gateway.scheduling.scheduler import RegionScheduler
from netmon.estimate import LinkCondition
from netmon.region_link import LinkNow

_PREFIX: Final = "prfaas_gateway_"

Sample = tuple[Sequence[str], float | None]
"""Label values, and the value; None: there is no sample."""


class SchedulingCollector(Collector):
    """Thresholds, what was learnt, and links. `links` gives the links that the gateway follows."""

    def __init__(
        self, scheduler: RegionScheduler, links: Callable[[], Sequence[LinkNow]] | None = None
    ) -> None:
        self._scheduler = scheduler
        self._links = links or (lambda: ())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """All series with their present values."""
        yield from self._thresholds()
        yield from self._learned()
        yield from self._of_links()

    def _thresholds(self) -> Iterator[GaugeMetricFamily]:
        found = self._scheduler.thresholds_now()
        labels = ("source", "target")
        ends = [(item.cluster, item.pd) for item in found]
        yield _family(
            "threshold_tokens",
            "The current threshold: prompts with more uncached tokens are meant for the source.",
            labels,
            zip(ends, (item.tokens for item in found), strict=True),
        )
        yield _family(
            "threshold_base_tokens",
            "The planned threshold, before the state of the link raises it.",
            labels,
            zip(ends, (item.base_tokens for item in found), strict=True),
        )

    def _learned(self) -> Iterator[GaugeMetricFamily]:
        places = [
            (known, (model, place), place)
            for model, known in self._scheduler.models().items()
            for place in known.places
        ]
        labels, now_s = ("model_name", "place"), self._scheduler.clock()
        yield _family(
            "learned_prefills",
            "Prefills that the profile of a place rests on.",
            labels,
            [(names, known.profile(place).num_seen) for known, names, place in places],
        )
        yield _family(
            "ttft_prediction_median_error_ratio",
            "Median of |predicted / measured - 1| of the latest streams.",
            labels,
            [(names, known.error(place)) for known, names, place in places],
        )
        yield _family(
            "ttft_overhead_seconds",
            "What TTFTs take whatever the prompt, the queue and the load.",
            labels,
            [(names, known.service(place, now_s).overhead_s) for known, names, place in places],
        )
        yield _family(
            "ttft_decode_seconds",
            "What TTFTs take longer for each request in a decoding engine's batch.",
            labels,
            [(names, known.service(place, now_s).decode_s) for known, names, place in places],
        )
        yield _family(
            "ttft_busy_seconds",
            "What TTFTs take longer while all instances at other places prefill.",
            labels,
            [(names, known.service(place, now_s).busy_s) for known, names, place in places],
        )

    def _of_links(self) -> Iterator[GaugeMetricFamily]:
        links = self._links()
        quantities: tuple[tuple[str, str, Callable[[LinkNow], float | None]], ...] = (
            (
                "available_bytes_per_second",
                "What transfers get together when they ask for more, as measured last.",
                lambda link: link.available_bytes_per_s,
            ),
            ("rtt_seconds", "Round trip of the worst path.", lambda link: link.rtt_s or None),
            ("loss_ratio", "Retransmitted share of what is sent.", lambda link: link.loss),
            ("backlog_bytes", "What waits at the senders.", lambda link: link.backlog_bytes),
            ("age_seconds", "Since anything was heard of the link.", lambda link: link.age_s),
        )
        for name, text, value in quantities:
            yield _family(
                "link_" + name,
                text,
                ("source", "target"),
                [((link.source, link.target), value(link)) for link in links],
            )
        yield _family(
            "link_condition",
            "1 for the condition that the link is in.",
            ("source", "target", "condition"),
            [
                ((link.source, link.target, condition.value), float(link.condition == condition))
                for link in links
                for condition in LinkCondition
            ],
        )


def _family(
    name: str, text: str, labels: Sequence[str], samples: Iterable[Sample]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(_PREFIX + name, text, labels=labels)
    for values, value in samples:
        if value is not None:
            family.add_metric(values, value)
    return family
