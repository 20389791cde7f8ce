"""Who decides in a replay where a request is prefilled and whether it is let in.

`StaticDecider` is the paper's threshold. `LiveDecider` drives the object that a gateway runs,
`scheduler.live.core.LiveScheduler`: it tells it what happens to links and requests, asks it for
routes and admission, and lets it see the stations as they are (`scheduler.replay.station_views`).
`OracleDecider` shows it links as they will be, and t follows their rates by the plan.

They know stations, pools and watched links; nothing of a replay's own events.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.live.admission import AdmissionConfig, AdmissionPolicy, admit_decode
from scheduler.live.core import Event, LiveScheduler
from scheduler.live.events import (
    AdmissionOver,
    AdmitAsked,
    LinkHeard,
    RouteAsked,
    ThresholdPlanned,
    ThresholdsAsked,
)
from scheduler.live.feedback import (
    AnswerDecoded,
    FirstToken,
    LegAnswered,
    LegBegun,
    LegOver,
    Prefilled,
    RequestArrived,
)
from scheduler.live.settings import LiveSettings, RoutingPolicy
from scheduler.planning.pair_search import best_of_pair
from scheduler.planning.plan import is_pair
from scheduler.planning.throughput import Mode
from scheduler.replay.jobs import Job
from scheduler.replay.model import Policy, ReplayModel, Routing
from scheduler.replay.station_views import Parts, StationViews
from scheduler.routing.decision import HAND_OFF, RequestShape
from scheduler.routing.prediction import PrefillTask, transfer_tail_s
from scheduler.routing.queue_order import OrderConfig
from scheduler.routing.threshold import ThresholdConfig

MODEL: Final = "replayed"
"""The served name of the one model that all requests are for."""
_LOOK_S: Final = 0.2
"""Thresholds follow links at most so often while no request asks."""
_FOLLOWS_NO_LINK: Final = ThresholdConfig(rising_factor=1.0, congested_factor=1.0, max_factor=1.0)


class Decider:
    """One policy at work. It is told how requests go; a policy that learns nothing ignores it."""

    def __init__(self, parts: Parts, thresholds: dict[str, float]) -> None:
        self.thresholds = thresholds
        """The plan's t of each prefill cluster by name."""
        self._parts = parts

    def place(self, job: Job, kv_bytes: float, now_s: float) -> bool:
        """Write into the job where it goes and what is cached there; False: refused."""
        raise NotImplementedError

    def believed_s(self, job: Job) -> float:
        """How long its prefill should take at its place."""
        profile = self._parts.stations[job.place].profile
        return profile.prefill_s(job.num_tokens, job.cached_tokens)

    def tail_s(self, job: Job, now_s: float) -> float | None:
        """From now, when its prefill begins, how long its transfer should go on after it."""
        return None

    def landed(self, job: Job, now_s: float) -> bool:
        """Its KVCache has landed: whether it may decode; False: refused after all."""
        return True

    def given_up(self, job: Job, now_s: float) -> None:
        """Its KVCache did not land in time."""

    def decoding(self, job: Job, now_s: float) -> None:
        """It has a decode slot; its first token is one step away."""

    def done(self, job: Job, now_s: float) -> None:
        """Its last token is there."""

    def over(self, job: Job, now_s: float) -> None:
        """It was let in, and nobody will serve it any more."""

    def present_thresholds(self) -> list[float]:
        """t of each prefill cluster as it is now, for the record."""
        return [self.thresholds[station.name] for station in self._parts.stations[1:]]

    def gives_up(self, link: LinkView) -> bool:
        """Whether transfers that wait for this link should be prefilled at home instead."""
        return False

    def looked(self, now_s: float) -> None:
        """Links were just sampled, or the plan has changed."""

    def plan_sends(self, bytes_per_s: float) -> None:
        """What the plan in force sends over each link at its capacity."""


class StaticDecider(Decider):
    """More than t uncached goes to the prefill cluster that has least to compute and to do."""

    def place(self, job: Job, kv_bytes: float, now_s: float) -> bool:
        stations, hits = self._parts.stations, self._parts.hits(job)
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


