"""The live scheduler's views of a replay's stations, in the place of a gateway's reports.

Routing sees the stations as they are. The long-term loop gets reports of them (`reports`), because
it counts instances by their reports. What a gateway learns or is told (profiles, overheads, links,
thresholds, requests in flight) is the live scheduler's own state here too. This file decides
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scheduler.live.core import LiveScheduler
from scheduler.live.settings import PdSettings
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
    """The parts of a replay that a decider sees. Station 0 is the PD cluster's own. `watches` has
    one per station, None for station 0. `caches` is None if nothing is cached.
    """

    stations: Sequence[PrefillStation]
    pool: DecodePool
    caches: Sequence[ReplayCache] | None
    watches: Sequence[WatchedLink | None]

    def hits(self, job: Job) -> list[int]:
        """How many tokens of a prompt each station has cached."""
        if self.caches is None:
            return [0] * len(self.stations)
        return [cache.hit_tokens(job.blocks, job.num_tokens) for cache in self.caches]


def reports(parts: Parts) -> Iterator[ClusterReport]:
    """The reports that the fronts of all clusters would send now, the PD cluster's first."""
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
    """The `Views` of a replay: as if reports of all clusters were never late."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

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
            decode=self.decode_side(live, model, now_s, pd),
            prefill_clusters=tuple(prefill_clusters),
        )

    def num_free_slots(self, live: LiveScheduler, model: str, pd: PdSettings) -> int | None:
        """The free slots of the decode pool."""
        pool = self._parts.pool
        return max(0, pool.slots_total - pool.num_running - len(pool.waiting))

    def decode_side(
        self, live: LiveScheduler, model: str, now_s: float, pd: PdSettings
    ) -> DecodeView:
        """The decode pool. It does not tell how long answers will be, which no gateway knows."""
        pool, known = self._parts.pool, live.knowledge(model)
        lands_at_s = sorted([leg.lands_at_s for leg in live.ledger.landing(model, pd.name)])
        return DecodeView(
            slots_total=pool.slots_total,
            slots_used=pool.num_running,
            num_waiting=len(pool.waiting),
            decode_s=known.decode_s,
            step_s=known.step_s or 0.0,
            # A landing that is overdue is expected now.
            landing_s=tuple([at_s - now_s if at_s > now_s else 0.0 for at_s in lands_at_s]),
        )
