"""Who decides in a replay where a request is prefilled and whether it is let in.

`StaticDecider` is the paper's threshold. `CoreDecider` shows the running replay to the scheduler's
own cores and does what they say; as an oracle it is shown links as they will be, and t follows
their rates by the plan instead of by congestion. Both write the place into the job.

They know stations, pools and watched links; nothing of events.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

import numpy as np

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.live.admission import AdmissionPolicy, AdmissionRequest, admit, admit_decode
from scheduler.planning.lengths import mean_tokens
from scheduler.planning.pair_search import best_of_pair
from scheduler.planning.plan import is_pair
from scheduler.planning.throughput import Mode
from scheduler.replay.caching import ReplayCache
from scheduler.replay.decode import DecodePool
from scheduler.replay.jobs import Job
from scheduler.replay.live_views import FromNow, LiveCluster, LiveDecode, LiveShape, LiveSnapshot
from scheduler.replay.model import Policy, ReplayModel, Routing
from scheduler.replay.prefill import PrefillStation
from scheduler.replay.watching import WatchedLink
from scheduler.routing.prediction import PrefillTask, transfer_tail_s
from scheduler.routing.profiles import KvProfile
from scheduler.routing.short_term import RouteConfig, choose
from scheduler.routing.threshold import ThresholdController

_GAIN: Final = 0.02
"""How fast the mean decode time follows what is seen."""


class Parts(Protocol):
    """What a decider is shown of the replay. Station 0 is the PD cluster's own."""

    @property
    def stations(self) -> Sequence[PrefillStation]: ...

    @property
    def pool(self) -> DecodePool: ...

    @property
    def caches(self) -> Sequence[ReplayCache] | None: ...

    @property
    def watches(self) -> Sequence[WatchedLink | None]:
        """By station; None for station 0."""


class Decider(Protocol):
    """One policy at work."""

    thresholds: dict[str, float]
    """The plan's t of each prefill cluster by name."""

    def place(self, job: Job, kv_bytes: float, now_s: float) -> bool:
        """Write into the job where it goes and what is cached there; False: refused."""

    def landed(self, job: Job, now_s: float) -> bool:
        """Its KVCache has landed: whether it may decode; False: refused after all."""

    def tail_s(self, job: Job, now_s: float) -> float | None:
        """From now, when its prefill begins, how long its transfer should go on after it."""

    def done(self, job: Job) -> None:
        """Its last token is there."""

    def present_thresholds(self) -> list[float]:
        """t of each prefill cluster as it is now, for the record."""

    def gives_up(self, link: LinkView) -> bool:
        """Whether transfers that wait for this link should be prefilled at home instead."""

    def looked(self, now_s: float) -> None:
        """Links were just sampled."""

    def plan_sends(self, bytes_per_s: float) -> None:
        """What the plan in force sends over each link at its capacity."""


class StaticDecider:
    """More than t uncached goes to the prefill cluster that has least to compute and to do."""

    def __init__(self, parts: Parts, thresholds: dict[str, float]) -> None:
        self.thresholds = thresholds
        self._parts = parts

    def place(self, job: Job, kv_bytes: float, now_s: float) -> bool:
        stations, caches = self._parts.stations, self._parts.caches
        hits = [0] * len(stations)
        if caches is not None:
            hits = [cache.hit_tokens(job.blocks, job.num_tokens) for cache in caches]
        uncached = job.num_tokens - hits[0]
        best, least = 0, (0, 0.0)
        for index in range(1, len(stations)):
            station = stations[index]
            if uncached > self.thresholds[station.name]:
                busy = (station.num_queued + station.num_running) / max(1, station.num_usable)
                cost = job.num_tokens - hits[index], busy
                if best == 0 or cost < least:
                    best, least = index, cost
        job.place, job.cached_tokens = best, hits[best]
        return True

    def landed(self, job: Job, now_s: float) -> bool:
        return True

    def tail_s(self, job: Job, now_s: float) -> float | None:
        return None

    def done(self, job: Job) -> None:
        pass

    def gives_up(self, link: LinkView) -> bool:
        return False

    def present_thresholds(self) -> list[float]:
        return [self.thresholds[station.name] for station in self._parts.stations[1:]]

    def looked(self, now_s: float) -> None:
        pass

    def plan_sends(self, bytes_per_s: float) -> None:
        pass