class LiveDecider(Decider):
    """The live scheduler, told what a gateway would tell it. See the module text."""

    def __init__(
        self, parts: Parts, model: ReplayModel, policy: Policy, thresholds: dict[str, float]
    ) -> None:
        super().__init__(parts, thresholds)
        pd, *others = (station.name for station in parts.stations)
        self.live = LiveScheduler(_settings(policy, pd, tuple(others)), StationViews(parts))
        self._admission = policy.admission
        self._kv = model.region.kv
        self._targets = [HAND_OFF, *others]
        """What the live scheduler calls each station."""
        self._places = {name: place for place, name in enumerate(self._targets)}
        self._planned_bytes_per_s = 0.0
        self._told_plan: tuple[dict[str, float], float] | None = None
        self._looked_s = -1.0
        known = self.live.knowledge(MODEL)
        for target, station in zip(self._targets, parts.stations, strict=True):
            # The profiles of the plan: a gateway that has been running for a while knows as much.
            known.believe(target, station.profile)

    def place(self, job: Job, kv_bytes: float, now_s: float) -> bool:
        hits = self._parts.hits(job)
        self._hear_links(now_s)
        decision = self.live.take(RouteAsked(MODEL, self._shape(job, hits)), now_s)
        predicted = decision.predicted
        if self._admission is not None:
            asked = AdmitAsked(job.index, "", MODEL, job.num_tokens, predicted)
            if not self.live.take(asked, now_s).verdict.admitted:
                return False
        place = job.place = self._places.get(decision.target, 0)
        job.cached_tokens = hits[place]
        if decision.move.pays:
            job.move_from = self._places[decision.move.source]
            job.move_tokens = decision.move.saved_tokens
            job.cached_tokens += job.move_tokens
        job.predicted = predicted
        self._tell(RequestArrived(MODEL, job.num_tokens, hits[0]), now_s)
        if hits[0]:
            kv_bytes += self._kv.fixed_bytes - float(self._kv.size(hits[0]))
        leg = LegBegun(
            transfer_id=str(job.index),
            model=MODEL,
            place=self._targets[place],
            num_tokens=job.num_tokens,
            uncached_tokens=job.num_tokens - job.cached_tokens,
            landing_cached_tokens=hits[0],
            nbytes=int(kv_bytes),
            lands_s=0.0 if predicted is None else predicted.landed_s,
        )
        self._tell(leg, now_s)
        return True

    def believed_s(self, job: Job) -> float:
        profile = self.live.knowledge(MODEL).prefill(self._targets[job.place])
        return profile.prefill_s(job.num_tokens, job.cached_tokens)

    def tail_s(self, job: Job, now_s: float) -> float | None:
        watch = self._parts.watches[job.place]
        if watch is None:
            return None
        task = PrefillTask(job.num_tokens, 0, job.token_bytes, job.fixed_bytes)
        return transfer_tail_s(watch.view(now_s), 0.0, job.believed_s, task)

    def landed(self, job: Job, now_s: float) -> bool:
        prefilled = Prefilled(
            model=MODEL,
            place=self._targets[job.place],
            instance=job.instance,
            num_tokens=job.num_tokens,
            cached_tokens=job.cached_tokens,
            tail_s=now_s - job.prefill_end_s,
            seconds=job.service_s,
        )
        self._tell(prefilled, now_s)
        self._tell(LegOver(str(job.index)), now_s)
        admission = self._admission
        if admission is None or admission.policy is not AdmissionPolicy.AT_DECODE:
            return True
        if admit_decode(0.0, self.live.decode_side(MODEL, now_s), admission).admitted:
            return True
        self.over(job, now_s)
        return False

    def given_up(self, job: Job, now_s: float) -> None:
        self._tell(LegOver(str(job.index)), now_s)

    def decoding(self, job: Job, now_s: float) -> None:
        # What was predicted of a route says nothing of one that failed and was prefilled again.
        if job.predicted is None or job.fell_back:
            return
        # Told a step early, as the step's time is known. Who waited for a slot met a full engine.
        ttft_s, was_full = now_s + job.step_s - job.arrival_s, now_s > job.landed_s
        target = self._targets[job.place]
        self._tell(FirstToken(MODEL, target, job.predicted, ttft_s, was_full), now_s)

    def done(self, job: Job, now_s: float) -> None:
        seconds = max(0.0, now_s - job.slot_s - job.step_s)
        self._tell(AnswerDecoded(MODEL, job.output_tokens, seconds), now_s)
        self.over(job, now_s)

    def over(self, job: Job, now_s: float) -> None:
        self._tell(LegAnswered(str(job.index)), now_s)
        if self._admission is not None:
            self._tell(AdmissionOver(job.index), now_s)

    def present_thresholds(self) -> list[float]:
        found = {item.cluster: item.tokens for item in self.live.thresholds.overview()}
        return [found[name] for name in self._targets[1:]]

    def gives_up(self, link: LinkView) -> bool:
        return link.state is LinkCondition.DOWN

    def looked(self, now_s: float) -> None:
        self._tell_plan(now_s)
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._hear_links(now_s)
            self.live.take(ThresholdsAsked(), now_s)

    def plan_sends(self, bytes_per_s: float) -> None:
        self._planned_bytes_per_s = bytes_per_s

    def _tell_plan(self, now_s: float) -> None:
        tokens = {name: self._plan_tokens(name, now_s) for name in self._targets[1:]}
        plan = tokens, self._planned_bytes_per_s
        if plan != self._told_plan:
            self._told_plan = plan
            for name in tokens:
                self._tell(ThresholdPlanned(name, tokens[name], self._planned_bytes_per_s), now_s)

    def _plan_tokens(self, cluster: str, now_s: float) -> float:
        return self.thresholds[cluster]

    def _tell(self, event: Event[Any], now_s: float) -> None:
        self.live.take(event, now_s)

    def _hear_links(self, now_s: float) -> None:
        """Hand over what has changed, as a gateway does before a question."""
        pd = self.live.settings.pd
        for station, watch in zip(self._parts.stations, self._parts.watches, strict=True):
            if watch is None:
                continue
            view, heard = watch.view(now_s), self.live.links.get((station.name, pd))
            if view is not heard and view != heard:
                self._tell(LinkHeard(station.name, pd, view), now_s)

    def _shape(self, job: Job, hits: list[int]) -> RequestShape:
        if self._parts.caches is None:
            return RequestShape(num_prompt_tokens=job.num_tokens)
        by_name = dict(zip(self._targets[1:], hits[1:], strict=True))
        return RequestShape(
            num_prompt_tokens=job.num_tokens,
            local_cached_tokens=hits[0],
            prefill_cached_tokens=by_name,
            landing_cached_tokens=hits[0],
            sendable_tokens=by_name,
        )


