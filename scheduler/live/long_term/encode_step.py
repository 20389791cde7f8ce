"""How many instances of a PD cluster encode: the part of the long-term loop for the encode stage.

An `EncodeStage` has the instances that encode, those that could, and what a request's media cost:
on an instance that encodes, and on one that prefills. The stage is to carry all media, so that a
prompt waits for its turn while they are encoded:

    rps(N_e) = min(rps of the other instances, divided as is best, N_e / (stage_s local))

`local` is the share of requests that the cluster prefills itself. The threshold takes no account of
the stage: it would send media to prefill clusters, whose stages no plan knows. Without any instance
that encodes, each prefill takes `own_s` longer instead.

`EncodeSearch` finds the N_e with the highest rps, and the next step towards it: one instance from
or to the role where that gains most. The rules for taking the step are those of `loop`. What a
stage that is too small does not encode in time, the instances that prefill do (`left_share`).

Pure, without a clock. This file does not know how demand or times are measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from scheduler.live.long_term.conversion import ConversionWish
from scheduler.live.long_term.step_config import (
    MAX_ERROR,
    NUM_ERRORS,
    ROUNDING,
    LongTermConfig,
    StepReason,
    gain_of,
)
from scheduler.planning.plan import TARGET_LOAD, Plan
from scheduler.planning.region_model import Region
from scheduler.planning.solve import best_plan
from scheduler.planning.throughput import Mode

OtherRole = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeStage:
    """The encode stage of a PD cluster. Instances count by the role that they have, or that they
    will have after a conversion that runs.

    `num_leaving` of the `num_encode` instances can be given `prefill` or `decode`. `num_able` says
    how many of the instances with another role can be given the role `encode`. A request's media
    take `stage_s` seconds of an instance that encodes, and `own_s` of one that prefills: means over
    all requests, those without media included. `relative_error` is that of these means.
    """

    num_encode: int
    num_leaving: int
    num_able: Mapping[OtherRole, int]
    stage_s: float
    own_s: float
    relative_error: float

    def scaled(self, factor: float) -> EncodeStage:
        """The same with so many times the media."""
        return replace(self, stage_s=self.stage_s * factor, own_s=self.own_s * factor)


@dataclass(frozen=True)
class EncodePlan:
    """A plan for the instances that do not encode, beside `num_encode` that do. Together they
    sustain `rps` requests/s.
    """

    plan: Plan
    num_encode: int
    rps: float


@dataclass(frozen=True)
class EncodeSearch:
    """Divisions of one PD cluster among encode, prefill and decode.

    `region` has one PD cluster; its instances are those that do not encode now, and `num_prefill`
    of them prefill. It raises `NoRouteError` as the searches for plans do.
    """

    region: Region
    stage: EncodeStage
    num_prefill: int

    @cached_property
    def present(self) -> EncodePlan:
        """The present division."""
        return self._planned(0, self.num_prefill, self.num_prefill)

    @cached_property
    def best(self) -> EncodePlan:
        """The best division. Of equals, the one that needs the fewest conversions."""
        num_others = sum(self._nums.values())
        tried = [
            self._planned(way, min(1, self.num_prefill), max(1, num_others - way - 1))
            for way in sorted(self._ways, key=abs)
        ]
        return max(self.present, *tried, key=lambda item: item.rps)

    def step(self, way: int) -> tuple[EncodePlan, OtherRole] | None:
        """One instance more (1) or less (-1) that encodes, and the role that loses or gains it:
        what gains most. None if no instance can change so.
        """
        if way < 0 and way not in self._ways:
            return None
        roles = [role for role in self._nums if way < 0 or self._num_spare(role)]
        # Of equals, the first one.
        tried = [(self.after(way, role), role) for role in roles]
        return max(tried, key=lambda item: item[0].rps, default=None)

    def after(self, way: int, role: OtherRole) -> EncodePlan:
        """The division after a step that takes an instance from a role, or gives it one."""
        num_prefill = self.num_prefill - (way if role == "prefill" else 0)
        return self._planned(way, num_prefill, num_prefill)

    def scaled(self, factor: float) -> EncodeSearch:
        """The same search with so many times the media."""
        return replace(self, stage=self.stage.scaled(factor))

    def left_share(self, rate_rps: float) -> float:
        """The share of media that the present stage leaves to instances that prefill at this rate,
        requests/s.
        """
        need_s = rate_rps * self.stage.stage_s * _local_share(self.present.plan)
        return max(0.0, 1 - self.stage.num_encode / need_s) if need_s > 0 else 0.0

    @property
    def _nums(self) -> dict[OtherRole, int]:
        """The instances of each other role now."""
        (pd,) = self.region.pd_clusters
        return {"prefill": self.num_prefill, "decode": pd.num_instances - self.num_prefill}

    def _num_spare(self, role: OtherRole) -> int:
        """How many instances of a role could encode. The last one of a role is never taken."""
        return min(self.stage.num_able[role], max(0, self._nums[role] - 1))

    @property
    def _ways(self) -> range:
        """By how much the number that encodes may change. The last one that encodes stays, for as
        long as there are media.
        """
        num, num_leaving = self.stage.num_encode, self.stage.num_leaving
        most = sum(self._num_spare(role) for role in self._nums)
        return range(min(0, max(1, num - num_leaving) - num), most + 1)

    def _planned(self, way: int, least: int, most: int) -> EncodePlan:
        """The best plan with so many more that encode, and N_p within bounds."""
        (pd,), num_encode = self.region.pd_clusters, self.stage.num_encode + way
        others = replace(pd, num_instances=pd.num_instances - way)
        region = replace(self.region, pd_clusters=(others,))
        if not num_encode:
            region = raised(region, self.stage.own_s)
        plan = best_plan(region, bounds={pd.name: (least, most)})
        rps, need_s = plan.system_rps(Mode.EXACT), self.stage.stage_s * _local_share(plan)
        if num_encode and need_s > 0:
            rps = min(rps, num_encode / need_s)
        return EncodePlan(plan, num_encode, rps)


@dataclass(frozen=True)
class EncodeGoal:
    """The encode stage of the best plan: its instances, and those that the measured rate needs."""

    num_encode: int
    needed_encode: float

    @classmethod
    def of(cls, found: EncodePlan, stage: EncodeStage, rate_rps: float) -> EncodeGoal:
        """Needed are as many as work for `TARGET_LOAD` of their time if they encode all media."""
        need_s = stage.stage_s * _local_share(found.plan)
        return cls(found.num_encode, rate_rps * need_s / TARGET_LOAD)


@dataclass(frozen=True)
class EncodeStep:
    """Why the stage gains or loses an instance (`way` 1 or -1), or why not. With a step, `role` is
    the one that loses or gains it. `gain` is that of the best number over the present one.
    """

    reason: StepReason
    gain: float
    way: int = 0
    after: EncodePlan | None = None
    role: OtherRole | None = None


def encode_step(
    search: EncodeSearch,
    config: LongTermConfig,
    *,
    is_converting: bool,
    changed_s: float,
    changed: tuple[float, int] | None,
    now_s: float,
) -> EncodeStep:
    """Judge the next step by the rules of `loop`.

    `changed_s` is when the cluster had its last conversion between prefill and decode, `changed`
    when and how (1, -1, or 0 if it failed) it had one of its encode stage.
    """
    present, best = search.present, search.best
    num_steps = best.num_encode - present.num_encode
    gain = gain_of(best.rps, present.rps)
    if not num_steps or gain < ROUNDING:
        return EncodeStep(StepReason.BEST_ALREADY, gain)
    if gain < config.min_gain:
        return EncodeStep(StepReason.SMALL_GAIN, gain)
    if is_converting:
        return EncodeStep(StepReason.CONVERTING, gain)
    way = 1 if num_steps > 0 else -1
    last_s, last_way = changed or (-math.inf, way)
    dwell_s = config.dwell_s if last_way == way else config.reverse_dwell_s
    if now_s - last_s < dwell_s or now_s - changed_s < config.dwell_s:
        return EncodeStep(StepReason.DWELLING, gain)
    found = search.step(way)
    # The first of several steps must bring its part of the whole gain.
    if found is None or gain_of(found[0].rps, present.rps) < config.min_gain / abs(num_steps):
        return EncodeStep(StepReason.SMALL_GAIN, gain)
    unlucky = 1 - way * min(MAX_ERROR, NUM_ERRORS * search.stage.relative_error)
    if not _holds(search.scaled(unlucky), way, found[1]):
        return EncodeStep(StepReason.UNSURE, gain)
    return EncodeStep(StepReason.CONVERT, gain, way, *found)


def _holds(search: EncodeSearch, way: int, role: OtherRole) -> bool:
    """Whether the step is no loss for this demand."""
    return search.after(way, role).rps >= search.present.rps


def raised(region: Region, seconds: float) -> Region:
    """The region with prefills of its PD cluster that take so much longer."""
    (pd,) = region.pd_clusters
    return replace(region, pd_clusters=(replace(pd, prefill=pd.prefill.raised(seconds)),))


def encode_wish(cluster: str, way: int, role: OtherRole, model: str) -> ConversionWish:
    """The wish for the step that `EncodeSearch.step` found."""
    if way > 0:
        return ConversionWish(cluster, role, "encode", model)
    return ConversionWish(cluster, "encode", role, model)


def _local_share(plan: Plan) -> float:
    return max(0.0, 1 - plan.offload_fraction)