class CoreDecider:
    """The scheduler's cores, shown the replay as it is."""

    def __init__(
        self, parts: Parts, model: ReplayModel, policy: Policy, thresholds: dict[str, float]
    ) -> None:
        self.thresholds = thresholds
        self._parts = parts
        self._admission = policy.admission
        self._places = {station.name: i for i, station in enumerate(parts.stations)}
        region = model.region
        typical = max(1, round(mean_tokens(region.traffic.lengths)))
        self._route = RouteConfig(
            kv=KvProfile.of(region.kv, typical),
            margin_s=policy.margin_s,
            margin_share=policy.margin_share,
        )
        self._controllers = [ThresholdController(policy.threshold) for _ in parts.stations[1:]]
        self._planned_bytes_per_s = 0.0
        clusters = [LiveCluster(station.name, station.believed) for station in parts.stations]
        self._decode = LiveDecode(parts.pool.full_step_s)
        self._decode.decode_s = region.traffic.output_tokens * parts.pool.full_step_s
        self._snapshot = LiveSnapshot(clusters[0], self._decode, clusters[1:])
        self._clusters = clusters
        self._shown = list(zip(parts.stations, clusters, parts.watches, strict=True))
        self._shape = LiveShape(0, 0)
        # The same objects as the decisions take them.
        self._as_shape, self._as_snapshot = self._shape.as_shape(), self._snapshot.as_snapshot()
        self._as_decode = self._decode.as_view()
        self._landings_s: list[float] = []
        # Running decodes began in this order, and each is taken to last the same.
        self._decode.left_s = self._left_s = FromNow(parts.pool.began_s)
        self._decode.landing_s = self._landing_s = FromNow(self._landings_s)
        self._looked_s = -1.0
        for cluster in clusters[1:]:
            cluster.threshold_tokens = thresholds[cluster.name]

    def place(self, job: Job, kv_bytes: float, now_s: float) -> bool:
        shape = self._shape
        shape.num_prompt_tokens, shape.transfer_bytes = job.num_tokens, int(kv_bytes)
        hits = self._hits(job, shape)
        self._show(job.num_tokens, hits, now_s)
        chosen = choose(self._as_shape, self._as_snapshot, self._route, now_s)
        taken = chosen.taken
        predicted = taken.prediction
        if self._admission is not None:
            request = AdmissionRequest(predicted, kv_bytes, job.num_tokens)
            verdict = admit(request, self._as_decode, self._admission, now_s)
            if not verdict.admitted:
                return False
        job.place = self._places[taken.target] if taken is chosen.remote else 0
        job.cached_tokens = taken.cached_tokens
        if taken.move.pays:
            job.move_from = self._places[taken.move.source]
            job.move_tokens = taken.move.saved_tokens
        job.predicted_ttft_s = predicted.ttft_s
        job.expected_landing_s = now_s + predicted.landed_s
        insort(self._landings_s, job.expected_landing_s)
        return True

    def landed(self, job: Job, now_s: float) -> bool:
        if job.expected_landing_s == job.expected_landing_s:  # it was predicted
            at = bisect_left(self._landings_s, job.expected_landing_s)
            del self._landings_s[at]
        admission = self._admission
        if admission is None or admission.policy is not AdmissionPolicy.AT_DECODE:
            return True
        self._show_decode(now_s)
        return admit_decode(0.0, self._as_decode, admission).admitted

    def tail_s(self, job: Job, now_s: float) -> float | None:
        watch = self._parts.watches[job.place]
        if watch is None:
            return None
        task = PrefillTask(job.num_tokens, 0, job.token_bytes, job.fixed_bytes)
        return transfer_tail_s(watch.view(now_s), 0.0, job.believed_s, task)

    def done(self, job: Job) -> None:
        self._decode.decode_s += _GAIN * (job.done_s - job.slot_s - self._decode.decode_s)

    def gives_up(self, link: LinkView) -> bool:
        return link.state is LinkCondition.DOWN

    def present_thresholds(self) -> list[float]:
        return [cluster.threshold_tokens for cluster in self._clusters[1:]]

    def looked(self, now_s: float) -> None:
        if now_s - self._looked_s < 0.2:
            return
        self._looked_s = now_s
        for index, controller in enumerate(self._controllers, 1):
            watch, cluster = self._parts.watches[index], self._clusters[index]
            if watch is not None:
                base = self.thresholds[cluster.name]
                seen = watch.view(now_s)
                found = controller.update(base, seen, self._planned_bytes_per_s, now_s)
                cluster.threshold_tokens = found.tokens

    def plan_sends(self, bytes_per_s: float) -> None:
        self._planned_bytes_per_s = bytes_per_s

    def _hits(self, job: Job, shape: LiveShape) -> list[int] | None:
        caches = self._parts.caches
        if caches is None:
            return None
        hits = [cache.hit_tokens(job.blocks, job.num_tokens) for cache in caches]
        shape.local_cached_tokens = shape.landing_cached_tokens = hits[0]
        by_name = {cluster.name: hit for cluster, hit in zip(self._clusters, hits, strict=True)}
        shape.prefill_cached_tokens = shape.sendable_tokens = by_name
        return hits

    def _show(self, num_tokens: int, hits: list[int] | None, now_s: float) -> None:
        """Bring the snapshot up to date for one request."""
        self._snapshot.taken_s = now_s
        for index, (station, cluster, watch) in enumerate(self._shown):
            uncached = num_tokens if hits is None else num_tokens - hits[index]
            believed = cluster.prefill = station.believed
            cluster.queued_s = station.queued_s(uncached, now_s) * believed.factor
            cluster.free_s = station.free_s(now_s)
            if watch is not None:
                cluster.link = self._clusters[0].links_in[cluster.name] = watch.view(now_s)
        self._show_decode(now_s)

    def _show_decode(self, now_s: float) -> None:
        decode, pool = self._decode, self._parts.pool
        decode.slots_total = pool.slots_total
        decode.slots_used = len(pool.began_s)
        decode.num_waiting = len(pool.waiting)
        self._left_s.now_s = now_s - decode.decode_s
        self._landing_s.now_s = now_s


