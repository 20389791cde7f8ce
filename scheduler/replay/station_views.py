"""The stations of a replay as the live scheduler sees them, where a gateway has reports.

A request finds them as they are. The long-term loop is told reports of them (`reports`), because it
counts instances by what was reported of them. What a gateway learns or is told (profiles,
overheads, links, thresholds, what is on its way) is the live scheduler's own here, too. Does not
decide anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scheduler.live.core import LiveScheduler
from scheduler.live.snapshots import PendingRequest
from scheduler.replay.caching import ReplayCache
from scheduler.replay.decode import DecodePool
from scheduler.replay.jobs import Job
from scheduler.replay.model import MODEL
from scheduler.replay.prefill import PrefillStation
from scheduler.replay.watching import WatchedLink
from scheduler.reports import ClusterReport, InstanceReport
from scheduler.routing.decision import HAND_OFF
from scheduler.routing.views import ClusterView, DecodeView, RegionSnapshot


@dataclass(frozen=True, slots=True)
class Parts:
    """What a decider is shown of the replay. Station 0 is the PD cluster's own. `watches` are by
    station, None for station 0; `caches` None: nothing is ever cached.
    """

    stations: Sequence[PrefillStation]
    pool: DecodePool
    caches: Sequence[ReplayCache] | None
    watches: Sequence[WatchedLink | None]

    def hits(self, job: Job) -> list[int]:
        """Tokens of a prompt that each station has cached."""
        if self.caches is None:
            return [0] * len(self.stations)
        return [cache.hit_tokens(job.blocks, job.num_tokens) for cache in self.caches]


def reports(parts: Parts) -> Iterator[ClusterReport]:
    """What the fronts of all clusters would say now, the PD cluster's first."""
    for station in parts.stations:
        is_home = station is parts.stations[0]
        slots = parts.pool.slots_per_instance if is_home else 0
        instances = [*station.instances, *(parts.pool.instances if is_home else ())]
        yield ClusterReport(
            name=station.name,
            healthy=station.num_usable > 0,
            queue_depth=station.num_queued,
            running=station.num_running,
            instances=tuple(
                InstanceReport(
                    name=item.name,
                    role=item.role,
                    model=MODEL,
                    healthy=True,
                    draining=not item.is_usable,
                    running=item.num_requests,
                    max_concurrent=1 if item.role == "prefill" else slots,
                    role_epoch=item.role_epoch,
                    decode_slots=slots,
                )
                for item in instances
            ),
        )


class StationViews:
    """The `Views` of a replay: what reports of all clusters would say if none were ever late."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def snapshot(
        self, live: LiveScheduler, model: str, now_s: float, request: PendingRequest | None
    ) -> RegionSnapshot:
        """The region as this request finds it; there always is one."""
        assert request is not None
        known, (home, *others) = live.knowledge(model), self._parts.stations
        prefill_clusters = []
        for station in others:
            name, link = station.name, live.link(station.name, home.name)
            cluster = ClusterView(
                name=name,
                prefill=known.prefill(name),
                free_s=station.free_s(now_s),
                queued_s=station.queued_s(request.shape.prefill_uncached_tokens(name), now_s),
                link=link,
                threshold_tokens=live.thresholds.update(name, link, now_s),
                plan_threshold_tokens=live.thresholds.plan_tokens(name),
            )
            prefill_clusters.append(cluster)
        local = ClusterView(
            name=home.name,
            prefill=known.prefill(HAND_OFF),
            free_s=home.free_s(now_s),
            queued_s=home.queued_s(request.shape.local_uncached_tokens, now_s),
            links_in={} if self._parts.caches is None else live.links_in(home.name, now_s),
        )
        return RegionSnapshot(
            taken_s=now_s,
            local=local,
            decode=self.decode_side(live, model, now_s),
            prefill_clusters=tuple(prefill_clusters),
        )

    def decode_side(self, live: LiveScheduler, model: str, now_s: float) -> DecodeView:
        """The decode pool; nobody knows how long an answer will be."""
        pool, known = self._parts.pool, live.knowledge(model)
        lands_at_s = sorted(leg.lands_at_s for leg in live.ledger.landing(model))
        return DecodeView(
            slots_total=pool.slots_total,
            slots_used=pool.num_running,
            num_waiting=len(pool.waiting),
            decode_s=known.decode_s,
            step_s=known.step_s or 0.0,
            landing_s=tuple([at_s - now_s if at_s > now_s else 0.0 for at_s in lands_at_s]),
        )
