"""The region as routing sees it, made of reports, links, what is under way and what was learnt.

Reports are up to a second old, so jobs that began or ended since then are added or removed. The
learnt profile of a place turns its work into seconds. Pure; time is an argument. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from typing import Final

import msgspec

from netmon.region_link import LinkView
from scheduler.live.decode_side import Decoding, decode_view, decoding, landing_room_bytes
from scheduler.live.learning.cache_moves import CacheMoveLedger
from scheduler.live.learning.knowledge import ModelKnowledge
from scheduler.live.ledger import DirectPrompt, Ledger, PrefillLeg
from scheduler.live.place_work import PlaceWork
from scheduler.live.thresholds import Thresholds
from scheduler.reports import ClusterReport, InstanceReport, decodes, is_of_model, serves
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, RequestShape
from scheduler.routing.media import MediaView
from scheduler.routing.order_config import OrderConfig
from scheduler.routing.profiles import PrefillProfile
from scheduler.routing.views import ClusterView, DecodeView, RegionSnapshot

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


class ReportDigest:
    """What is worked out once of a cluster's report for one model, each part when it is first
    needed.
    """

    def __init__(self, source: Reported, model: str) -> None:
        self.source, self.model = source, model
        self._work: PlaceWork | None = None

    @property
    def instances(self) -> tuple[InstanceReport, ...]:
        """All instances of the cluster."""
        return () if self.source.report is None else self.source.report.instances

    @cached_property
    def decoding(self) -> Decoding:
        """The instances that decode."""
        return decoding(self.instances, self.source.at_s, self.model)

    @cached_property
    def handing_off(self) -> list[InstanceReport]:
        """The instances of a PD cluster that prefill for others."""
        return [item for item in self.instances if item.role == "prefill"]

    @cached_property
    def layouts(self) -> frozenset[str] | None:
        """The fingerprints of the KVCache that the instances of a prefill cluster compute for the
        model; None while one of them has not said, or there are none.
        """
        return _layouts(self.instances, self.model)

    @cached_property
    def decoding_layouts(self) -> frozenset[str] | None:
        """The fingerprints of the KVCache that the instances of a PD cluster decode."""
        return _layouts([item for item in self.instances if decodes(item.role)], self.model)

    @cached_property
    def can_hand_off(self) -> bool:
        """Whether an instance of a PD cluster may decode what another one of it prefills."""
        return _can_feed(_layouts(self.handing_off, self.model), self.decoding_layouts)

    @cached_property
    def whole(self) -> list[InstanceReport]:
        """The instances that serve a request whole."""
        serving = [item for item in self.instances if serves(item, self.model)]
        # Prefill instances serve whole requests only where no other instance can.
        return [item for item in serving if decodes(item.role)] or serving

    @cached_property
    def whole_names(self) -> frozenset[str]:
        """The names of `whole`."""
        return frozenset(item.name for item in self.whole)

    def work(
        self, place: str, instances: Sequence[InstanceReport], first_pd: str, order: OrderConfig
    ) -> PlaceWork:
        """The prefills of the cluster, which `instances` compute."""
        work, report = self._work, self.source.report
        assert report is not None
        # An operator may change the order between two reports.
        if work is None or work.order is not order:
            at_s, model = self.source.at_s, self.model
            work = self._work = PlaceWork(
                report, at_s, instances, place=place, model=model, first_pd=first_pd, order=order
            )
        return work


class PendingRequest(msgspec.Struct, frozen=True):
    """A request to be routed. `priority` is the client's, `home` the PD cluster that it belongs to.

    `shape` is as its home sees it.
    """

    shape: RequestShape
    priority: int = 0
    home: str = ""


class SnapshotMaker(msgspec.Struct, frozen=True):
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
    order: OrderConfig = msgspec.field(default_factory=OrderConfig)
    """The order in which the queues of prefill clusters start their jobs."""
    request: PendingRequest | None = None
    """The request that the snapshot is for. Jobs that it will overtake are not ahead of it. None:
    all waiting jobs are ahead.
    """

    def make(
        self, pd: ReportDigest, prefill_clusters: Sequence[ReportDigest], now_s: float
    ) -> RegionSnapshot:
        """The region at `now_s`."""
        name = pd.source.name
        seen = RegionSnapshot(
            taken_s=now_s,
            local=self._hand_off(pd, now_s),
            engines=self._engines(pd, now_s),
            decode=self.decode_side(pd, now_s),
            # Only this gateway's own landings are added. Those of others are in the next report.
            landing_room_bytes=landing_room_bytes(pd.decoding, pd=name, ledger=self.ledger),
            prefill_clusters=tuple(
                [self._prefill_cluster(digest, pd, now_s) for digest in prefill_clusters]
            ),
            moving=self.moves.moving(),
            failed_moves=self.moves.failed_lately(now_s),
        )
        if self.request is None or self.request.shape.media is None:
            return seen
        return self._with_media(seen, pd, prefill_clusters)

    def _with_media(
        self, seen: RegionSnapshot, pd: ReportDigest, prefill_clusters: Sequence[ReportDigest]
    ) -> RegionSnapshot:
        """The same, with how each cluster gets and encodes the request's media."""
        name = pd.source.name
        hand_off, whole = self.place(HAND_OFF, name), self.place(ONE_ENGINE, name)
        return msgspec.structs.replace(
            seen,
            local=self._encoding(seen.local, hand_off, pd, pd.handing_off),
            engines=seen.engines and self._encoding(seen.engines, whole, pd, pd.whole),
            prefill_clusters=tuple(
                self._encoding(
                    cluster,
                    cluster.name,
                    digest,
                    digest.instances,
                    self._media_link(name, cluster, seen.taken_s),
                )
                for cluster, digest in zip(seen.prefill_clusters, prefill_clusters, strict=True)
            ),
        )

    def _encoding(
        self,
        cluster: ClusterView,
        place: str,
        digest: ReportDigest,
        instances: Iterable[InstanceReport],
        link: LinkView | None = None,
    ) -> ClusterView:
        """`cluster`, of whose report `instances` would compute the prompt."""
        report, line = digest.source.report, self.knowledge.media.line(place)
        stage = None if report is None else report.encode
        media = MediaView(model=self.model, stage=stage, line=line, link=link)
        # A front gives a prompt with media to no engine without an encoder.
        reads = any(serves(item, self.model) and not item.text_only for item in instances)
        return msgspec.structs.replace(
            cluster, media=media, is_healthy=cluster.is_healthy and reads
        )

    def _media_link(self, source: str, cluster: ClusterView, now_s: float) -> LinkView:
        """The link over which media come to a prefill cluster. Where nobody has measured it, the
        link of its KVCache, which is the other direction, stands for it.
        """
        link, back = self.links_in(cluster.name, now_s, (source,))[source], cluster.link
        if link.available_bytes_per_s is not None or back is None:
            return link
        return LinkView(
            available_bytes_per_s=back.available_bytes_per_s,
            rtt_s=back.rtt_s,
            is_floor=back.is_floor,
        )

    def decode_side(self, pd: ReportDigest, now_s: float) -> DecodeView:
        """The instances of the PD cluster that decode for the model."""
        return decode_view(
            pd.decoding,
            now_s,
            pd=pd.source.name,
            model=self.model,
            known=self.knowledge,
            ledger=self.ledger,
        )

    def _prefill_cluster(
        self, digest: ReportDigest, home: ReportDigest, now_s: float
    ) -> ClusterView:
        name, report = digest.source.name, digest.source.report
        pd = home.source.name
        link, profile = self.link(name, pd), self.knowledge.prefill(name)
        threshold = self.thresholds.update(name, link, now_s, pd=pd)
        if report is None:
            return ClusterView(
                name=name,
                prefill=profile,
                is_healthy=False,
                link=link,
                threshold_tokens=threshold.tokens,
                plan_threshold_tokens=threshold.plan_tokens,
            )
        work = digest.work(name, report.instances, self.first_pd, self.order)
        work.follow(self.ledger, profile, digest.source.at_s - link.rtt_s - ON_THE_WAY_S)
        return ClusterView(
            name=name,
            prefill=profile,
            free_s=work.free_s(now_s),
            num_busy=work.num_busy,
            is_healthy=report.healthy and work.is_usable,
            num_queued=work.num_queued,
            max_queued=report.max_queued or None,
            ahead_s=self._ahead_s(work, name, pd, now_s),
            link=self._filled(link, work, pd),
            links_in=self._links_in(name, report.instances, now_s),
            threshold_tokens=threshold.tokens,
            plan_threshold_tokens=threshold.plan_tokens,
            can_feed=_can_feed(digest.layouts, home.decoding_layouts),
        )

    def _ahead_s(self, work: PlaceWork, cluster: str, pd: str, now_s: float) -> tuple[float, ...]:
        """The prefills in the queue of a prefill cluster that start before the request."""
        if self.request is None:
            return work.waiting_s
        uncached_tokens = self.request.shape.prefill_uncached_tokens(cluster)
        return work.ahead_s(self.request.priority, uncached_tokens, pd, now_s)

    def _links_in(
        self, name: str, instances: Iterable[InstanceReport], now_s: float
    ) -> Mapping[str, LinkView]:
        """The links over which cached prefixes come to these instances; none without a node
        agent.
        """
        # Without a request, any cluster might send something.
        sources = None if self.request is None else self.request.shape.sendable_tokens
        if sources is not None and not sources:
            return {}
        if not any(item.node for item in instances):
            return {}
        return self.links_in(name, now_s, sources)

    def _hand_off(self, pd: ReportDigest, now_s: float) -> ClusterView:
        """The instances of the PD cluster that prefill for others."""
        name, report = pd.source.name, pd.source.report
        place = self.place(HAND_OFF, name)
        profile = self.knowledge.prefill(place)
        if report is None:
            return ClusterView(name=name, prefill=profile, is_healthy=False)
        work = pd.work(place, pd.handing_off, self.first_pd, self.order)
        work.follow(self.ledger, profile, pd.source.at_s - ON_THE_WAY_S)
        return ClusterView(
            name=name,
            prefill=profile,
            free_s=work.free_s(now_s),
            num_busy=work.num_busy,
            is_healthy=report.healthy and work.is_usable,
            num_queued=work.num_queued,
            links_in=self._links_in(name, pd.handing_off, now_s),
            ahead_s=work.waiting_s,
            can_feed=pd.can_hand_off,
        )

    def _engines(self, pd: ReportDigest, now_s: float) -> ClusterView:
        """The instances that serve a request whole."""
        name, report = pd.source.name, pd.source.report
        place = self.place(ONE_ENGINE, name)
        profile = self.knowledge.prefill(place)
        if report is None:
            return ClusterView(name=name, prefill=profile, is_healthy=False)
        direct = self.ledger.direct()
        busy = direct.keys() & pd.whole_names
        free_s = [0.0] * (len(pd.whole) - len(busy))
        free_s += [self._engine_s(item, direct[item], profile, now_s) for item in busy]
        wanted, taken = (place, self.model), self.ledger.taken().values()
        coming = [leg for leg in taken if (leg.place, leg.model) == wanted]
        heapify(free_s)
        # Nobody knows yet which engine gets which of them: each the one that is free first.
        for leg in coming if free_s else ():
            heapreplace(free_s, free_s[0] + _prefill_s(profile, leg))
        return ClusterView(
            name=name,
            prefill=profile,
            free_s=tuple(sorted(free_s)),
            num_busy=min(len(free_s), len(busy) + len(coming)),
            is_healthy=report.healthy,
            links_in=self._links_in(name, pd.whole, now_s),
        )

    def _engine_s(
        self, instance: str, given: Sequence[DirectPrompt], profile: PrefillProfile, now_s: float
    ) -> float:
        """When an engine has computed the prompts that it was given."""
        num_left = 0
        ahead_s = 0.0
        for prompt in given:
            prefill_s = _prefill_s(profile, prompt)
            spent_s = self.ledger.alone_s(ONE_ENGINE, instance, prompt.begun_s, now_s)
            if spent_s > LATE_FACTOR * (ahead_s + prefill_s) + LATE_S:
                continue
            # However late the first prompt is, the later ones are still to be computed.
            ahead_s += max(0.0, prefill_s - spent_s) if not num_left else prefill_s
            num_left += 1
        return ahead_s

    def _filled(self, link: LinkView, work: PlaceWork, pd: str) -> LinkView:
        """The link to `pd` with what running prefills will go on to emit.

        A link that nobody has filled is not known to be too slow for that: a backlog would have
        shown it.
        """
        kv = self.knowledge.kv
        if kv is None or link.is_floor:
            return link
        inflow_bytes_per_s = work.emitted_bytes_per_s(pd, kv)
        return msgspec.structs.replace(link, inflow_bytes_per_s=inflow_bytes_per_s)


def _prefill_s(profile: PrefillProfile, work: DirectPrompt | PrefillLeg) -> float:
    return profile.prefill_s(work.num_tokens, work.num_tokens - work.uncached_tokens)


def _layouts(instances: Iterable[InstanceReport], model: str) -> frozenset[str] | None:
    found = frozenset(
        item.layout_fingerprint
        for item in instances
        # One that lost its health because nobody can use its KVCache still says which it is.
        if serves(item, model) or (not item.compatible and is_of_model(item, model))
    )
    # Before all have said what they have, a transfer that fails tells.
    return None if not found or "" in found else found


def _can_feed(computed: frozenset[str] | None, decoded: frozenset[str] | None) -> bool:
    """Whether an instance that decodes may use the KVCache of one that computes it."""
    return computed is None or decoded is None or not computed.isdisjoint(decoded)
