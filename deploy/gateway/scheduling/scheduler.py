"""The gateway's shell around the live scheduler: a clock, present facts, and questions.

Before a question it hands over the reports and links that have changed, so that the answer rests on
the present. Every event passes `tell` or `ask`. It decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Protocol, TypeVar

import msgspec

from deploy.gateway.config import GatewayConfig, SharedUplink
from deploy.gateway.scheduling.recorder import Recorder
from netmon.region_link import LinkView
from scheduler.live.core import Event, LiveScheduler
from scheduler.live.events import (
    LinkHeard,
    ReportHeard,
    RequestTaken,
    RouteAsked,
    RouteEarly,
    ThresholdsAsked,
)
from scheduler.live.learning.knowledge import ModelKnowledge
from scheduler.live.settings import LiveSettings, PdSettings
from scheduler.live.snapshots import LinkPair, Reported
from scheduler.live.thresholds import ThresholdNow
from scheduler.planning.region_model import Uplink
from scheduler.reports import ClusterReport
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, Decision, RequestShape
from scheduler.routing.short_term import RouteDecision
from scheduler.routing.spill import Spill

R = TypeVar("R")


class Reports(Protocol):
    """The latest report of each cluster; `deploy.gateway.links.watcher.RegionWatcher` is one."""

    def reported_pds(self) -> list[Reported]: ...

    def reported_prefill(self) -> list[Reported]: ...


class RegionScheduler:
    """The scheduler of one gateway, on one event loop."""

    def __init__(
        self,
        settings: LiveSettings,
        reports: Reports,
        link: Callable[[str, str], LinkView] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`link` gives the present state of a link between two clusters. Without it, no link
        is known.
        """
        self.live = LiveScheduler(settings)
        self.clock = clock
        self._reports = reports
        self._heard: dict[str, Reported] = {}
        self._recorder: Recorder | None = None
        self._listeners: list[Callable[[Event[Any], float], None]] = []
        self._link = link
        self._pairs = [pair for name, pd in settings.pairs for pair in ((name, pd), (pd, name))]

    def record(self, recorder: Recorder) -> None:
        """Record every event from now on. Raises OSError."""
        recorder.start(self.live)
        self._recorder = recorder

    def on_taken(self, listener: Callable[[Event[Any], float], None]) -> None:
        """Call `listener` with every event that was taken, and its time."""
        self._listeners.append(listener)

    def tell(self, event: Event[R]) -> R:
        """Hand an event over and return its answer."""
        return self._take(event, self.clock())

    def ask(self, event: Event[R]) -> R:
        """Like `tell`, for an answer that rests on reports and links as they are now."""
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
        home: str = "",
    ) -> RouteDecision:
        """Where a prompt is computed and decoded. Clusters in `excluded` are passed over. `home` is
        the PD cluster that the request belongs to; "" is the first one. Asking changes nothing;
        `taken` says that the route is gone.
        """
        return self.ask(RouteAsked(model, shape, priority, excluded, home))

    def taken(
        self,
        request: int,
        model: str,
        shape: RequestShape,
        decision: Decision,
        *,
        priority: int = 0,
    ) -> None:
        """The request of this number in `AdmitAsked` goes the way of `decision` from now on."""
        predicted, saved_tokens, cached_tokens = None, 0, shape.local_cached_tokens
        if isinstance(decision, RouteDecision):
            predicted = decision.predicted
            saved_tokens = decision.move.saved_tokens if decision.move.pays else 0
        if decision.target not in (HAND_OFF, ONE_ENGINE):
            cached_tokens = shape.prefill_cached_tokens.get(decision.target, 0)
        num_tokens = shape.num_prompt_tokens
        lands_s = 0.0 if predicted is None else predicted.landed_s
        self.tell(
            RequestTaken(
                request,
                model,
                decision.target,
                num_tokens,
                max(0, num_tokens - cached_tokens - saved_tokens),
                lands_s,
                priority,
                decision.pd,
            )
        )

    def route_early(
        self, model: str, shape: RequestShape, *, priority: int = 0, home: str = ""
    ) -> RouteDecision | None:
        """The route of a prompt that was not counted; None: count it and look it up first."""
        return self.ask(RouteEarly(model, shape, priority, home))

    def thresholds_now(self) -> list[ThresholdNow]:
        """All thresholds, with links as they are now."""
        return self.ask(ThresholdsAsked())

    def base_tokens(self, pd: str = "") -> Mapping[str, float]:
        """The plan's thresholds by prefill cluster, for prompts that decode in `pd`."""
        return self.live.thresholds.base_tokens(pd)

    @property
    def pairs(self) -> tuple[LinkPair, ...]:
        """Each prefill cluster with each PD cluster that it has a link to."""
        return self.live.settings.pairs

    def layouts_at(self, cluster: str, model: str) -> tuple[str, ...]:
        """The fingerprints of the KVCache that a prefill cluster computes for a model; none while
        they are not known.
        """
        if cluster not in self.live.reports:
            return ()
        return tuple(sorted(self.live.layouts(model, cluster) or ()))

    def knowledge(self, model: str) -> ModelKnowledge:
        """The profiles and traffic learnt of a served model, for reading only."""
        return self.live.knowledge(model)

    def models(self) -> Mapping[str, ModelKnowledge]:
        """All models that were asked about or learnt about."""
        return self.live.models()

    def reports(self) -> list[Reported]:
        """The PD clusters' reports and those of the prefill clusters."""
        return [*self._reports.reported_pds(), *self._reports.reported_prefill()]

    def links(self) -> dict[LinkPair, LinkView]:
        """The links of each PD cluster with its prefill clusters, both ways, as routing sees
        them.
        """
        self._hear(self.clock())
        return {pair: self.live.link(*pair) for pair in self._pairs}

    def _hear(self, now_s: float) -> None:
        """Hand over what has changed since the last question."""
        for found in self.reports():
            known = self._heard.get(found.name)
            # By identity: comparing whole reports at every request would cost more than the
            # request's route.
            if known is None or found.report is not known.report or found.at_s != known.at_s:
                self._heard[found.name] = found
                report = found.report and for_scheduler(found.report)
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
        for listener in self._listeners:
            listener(event, now_s)
        return answer


