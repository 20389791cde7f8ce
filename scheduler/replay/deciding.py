"""The decider of a replay: where a request is prefilled, and whether it is admitted.

`Decider` drives the object that a gateway runs, `scheduler.live.core.LiveScheduler`: it tells it
what happens to links and requests, passes on the reports of clusters, and asks it for routes and
admission. `scheduler.replay.baselines` has what it is compared with.

Deciders know stations, pools and watched links, but not the events of a replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from scheduler.live.admission import AdmissionConfig, AdmissionPolicy, Verdict, admit_decode
from scheduler.live.core import Event, LiveScheduler, R
from scheduler.live.events import (
    AdmissionOver,
    AdmitAsked,
    LinkHeard,
    ReportHeard,
    RouteAsked,
    ThresholdPlanned,
    ThresholdsAsked,
)
from scheduler.live.feedback import (
    AnswerDecoded,
    DirectAnswered,
    DirectBegun,
    DirectOver,
    DirectTook,
    FirstToken,
    InstanceGiven,
    InstanceOver,
    LegAnswered,
    LegBegun,
    LegOver,
    Prefilled,
    RequestArrived,
    waited_s,
)
from scheduler.live.long_term.loop import LongTermConfig
from scheduler.live.long_term.model_plan import ThresholdPlan
from scheduler.live.settings import LiveSettings, PdSettings, RoutingPolicy
from scheduler.replay.jobs import Decided, Job, Way
from scheduler.replay.model import MODEL, Policy, ReplayModel
from scheduler.replay.parts import Parts, reports
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, PdCached, RequestShape
from scheduler.routing.order_config import OrderConfig
from scheduler.routing.prediction import PrefillTask, transfer_tail_s
from scheduler.routing.short_term import RouteDecision

_LOOK_S: Final = 0.2
"""The least time between two looks at links while no request asks."""


PdPlans = Mapping[str, ThresholdPlan]
"""The thresholds for prompts that decode in each PD cluster, by its name."""


class Decider:
    """Runs the live scheduler, and tells it what a gateway would tell it."""

    def __init__(self, parts: Parts, model: ReplayModel, policy: Policy, planned: PdPlans) -> None:
        """The thresholds of `planned` hold until the long-term loop plans anew, if the policy has
        one.
        """
        self.pds = [pd.station.name for pd in parts.pds]
        sources = [station.name for station in parts.sources]
        linked = {
            name: tuple(s for p, s in enumerate(sources, 1) if (p, at) in parts.watches)
            for at, name in enumerate(self.pds)
        }
        self.report_every_s: float | None = policy.report_every_s
        """How often `report` must be called; None: never."""
        self.live = LiveScheduler(_settings(policy, linked))
        self._parts = parts
        self._admission = policy.admission
        self._kv = model.region.kv
        self._targets = [HAND_OFF, *sources]
        """The live scheduler's name of each place."""
        self._places = {name: place for place, name in enumerate(self._targets)}
        self._looked_s = -1.0
        known = self.live.knowledge(MODEL)
        # The profiles of the plan: a gateway that has been running for a while knows as much.
        for pd in parts.pds:
            for place in self.live.pd_places(pd.station.name):
                known.believe(place, pd.station.profile)
        for station in parts.sources:
            known.believe(station.name, station.profile)
        for name, plan in planned.items():
            for cluster, tokens in plan.tokens.items():
                sends = plan.sends.get(cluster, 0.0)
                self.live.take(ThresholdPlanned(cluster, tokens, sends, name), 0.0)

    def place(self, job: Job, kv_bytes: float, now_s: float) -> bool:
        """Write into the job where it goes and what is cached there. False: refused."""
        decision, hits = self._routed(job, now_s)
        predicted = decision.predicted
        verdict: Verdict | None = None
        if self._admission is not None:
            asked = AdmitAsked(job.index, "", MODEL, job.num_tokens, predicted, pd=decision.pd)
            verdict = self.live.take(asked, now_s).verdict
        job.decided = Decided(
            decision.target,
            decision.reason,
            self.pds[job.pd],
            decision.pd_reason,
            decision.move.reason,
            "" if verdict is None else verdict.reason,
        )
        if verdict is not None and not verdict.admitted:
            return False
        job.cached_tokens = hits[job.place]
        if decision.move.pays:
            job.move_from = self._places[decision.move.source]
            job.move_tokens = decision.move.saved_tokens
            job.cached_tokens += job.move_tokens
        job.predicted = predicted
        job.decode_instance = self._parts.pds[job.pd].pool.reserve(job)
        self._begun(job, hits[0], kv_bytes, now_s)
        return True

    def _routed(self, job: Job, now_s: float) -> tuple[RouteDecision, list[int]]:
        """The route of a job, which gets its places from it, and what these have cached. As in a
        gateway, clusters that turn out to be lost are passed over in another try.
        """
        hits = self._parts.hits(job)
        shape, home = self._shape(job, hits), self.pds[job.home]
        excluded: set[str] = set()
        while True:
            question = RouteAsked(MODEL, shape, excluded=frozenset(excluded), home=home)
            decision = self.live.take(question, now_s)
            job.place = self._places.get(decision.target, 0)
            job.is_whole = decision.target == ONE_ENGINE
            job.pd = self.pds.index(decision.pd) if decision.pd else job.home
            lost = self._parts.lost(job)
            if not lost or lost in excluded:
                break
            excluded.add(lost)
        return decision, hits if job.pd == job.home else self._parts.hits(job)

    def report(self, now_s: float) -> None:
        """Pass on reports and links, as a gateway does that asks for them. A lost cluster answers
        with none.
        """
        lost = {station.name for station in self._parts.stations() if station.is_lost}
        for report in reports(self._parts, now_s):
            found = None if report.name in lost else report
            self.tell(ReportHeard(report.name, found, now_s), now_s)
        self.hear_links(now_s)

    def _begun(self, job: Job, home_tokens: int, kv_bytes: float, now_s: float) -> None:
        """Tell that the request goes to its place. `home_tokens` are cached in the PD cluster."""
        home = self.pds[job.home]
        encoding = self._parts.encoding
        media = encoding.left(job, home)[1] if encoding is not None and job.media else 0
        self.tell(RequestArrived(MODEL, job.num_tokens, home_tokens, home, media), now_s)
        if job.decode_instance:
            given = InstanceGiven(job.decode_instance, job.index)
            job.was_full = self.live.take(given, now_s)
        if job.is_whole:
            direct = DirectBegun(job.decode_instance, job.num_tokens, job.uncached_tokens)
            job.direct_key = self.live.take(direct, now_s)
            return
        # What the PD cluster has cached is not sent. `size` includes the fixed bytes, which are
        # sent in any case.
        if home_tokens:
            kv_bytes += self._kv.fixed_bytes - float(self._kv.size(home_tokens))
        leg = LegBegun(
            transfer_id=str(job.index),
            model=MODEL,
            place=self._target(job),
            num_tokens=job.num_tokens,
            uncached_tokens=job.uncached_tokens,
            landing_cached_tokens=home_tokens,
            nbytes=int(kv_bytes),
            lands_s=0.0 if job.predicted is None else job.predicted.landed_s,
            instance=job.decode_instance,
            pd=self.pds[job.pd],
        )
        self.tell(leg, now_s)

    def _target(self, job: Job) -> str:
        return ONE_ENGINE if job.is_whole else self._targets[job.place]

    def believed_s(self, job: Job) -> float:
        """How long the job's prefill should take at its place."""
        place = self.live.place(self._target(job), self.pds[job.pd])
        profile = self.live.knowledge(MODEL).prefill(place)
        return profile.prefill_s(job.num_tokens, job.cached_tokens)

    def tail_s(self, job: Job, now_s: float) -> float | None:
        """How long the job's transfer should go on after a prefill that begins now."""
        watch = self._parts.watches.get(job.way)
        if watch is None:
            return None
        task = PrefillTask(job.num_tokens, 0, job.token_bytes, job.fixed_bytes)
        return transfer_tail_s(watch.view(now_s), 0.0, job.believed_s, task)

    def landed(self, job: Job, now_s: float) -> bool:
        """The job's KVCache has landed. Returns whether it may decode; False: refused after all."""
        seconds = job.prefill_end_s - job.turn_s
        prefilled = Prefilled(
            model=MODEL,
            place=self._target(job),
            instance=job.instance,
            num_tokens=job.num_tokens,
            cached_tokens=job.cached_tokens,
            tail_s=now_s - job.prefill_end_s,
            # Prefills that end in one pass end at one time.
            seconds=seconds or None,
            pd=self.pds[job.pd],
            encoded_tokens=job.encoded_tokens if job.media else None,
        )
        self.tell(prefilled, now_s)
        self.tell(LegOver(str(job.index)), now_s)
        admission = self._admission
        if admission is None or admission.policy is not AdmissionPolicy.AT_DECODE:
            return True
        decode = self.live.decode_side(MODEL, now_s, self.pds[job.pd])
        if admit_decode(0.0, decode, admission).admitted:
            return True
        self.over(job, now_s)
        return False

    def given_up(self, job: Job, now_s: float) -> None:
        """The job's KVCache did not land in time."""
        self.tell(LegOver(str(job.index)), now_s)

    def decoding(self, job: Job, now_s: float) -> None:
        """The job has a decode slot, and its first token is one step away. A job that is served
        whole has that token.
        """
        pd, target = self.pds[job.pd], self._target(job)
        if job.is_whole:
            self._computed(job, pd, now_s)
        predicted = job.predicted
        # The prediction was for the first route, which failed; another prefill replaced it.
        if predicted is None or job.fell_back:
            return
        # Told early, as the step's time is known.
        ttft_s = job.slot_s + job.step_s - job.arrival_s
        waits = (
            job.turn_s - job.arrival_s,
            job.landed_s - job.prefill_end_s,
            job.slot_s - job.ready_s,
        )
        token = FirstToken(
            MODEL,
            target,
            predicted,
            ttft_s,
            job.was_full,
            pd,
            bool(job.media),
            waited_s(predicted, *waits),
            job.num_tokens,
            job.cached_tokens,
        )
        self.tell(token, now_s)

    def _computed(self, job: Job, pd: str, now_s: float) -> None:
        """The engine that serves the job whole has computed its prompt."""
        self.tell(DirectOver(job.direct_key), now_s)
        seconds = self.live.take(DirectAnswered(job.decode_instance, job.arrival_s), now_s)
        if seconds is not None and not job.was_full:
            shape = RequestShape(
                num_prompt_tokens=job.num_tokens, local_cached_tokens=job.cached_tokens
            )
            encoded_tokens = job.encoded_tokens if job.media else None
            self.tell(DirectTook(MODEL, shape, seconds, pd, encoded_tokens), now_s)

    def done(self, job: Job, now_s: float) -> None:
        """The job has its last token."""
        seconds = max(0.0, now_s - job.slot_s - job.step_s)
        answer = AnswerDecoded(MODEL, job.output_tokens, seconds, job.decode_instance)
        self.tell(answer, now_s)
        self.over(job, now_s)

    def over(self, job: Job, now_s: float) -> None:
        """An admitted job is over: served, refused after all, or lost."""
        self.tell(LegAnswered(str(job.index)), now_s)
        if job.direct_key:
            self.tell(DirectOver(job.direct_key), now_s)
        self._parts.pds[job.pd].pool.release(job)
        if job.decode_instance:
            self.tell(InstanceOver(job.decode_instance), now_s)
            job.decode_instance = ""
        if self._admission is not None:
            self.tell(AdmissionOver(job.index), now_s)

    def present_thresholds(self) -> dict[Way, float]:
        """The present t of each link, for the time series."""
        return {
            (self._places[item.cluster], self.pds.index(item.pd)): item.tokens
            for item in self.live.thresholds.overview()
        }

    def looked(self, now_s: float) -> None:
        """Links were just sampled: let thresholds follow them."""
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self.hear_links(now_s)
            self.live.take(ThresholdsAsked(), now_s)

    def hear_links(self, now_s: float) -> None:
        """Pass on the changed views of links, as a gateway does before it asks for a decision."""
        for (place, at), watch in self._parts.watches.items():
            source, pd = self._targets[place], self.pds[at]
            view, heard = watch.view(now_s), self.live.links.get((source, pd))
            if view is not heard and view != heard:
                self.tell(LinkHeard(source, pd, view), now_s)

    def tell(self, event: Event[Any], now_s: float) -> None:
        """Tell the live scheduler what happened."""
        self.live.take(event, now_s)

    def plan(self, event: Event[R], now_s: float) -> R:
        """Pass on an event of the long-term loop, which may set t."""
        return self.live.take(event, now_s)

    def _shape(self, job: Job, hits: list[int]) -> RequestShape:
        encoding = self._parts.encoding
        media = None if encoding is None else encoding.shape(job)
        if self._parts.caches is None:
            return RequestShape(num_prompt_tokens=job.num_tokens, media=media)
        by_name = dict(zip(self._targets[1:], hits[1:], strict=True))
        return RequestShape(
            num_prompt_tokens=job.num_tokens,
            local_cached_tokens=hits[0],
            media=media,
            prefill_cached_tokens=by_name,
            landing_cached_tokens=hits[0],
            sendable_tokens=by_name,
            cached_in_pds={
                name: PdCached(num, num)
                for name in self.pds
                if name != self.pds[job.home] and (num := self._parts.cached_tokens(job, name))
            },
        )


def _settings(policy: Policy, linked: Mapping[str, tuple[str, ...]]) -> LiveSettings:
    """`linked` are the prefill clusters with a link to each PD cluster."""
    return LiveSettings(
        pd_clusters=tuple(PdSettings(pd, sources, policy.spill) for pd, sources in linked.items()),
        # The plan's t of each cluster is told at once.
        threshold_tokens=0.0,
        hand_off_tokens=policy.hand_off_tokens,
        routing=RoutingPolicy(
            margin_s=policy.margin_s,
            margin_share=policy.margin_share,
            home_margin_s=policy.home_margin_s,
            home_margin_share=policy.home_margin_share,
        ),
        threshold=policy.threshold,
        order=policy.order or OrderConfig(),
        refuses_load=policy.admission is not None,
        admission=policy.admission or AdmissionConfig(),
        models=() if policy.long_term is None else (MODEL,),
        long_term=policy.long_term or LongTermConfig(),
    )
