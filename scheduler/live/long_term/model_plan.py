"""The plan that one served model follows in one PD cluster, from one period to the next.

Every period poses a question, and the threshold and conversions follow the answer. A threshold for
a division that is still to come waits until the conversion to it has ended well. A wish is carried
out or refused before the next question. Pure; does not know who sets thresholds or converts
instances.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from scheduler.live.learning.measured_traffic import MeasuredTraffic
from scheduler.live.long_term.conversion import ConversionWish
from scheduler.live.long_term.encode_step import EncodeGoal, EncodeStage
from scheduler.live.long_term.loop import LongTermConfig, LongTermDecision, LongTermQuestion
from scheduler.live.long_term.running_region import Modelled, NotModelled
from scheduler.planning.joint import JointRegion
from scheduler.planning.plan import Plan
from scheduler.planning.region_model import Region
from scheduler.planning.throughput import Mode


class PlanGoal(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan that was found, towards which steps are taken. Rates are requests/s. `needed_*`
    are the instances by cluster that the measured rate needs, be there more or fewer.
    """

    num_prefill: dict[str, int]
    num_decode: dict[str, int]
    thresholds: dict[str, float]
    max_rps: float
    bottlenecks: list[str]
    needed_prefill: dict[str, float] = {}
    needed_decode: dict[str, float] = {}
    num_encode: dict[str, int] = {}
    needed_encode: dict[str, float] = {}


def plan_goal(plan: Plan, rate_rps: float, encode: EncodeGoal | None = None) -> PlanGoal:
    """The goal that a plan describes, for measured traffic of this rate."""
    num_prefill = {name: round(num) for name, num in plan.num_prefill.items()}
    pd = plan.region.pd_clusters[0].name
    return PlanGoal(
        num_prefill=num_prefill,
        num_decode={
            cluster.name: cluster.num_instances - num_prefill[cluster.name]
            for cluster in plan.region.pd_clusters
        },
        thresholds=plan.thresholds(),
        max_rps=plan.system_rps(Mode.EXACT),
        bottlenecks=[f"{part.kind} of {part.name}" for part in plan.bottlenecks(Mode.EXACT)],
        needed_prefill=plan.needed_instances(rate_rps, "prefill"),
        needed_decode=plan.needed_instances(rate_rps, "decode"),
        num_encode={} if encode is None else {pd: encode.num_encode},
        needed_encode={} if encode is None else {pd: encode.needed_encode},
    )


@dataclass(frozen=True, slots=True)
class ThresholdPlan:
    """The threshold of each prefill cluster, and the bytes/s that the best plan sends over its link
    for the present traffic.
    """

    tokens: Mapping[str, float]
    sends: Mapping[str, float]


def sends_of(plan: Plan, rate_rps: float) -> dict[str, float]:
    """The bytes/s that the plan sends from each prefill cluster at this rate of requests, or at the
    highest one that the region bears.
    """
    by_link = plan.link_bytes_per_s(Mode.EXACT, min(rate_rps, plan.system_rps(Mode.EXACT)))
    return {link.source: by_link.get(link.name, 0.0) for link in plan.region.links}