class OracleDecider(CoreDecider):
    """The cores with links as they will be, and the plan's t for the lowest rate to come."""

    def __init__(
        self, parts: Parts, model: ReplayModel, policy: Policy, thresholds: dict[str, float]
    ) -> None:
        super().__init__(parts, model, policy, thresholds)
        self._model = model
        self._num_prefill = float(len(parts.stations[0].instances))
        self._best: dict[float, float] = {}

    def looked(self, now_s: float) -> None:
        region = self._model.region
        if not is_pair(region) or not region.links:
            return
        watch, cluster = self._parts.watches[1], self._clusters[1]
        assert watch is not None
        rate = watch.view(now_s).available_bytes_per_s or 0.0
        cluster.threshold_tokens = self._best_at(rate)

    def _best_at(self, rate: float) -> float:
        found = self._best.get(rate)
        if found is None:
            found = self._best[rate] = self._solve(rate)
        return found

    def _solve(self, rate: float) -> float:
        region = self._model.region
        if rate <= 0:
            return region.traffic.lengths.max_tokens
        if rate >= region.links[0].bytes_per_s:
            return self.thresholds[self._clusters[1].name]
        link = replace(region.links[0], bytes_per_s=rate)
        there = replace(region, links=(link,))
        tokens, _, _ = best_of_pair(there, Mode.EXACT, num_prefill=np.array([self._num_prefill]))
        return tokens


def decider_of(
    parts: Parts, model: ReplayModel, policy: Policy, thresholds: dict[str, float]
) -> Decider:
    """The policy's decider."""
    if policy.routing is Routing.STATIC:
        return StaticDecider(parts, thresholds)
    if policy.routing is Routing.ORACLE:
        return OracleDecider(parts, model, policy, thresholds)
    return CoreDecider(parts, model, policy, thresholds)
