"""The KVCache transfers of a replay: the links, what crosses them, and their statistics.

A transfer begins with its prefill and emits while that lasts. The bytes whose number does not grow
with the tokens are emitted at its end. Then it is known when it will land, or that it will be given
up before. A link is named by the places (indexes) of its prefill cluster (from 1 on) and its PD
cluster.

This file knows no decisions and no queue of events: it has callbacks for landings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from netmon.estimate import LinkCondition
from scheduler.planning.region_model import Link
from scheduler.replay.jobs import Job, Way
from scheduler.replay.links import RateSchedule, ReplayLink
from scheduler.replay.model import Policy, ReplayModel, Routing
from scheduler.replay.prefill import PrefillStation
from scheduler.replay.results import Lateness
from scheduler.replay.watching import (
    SAMPLE_S,
    DirectLink,
    ForeseenLink,
    MonitoredLink,
    StillLink,
    WatchedLink,
)

_INSTANT_S: Final = 1e-6
"""A shorter pass emits everything at once."""
_SLOW_SAMPLE_S: Final = 1.0
"""The time between samples of links without a monitor."""
_STILL_SAMPLE_S: Final = 30.0
"""The same if no link ever changes."""


class Transfers:
    """The transfers of a replay. `pds` are the stations of the PD clusters.

    It calls `land_later` and `give_up_later` with (time, job, landing version). The event is void
    if the job has another version by then.
    """

    def __init__(
        self,
        model: ReplayModel,
        policy: Policy,
        pds: Sequence[PrefillStation],
        *,
        land_later: Callable[[float, Job, int], None],
        give_up_later: Callable[[float, Job, int], None],
    ) -> None:
        self.lateness = Lateness()
        self._kv = model.region.kv
        self._timeout_s = model.transfer_timeout_s
        self._pds = pds
        self._land_later = land_later
        self._give_up_later = give_up_later
        self._specs: dict[Way, Link] = {
            (place, pd): spec
            for place, cluster in enumerate(model.region.prefill_clusters, 1)
            for pd, home in enumerate(pds)
            if (spec := model.region.link(cluster.name, home.name)) is not None
        }
        for place, cluster in enumerate(model.region.prefill_clusters, 1):
            if not any(source == place for source, _ in self._specs):
                raise ValueError(f"no link from {cluster.name} to {pds[0].name}; add one")
        uplinks = {up: ReplayLink(RateSchedule.of(up.bytes_per_s)) for up in model.uplinks}
        self._links: dict[Way, ReplayLink] = {}
        self.watches: dict[Way, WatchedLink] = {}
        """Each link as routing sees it."""
        for way, spec in self._specs.items():
            schedule = model.schedules.get(spec.name) or RateSchedule.of(spec.bytes_per_s)
            shared = [link for up, link in uplinks.items() if up.carries(spec)]
            link = self._links[way] = ReplayLink(schedule, spec.rtt_s / 2, shared)
            self.watches[way] = _watched(link, spec, policy)
        self.sample_s = self._sample_s()
        """`sample` must be called this often."""
        self.is_tracked = policy.routing is not Routing.STATIC and any(
            not link.schedule.is_constant for link in self._links.values()
        )
        """Whether `expect` must be called."""
        self._expected: dict[Way, dict[int, tuple[float, float]]] = {w: {} for w in self._links}
        """For each link and unfinished transfer: when it began, and how long it should take."""
        self._awaiting: dict[Way, dict[int, Job]] = {way: {} for way in self._links}
        """For each link: the jobs whose prefill is over and whose KVCache has not landed."""
        self._sees_outages = policy.routing is not Routing.STATIC
        self._worst_late = 0.0
        self._sent_recorded = dict.fromkeys(self._links, 0.0)

    def _sample_s(self) -> float:
        watches = self.watches.values()
        if any(isinstance(watch, MonitoredLink) for watch in watches):
            return SAMPLE_S
        if any(not isinstance(watch, StillLink) for watch in watches):
            return _SLOW_SAMPLE_S
        return _STILL_SAMPLE_S

    # ---- one transfer

    def fetch(self, job: Job, now_s: float) -> None:
        """Send a cached prefix from a prefill cluster. The prefill begins after it has landed."""
        link = self._links[job.move_from, job.pd]
        link.change(now_s, 0.0, float(self._kv.size(job.move_tokens)))
        job.move_s = link.landed_s(link.emitted_bytes)

    def begin(self, job: Job, kv_bytes: float, cached_tokens: int) -> None:
        """The job's prefill is about to begin. What the PD cluster has cached is not sent."""
        job.fixed_bytes = min(self._kv.fixed_bytes, kv_bytes)
        job.token_bytes = kv_bytes - job.fixed_bytes
        if cached_tokens:
            # Both sizes include the fixed bytes, so the difference does not.
            job.token_bytes = max(0.0, kv_bytes - float(self._kv.size(cached_tokens)))
        self._links[job.way].expect(_mean_emission(job))

    def emit(self, job: Job, num_tokens: int, seconds: float, now_s: float) -> None:
        """A pass begins that computes `num_tokens` of the job's prompt in `seconds`."""
        nbytes = job.token_bytes * num_tokens / max(1, job.uncached_tokens)
        lasts = seconds >= _INSTANT_S
        job.emit_bytes_per_s = nbytes / seconds if lasts else 0.0
        self._links[job.way].change(now_s, job.emit_bytes_per_s, 0.0 if lasts else nbytes)

    def pause(self, job: Job, now_s: float) -> None:
        """A pass is over, and the job's prefill is not."""
        self._links[job.way].change(now_s, -job.emit_bytes_per_s)
        job.emit_bytes_per_s = 0.0

    def expect(self, job: Job, tail_s: float | None, now_s: float) -> None:
        """Note the predicted end of a transfer: `tail_s` after its prefill; None: unknown."""
        if tail_s is not None:
            self._expected[job.way][job.index] = now_s, job.believed_s + tail_s

    def emitted(self, job: Job, now_s: float) -> None:
        """The job's prefill is over, and all of its KVCache has been emitted."""
        link = self._links[job.way]
        link.change(now_s, -job.emit_bytes_per_s, job.fixed_bytes)
        link.expect(-_mean_emission(job))
        job.emitted = link.emitted_bytes
        self._awaiting[job.way][job.index] = job
        self._foresee(job, link)

    def forget(self, job: Job) -> None:
        """The job's transfer is over."""
        self._expected[job.way].pop(job.index, None)
        del self._awaiting[job.way][job.index]

    def stop(self, job: Job, now_s: float) -> None:
        """The job's prefill ended too early. What it has emitted is sent in vain."""
        link = self._links[job.way]
        link.change(now_s, -job.emit_bytes_per_s)
        link.expect(-_mean_emission(job))
        self._expected[job.way].pop(job.index, None)

    def awaiting(self, place: int) -> list[Job]:
        """The jobs that were prefilled at this place and whose KVCache has not landed."""
        return [
            job for way in self._links if way[0] == place for job in self._awaiting[way].values()
        ]

    def give_up(self, job: Job, now_s: float) -> None:
        """Drop the job's unsent bytes. Later transfers land sooner then."""
        self.forget(job)
        link = self._links[job.way]
        link.skip(now_s, job.emitted, job.token_bytes + job.fixed_bytes)
        for other in self._awaiting[job.way].values():
            self._foresee(other, link)

    def _foresee(self, job: Job, link: ReplayLink) -> None:
        """Schedule the landing of the job, or that it is given up."""
        landed_s = link.landed_s(job.emitted)
        limit_s = job.prefill_end_s + self._timeout_s
        job.landing_version += 1
        # If no instance of the PD cluster prefills, giving up would lose the request.
        waits = landed_s < math.inf and not self._pds[job.pd].num_usable
        if landed_s <= limit_s or waits:
            self._land_later(landed_s, job, job.landing_version)
        else:
            self._give_up_later(limit_s, job, job.landing_version)

    # ---- all links

    def sample(self, now_s: float) -> Iterator[Job]:
        """Sample every link. Yields the jobs whose transfers must be given up because their link is
        down; in a gateway these would be failed transfers. A static policy looks at no link, and
        waits for the timeout.
        """
        for way, watch in self.watches.items():
            self._see_oldest(way, now_s)
            watch.sample(now_s)
            if not (self._sees_outages and self._awaiting[way]):
                continue
            if watch.view(now_s).state is LinkCondition.DOWN:
                # A copy: the caller gives jobs up between two of them.
                yield from list(self._awaiting[way].values())

    def _see_oldest(self, way: Way, now_s: float) -> None:
        """Compare the age of a link's oldest transfer with its predicted time."""
        transfers = self._expected[way]
        if not transfers:
            return
        # A dict keeps the order of insertion, so its first transfer is the oldest.
        began_s, expected_s = next(iter(transfers.values()))
        age_s = now_s - began_s
        if expected_s > 0:
            self._worst_late = max(self._worst_late, age_s / expected_s)
            since_change_s = self._links[way].schedule.since_change_s(now_s)
            self.lateness.see(age_s, expected_s, since_change_s)

    def row(self, now_s: float, passed_s: float) -> Iterator[tuple[str, float]]:
        """The values of the time series, `passed_s` after the previous row."""
        for way, link in self._links.items():
            # With one PD cluster, the name of the prefill cluster says enough.
            spec = self._specs[way]
            name = spec.source if len(self._pds) == 1 else spec.name
            link.advance(now_s)
            seen = self.watches[way].view(now_s)
            yield f"link_rate:{name}", link.rate
            yield f"link_seen:{name}", seen.available_bytes_per_s or 0.0
            yield f"link_state:{name}", list(type(seen.state)).index(seen.state)
            yield f"link_backlog:{name}", link.backlog_bytes
            sent = link.sent_bytes - self._sent_recorded[way]
            self._sent_recorded[way] = link.sent_bytes
            yield f"link_sent:{name}", sent / passed_s
        yield "lateness", self._worst_late
        self._worst_late = 0.0

    def egress_bytes(self, now_s: float) -> dict[str, float]:
        """The bytes that each link has sent, by its name."""
        for link in self._links.values():
            link.advance(now_s)
        return {self._specs[way].name: link.sent_bytes for way, link in self._links.items()}


def _watched(link: ReplayLink, spec: Link, policy: Policy) -> WatchedLink:
    """How the policy sees a link."""
    if policy.routing is Routing.ORACLE:
        return ForeseenLink(link, spec.rtt_s)
    if link.schedule.is_constant:
        return StillLink(link, spec.rtt_s)
    if policy.monitor is None:
        return DirectLink(link, spec.rtt_s)
    return MonitoredLink(spec.name, link, spec.rtt_s, policy.monitor)


def _mean_emission(job: Job) -> float:
    """Mean bytes/s over the job's prefill, with the bytes that are emitted at its end."""
    return (job.token_bytes + job.fixed_bytes) / max(_INSTANT_S, job.service_s)