class OracleDecider(LiveDecider):
    """The live scheduler with links as they will be, and the best t for the lowest rate to come."""

    def __init__(
        self, parts: Parts, model: ReplayModel, policy: Policy, thresholds: dict[str, float]
    ) -> None:
        super().__init__(parts, model, replace(policy, threshold=_FOLLOWS_NO_LINK), thresholds)
        self._model = model
        self._num_prefill = float(len(parts.stations[0].instances))
        self._best: dict[float, float] = {}

    def _plan_tokens(self, cluster: str, now_s: float) -> float:
        region, watch = self._model.region, self._parts.watches[1]
        if watch is None or not is_pair(region):
            return self.thresholds[cluster]
        rate = watch.view(now_s).available_bytes_per_s or 0.0
        if rate >= region.links[0].bytes_per_s:
            return self.thresholds[cluster]
        found = self._best.get(rate)
        if found is None:
            found = self._best[rate] = self._solve(rate)
        return found

    def _solve(self, rate: float) -> float:
        region = self._model.region
        if rate <= 0:
            return region.traffic.lengths.max_tokens
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
    return LiveDecider(parts, model, policy, thresholds)


def _settings(policy: Policy, pd: str, prefill_clusters: tuple[str, ...]) -> LiveSettings:
    return LiveSettings(
        pd=pd,
        prefill_clusters=prefill_clusters,
        # The plan's t of each cluster is told before the first request.
        threshold_tokens=0.0,
        hand_off_tokens=1,
        routing=RoutingPolicy(margin_s=policy.margin_s, margin_share=policy.margin_share),
        threshold=policy.threshold,
        order=policy.order or OrderConfig(),
        refuses_load=policy.admission is not None,
        admission=policy.admission or AdmissionConfig(),
    )
