"""The live scheduler's views of a replay's stations, in the place of a gateway's reports.

Routing sees the stations as they are. The long-term loop gets reports of them (`reports`), because
it counts instances by their reports. What a gateway learns or is told (profiles, overheads, links,
thresholds, requests in flight) is the live scheduler's own state here too. This file decides
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from scheduler.live.core import LiveScheduler, ReportedViews
from scheduler.live.settings import PdSettings
from scheduler.live.snapshots import PendingRequest
from scheduler.replay.caching import ReplayCache
from scheduler.replay.decode import DecodePool
from scheduler.replay.encoding import EncodeStages
from scheduler.replay.jobs import Job, Way
from scheduler.replay.model import MODEL
from scheduler.replay.prefill import PrefillStation
from scheduler.replay.watching import WatchedLink
from scheduler.reports import ClusterReport, InstanceReport, JobReport
from scheduler.routing.decision import HAND_OFF, RequestShape
from scheduler.routing.media import MediaView
from scheduler.routing.service import Load
from scheduler.routing.views import ClusterView, DecodeView, RegionSnapshot


@dataclass(frozen=True, slots=True)
class PdParts:
    """One PD cluster: its instances that prefill, and those that decode."""

    station: PrefillStation
    pool: DecodePool


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a replay that a decider sees. `caches` are those of all clusters by name, None
    if nothing is cached.
    """

    pds: Sequence[PdParts]
    sources: Sequence[PrefillStation]
    """The prefill clusters. The first one has place 1."""
    caches: Mapping[str, ReplayCache] | None
    watches: Mapping[Way, WatchedLink]
    encoding: EncodeStages | None = None
    """None if there are no media."""

    def station(self, job: Job) -> PrefillStation:
        """Where the job is prefilled."""
        return self.sources[job.place - 1] if job.place else self.pds[job.pd].station

    def lost(self, job: Job) -> str:
        """The name of the lost cluster that the job would need; "" if there is none."""
        needed = (self.station(job), self.pds[job.pd].station)
        return next((station.name for station in needed if station.is_lost), "")

    def stations(self) -> list[PrefillStation]:
        """All stations, those of PD clusters first."""
        return [*(pd.station for pd in self.pds), *self.sources]

    def load(self, job: Job) -> Load:
        """What others compute as the job's prefill begins."""
        own, pool = self.station(job), self.pds[job.pd].pool
        others = [item for item in self.stations() if item is not own]
        num_instances = sum(item.num_usable for item in others)
        decodes = pool.num_running / max(1, pool.num_usable)
        busy = sum(item.num_busy() for item in others) / max(1, num_instances)
        return Load(decodes, min(1.0, busy))

    def cached_tokens(self, job: Job, cluster: str) -> int:
        """How many tokens of a prompt a cluster has cached."""
        if self.caches is None:
            return 0
        return self.caches[cluster].hit_tokens(job.blocks, job.num_tokens)

    def hits(self, job: Job) -> list[int]:
        """How many tokens of a prompt each place has cached; place 0 is the PD cluster that decodes
        it.
        """
        if self.caches is None:
            return [0] * (1 + len(self.sources))
        stations = [self.pds[job.pd].station, *self.sources]
        return [self.cached_tokens(job, station.name) for station in stations]


def reports(parts: Parts, now_s: float) -> Iterator[ClusterReport]:
    """The reports that the fronts of all clusters would send now, those of PD clusters first."""
    for pd in parts.pds:
        yield _report(pd.station, pd.pool, now_s, parts.encoding)
    for station in parts.sources:
        yield _report(station, None, now_s, parts.encoding)


def _report(
    station: PrefillStation, pool: DecodePool | None, now_s: float, encoding: EncodeStages | None
) -> ClusterReport:
    slots = 0 if pool is None else pool.slots_per_instance
    instances = [*station.instances, *(() if pool is None else pool.instances)]
    return ClusterReport(
        name=station.name,
        healthy=station.num_usable > 0,
        queue_depth=station.num_queued,
        running=station.num_running,
        encode=None if encoding is None else encoding.report(station.name, now_s),
        instances=tuple(
            InstanceReport(
                name=item.name,
                role=item.role,
                model=MODEL,
                healthy=not item.is_lost,
                draining=not (item.is_usable or item.is_lost),
                running=item.num_requests,
                max_concurrent=1 if item.role == "prefill" else slots,
                role_epoch=item.role_epoch,
                decode_slots=slots,
            )
            for item in instances
        ),
        jobs=tuple(
            JobReport(
                transfer_id=str(job.index),
                num_tokens=job.num_tokens,
                uncached_tokens=job.num_tokens - job.cached_tokens,
                for_s=max(0.0, now_s - (job.start_s if instance else job.arrival_s)),
                instance=instance,
                model=MODEL,
            )
            for job, instance in station.jobs()
        ),
    )


