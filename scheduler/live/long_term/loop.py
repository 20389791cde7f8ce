"""The long timescale: every few minutes, the threshold t and the division that the traffic asks
for.

A `LongTermQuestion` has the measured traffic, the region's profiles and links, the present t and
division, and when each PD cluster had its last conversion. The answer is a `LongTermDecision`: t
until the conversions have ended, t after them, the conversions, the plan that they lead to, and the
reason, also for doing nothing. The same question has the same answer, whoever computes it and when.

Rules:

1. Solve for the best division for the measured traffic (PrfaaS 3.4.3). No cluster gives up the last
   instance of a role. The gain of a conversion is counted against the present division with *its*
   best t, not with the present t, because t is free to change.
2. Convert when the best division gains `min_gain` or more, and when the next step is no loss even
   if the measured means are off by `NUM_ERRORS` standard errors in the unlucky direction. So the
   noise of few samples converts nothing, and no other threshold is needed.
   An instance is given only to a role whose instances are busy (`BUSY_SHARE`): a gain of the
   highest rate is none while nobody asks for it, and a plan whose model is wrong is contradicted by
   a stage with time to spare.
3. Each step converts one instance of a cluster, towards the best division. Throughput is concave in
   the division, so every step gains, and a wrong one costs little. A change by several instances
   takes as many steps.
4. A cluster waits `dwell_s` before its next conversion, and `reverse_dwell_s` before one in the
   other direction. While a conversion runs, its cluster is asked for no other. A failed conversion
   counts as one in the other direction: an instance that cannot be drained must not be taken from
   its work every few minutes.
5. Where the traffic has media and the cluster an encode stage, the stage gains or loses an instance
   by the same rules (`encode_step`), if that gains more than another division of the others can.
   Its conversions dwell apart from those between prefill and decode, but only one begins at a time.
6. t follows at every step where that gains `MIN_THRESHOLD_GAIN`. A step moves at most
   `MAX_MOVED_SHARE` of the requests to the other side.

While an instance drains it is lost to both roles. So t counts on the fewer prefill instances: at
once if a prefill instance is taken, and until the end of the conversion if one is gained.

An answer costs tens to hundreds of milliseconds, so it is computed off the event loop. No I/O, no
clock. `model_plan` keeps what lasts from one question to the next, `conversion` converts an
instance, and `scheduler.routing.threshold` reacts to congestion within seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from scheduler.live.learning.measured_traffic import MeasuredTraffic
from scheduler.live.long_term.conversion import ConversionWish
from scheduler.live.long_term.encode_step import (
    EncodeGoal,
    EncodeSearch,
    EncodeStage,
    encode_step,
    encode_wish,
    raised,
)
from scheduler.live.long_term.step_config import (
    BUSY_SHARE,
    MAX_ERROR,
    NUM_ERRORS,
    ROUNDING,
    LongTermConfig,
    StepReason,
    gain_of,
)
from scheduler.planning.joint import JointRegion
from scheduler.planning.plan import NoRouteError, Plan
from scheduler.planning.region_model import Allocation, Region, measured_region
from scheduler.planning.solve import best_plan, plan_at
from scheduler.planning.threshold_search import Bounds, threshold_plan
from scheduler.planning.throughput import Mode

__all__ = ["LongTermConfig", "LongTermDecision", "LongTermQuestion", "StepReason", "bounds_of"]

MIN_THRESHOLD_GAIN: Final = 0.005
"""The throughput that another t must gain, as a share of the present one."""
MAX_MOVED_SHARE: Final = 0.5
"""The largest share of requests that one step of t may move to the other side."""


@dataclass(frozen=True)
class LongTermDecision:
    """What to do until the next step. `numbers` are what `reason` rests on; rates are requests/s:

    kept_rps       with the present t and division
    present_rps    with the present division and its best t
    next_rps       after the conversions of this step
    best_rps       with the best division
    gain           best over present, less 1

    Where there is an encode stage: `encode_gain` of the best number of instances that encode over
    the present one, and `encode_left`, the share of media that the present ones leave to instances
    that prefill at the measured rate.
    """

    reason: StepReason
    thresholds: Mapping[str, float]
    """The threshold of each prefill cluster from now on."""
    thresholds_after: Mapping[str, float]
    """The thresholds for when the conversions are done."""
    conversions: tuple[ConversionWish, ...] = ()
    plan: Plan | None = None
    """The best plan, towards which the loop works; None when none was made."""
    adopted: Plan | None = None
    """The routing that `thresholds_after` stand for; None: they stay as they are."""
    numbers: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    encode: EncodeGoal | None = None
    """The encode stage of the best plan; None: there is none, or nothing to encode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTermQuestion:
    """What are the best threshold and division of one region for the next period?

    `region` is as configured and learnt. `current` has all PD clusters of `region`; its instances
    serve `model`. Where several PD clusters share prefill clusters or links, `joint` divides these.
    `changed` says for each PD cluster when a conversion was last asked of it or ended, and by how
    much it changed N_p (0 if it failed). `adopted` is the routing that the present thresholds stand
    for, where one threshold does not describe it. `encode` is the encode stage of the PD cluster,
    and `changed_encode` is for its conversions what `changed` is for the others.
    """

    model: str
    config: LongTermConfig
    region: Region
    measured: MeasuredTraffic | None
    current: Allocation
    changed: Mapping[str, tuple[float, int]]
    adopted: Plan | None
    now_s: float
    joint: JointRegion | None = None
    """All PD clusters of the region that are planned for now. None: `region` is all there is."""
    encode: EncodeStage | None = None
    changed_encode: Mapping[str, tuple[float, int]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    busy: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """How busy the instances of the PD cluster were in the last period, by role. A role that is not
    here counts as busy: no report says how much it can do.
    """

    def answer(self) -> LongTermDecision:
        """Decide. Takes milliseconds to seconds, and may be called in any thread."""
        num_requests = 0.0 if self.measured is None else self.measured.num_requests
        if self.measured is None or num_requests < self.config.min_requests:
            numbers = {"requests": num_requests, "min_requests": self.config.min_requests}
            return self._unchanged(StepReason.TOO_FEW_REQUESTS, numbers)
        try:
            shared = self._with_share()
            if shared.encode is None:
                return shared._decide(self.measured)
            return shared._decide_encode(shared.encode, self.measured)
        except NoRouteError:
            return self._unchanged(StepReason.NO_ROUTE, {"requests": num_requests})

    def _with_share(self) -> LongTermQuestion:
        """The same question for what the PD cluster may use of what it shares with others."""
        if self.joint is None:
            return self
        key = self.model, self.region.pd_clusters[0].name
        return replace(self, region=self.joint.shares[key], joint=None)

    def _decide_encode(self, stage: EncodeStage, measured: MeasuredTraffic) -> LongTermDecision:
        """The step of the encode stage, or else one between prefill and decode."""
        (name, num_prefill), *_ = self.current.num_prefill.items()
        search = EncodeSearch(self._modelled(measured), stage, num_prefill)
        found = encode_step(
            search,
            self.config,
            is_converting=name in self.current.converting,
            changed_s=self.changed.get(name, (-math.inf, 0))[0],
            changed=self.changed_encode.get(name),
            now_s=self.now_s,
        )
        left = search.left_share(measured.rate_rps)
        numbers = {"encode_gain": found.gain, "encode_left": left}
        goal = EncodeGoal.of(search.best, stage, measured.rate_rps)
        if found.way < 0 and not self._is_busy(found.role or ""):
            found = replace(found, after=None)
        if found.after is None or found.role is None:
            # What the stage leaves to instances that prefill is work of theirs.
            region = raised(self.region, left * stage.own_s if stage.num_encode else stage.own_s)
            decision = replace(self, encode=None, region=region)._decide(measured)
            return replace(
                decision, numbers=MappingProxyType({**decision.numbers, **numbers}), encode=goal
            )
        numbers |= {
            "requests": measured.num_requests,
            "rate_rps": measured.rate_rps,
            "present_rps": search.present.rps,
            "next_rps": found.after.rps,
            "best_rps": search.best.rps,
            "gain": found.gain,
        }
        # An instance that will prefill does not yet, and one that will encode no longer does.
        until = found.after if found.way > 0 else search.present
        return LongTermDecision(
            found.reason,
            self._towards(until.plan),
            self._towards(found.after.plan),
            (encode_wish(name, found.way, found.role, self.model),),
            search.best.plan,
            found.after.plan,
            MappingProxyType(numbers),
            goal,
        )

    def _decide(self, measured: MeasuredTraffic) -> LongTermDecision:
        current = self.current
        model = self._modelled(measured)
        present = plan_at(model, current.num_prefill)
        best = best_plan(model, bounds=bounds_of(current))
        kept = self._kept(model) or present
        division = self._next(best)
        after = plan_at(model, division) if division != current.num_prefill else present
        reason = self._reason(measured, (present, after, best))
        numbers = {
            "requests": measured.num_requests,
            "rate_rps": measured.rate_rps,
            "kept_rps": _rps(kept),
            "present_rps": _rps(present),
            "next_rps": _rps(after),
            "best_rps": _rps(best),
            "gain": _gain(best, present),
        }
        tokens = dict(current.thresholds)
        adopted: Plan | None = None
        if reason is StepReason.CONVERT:
            # An instance that will prefill does not yet, and one that will decode no longer does.
            fewer = {name: min(n, division[name]) for name, n in current.num_prefill.items()}
            tokens, adopted = self._towards(plan_at(model, fewer)), after
        elif _gain(present, kept) >= MIN_THRESHOLD_GAIN:
            tokens, adopted = self._towards(present), present
        return LongTermDecision(
            reason,
            tokens,
            tokens if adopted is None else self._towards(adopted),
            self._wishes(division) if reason is StepReason.CONVERT else (),
            best,
            adopted,
            MappingProxyType(numbers),
        )

    def _reason(self, measured: MeasuredTraffic, plans: tuple[Plan, Plan, Plan]) -> StepReason:
        """Why to take or not to take the step from the first of the plans to the second, on the way
        to the third.
        """
        present, after, best = plans
        steps = _steps(self.current.num_prefill, best)
        gain = _gain(best, present)
        if not any(steps.values()) or gain < ROUNDING:
            return StepReason.BEST_ALREADY
        if gain < self.config.min_gain:
            return StepReason.SMALL_GAIN
        # No cluster that must change may change now.
        if after is present:
            running = any(steps[name] for name in self.current.converting)
            return StepReason.CONVERTING if running else StepReason.DWELLING
        num_steps = max(map(abs, steps.values()))
        # The first of several steps must bring its part of the whole gain.
        if _gain(after, present) < self.config.min_gain / num_steps:
            return StepReason.SMALL_GAIN
        ways = {int(np.sign(n)) for n in _steps(self.current.num_prefill, after).values() if n}
        if not all(self._is_busy("prefill" if way > 0 else "decode") for way in ways):
            return StepReason.NOT_BUSY
        if all(self._holds(measured, way, present, after) for way in ways):
            return StepReason.CONVERT
        return StepReason.UNSURE

    def _is_busy(self, role: str) -> bool:
        return self.busy.get(role, 1.0) >= BUSY_SHARE

    def _holds(self, measured: MeasuredTraffic, way: int, present: Plan, after: Plan) -> bool:
        """Whether the step is no loss with the means off against it. `way` is 1 towards more
        prefill.
        """
        uncached, output = (
            min(MAX_ERROR, NUM_ERRORS * sample.relative_error)
            for sample in (measured.uncached, measured.output)
        )
        unlucky = self._modelled(measured, 1 - way * uncached, 1 + way * output)
        stay, go = (plan_at(unlucky, _division(plan)) for plan in (present, after))
        return _rps(go) >= _rps(stay)

    def _modelled(
        self, measured: MeasuredTraffic, uncached_scale: float = 1.0, output_scale: float = 1.0
    ) -> Region:
        """The region as measured, or as it would be with other means."""
        traffic = measured.traffic(uncached_scale=uncached_scale, output_scale=output_scale)
        return measured_region(self.region, traffic, self.current)

    def _next(self, best: Plan) -> dict[str, int]:
        """N_p one step further towards the best plan, for the clusters that may change now."""
        division = dict(self.current.num_prefill)
        for name, wanted in _steps(self.current.num_prefill, best).items():
            if wanted and name not in self.current.converting:
                step = 1 if wanted > 0 else -1
                # A cluster that was never converted owes no dwelling, in either direction.
                changed_s, last = self.changed.get(name, (-math.inf, step))
                same = last == step
                dwell_s = self.config.dwell_s if same else self.config.reverse_dwell_s
                encode_s = self.now_s - self.changed_encode.get(name, (-math.inf, 0))[0]
                if self.now_s - changed_s >= dwell_s and encode_s >= self.config.dwell_s:
                    division[name] += step
        return division

    def _wishes(self, division: Mapping[str, int]) -> tuple[ConversionWish, ...]:
        wishes = []
        for name, n in division.items():
            step = n - self.current.num_prefill[name]
            if step > 0:
                wishes.append(ConversionWish(name, "decode", "prefill", self.model))
            elif step < 0:
                wishes.append(ConversionWish(name, "prefill", "decode", self.model))
        return tuple(wishes)

    def _towards(self, plan: Plan) -> dict[str, float]:
        """The plan's thresholds, or as far towards them as one step may go."""
        lengths = plan.region.traffic.lengths
        found = plan.thresholds()
        for name, wanted in found.items():
            present = self.current.thresholds.get(name)
            if present is None:
                continue
            # Row 0 of the moments is P(L <= x), so the difference is the share of requests that
            # moves.
            start, end = lengths.moments_to([present, wanted])[0]
            if abs(end - start) > MAX_MOVED_SHARE:
                share = start + math.copysign(MAX_MOVED_SHARE, end - start)
                found[name] = float(lengths.quantile([share])[0])
        return found

    def _kept(self, model: Region) -> Plan | None:
        """The present threshold and division in this traffic; None if nothing says what they
        mean.
        """
        current, adopted = self.current, self.adopted
        has_one = adopted is None or adopted.threshold_tokens is not None
        if has_one and len(model.pd_clusters) == 1:
            # Clusters that the last plan sent nothing to have the longest prompt as threshold.
            sources = {c.name for c in model.prefill_clusters if c.num_instances}
            tokens = [t for name, t in current.thresholds.items() if name in sources]
            num_prefill = current.num_prefill[model.pd_clusters[0].name]
            return threshold_plan(model, min(tokens), num_prefill) if tokens else None
        try:
            kept = adopted and adopted.kept_in(model)
        # The adopted plan is for other clusters or links than the region has now.
        except ValueError:
            return None
        return kept and replace(kept, num_prefill=dict(current.num_prefill))

    def _unchanged(self, reason: StepReason, numbers: Mapping[str, float]) -> LongTermDecision:
        tokens = dict(self.current.thresholds)
        return LongTermDecision(reason, tokens, tokens, numbers=MappingProxyType(dict(numbers)))


def bounds_of(current: Allocation) -> Bounds:
    """The least and the most N_p: every cluster keeps one instance of each role that it has."""
    found = {}
    for name, num_prefill in current.num_prefill.items():
        num_decode = current.num_decode[name]
        found[name] = (min(1, num_prefill), num_prefill + max(0, num_decode - 1))
    return found


def _division(plan: Plan) -> dict[str, int]:
    return {name: round(n) for name, n in plan.num_prefill.items()}


def _steps(num_prefill: Mapping[str, int], plan: Plan) -> dict[str, int]:
    """The change of N_p that each cluster would need."""
    return {name: n - num_prefill[name] for name, n in _division(plan).items()}


def _rps(plan: Plan) -> float:
    return plan.system_rps(Mode.EXACT)


def _gain(new: Plan, old: Plan) -> float:
    """The gain in throughput, as a share of the old one."""
    return gain_of(_rps(new), _rps(old))
