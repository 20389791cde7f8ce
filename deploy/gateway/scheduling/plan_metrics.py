"""Prometheus metrics of the long-term loop, `prfaas_plan_*`: the plan, and wanted instances.

Only the gateway that leads shows a plan, because the plans of others are not followed. It does not
know how a plan is made.
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deploy.gateway.scheduling.plan_overview import PlanDecision
from scheduler.live.long_term.model_plan import PlanGoal
from scheduler.reports import ClusterReport

_PREFIX: Final = "prfaas_plan_"
_ROUNDING: Final = 1e-6

Place = tuple[str, str, str]
"""Cluster, role, served model."""


class PlanMetrics(Collector):
    """The decisions of one gateway's loop. Single-threaded."""

    def __init__(self, registry: CollectorRegistry, models: Iterable[str] = ()) -> None:
        """`models` are the served names. An instance without a name serves the only one."""
        self._steps = Counter(
            _PREFIX + "steps_total",
            "Steps of the long-term loop.",
            ["model_name", "reason"],
            registry=registry,
        )
        names = tuple(models)
        self._only_model = names[0] if len(names) == 1 else ""
        self._leads: Callable[[], bool] = bool
        self._reports: Callable[[], Iterable[ClusterReport | None]] = tuple
        self._goals: dict[tuple[str, str], PlanGoal] = {}
        self._gains: dict[tuple[str, str], float] = {}
        self._thresholds: dict[tuple[str, str], float] = {}
        self._members: dict[str, Tally[Place]] = {}
        registry.register(self)

    def watch(
        self, leads: Callable[[], bool], reports: Callable[[], Iterable[ClusterReport | None]]
    ) -> None:
        """Ask these at each scrape: whether this gateway leads, and for the clusters' reports."""
        self._leads, self._reports = leads, reports

    def decided(self, found: PlanDecision) -> None:
        """Show a step. Without a plan nothing is known to be wanted but what is there."""
        self._steps.labels(found.model, found.reason).inc()
        key = found.model, found.pd
        if (gain := found.numbers.get("gain")) is not None:
            self._gains[key] = gain
        if found.goal is None:
            self._goals.pop(key, None)
        else:
            self._goals[key] = found.goal

    def show_threshold(self, cluster: str, pd: str, tokens: float) -> None:
        """The plan's t of the link from a prefill cluster to a PD cluster."""
        self._thresholds[cluster, pd] = tokens

    def describe(self) -> list[Metric]:
        return [*self._families()]

    def collect(self) -> Iterator[Metric]:
        families = self._families()
        wanted, planned, thresholds, gains = families
        if self._leads():
            for place, num in self._wanted().items():
                wanted.add_metric(place, num)
            for place, num in self._planned().items():
                planned.add_metric(place, num)
            for ends, tokens in self._thresholds.items():
                thresholds.add_metric(ends, tokens)
            for key, gain in self._gains.items():
                gains.add_metric(key, gain)
        yield from families

    def _families(self) -> tuple[GaugeMetricFamily, ...]:
        by_place = ("cluster", "role", "model_name")
        return tuple(
            GaugeMetricFamily(_PREFIX + name, text, labels=labels)
            for name, text, labels in (
                (
                    "wanted_instances",
                    "Instances that the measured load asks for; those of now while none is known.",
                    by_place,
                ),
                (
                    "instances",
                    "The best division of the instances that there are now.",
                    by_place,
                ),
                ("threshold_tokens", "The planned threshold.", ("source", "target")),
                (
                    "gain_ratio",
                    "Throughput of the best plan over that of the present division, less 1.",
                    ("model_name", "cluster"),
                ),
            )
        )

    def _planned(self) -> Mapping[Place, int]:
        found: dict[Place, int] = {}
        for (model, _), goal in self._goals.items():
            for role, nums in (
                ("encode", goal.num_encode),
                ("prefill", goal.num_prefill),
                ("decode", goal.num_decode),
            ):
                found |= {(cluster, role, model): num for cluster, num in nums.items()}
        return found

    def _wanted(self) -> Mapping[Place, int]:
        """Instances by place; what no plan speaks of stays as it is."""
        members = self._members_now()
        needed: dict[Place, float] = {}
        for (model, _), goal in self._goals.items():
            for role, nums in (
                ("encode", goal.needed_encode),
                ("prefill", goal.needed_prefill),
                ("decode", goal.needed_decode),
            ):
                for cluster, num in nums.items():
                    # What does both is one kind of instance, which has both kinds of work.
                    is_both = (cluster, "both", model) in members
                    place = (cluster, "both" if is_both else role, model)
                    # PD clusters share prefill clusters, and each plan needs a part of one.
                    needed[place] = needed.get(place, 0.0) + num
        # The last instance stays: without one, no plan would speak of its cluster again.
        asked = {
            place: max(1, math.ceil(num - _ROUNDING))
            for place, num in needed.items()
            if num > _ROUNDING or place in members
        }
        return members | asked

    def _members_now(self) -> dict[Place, int]:
        """Instances by place, healthy or not: an outage must not look like a wish for fewer."""
        for report in self._reports():
            # The last known members count while a front does not answer.
            if report is not None and report.heard:
                self._members[report.name] = Tally(
                    (report.name, item.role, item.model or self._only_model)
                    for item in report.instances
                    if not item.leaving
                )
        return {place: num for tally in self._members.values() for place, num in tally.items()}