class ReportedStations(ReportedViews):
    """The region by reports, with the places that a replay has: in a PD cluster, prompts are
    prefilled by the instances that prefill, which have a common queue. No engine serves one whole.
    """

    def snapshot(
        self,
        live: LiveScheduler,
        model: str,
        now_s: float,
        request: PendingRequest | None,
        pd: PdSettings,
    ) -> RegionSnapshot:
        """The region at `now_s`, as far as reports say."""
        seen = super().snapshot(live, model, now_s, request, pd)
        local = msgspec.structs.replace(seen.local, max_queued=None)
        return msgspec.structs.replace(seen, local=local, engines=None)


class StationViews:
    """The `Views` of a replay: as if reports of all clusters were never late."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._pds = {pd.station.name: pd for pd in parts.pds}
        self._numbers = {pd.station.name: at for at, pd in enumerate(parts.pds)}
        self._sources = {
            pd.station.name: [s for p, s in enumerate(parts.sources, 1) if (p, at) in parts.watches]
            for at, pd in enumerate(parts.pds)
        }

    def snapshot(
        self,
        live: LiveScheduler,
        model: str,
        now_s: float,
        request: PendingRequest | None,
        pd: PdSettings,
    ) -> RegionSnapshot:
        """The region as `request` finds it. A replay always has a request here."""
        assert request is not None
        known, home = live.knowledge(model), self._pds[pd.name].station
        shape, number = request.shape, self._numbers[pd.name]
        prefill_clusters = []
        for station in self._sources[pd.name]:
            name, link = station.name, live.link(station.name, home.name)
            threshold = live.thresholds.update(name, link, now_s, pd=pd.name)
            cluster = ClusterView(
                name=name,
                prefill=known.prefill(name),
                is_healthy=not station.is_lost,
                free_s=station.free_s(now_s),
                num_busy=station.num_busy(),
                queued_s=station.queued_s(shape.prefill_uncached_tokens(name), now_s, number),
                link=link,
                threshold_tokens=threshold.tokens,
                plan_threshold_tokens=threshold.plan_tokens,
                media=self._media(live, shape, name, name, now_s),
            )
            prefill_clusters.append(cluster)
        local = ClusterView(
            name=home.name,
            prefill=known.prefill(live.place(HAND_OFF, pd.name)),
            is_healthy=not home.is_lost,
            free_s=home.free_s(now_s),
            num_busy=home.num_busy(),
            queued_s=home.queued_s(shape.local_uncached_tokens, now_s, number),
            links_in={} if self._parts.caches is None else live.links_in(home.name, now_s),
            media=self._media(live, shape, home.name, live.place(HAND_OFF, pd.name), now_s),
        )
        return RegionSnapshot(
            taken_s=now_s,
            local=local,
            decode=self.decode_side(live, model, now_s, pd),
            prefill_clusters=tuple(prefill_clusters),
        )

    def _media(
        self, live: LiveScheduler, shape: RequestShape, cluster: str, place: str, now_s: float
    ) -> MediaView | None:
        """How a cluster encodes the request's media; None for text. They are where they have to be:
        a replay has no way of the client's body.
        """
        encoding = self._parts.encoding
        if encoding is None or shape.media is None:
            return None
        # A gateway that has been running for a while knows the profile's line.
        line = live.knowledge(MODEL).media.line(place) or encoding.line(cluster)
        return MediaView(model=MODEL, stage=encoding.report(cluster, now_s), line=line)

    def num_free_slots(self, live: LiveScheduler, model: str, pd: PdSettings) -> int | None:
        """The free slots of the PD cluster's decode pool."""
        pool = self._pds[pd.name].pool
        if not pool.slots_total:
            return None
        return max(0, pool.slots_total - pool.num_running - len(pool.waiting))

    def decode_side(
        self, live: LiveScheduler, model: str, now_s: float, pd: PdSettings
    ) -> DecodeView:
        """The decode pool. It does not tell how long answers will be, which no gateway knows."""
        pool, known = self._pds[pd.name].pool, live.knowledge(model)
        lands_at_s = sorted([leg.lands_at_s for leg in live.ledger.landing(model, pd.name)])
        return DecodeView(
            slots_total=pool.slots_total,
            slots_used=pool.num_running,
            num_waiting=len(pool.waiting),
            decode_s=known.decode_s,
            step_s=known.step_s or 0.0,
            # A landing that is overdue is expected now.
            num_instances=pool.num_usable,
            landing_s=tuple([at_s - now_s if at_s > now_s else 0.0 for at_s in lands_at_s]),
        )
