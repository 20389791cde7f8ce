"""A region as a gateway's scheduler sees it: reports and links that tests write by hand."""

from __future__ import annotations

from typing import Any

import report_cases

from deploy.gateway.scheduling.config import RoutingSection
from deploy.gateway.scheduling.scheduler import RegionScheduler
from netmon.region_link import LinkView
from scheduler.live.settings import LiveSettings, PdSettings
from scheduler.live.snapshots import PendingRequest, Reported
from scheduler.reports import ClusterReport, InstanceReport, JobReport
from scheduler.routing.views import RegionSnapshot

MODEL = "tiny"
FAST_LINK = LinkView(available_bytes_per_s=1e9, rtt_s=0.02)


report = report_cases.cluster


def instance(name: str, role: Any = "prefill", **fields: Any) -> InstanceReport:
    return report_cases.instance(name, role, **({"model": MODEL, "max_concurrent": 2} | fields))


def job(name: str, tokens: int = 1000, for_s: float = 0.0, **fields: Any) -> JobReport:
    values: dict[str, Any] = {"num_tokens": tokens, "uncached_tokens": tokens}
    return JobReport(transfer_id=name, for_s=for_s, **(values | fields))


class Region:
    """Reports of `home` and `far`, taken at `at_s`, and the clock of their scheduler."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.at_s = 100.0
        self.home: ClusterReport | None = report("home", instance("d0", "both", decode_slots=4))
        self.far: ClusterReport | None = report("far", instance("p0"), max_queued=8)
        self.links = {("far", "home"): FAST_LINK, ("home", "far"): FAST_LINK}
        self.prefill_clusters: tuple[str, ...] = ("far",)

    def reported_pd(self) -> Reported:
        return Reported("home", self.home, self.at_s)

    def reported_pds(self) -> list[Reported]:
        return [self.reported_pd()]

    def reported_prefill(self) -> list[Reported]:
        return [Reported(name, self.far, self.at_s) for name in self.prefill_clusters]

    def scheduler(self, *, follows_links: bool = True, **routing: Any) -> RegionScheduler:
        section = RoutingSection.model_validate(routing)
        settings = LiveSettings(
            pd_clusters=(PdSettings("home", self.prefill_clusters),),
            threshold_tokens=1000,
            hand_off_tokens=256,
            routing=section.routing(),
            threshold=section.threshold(),
        )
        return RegionScheduler(
            settings,
            self,
            (lambda a, b: self.links[a, b]) if follows_links else None,
            clock=lambda: self.now_s,
        )


def snapshot(
    scheduler: RegionScheduler, model: str = MODEL, request: PendingRequest | None = None
) -> RegionSnapshot:
    """The region as a request would find it now."""
    scheduler.links()  # hear of what has changed
    return scheduler.live.snapshot(model, scheduler.clock(), request)


def teach(scheduler: RegionScheduler, place: str, per_token_s: float) -> None:
    """Prefills at `place` took so long, and landings 512 bytes for each token."""
    known = scheduler.knowledge(MODEL)
    for number in range(1, 9):
        num_tokens = number * 500
        known.learn(place, num_tokens, 0, num_tokens * per_token_s)
        known.reserved(num_tokens, 0, num_tokens * 512)
