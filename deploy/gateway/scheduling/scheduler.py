"""The gateway's shell around the live scheduler: a clock, what is known now, and questions.

Before a question it hands over the reports and links that have changed, so that the answer rests on
the present. Every event passes `tell`. Does not decide anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from typing import Protocol, TypeVar

from deploy.gateway.config import GatewayConfig
from deploy.gateway.scheduling.recorder import Recorder, without_texts
from netmon.region_link import LinkView
from scheduler.live.core import Event, LiveScheduler
from scheduler.live.events import (
    LinkHeard,
    ReportHeard,
    RouteAsked,
    RouteEarly,
    ThresholdsAsked,
)
from scheduler.live.learning.knowledge import ModelKnowledge
from scheduler.live.settings import LiveSettings
from scheduler.live.snapshots import LinkPair, Reported
from scheduler.live.thresholds import ThresholdNow
from scheduler.routing.decision import RequestShape
from scheduler.routing.short_term import RouteDecision

R = TypeVar("R")


class Reports(Protocol):
    """The latest report of each cluster; `deploy.gateway.links.watcher.RegionWatcher` is one."""

    def reported_pd(self) -> Reported: ...

    def reported_prefill(self) -> list[Reported]: ...


class RegionScheduler:
    """One for each gateway, on one event loop."""

    def __init__(
        self,
        settings: LiveSettings,
        reports: Reports,
        link: Callable[[str, str], LinkView] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`link` gives the state of the link from cluster to cluster; without it nothing is known
        of any.
        """
        self.live = LiveScheduler(settings)
        self.clock = clock
        self._reports = reports
        self._heard: dict[str, Reported] = {}
        self._recorder: Recorder | None = None
        self._link = link
        self._pairs = [
            pair
            for name in settings.prefill_clusters
            for pair in ((name, settings.pd), (settings.pd, name))
        ]

    def record(self, recorder: Recorder) -> None:
        """Have every event from now on written down. Raises OSError."""
        recorder.start(self.live)
        self._recorder = recorder

    def tell(self, event: Event[R]) -> R:
        """Hand an event over; what it is answered now."""
        return self._take(event, self.clock())

    def ask(self, event: Event[R]) -> R:
        """The same for an answer that rests on reports and links as they are now."""
        now_s = self.clock()
        self._hear(now_s)
        return self._take(event, now_s)

    def route(
        self,
        model: str,
        shape: RequestShape,
        *,
        excluded: Set[str] = frozenset(),
        priority: int = 0,
    ) -> RouteDecision:
        """Where a prompt is computed, passing over the clusters in `excluded`."""
        return self.ask(RouteAsked(model, shape, priority, excluded))

    def route_early(
        self, model: str, shape: RequestShape, *, priority: int = 0
    ) -> RouteDecision | None:
        """The route of a prompt that nobody has counted; None: count it and look it up first."""
        return self.ask(RouteEarly(model, shape, priority))

    def thresholds_now(self) -> list[ThresholdNow]:
        """All thresholds, for links as they are now."""
        return self.ask(ThresholdsAsked())

    def base_tokens(self) -> Mapping[str, float]:
        """What the plan says of t, by prefill cluster."""
        return self.live.thresholds.base_tokens()

    def knowledge(self, model: str) -> ModelKnowledge:
        """What was learnt of a served model, to be looked at."""
        return self.live.knowledge(model)

    def models(self) -> Mapping[str, ModelKnowledge]:
        """All models of which anything was asked or learnt."""
        return self.live.models()

    def reports(self) -> list[Reported]:
        """The PD cluster's report and those of the prefill clusters."""
        return [self._reports.reported_pd(), *self._reports.reported_prefill()]

    def links(self) -> dict[LinkPair, LinkView]:
        """Links of the PD cluster with each prefill cluster, both ways, as routing sees them."""
        self._hear(self.clock())
        return {pair: self.live.link(*pair) for pair in self._pairs}

    def _hear(self, now_s: float) -> None:
        """Hand over what has changed since the last question."""
        for found in self.reports():
            known = self._heard.get(found.name)
            if known is None or found.report is not known.report or found.at_s != known.at_s:
                self._heard[found.name] = found
                report = found.report if self._recorder is None else without_texts(found.report)
                self._take(ReportHeard(found.name, report, found.at_s), now_s)
        if self._link is None:
            return
        for source, target in self._pairs:
            view = self._link(source, target)
            if view != self.live.links.get((source, target)):
                self._take(LinkHeard(source, target, view), now_s)

    def _take(self, event: Event[R], now_s: float) -> R:
        answer = self.live.take(event, now_s)
        if self._recorder is not None:
            self._recorder.note(self.live, event, answer, now_s)
        return answer


def live_settings(
    config: GatewayConfig, pd: str, prefill_clusters: tuple[str, ...]
) -> LiveSettings:
    """What the gateway's configuration sets of the scheduler of these clusters."""
    scheduling, admission = config.scheduling, config.scheduling.admission
    long_term = scheduling.long_term
    return LiveSettings(
        pd=pd,
        prefill_clusters=prefill_clusters,
        threshold_tokens=config.threshold_tokens,
        hand_off_tokens=config.hand_off_tokens,
        routing=scheduling.routing.routing(),
        threshold=scheduling.routing.threshold(),
        order=scheduling.queue.order(),
        refuses_load=admission.policy != "off",
        admission=admission.admission(),
        default_tenant=admission.default_tenant,
        tenants=admission.tenants,
        models=tuple(model.name for model in config.models),
        long_term=long_term.loop(),
        follows_plans=long_term.mode == "act",
    )