class ModelPlan:
    """The plan of one model in one PD cluster. Each period calls `ask`, `decide`, then `answered`
    for each wish.
    """

    def __init__(self, model: str, pd: str = "") -> None:
        self.pd = pd
        self.region: Region | None = None
        """The region as last planned; None if it was not, for the reason in `unknown`."""
        self.unknown = "no period is over yet"
        self.notes: tuple[str, ...] = ()
        """What was left out of the region, and why."""
        self.encode: EncodeStage | None = None
        """The encode stage as last planned; None where it was not, or nothing is encoded."""
        self.question: LongTermQuestion | None = None
        """The question that `decide` will answer."""
        self.answer: LongTermDecision | None = None
        """The answer to `question`, where the caller has computed it already."""
        self.converts = ""
        """The instance whose conversion is the last step of this plan; "" for none."""
        self.model = model
        self._after: ThresholdPlan | None = None
        """The thresholds for when `converts` has its new role."""
        self.changed: dict[str, tuple[float, int]] = {}
        """When and how each PD cluster was last converted, as in `LongTermQuestion.changed`."""
        self.changed_encode: dict[str, tuple[float, int]] = {}
        """The same of its encode stage."""
        self._adopted: Plan | None = None
        self._rate_rps = math.inf
        """The measured rate of the traffic that was last planned for."""

    def ask(
        self,
        modelled: Modelled | NotModelled,
        measured: MeasuredTraffic | None,
        config: LongTermConfig,
        now_s: float,
        joint: JointRegion | None = None,
    ) -> None:
        """Pose the question for a period that is over. `joint` divides what PD clusters share."""
        self.question = self.answer = None
        if isinstance(modelled, NotModelled):
            self.region, self.unknown, self.notes, self.encode = None, modelled.reason, (), None
            return
        self.region, self.unknown, self.notes = modelled.region, "", modelled.notes
        if measured is not None:
            self._rate_rps = measured.rate_rps
        self.encode = modelled.encode
        self.question = LongTermQuestion(
            model=self.model,
            config=config,
            region=modelled.region,
            measured=measured,
            current=modelled.current,
            changed=dict(self.changed),
            adopted=self._adopted,
            now_s=now_s,
            joint=joint,
            encode=modelled.encode,
            changed_encode=dict(self.changed_encode),
            busy=modelled.busy,
        )

    def reconfigure(self, config: LongTermConfig) -> None:
        """Have a question that is not decided yet answered by other settings."""
        if self.question is not None:
            self.question, self.answer = replace(self.question, config=config), None

    def decide(self) -> LongTermDecision | None:
        """The answer, which holds from now on; None if nothing was asked."""
        question, self.question = self.question, None
        if question is None:
            return None
        decision = self.answer = self.answer or question.answer()
        self._adopted = decision.adopted or self._adopted
        # Dwelling counts from the wish, so that a wish that hangs is not repeated meanwhile.
        for wish in decision.conversions:
            self._changed_by(wish)[wish.cluster] = question.now_s, _way(wish)
        return decision

    def to_set(self) -> ThresholdPlan | None:
        """What to set at once by the decision; None: nothing, or only after a conversion."""
        decision = self.answer
        if decision is None or decision.plan is None or decision.conversions:
            return None
        planned = ThresholdPlan(decision.thresholds, sends_of(decision.plan, self._rate_rps))
        if not self.converts:
            return planned
        # The decision is for the division after the conversion under way.
        self._after = planned
        return None

    def answered(self, wish: ConversionWish, instance: str) -> ThresholdPlan | None:
        """What to set when the conversion of `instance` has begun for a wish, or the wish was
        refused ("").
        """
        decision = self.answer
        if decision is None or decision.plan is None or wish not in decision.conversions:
            return None
        sends = sends_of(decision.plan, self._rate_rps)
        if instance:
            self.converts = instance
            self._after = ThresholdPlan(decision.thresholds_after, sends)
        elif self.converts or wish.from_role == "prefill" or wish.to_role == "encode":
            return None  # The threshold is for another division than the present one.
        return ThresholdPlan(decision.thresholds, sends)

    def ended(
        self, wish: ConversionWish, instance: str, now_s: float, *, is_converted: bool
    ) -> ThresholdPlan | None:
        """What to set when a conversion has ended, whoever asked for it.

        The new division is there, or the old one is again.
        """
        self._changed_by(wish)[wish.cluster] = now_s, _way(wish) if is_converted else 0
        if instance != self.converts:
            return None
        # After a failure the thresholds in force are those for the old division already.
        after, self.converts, self._after = self._after, "", None
        return after if is_converted else None

    def _changed_by(self, wish: ConversionWish) -> dict[str, tuple[float, int]]:
        return self.changed_encode if _is_of_encode(wish) else self.changed


def _is_of_encode(wish: ConversionWish) -> bool:
    return "encode" in (wish.from_role, wish.to_role)


def _way(wish: ConversionWish) -> int:
    """By how much a conversion changes N_p, or the number of instances that encode."""
    return 1 if wish.to_role == ("encode" if _is_of_encode(wish) else "prefill") else -1
