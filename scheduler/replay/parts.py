"""The parts of a replay that a decider sees, and the reports that their fronts would send.

This file decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scheduler.replay.caching import ReplayCache
from scheduler.replay.decode import DecodePool
from scheduler.replay.encoding import EncodeStages
from scheduler.replay.jobs import Job, Way
from scheduler.replay.model import MODEL
from scheduler.replay.prefill import PrefillStation
from scheduler.replay.watching import WatchedLink
from scheduler.reports import ClusterReport, InstanceReport, JobReport
from scheduler.routing.service import Load


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
        busy = sum(item.num_busy for item in others) / max(1, num_instances)
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
        yield _report(parts, pd.station, pd.pool, now_s)
    for station in parts.sources:
        yield _report(parts, station, None, now_s)


def _report(
    parts: Parts, station: PrefillStation, pool: DecodePool | None, now_s: float
) -> ClusterReport:
    encoding = parts.encoding
    slots = 0 if pool is None else pool.slots_per_instance
    instances = [*station.instances, *(() if pool is None else pool.instances)]
    return ClusterReport(
        name=station.name,
        healthy=any(item.is_usable for item in instances),
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
                max_concurrent=station.max_concurrent,
                # Instances with a node agent can be sent cached prefixes.
                node="" if parts.caches is None else item.name,
                role_epoch=item.role_epoch,
                decode_slots=slots,
                num_running=item.num_slots_used if item.role == "decode" else item.num_requests,
            )
            for item in instances
        ),
        jobs=tuple(
            JobReport(
                transfer_id=str(job.index),
                num_tokens=job.num_tokens,
                uncached_tokens=job.uncached_tokens,
                for_s=max(0.0, now_s - (job.given_s if instance else job.arrival_s)),
                instance=instance,
                model=MODEL,
                pd=parts.pds[job.pd].station.name,
            )
            for job, instance in station.jobs()
        ),
    )
