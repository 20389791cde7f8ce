"""The region as routing sees it, made of reports, links, what is under way and what was learnt.

Reports are up to a second old, so jobs that began or ended since then are added or removed. The
learnt profile of a place turns its work into seconds. Pure; time is an argument. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from netmon.region_link import LinkView
from scheduler.live.decode_side import decode_view, decoding, landing_room_bytes
from scheduler.live.learning.cache_moves import CacheMoveLedger
from scheduler.live.learning.knowledge import ModelKnowledge
from scheduler.live.ledger import DirectPrompt, Ledger, PrefillLeg
from scheduler.live.thresholds import Thresholds
from scheduler.reports import ClusterReport, InstanceReport, JobReport, serves
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, RequestShape
from scheduler.routing.order_config import OrderConfig
from scheduler.routing.profiles import PrefillProfile
from scheduler.routing.queue_order import QueueOrder, WaitingJob, priority_class
from scheduler.routing.views import ClusterView, DecodeView, InstanceView, RegionSnapshot

ON_THE_WAY_S: Final = 1.0
"""How long before a report was asked for an unreported job may have begun and still count, seconds
beyond a round trip: it may be on its way. A job that is missing for longer came and went between
two reports.
"""
LATE_FACTOR: Final = 2.0
LATE_S: Final = 1.0
"""An engine that answers in one piece does so after the last token. A prompt counts as computed
once it is later than predicted by `LATE_FACTOR` and `LATE_S` seconds.
"""
NO_LINK_KNOWN: Final = LinkView()
"""The link of a gateway that does not follow links: nothing speaks against using it."""

LinkNow = Callable[[str, str], LinkView]
LinksIn = Callable[[str, float, Iterable[str] | None], Mapping[str, LinkView]]
"""The links to a cluster from others, by name, as a cache move would find them at a time; None:
from all others.
"""
PlaceIn = Callable[[str, str], str]
"""The place of a route's target where a PD cluster decodes, as `LiveScheduler.place`."""
LinkPair = tuple[str, str]
"""The clusters at the two ends of a link: (from, to)."""


@dataclass(frozen=True, slots=True)
class Reported:
    """The latest report of a cluster and when it was asked for. None: no report, or it is too
    old.
    """

    name: str
    report: ClusterReport | None
    at_s: float


class _Job(NamedTuple):
    """The present state of a prefill: on `instance` for `for_s`, or waiting ("") for that long."""

    instance: str
    model: str
    uncached_tokens: int
    for_s: float
    prefill_s: float
    priority: int = 0
    pd: str = ""


