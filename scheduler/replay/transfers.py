"""The KVCache of a replay on its way: every link, what crosses it, and what is noted of it.

A transfer begins with its prefill and emits while that lasts; what does not grow with the tokens is
emitted at its end. From then on it is foreseen when it lands, or that it is given up before.
Stations are told apart by their place; place 0, the PD cluster's own, has no link.

Knows no decisions and no queue of events: it calls whoever waits for a landing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

from netmon.estimate import LinkCondition
from scheduler.replay.jobs import Job
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
"""A shorter prefill emits everything at its end."""
_SLOW_SAMPLE_S: Final = 1.0
"""How often links that nobody monitors are looked at."""
_STILL_SAMPLE_S: Final = 30.0
"""The same where no link ever changes."""


class Transfers:
    """The transfers of a replay. `home` is the station of place 0.

    `land_later` and `give_up_later` are called with (when, job, its landing version): the event is
    void where the job has another version by then.
    """

    def __init__(
        self,
        model: ReplayModel,
        policy: Policy,
        home: PrefillStation,
        *,
        land_later: Callable[[float, Job, int], None],
        give_up_later: Callable[[float, Job, int], None],
    ) -> None:
        self.watches: list[WatchedLink | None] = [None]
        """By place."""
        self.lateness = Lateness()
        self._kv = model.region.kv
        self._timeout_s = model.transfer_timeout_s
        self._home = home
        self._land_later = land_later
        self._give_up_later = give_up_later
        self._names = [cluster.name for cluster in model.region.prefill_clusters]
        names = {link.source: link.name for link in model.region.links}
        self._link_names = [names[source] for source in self._names]
        self._links: dict[int, ReplayLink] = {}
        for place, name in enumerate(self._names, 1):
            self._links[place], watch = _link_of(model, policy, name)
            self.watches.append(watch)
        self.sample_s = self._sample_s()
        """How often `sample` is to be called."""
        self.is_tracked = policy.routing is not Routing.STATIC and any(
            not link.schedule.is_constant for link in self._links.values()
        )
        """Whether `expect` is to be called."""
        self._expected: dict[int, dict[int, tuple[float, float]]] = {p: {} for p in self._links}
        """Of each place: when its unfinished transfers began, and how long they should take."""
        self._awaiting: dict[int, dict[int, Job]] = {place: {} for place in self._links}
        """Of each place: whose prefill is over and whose KVCache has not landed."""
        self._sees_outages = policy.routing is not Routing.STATIC
        self._worst_late = 0.0
        self._sent_recorded = dict.fromkeys(self._links, 0.0)

    def _sample_s(self) -> float:
        if any(isinstance(watch, MonitoredLink) for watch in self.watches):
            return SAMPLE_S
        if any(not isinstance(watch, StillLink) for watch in self.watches[1:]):
            return _SLOW_SAMPLE_S
        return _STILL_SAMPLE_S

    # ---- one transfer

    def fetch(self, job: Job, now_s: float) -> None:
        """A cached prefix from a prefill cluster crosses its link before the prefill can begin."""
        link = self._links[job.move_from]
        link.change(now_s, 0.0, float(self._kv.size(job.move_tokens)))
        job.move_s = link.landed_s(link.emitted_bytes)

    def begin(self, job: Job, kv_bytes: float, cached_tokens: int, now_s: float) -> None:
        """Its prefill begins. What the PD cluster has cached need not be sent."""
        job.fixed_bytes = min(self._kv.fixed_bytes, kv_bytes)
        job.token_bytes = kv_bytes - job.fixed_bytes
        if cached_tokens:
            job.token_bytes = max(0.0, kv_bytes - float(self._kv.size(cached_tokens)))
        lasts = job.service_s >= _INSTANT_S
        job.emit_bytes_per_s = job.token_bytes / job.service_s if lasts else 0.0
        link = self._links[job.place]
        link.change(now_s, job.emit_bytes_per_s)
        link.expected_inflow += _mean_emission(job)

    def expect(self, job: Job, tail_s: float | None, now_s: float) -> None:
        """It has begun, and should go on for `tail_s` after its prefill; None: nobody knows."""
        if tail_s is not None:
            self._expected[job.place][job.index] = now_s, job.believed_s + tail_s

    def emitted(self, job: Job, now_s: float) -> None:
        """Its prefill is over: all of it has been emitted."""
        link = self._links[job.place]
        burst = job.fixed_bytes if job.emit_bytes_per_s else job.fixed_bytes + job.token_bytes
        link.change(now_s, -job.emit_bytes_per_s, burst)
        link.expected_inflow = max(0.0, link.expected_inflow - _mean_emission(job))
        job.emitted_bytes = link.emitted_bytes
        self._awaiting[job.place][job.index] = job
        self._foresee(job, link)

    def forget(self, job: Job) -> None:
        """It need not be awaited any longer."""
        self._expected[job.place].pop(job.index, None)
        del self._awaiting[job.place][job.index]

    def give_up(self, job: Job, now_s: float) -> None:
        """What was not sent yet never is; those behind it land sooner."""
        self.forget(job)
        link = self._links[job.place]
        link.advance(now_s)
        unsent = job.emitted_bytes - link.sent_bytes - link.skipped_bytes
        link.skip(now_s, max(0.0, min(job.token_bytes + job.fixed_bytes, unsent)))
        for other in self._awaiting[job.place].values():
            self._foresee(other, link)

    def _foresee(self, job: Job, link: ReplayLink) -> None:
        """When it has landed, or when it is given up."""
        landed_s = link.landed_s(job.emitted_bytes)
        limit_s = job.prefill_end_s + self._timeout_s
        job.landing_version += 1
        waits = landed_s < math.inf and not self._home.num_usable
        if landed_s <= limit_s or waits:
            self._land_later(landed_s, job, job.landing_version)
        else:
            self._give_up_later(limit_s, job, job.landing_version)

    # ---- all links

    def sample(self, now_s: float) -> Iterator[Job]:
        """Sample every link; yields whose transfers are to be given up, link by link: those that
        wait for a link that is down, as a failed transfer is in a gateway. A static policy looks at
        no link and waits for the timeout.
        """
        for place in self._links:
            watch = self._watch(place)
            self._see_oldest(place, now_s)
            watch.sample(now_s)
            if not (self._sees_outages and self._awaiting[place]):
                continue
            if watch.view(now_s).state is LinkCondition.DOWN:
                yield from list(self._awaiting[place].values())

    def _watch(self, place: int) -> WatchedLink:
        watch = self.watches[place]
        assert watch is not None
        return watch

    def _see_oldest(self, place: int, now_s: float) -> None:
        """Note the age of a link's oldest transfer against its predicted time."""
        transfers = self._expected[place]
        if not transfers:
            return
        began_s, expected_s = next(iter(transfers.values()))
        age_s = now_s - began_s
        if expected_s > 0:
            self._worst_late = max(self._worst_late, age_s / expected_s)
            since_change_s = self._links[place].schedule.since_change_s(now_s)
            self.lateness.see(age_s, expected_s, since_change_s)

    def row(self, now_s: float, passed_s: float) -> Iterator[tuple[str, float]]:
        """The values of the time series, `passed_s` after the last."""
        for place, link in self._links.items():
            name = self._names[place - 1]
            link.advance(now_s)
            seen = self._watch(place).view(now_s)
            yield f"link_rate:{name}", link.rate
            yield f"link_seen:{name}", seen.available_bytes_per_s or 0.0
            yield f"link_state:{name}", list(type(seen.state)).index(seen.state)
            yield f"link_backlog:{name}", link.backlog_bytes
            sent = link.sent_bytes - self._sent_recorded[place]
            self._sent_recorded[place] = link.sent_bytes
            yield f"link_sent:{name}", sent / passed_s
        yield "lateness", self._worst_late
        self._worst_late = 0.0

    def egress_bytes(self, now_s: float) -> dict[str, float]:
        """What each link has sent, by its name."""
        for link in self._links.values():
            link.advance(now_s)
        sent = [link.sent_bytes for link in self._links.values()]
        return dict(zip(self._link_names, sent, strict=True))


def _link_of(model: ReplayModel, policy: Policy, name: str) -> tuple[ReplayLink, WatchedLink]:
    """The link from one prefill cluster, and what the policy sees of it."""
    spec = model.region.link(name, model.pd.name)
    if spec is None:
        raise ValueError(f"no link from {name} to {model.pd.name}; add one")
    schedule = model.schedules.get(spec.name) or RateSchedule.of(spec.bytes_per_s)
    link = ReplayLink(schedule, spec.rtt_s / 2)
    if policy.routing is Routing.ORACLE:
        return link, ForeseenLink(link, spec.rtt_s)
    if schedule.is_constant:
        return link, StillLink(link, spec.rtt_s)
    if policy.monitor is None:
        return link, DirectLink(link, spec.rtt_s)
    return link, MonitoredLink(spec.name, link, spec.rtt_s, policy.monitor)


def _mean_emission(job: Job) -> float:
    """Bytes/s over its prefill, what it emits at the end included."""
    return (job.token_bytes + job.fixed_bytes) / max(_INSTANT_S, job.service_s)