def in_region(cluster: str, instance: str) -> str:
    """The name by which the live scheduler knows an instance. A front's own name for it is unique
    in its cluster only: two sites with one chart have the same names.
    """
    return f"{cluster}/{instance}"


def for_scheduler(report: ClusterReport) -> ClusterReport:
    """A report as the live scheduler takes it: instances have their names `in_region`, and what no
    decision reads (error texts, layouts in words, how prompts are cached) is left out, since it
    would make recordings larger.
    """
    replace = msgspec.structs.replace
    instances = tuple(
        replace(
            item,
            name=in_region(report.name, item.name),
            reason="",
            cache=None,
            layout="",
            weights="",
            adapters={},
            encoder="",
        )
        for item in report.instances
    )
    jobs = tuple(
        replace(job, instance=in_region(report.name, job.instance)) if job.instance else job
        for job in report.jobs
    )
    return replace(report, reason="", instances=instances, jobs=jobs)


def pd_settings(
    names: Iterable[str], links: Iterable[LinkPair], spill: Mapping[str, Spill]
) -> tuple[PdSettings, ...]:
    """What the live scheduler knows of each PD cluster: the prefill clusters that have a link to
    it, and its rule, "overflow" where `spill` says none.
    """
    linked = {name: tuple(source for source, pd in links if pd == name) for name in names}
    return tuple(PdSettings(name, linked[name], spill.get(name, "overflow")) for name in linked)


def live_settings(
    config: GatewayConfig,
    pd_clusters: tuple[PdSettings, ...],
    uplinks: Iterable[SharedUplink] = (),
) -> LiveSettings:
    """The settings of the scheduler of these clusters, from the gateway's configuration."""
    scheduling, admission = config.scheduling, config.scheduling.admission
    long_term = scheduling.long_term
    return LiveSettings(
        pd_clusters=pd_clusters,
        uplinks=tuple(Uplink(item.cluster, item.way, item.rate) for item in uplinks),
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
