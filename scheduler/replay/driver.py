"""A region in virtual time: the scheduler's own code decides, and the hardware is a model.

The model is that of `scheduler.planning.load.queueing`, event by event, with what that one leaves
out: decisions that look at the present state, queues that are not first come, first served, links
that change, batches whose step time grows, caches, instances that change their role, refusals. With
a static threshold, first come, first served and a constant link both give the same timeline.

    arrival -> [refused] -> queue -> prefill, emitting KVCache -> landed -> slot -> done
                              ^                                     |
                              +---- given up: prefilled at home ----+

At one instant, things that end come before things that begin, and arrivals last. Deterministic:
the same model, workload, policy and seed give the same outcome.

No I/O, no clock. The driver does not know the reasons of a decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush
from typing import Any

import numpy as np

from scheduler.encoding.values import StartPass
from scheduler.live.long_term.model_plan import ThresholdPlan, sends_of
from scheduler.planning.region_model import PdClusterModel
from scheduler.replay.baselines import decider_of
from scheduler.replay.decode import DecodeInstance, DecodePool
from scheduler.replay.encoding import EncodeStages
from scheduler.replay.jobs import NEVER, Fate, Job
from scheduler.replay.model import Policy, ReplayModel
from scheduler.replay.parts import Parts, PdParts
from scheduler.replay.prefill import PrefillInstance, PrefillStation
from scheduler.replay.rebalancing import Rebalancer
from scheduler.replay.results import Outcome, Series
from scheduler.replay.starting import (
    prefill_jitter,
    starting_caches,
    starting_plans,
    starting_pool,
    starting_station,
)
from scheduler.replay.transfers import Transfers
from scheduler.replay.workload import Workload
from scheduler.routing.service import ALONE

(
    _DECODE_END,
    _PASS_END,
    _ENCODED,
    _LANDED,
    _READY,
    _GIVEN_UP,
    _RELABELLED,
    _CLUSTER_LOST,
    _CLUSTER_BACK,
    _SAMPLE,
    _RECORD,
    _LOOK,
    _REPORT,
    _ENCODE_TICK,
) = range(14)
"""Kinds of events, in their order at one instant."""


def replay(
    model: ReplayModel,
    workload: Workload,
    policy: Policy,
    *,
    seed: int = 1,
    num_points: int = 600,
) -> Outcome:
    """Play the whole workload to its end. `num_points` is about the length of the time series.

    ValueError if the policy leaves no instance to prefill or to decode.
    """
    return _Driver(model, workload, policy, seed, num_points).run()


class _Driver:
    """One replay. `run` may be called once."""

    def __init__(
        self, model: ReplayModel, workload: Workload, policy: Policy, seed: int, num_points: int
    ) -> None:
        self._model = model
        self._workload = workload
        self._events: list[tuple[float, int, int, Any, Any]] = []
        self._num_pushed = 0
        self._num_open = 0
        self._span_s = workload.arrivals_s[-1]
        plans = starting_plans(model, policy)
        counts = [round(plan.num_prefill[plan.region.pd_clusters[0].name]) for plan in plans]
        self._pds = [
            PdParts(starting_station(model, pd, num), self._pool_of(at, pd, num))
            for at, (pd, num) in enumerate(zip(model.region.pd_clusters, counts, strict=True))
        ]
        self._sources = [
            starting_station(model, cluster, int(cluster.num_instances), policy.order)
            for cluster in model.region.prefill_clusters
        ]
        self._transfers = Transfers(
            model,
            policy,
            [pd.station for pd in self._pds],
            land_later=partial(self._push, _LANDED),
            give_up_later=partial(self._push, _GIVEN_UP),
        )
        stations = [*(pd.station for pd in self._pds), *self._sources]
        self._caches = starting_caches(model, workload, stations)
        self._encoding: EncodeStages | None = None
        if workload.media is not None:
            if model.encoding is None:
                raise ValueError("the workload has media, and the model no encode times")
            self._encoding = EncodeStages(
                model.encoding,
                [station.name for station in stations],
                end_later=lambda at_s, name, run: self._push(_ENCODED, at_s, name, run),
                tick_later=lambda at_s, name: self._push(_ENCODE_TICK, at_s, name),
                ended=self._media_ended,
            )
        self._parts = Parts(
            self._pds, self._sources, self._caches, self._transfers.watches, self._encoding
        )
        planned = {
            plan.region.pd_clusters[0].name: ThresholdPlan(
                policy.thresholds or plan.thresholds(), sends_of(plan, rate_rps)
            )
            for plan, rate_rps in zip(plans, self._rates(), strict=True)
        }
        self._decider = decider_of(self._parts, model, policy, planned)
        self._rebalancer: Rebalancer | None = None
        if policy.long_term is not None:
            if model.joint is not None:
                raise ValueError("the long-term loop of a replay is for one PD cluster")
            if workload.media is not None:
                raise ValueError("the long-term loop of a replay is for text")
            self._rebalancer = Rebalancer(
                policy, policy.long_term.period_s, self._decider, self._parts, self._relabel_later
            )
        self._jitter = prefill_jitter(model, len(workload), seed)
        self._kv_bytes = model.region.kv.size(np.array(workload.prompt_tokens, float)).tolist()
        self._series = Series()
        self._record_s = max(1.0, self._span_s / num_points)
        self._jobs: list[Job] = []
        self._num_refused = self._num_refused_recorded = self._num_jobs_recorded = 0
        self._wasted_s = 0.0

    def _rates(self) -> list[float]:
        """The mean rate of the requests of each home."""
        homes = self._workload.homes or [0] * len(self._workload)
        return [homes.count(at) / max(1.0, self._span_s) for at in range(len(self._pds))]

    def _pool_of(self, at: int, pd: PdClusterModel, num_prefill: int) -> DecodePool:
        return starting_pool(
            self._model,
            pd,
            num_prefill,
            lambda at_s, instance, version: self._push(_DECODE_END, at_s, (at, instance), version),
            begun=self._decoding,
        )

    # ---- the loop

    def run(self) -> Outcome:
        handlers: tuple[Callable[[Any, Any, float], None], ...] = (
            self._decode_ended,
            self._pass_ended,
            self._encoded,
            self._landed,
            self._ready,
            self._given_up,
            self._relabelled,
            self._cluster_lost,
            self._cluster_back,
            self._sample,
            self._record,
            self._look,
            self._report,
            self._encode_tick,
        )
        for name, (from_s, until_s) in self._model.lost.items():
            self._push(_CLUSTER_LOST, from_s, name)
            self._push(_CLUSTER_BACK, until_s, name)
        if self._decider.report_every_s is not None:
            self._decider.report(0.0)
            self._push(_REPORT, self._decider.report_every_s)
        self._push(_SAMPLE, 0.0)
        self._push(_RECORD, 0.0)
        if self._rebalancer is not None:
            self._push(_LOOK, self._rebalancer.look_s)
        arrivals_s, num = self._workload.arrivals_s, len(self._workload)
        events, arrive = self._events, self._arrive
        index, next_s, now_s = 0, arrivals_s[0], 0.0
        while events:
            if next_s < events[0][0]:
                arrive(index, next_s)
                index += 1
                next_s = arrivals_s[index] if index < num else math.inf
            else:
                now_s, kind, _, first, second = heappop(events)
                # Events of the clock repeat for ever. They end with the last request, or the loop
                # would not.
                if kind >= _SAMPLE and index >= num and not self._num_open:
                    continue
                handlers[kind](first, second, now_s)
        return self._outcome(now_s)

    def _push(self, kind: int, at_s: float, first: Any = None, second: Any = None) -> None:
        self._num_pushed += 1
        heappush(self._events, (at_s, kind, self._num_pushed, first, second))

    def _relabel_later(self, now_s: float, name: str, epoch: int) -> None:
        self._push(_RELABELLED, now_s + self._model.relabel_s, name, epoch)

    # ---- the life of a request

    def _arrive(self, index: int, now_s: float) -> None:
        workload = self._workload
        home = 0 if workload.homes is None else workload.homes[index]
        job = Job(index, now_s, workload.prompt_tokens[index], workload.output_tokens[index], home)
        self._jobs.append(job)
        if workload.block_ids is not None:
            job.blocks = workload.block_ids[index]
        if workload.media is not None:
            job.media = workload.media[index]
        if not self._decider.place(job, self._kv_bytes[index], now_s):
            job.fate = Fate.REFUSED
            self._num_refused += 1
            return
        self._num_open += 1
        if job.move_from:
            self._transfers.fetch(job, now_s)
        self._enter(job, now_s)

    def _enter(self, job: Job, now_s: float) -> None:
        """Begin the job's prefill at once if an instance is free. Otherwise it waits."""
        station = self._parts.station(job)
        job.believed_s = self._decider.believed_s(job)
        job.service_s = station.real_s(job.num_tokens, job.cached_tokens)
        if self._jitter is not None:
            job.service_s *= self._jitter[job.index]
        if job.is_whole:
            self._serve_whole(station, job, now_s)
            return
        if self._encoding is not None and job.media:
            job.media_apart = job.media_left = job.encoded_tokens = 0
            self._encoding.submit(job, station.name, station.wait_s(), now_s)
        station.push(job)
        self._start(station, now_s)

    def _serve_whole(self, station: PrefillStation, job: Job, now_s: float) -> None:
        """The instance that decodes the job computes its prompt, and its media before."""
        if self._encoding is not None and job.media:
            job.media_left, job.encoded_tokens = self._encoding.left(job, station.name)
            job.encode_s = self._encoding.line(station.name).seconds(job.encoded_tokens)
            job.service_s += job.encode_s
        service = self._model.services.get(station.name, ALONE)
        ready_s = max(now_s + service.overhead_s, job.move_s)
        self._push(_READY, ready_s, job, job.landing_version)

    def _decoding(self, job: Job, now_s: float) -> None:
        """The job has a decode slot."""
        if job.is_whole:
            self._is_cached(self._pds[job.pd].station, job)
        self._decider.decoding(job, now_s)

    def _is_held(self, job: Job) -> bool:
        """Whether the job's instance must wait for the encode stage."""
        return self._encoding is not None and self._encoding.waits(job)

    def _next_pass(self, station: PrefillStation, instance: PrefillInstance, now_s: float) -> None:
        """Let an instance that computes nothing begin its next pass, if it has a job."""
        jobs = [] if instance.chunks else station.next_pass(instance, self._is_held, now_s)
        if not jobs:
            return
        # The instance waits for a cached prefix that is still being moved to it.
        begin_s = max(now_s, jobs[0].move_s)
        for job in jobs:
            if math.isnan(job.start_s):
                job.start_s = begin_s
                self._run(station, job, now_s)
        seconds = station.begin_pass(instance, jobs)
        for chunk in instance.chunks:
            if chunk.job.place:
                self._transfers.emit(chunk.job, chunk.num_tokens, seconds, now_s)
        self._push(_PASS_END, begin_s + seconds, (station, instance), instance.version)

    def _run(self, station: PrefillStation, job: Job, now_s: float) -> None:
        """An instance computes the job's prefill from now on."""
        if (service := self._model.services.get(station.name)) is not None:
            job.service_s += service.contention_s(job.service_s, self._parts.load(job))
        if job.media:
            self._encode_left(station, job, now_s)
        station.busy_s += job.service_s
        if job.place:
            # Asked now and not at arrival: while it waited, others may have filled the cache.
            pd, transfers = self._pds[job.pd].station.name, self._transfers
            cached = self._parts.cached_tokens(job, pd)
            transfers.begin(job, self._kv_bytes[job.index], cached)
            if transfers.is_tracked:
                transfers.expect(job, self._decider.tail_s(job, now_s), now_s)

    def _encode_left(self, station: PrefillStation, job: Job, now_s: float) -> None:
        """The instance first encodes the media that have no embeddings in its cluster."""
        assert self._encoding is not None
        job.encode_s = now_s - job.held_s
        job.media_left, job.encoded_tokens = self._encoding.left(job, station.name)
        if job.media_left:
            left_s = self._encoding.line(station.name).seconds(job.encoded_tokens)
            job.encode_s += left_s
            job.service_s += left_s
            job.believed_s += left_s

    def _media_ended(self, job: Job, now_s: float) -> None:
        """The encode stage is done with the job. Its prefill begins if it has an instance."""
        station = self._parts.station(job)
        instance = station.instance_of(job)
        if instance is not None:
            job.given_s = now_s
            self._next_pass(station, instance, now_s)

    def _encoded(self, name: str, run: StartPass, now_s: float) -> None:
        assert self._encoding is not None
        self._encoding.pass_ended(name, run, now_s)

    def _encode_tick(self, name: str, _: None, now_s: float) -> None:
        assert self._encoding is not None
        self._encoding.tick(name, now_s)

    def _withdraw(self, job: Job, now_s: float) -> None:
        """The encode stage encodes nothing for the job any more."""
        if self._encoding is not None:
            self._encoding.withdraw(job, now_s)

    def _pass_ended(
        self, where: tuple[PrefillStation, PrefillInstance], version: int, now_s: float
    ) -> None:
        station, instance = where
        if version != instance.version:
            return  # Its cluster was lost.
        for job, is_over in list(station.end_pass(instance, now_s)):
            if is_over:
                self._prefilled(station, job, now_s)
            elif job.place:
                self._transfers.pause(job, now_s)
        self._start(station, now_s)
        if not (instance.is_usable or instance.jobs) and self._rebalancer is not None:
            self._rebalancer.idle(instance, now_s)
            self._refill(now_s)

    def _prefilled(self, station: PrefillStation, job: Job, now_s: float) -> None:
        job.prefill_end_s = now_s
        self._is_cached(station, job)
        if job.place:
            self._transfers.emitted(job, now_s)
        else:
            self._landed(job, job.landing_version, now_s)

    def _is_cached(self, station: PrefillStation, job: Job) -> None:
        """What was computed for the job is there for others."""
        if self._encoding is not None:
            self._encoding.prefilled(job, station.name)
        if self._caches is not None:
            self._caches[station.name].add(job.blocks)

    def _start(self, station: PrefillStation, now_s: float) -> None:
        """Give waiting jobs to instances with room, and let those compute that do not."""
        while (begun := station.start(now_s)) is not None:
            begun[1].held_s = now_s
        for instance in station.instances:
            self._next_pass(station, instance, now_s)

    def _given_up(self, job: Job, version: int, now_s: float) -> None:
        """The PD cluster prefills it itself, if it can. Its unsent bytes are never sent."""
        if version != job.landing_version:
            return
        self._transfers.give_up(job, now_s)
        self._wasted_s += job.service_s
        self._prefill_again(job, now_s)

    def _prefill_again(self, job: Job, now_s: float) -> None:
        """Its PD cluster prefills the job itself, if it can."""
        self._decider.given_up(job, now_s)
        self._withdraw(job, now_s)
        job.fell_back = True
        job.landing_version += 1
        station = self._pds[job.pd].station
        # No instance of the PD cluster prefills, so none can take over.
        if not station.num_usable:
            self._lose(job, now_s)
            return
        job.place, job.move_s, job.computed_tokens, job.start_s = 0, 0.0, 0, NEVER
        job.cached_tokens = self._parts.cached_tokens(job, station.name)
        self._enter(job, now_s)

    def _lose(self, job: Job, now_s: float) -> None:
        self._decider.over(job, now_s)
        self._withdraw(job, now_s)
        job.landing_version += 1
        job.fate = Fate.LOST
        self._num_open -= 1

    def _landed(self, job: Job, version: int, now_s: float) -> None:
        if version != job.landing_version:
            return
        job.landed_s = now_s
        if job.place:
            self._transfers.forget(job)
            if self._caches is not None:
                self._caches[self._pds[job.pd].station.name].add(job.blocks)
        if self._decider.landed(job, now_s):
            service = self._model.services.get(self._parts.station(job).name, ALONE)
            if service.overhead_s:
                self._push(_READY, now_s + service.overhead_s, job, job.landing_version)
            else:
                self._ready(job, job.landing_version, now_s)
            return
        job.fate = Fate.REFUSED_LATE
        self._num_refused += 1
        self._num_open -= 1
        self._wasted_s += job.service_s

    def _ready(self, job: Job, version: int, now_s: float) -> None:
        """The job waits for a slot in a batch, unless its PD cluster was lost since it landed."""
        if version != job.landing_version:
            return
        pd = self._pds[job.pd]
        lost_s = self._model.lost.get(pd.station.name, (math.inf, math.inf))[0]
        came_s = job.arrival_s if job.is_whole else job.landed_s
        if came_s < lost_s <= now_s:
            self._lose(job, now_s)
        else:
            job.ready_s = now_s
            pd.pool.land(job, now_s)

    def _decode_ended(self, where: tuple[int, DecodeInstance], version: int, now_s: float) -> None:
        at, instance = where
        for job in self._pds[at].pool.ended(instance, version, now_s):
            job.fate = Fate.DONE
            self._num_open -= 1
            self._decider.done(job, now_s)
        if not (instance.is_usable or instance.num_requests) and self._rebalancer is not None:
            self._rebalancer.idle(instance, now_s)
            self._refill(now_s)

    # ---- the loss of a cluster

    def _cluster_lost(self, name: str, _: None, now_s: float) -> None:
        for pd in self._pds:
            if pd.station.name == name:
                self._lose_pd(pd, now_s)
        for place, source in enumerate(self._sources, 1):
            if source.name == name:
                self._lose_source(place, source, now_s)
        if self._encoding is not None:
            self._encoding.lose(name, now_s)

    def _lose_pd(self, pd: PdParts, now_s: float) -> None:
        """Requests that decode there are lost, wherever they are."""
        at = self._pds.index(pd)
        for source in self._sources:
            for job in source.take_away(lambda job: job.pd == at):
                self._stop(job, now_s)
                self._lose(job, now_s)
            self._start(source, now_s)
        for place in range(1, len(self._sources) + 1):
            for job in self._transfers.awaiting(place):
                if job.pd == at:
                    self._transfers.give_up(job, now_s)
                    self._lose(job, now_s)
        for job in [*pd.station.lose(), *pd.pool.lose()]:
            self._lose(job, now_s)

    def _lose_source(self, place: int, source: PrefillStation, now_s: float) -> None:
        """Prompts that it has not prefilled, or that have not landed, are prefilled where they
        decode.
        """
        unfinished = source.lose()
        for job in unfinished:
            self._stop(job, now_s)
        landing = self._transfers.awaiting(place)
        for job in landing:
            self._transfers.give_up(job, now_s)
            self._wasted_s += job.service_s
        for job in [*unfinished, *landing]:
            self._prefill_again(job, now_s)

    def _stop(self, job: Job, now_s: float) -> None:
        """End the transfer of a prefill that was running, and its encoding."""
        self._withdraw(job, now_s)
        if not math.isnan(job.start_s):
            self._transfers.stop(job, now_s)
            self._wasted_s += max(0.0, min(job.service_s, now_s - job.start_s))

    def _cluster_back(self, name: str, _: None, now_s: float) -> None:
        if self._encoding is not None:
            self._encoding.regain(name, now_s)
        for pd in self._pds:
            if pd.station.name == name:
                pd.station.regain()
                pd.pool.regain()
        for source in self._sources:
            if source.name == name:
                source.regain()
                self._start(source, now_s)
        self._refill(now_s)

    # ---- what happens by the clock

    def _sample(self, _: None, __: None, now_s: float) -> None:
        for job in self._transfers.sample(now_s):
            self._given_up(job, job.landing_version, now_s)
        self._decider.looked(now_s)
        self._push(_SAMPLE, now_s + self._transfers.sample_s)

    def _report(self, _: None, __: None, now_s: float) -> None:
        self._decider.report(now_s)
        self._push(_REPORT, now_s + (self._decider.report_every_s or math.inf))

    def _look(self, _: None, __: None, now_s: float) -> None:
        assert self._rebalancer is not None
        self._rebalancer.look(now_s)
        self._refill(now_s)
        self._push(_LOOK, now_s + self._rebalancer.look_s)

    def _relabelled(self, name: str, epoch: int, now_s: float) -> None:
        assert self._rebalancer is not None
        self._rebalancer.relabelled(name, epoch, now_s)
        self._refill(now_s)

    def _refill(self, now_s: float) -> None:
        """Let waiting requests begin on instances that may have become usable."""
        for pd in self._pds:
            self._start(pd.station, now_s)
            pd.pool.fill(now_s)

    def _record(self, _: None, __: None, now_s: float) -> None:
        if now_s <= self._span_s:
            self._series.add(now_s, dict(self._row(now_s)))
        self._push(_RECORD, now_s + self._record_s)

    def _row(self, now_s: float) -> Iterator[tuple[str, float]]:
        num_jobs = len(self._jobs)
        yield "offered_rps", (num_jobs - self._num_jobs_recorded) / self._record_s
        yield "refused_rps", (self._num_refused - self._num_refused_recorded) / self._record_s
        self._num_jobs_recorded, self._num_refused_recorded = num_jobs, self._num_refused
        yield from self._decode_row("", [pd.pool for pd in self._pds])
        yield "num_prefill", sum(len(pd.station.instances) for pd in self._pds)
        yield "num_decode", sum(len(pd.pool.instances) for pd in self._pds)
        for pd in self._pds if len(self._pds) > 1 else ():
            yield from self._decode_row(f":{pd.station.name}", [pd.pool])
        for station in self._parts.stations():
            yield f"queued:{station.name}", station.num_queued
            yield f"running:{station.name}", station.num_running
        for (place, at), tokens in self._decider.present_thresholds().items():
            source = self._sources[place - 1].name
            pair = source if len(self._pds) == 1 else f"{source} to {self._pds[at].station.name}"
            yield f"threshold:{pair}", tokens
        yield from self._transfers.row(now_s, self._record_s)

    def _decode_row(self, of: str, pools: list[DecodePool]) -> Iterator[tuple[str, float]]:
        yield f"decode_used{of}", sum(pool.num_running for pool in pools)
        yield f"decode_waiting{of}", sum(pool.num_waiting for pool in pools)
        yield f"decode_slots{of}", sum(pool.slots_total for pool in pools)

    def _outcome(self, end_s: float) -> Outcome:
        rebalancer = self._rebalancer
        return Outcome(
            slo=self._model.slo,
            jobs=self._jobs,
            series=self._series,
            span_s=self._span_s,
            egress_bytes=self._transfers.egress_bytes(end_s),
            prefill_busy_s=sum(station.busy_s for station in self._parts.stations()),
            wasted_prefill_s=self._wasted_s,
            role_changes=[] if rebalancer is None else rebalancer.role_changes,
            rebalances=[] if rebalancer is None else rebalancer.told,
            lateness=self._transfers.lateness,
            pd_names=[pd.station.name for pd in self._pds],
        )