class PendingRequest(msgspec.Struct, frozen=True):
    """A request to be routed. `priority` is the client's, `home` the PD cluster that it belongs to.

    `shape` is as its home sees it.
    """

    shape: RequestShape
    priority: int = 0
    home: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotMaker:
    """Makes snapshots for one model and the PD cluster that would decode.

    `link` gives the present state of a link between clusters.
    """

    model: str
    knowledge: ModelKnowledge
    ledger: Ledger
    thresholds: Thresholds
    link: LinkNow
    links_in: LinksIn
    place: PlaceIn
    moves: CacheMoveLedger
    first_pd: str = ""
    """The PD cluster of jobs that name none: their gateway knows only one."""
    order: OrderConfig = field(default_factory=OrderConfig)
    """The order in which the queues of prefill clusters start their jobs."""
    request: PendingRequest | None = None
    """The request that the snapshot is for. Jobs that it will overtake are not ahead of it. None:
    all waiting jobs are ahead.
    """

    def make(
        self, pd: Reported, prefill_clusters: Sequence[Reported], now_s: float
    ) -> RegionSnapshot:
        """The region at `now_s`."""
        return RegionSnapshot(
            taken_s=now_s,
            local=self._hand_off(pd, now_s),
            engines=self._engines(pd, now_s),
            decode=self.decode_side(pd, now_s),
            landing_room_bytes=self._landing_room_bytes(pd),
            prefill_clusters=tuple(
                self._prefill_cluster(source, pd.name, now_s) for source in prefill_clusters
            ),
            moving=self.moves.moving(),
            failed_moves=self.moves.failed_lately(now_s),
        )

    def decode_side(self, pd: Reported, now_s: float) -> DecodeView:
        """The instances of the PD cluster that decode for the model."""
        instances = () if pd.report is None else pd.report.instances
        return decode_view(
            decoding(instances, self.model),
            pd.at_s,
            now_s,
            pd=pd.name,
            model=self.model,
            known=self.knowledge,
            ledger=self.ledger,
        )

    def _prefill_cluster(self, source: Reported, pd: str, now_s: float) -> ClusterView:
        name, report = source.name, source.report
        link, profile = self.link(name, pd), self.knowledge.prefill(name)
        threshold = self.thresholds.update(name, link, now_s, pd=pd)
        if report is None:
            return ClusterView(
                name=name,
                prefill=profile,
                instances=(),
                is_healthy=False,
                link=link,
                threshold_tokens=threshold,
                plan_threshold_tokens=self.thresholds.plan_tokens(name, pd),
            )
        jobs = self._jobs(source, name, profile, now_s, rtt_s=link.rtt_s)
        waiting = [job for job in jobs if not job.instance]
        ahead = self._before_request(name, pd, self._ahead(report, jobs), now_s)
        instances = self._instances(report.instances, name, jobs, now_s)
        return ClusterView(
            name=name,
            prefill=profile,
            instances=instances,
            is_healthy=report.healthy and any(item.is_usable for item in instances),
            # Jobs that a free instance will take at once do not fill the queue.
            num_queued=max(0, len(waiting) - self._num_places(report, len(jobs) - len(waiting))),
            max_queued=report.max_queued or None,
            queued_s=sum(job.prefill_s for job in ahead),
            link=self._filled(link, [job for job in jobs if (job.pd or self.first_pd) == pd]),
            links_in=self._links_in(name, report.instances, now_s),
            threshold_tokens=threshold,
            plan_threshold_tokens=self.thresholds.plan_tokens(name, pd),
        )

    def _links_in(
        self, name: str, instances: Iterable[InstanceReport], now_s: float
    ) -> Mapping[str, LinkView]:
        """The links over which cached prefixes come to these instances; none without a node
        agent.
        """
        if not any(item.node for item in instances):
            return {}
        # Without a request, any cluster might send something.
        sources = None if self.request is None else self.request.shape.sendable_tokens
        return self.links_in(name, now_s, sources)

    def _num_places(self, report: ClusterReport, num_running: int) -> int:
        """How many more jobs the instances would take at once."""
        serving = [item for item in report.instances if serves(item, self.model)]
        return max(0, sum(item.max_concurrent for item in serving) - num_running)

    def _hand_off(self, pd: Reported, now_s: float) -> ClusterView:
        """The instances of the PD cluster that prefill for others.

        They have no common queue: a job that finds all of them full is refused.
        """
        place = self.place(HAND_OFF, pd.name)
        profile, report = self.knowledge.prefill(place), pd.report
        if report is None:
            return ClusterView(name=pd.name, prefill=profile, instances=(), is_healthy=False)
        jobs = self._jobs(pd, place, profile, now_s)
        own = [item for item in report.instances if item.role == "prefill"]
        instances = self._instances(own, place, jobs, now_s)
        ahead = self._ahead(report, jobs)
        room = sum(item.max_concurrent for item in own if serves(item, self.model))
        return ClusterView(
            name=pd.name,
            prefill=profile,
            instances=instances,
            is_healthy=report.healthy and any(item.is_usable for item in instances),
            num_queued=len(jobs),
            max_queued=room,
            links_in=self._links_in(pd.name, own, now_s),
            queued_s=sum(job.prefill_s for job in ahead),
        )

    def _engines(self, pd: Reported, now_s: float) -> ClusterView:
        """The instances that serve a request whole."""
        profile, report = self.knowledge.prefill(self.place(ONE_ENGINE, pd.name)), pd.report
        if report is None:
            return ClusterView(name=pd.name, prefill=profile, instances=(), is_healthy=False)
        serving = [item for item in report.instances if serves(item, self.model)]
        # Prefill instances serve whole requests only where no other instance can.
        whole = [item for item in serving if item.role != "prefill"] or serving
        direct = self.ledger.direct()
        instances = tuple(
            self._engine(item, direct.get(item.name, ()), profile, now_s) for item in whole
        )
        return ClusterView(
            name=pd.name,
            prefill=profile,
            instances=instances,
            is_healthy=report.healthy,
            links_in=self._links_in(pd.name, whole, now_s),
        )

    def _engine(
        self,
        item: InstanceReport,
        given: Sequence[DirectPrompt],
        profile: PrefillProfile,
        now_s: float,
    ) -> InstanceView:
        left: list[DirectPrompt] = []
        ahead_s = 0.0
        for prompt in given:
            cached_tokens = prompt.num_tokens - prompt.uncached_tokens
            prefill_s = profile.prefill_s(prompt.num_tokens, cached_tokens)
            spent_s = self.ledger.alone_s(ONE_ENGINE, item.name, prompt.begun_s, now_s)
            if spent_s > LATE_FACTOR * (ahead_s + prefill_s) + LATE_S:
                continue
            # However late the first prompt is, the later ones are still to be computed.
            ahead_s += max(0.0, prefill_s - spent_s) if not left else prefill_s
            left.append(prompt)
        return InstanceView(
            name=item.name,
            node=item.node,
            running_s=ahead_s,
            num_requests=item.running,
        )

    def _instances(
        self, items: Sequence[InstanceReport], place: str, jobs: Iterable[_Job], now_s: float
    ) -> tuple[InstanceView, ...]:
        by_instance: dict[str, list[_Job]] = {}
        for job in jobs:
            by_instance.setdefault(job.instance, []).append(job)
        return tuple(
            self._instance(item, place, by_instance.get(item.name, ()), now_s) for item in items
        )

    def _instance(
        self, item: InstanceReport, place: str, jobs: Sequence[_Job], now_s: float
    ) -> InstanceView:
        running_s = 0.0
        if jobs:
            first = max(jobs, key=_age_s)
            spent_s = self.ledger.alone_s(place, item.name, now_s - first.for_s, now_s)
            # However late the first job is, the later ones are still to be computed.
            running_s = sum(job.prefill_s for job in jobs) - min(spent_s, first.prefill_s)
        return InstanceView(
            name=item.name,
            node=item.node,
            is_usable=serves(item, self.model) and item.role_ready,
            running_s=max(0.0, running_s),
            num_requests=item.running,
        )

    def _ahead(self, report: ClusterReport, jobs: Iterable[_Job]) -> list[_Job]:
        """The jobs that wait for the same instances as a request for this model."""
        # Jobs of a model with instances of its own wait for those.
        others = {item.model for item in report.instances} - {"", self.model}
        return [job for job in jobs if not job.instance and job.model not in others]

    def _before_request(
        self, cluster: str, pd: str, waiting: list[_Job], now_s: float
    ) -> list[_Job]:
        """The waiting jobs of a prefill cluster that start before the request, if `pd` decodes
        it.
        """
        if self.request is None or not waiting:
            return waiting
        order: QueueOrder[int] = QueueOrder(self.order)
        for key, job in enumerate(waiting):
            priority, submitted_s = priority_class(job.priority), now_s - job.for_s
            owner = job.pd or self.first_pd
            order.add(WaitingJob(key, priority, job.uncached_tokens, submitted_s, owner))
        uncached_tokens = self.request.shape.prefill_uncached_tokens(cluster)
        new = WaitingJob(-1, priority_class(self.request.priority), uncached_tokens, now_s, pd)
        return [waiting[job.key] for job in order.ahead_of(new, now_s)]

    def _jobs(
        self,
        source: Reported,
        place: str,
        profile: PrefillProfile,
        now_s: float,
        *,
        rtt_s: float = 0.0,
    ) -> list[_Job]:
        """The cluster's present jobs. Jobs that no report has yet count as waiting."""
        assert source.report is not None
        since_s = max(0.0, now_s - source.at_s)
        reported = {job.transfer_id: job for job in source.report.jobs}
        jobs = [
            _Job(
                job.instance,
                job.model,
                job.uncached_tokens,
                job.for_s + since_s,
                _prefill_s(job, profile),
                job.priority,
                job.pd,
            )
            for transfer_id, job in reported.items()
            if not self.ledger.is_over(transfer_id)
        ]
        # A reported leg never counts as unreported again: a later report without it means its end.
        for transfer_id in reported:
            self.ledger.leg_reported(transfer_id)
        for _, leg in self.ledger.unreported(place, source.at_s - rtt_s - ON_THE_WAY_S):
            age_s, prefill_s = now_s - leg.begun_s, _prefill_s(leg, profile)
            jobs.append(
                _Job("", leg.model, leg.uncached_tokens, age_s, prefill_s, leg.priority, leg.pd)
            )
        return jobs

    def _filled(self, link: LinkView, jobs: Iterable[_Job]) -> LinkView:
        """The link with what running prefills will go on to emit.

        A link that nobody has filled is not known to be too slow for that: a backlog would have
        shown it.
        """
        kv = self.knowledge.kv
        if kv is None or link.is_floor:
            return link
        # Prefills of one instance run one after the other, so only the oldest of each emits now.
        heads: dict[str, _Job] = {}
        for job in jobs:
            head = heads.get(job.instance)
            if job.instance and (head is None or job.for_s > head.for_s):
                heads[job.instance] = job
        rate = sum(
            kv.token_part_bytes(job.uncached_tokens) / max(job.prefill_s, 1e-3)
            for job in heads.values()
        )
        return msgspec.structs.replace(link, inflow_bytes_per_s=rate)

    def _landing_room_bytes(self, pd: Reported) -> float | None:
        if pd.report is None:
            return None
        # Only this gateway's own landings are added. Those of others are in the next report.
        return landing_room_bytes(
            pd.report.instances, pd.at_s, pd=pd.name, model=self.model, ledger=self.ledger
        )


def _prefill_s(job: JobReport | PrefillLeg, profile: PrefillProfile) -> float:
    return profile.prefill_s(job.num_tokens, job.num_tokens - job.uncached_tokens)


def _age_s(job: _Job) -> float:
    return job.for_s
