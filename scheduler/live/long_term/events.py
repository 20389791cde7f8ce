"""The long-term loop as events: a period and what it was like, plans, and conversions.

    PeriodLook ... PeriodOver -> PlansAsked -> ConversionAnswered for each wish ... ConversionEnded

Solving a plan may take seconds, too long for an event. So `PeriodOver` poses each model's question
and `PlansAsked` answers it. Between the two, the caller may compute `LongTermQuestion.answer`
elsewhere and leave it in the model's plan. If it does not, as in the replay of a recording,
`PlansAsked` computes the answer, which is the same.

A region can have several PD clusters, and serve several models, each with instances of its own.
Every model has its own question, plan and conversions in every PD cluster. Prefill clusters and
links that PD clusters share are divided among these before any question is answered
(`scheduler.planning.joint`).
Thresholds belong to links, so a prefill cluster that serves several models is in no plan, and the
step of each of its models says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec

from scheduler.live.core import Event, LiveScheduler
from scheduler.live.learning.measured_traffic import MeasuredTraffic
from scheduler.live.long_term.conversion import Conversion, ConversionWish
from scheduler.live.long_term.loop import bounds_of
from scheduler.live.long_term.model_plan import ModelPlan, PlanGoal, ThresholdPlan, plan_goal
from scheduler.live.long_term.running_region import (
    Modelled,
    NotModelled,
    PeriodMeans,
    RegionFacts,
    model_region,
)
from scheduler.planning.joint import JointRegion
from scheduler.planning.region_model import Home, measured_region

NOT_KNOWN: Final = "not_known"
"""The reason of a step when something is missing to plan with."""
LOOK_S: Final = 2.0
"""The time between two looks at reports and links, seconds."""
SAME_TOKENS: Final = 0.5
"""Thresholds closer than this are the same, because prompts have whole tokens."""


class ThresholdChange(msgspec.Struct, frozen=True):
    """The threshold of the link from a prefill cluster to `pd`, before and from now on."""

    cluster: str
    before_tokens: float
    tokens: float
    pd: str = ""


class PlanStep(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one model for the next period of the PD cluster `pd`.

    `reason` is a `StepReason`, or `NOT_KNOWN` with the explanation in `unknown`. `changes` are the
    changes by `thresholds`. Without `conversions` they are made already, unless plans are advice or
    the changes wait for the conversion of `waits_for`. With `conversions`, `ConversionAnswered`
    makes them. `notes` say what the plan leaves out, and why.
    """

    model: str
    reason: str
    unknown: str = ""
    numbers: dict[str, float] = {}
    thresholds: dict[str, float] = {}
    thresholds_after: dict[str, float] = {}
    conversions: tuple[ConversionWish, ...] = ()
    goal: PlanGoal | None = None
    changes: tuple[ThresholdChange, ...] = ()
    waits_for: str = ""
    notes: tuple[str, ...] = ()
    pd: str = ""


class PeriodLook(Event[None], frozen=True):
    """A sample of reports and links, taken every `LOOK_S`."""

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Their present values count for the means of the period."""
        live.period.see(live.reports.values(), live.links)


class PdBusy(msgspec.Struct, frozen=True):
    """The work that keeps a PD cluster busy, as `PeriodOver` says it."""

    conversion: Conversion | None
    is_busy: bool


class PeriodOver(Event[None], frozen=True):
    """A period is over.

    The first PD cluster is busy with `conversion`, dwelling included. `is_busy` is also True
    without one while an instance gets its old role back. `others` says the same of other PD
    clusters, by name.
    """

    conversion: Conversion | None
    is_busy: bool
    others: dict[str, PdBusy] = msgspec.field(default_factory=dict)

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Pose the question of each plan."""
        live.period.see(live.reports.values(), live.links)
        means, settings = live.period.take(), live.settings
        busy = {**self.others, live.pd().name: PdBusy(self.conversion, self.is_busy)}
        asked: list[tuple[ModelPlan, Modelled | NotModelled, MeasuredTraffic | None]] = []
        for (model, name), plan in live.plans.items():
            traffic = live.traffic(model, name)
            # A plan must not rest on traffic from both before and after a change.
            traffic.forget_before_change(now_s)
            measured = traffic.measured(now_s)
            modelled = model_region(_facts(live, model, name, measured, means, busy.get(name)))
            asked.append((plan, modelled, measured))
        homes = [_home(*found) for found in asked]
        found_homes = tuple(home for home in homes if home is not None)
        # One PD cluster alone shares nothing, unless its links have an uplink in common.
        is_shared = len(found_homes) > 1 or bool(settings.uplinks)
        joint = JointRegion(found_homes, settings.uplinks) if is_shared else None
        for plan, modelled, measured in asked:
            plan.ask(modelled, measured, settings.long_term, now_s, joint)


class PlansAsked(Event[list[PlanStep]], frozen=True):
    """Asks what the plans of the last period say.

    The steps with the greatest gain come first, since only one conversion can begin in a cluster.
    """

    def apply(self, live: LiveScheduler, now_s: float) -> list[PlanStep]:
        """The step of each plan. Thresholds that need no conversion first are set, if plans are
        followed.
        """
        steps = [_step(live, model, plan) for (model, _), plan in live.plans.items()]
        return sorted(steps, key=lambda step: -step.numbers.get("gain", 0.0))


class ConversionAnswered(Event[list[ThresholdChange]], frozen=True):
    """The conversion of `instance` has begun for a wish, or the wish was refused ("")."""

    wish: ConversionWish
    instance: str

    def apply(self, live: LiveScheduler, now_s: float) -> list[ThresholdChange]:
        """The thresholds that are set until the conversion has ended."""
        plan = live.plans.get((self.wish.model, self.wish.cluster))
        if plan is None:
            return []
        return _set(live, plan.pd, plan.answered(self.wish, self.instance))


class ConversionEnded(Event[list[ThresholdChange]], frozen=True):
    """A conversion has ended, whoever asked for it. A wish without a model may belong to any
    model.
    """

    wish: ConversionWish
    instance: str
    is_converted: bool

    def apply(self, live: LiveScheduler, now_s: float) -> list[ThresholdChange]:
        """The thresholds that are set for the division as it is now."""
        changes = []
        for (model, pd), plan in live.plans.items():
            if self.wish.model in ("", model) and self.wish.cluster == pd:
                planned = plan.ended(
                    self.wish, self.instance, now_s, is_converted=self.is_converted
                )
                changes += _set(live, pd, planned)
        return changes


PlanEvent: TypeAlias = PeriodLook | PeriodOver | PlansAsked | ConversionAnswered | ConversionEnded
PlanDecisionEvent: TypeAlias = PlansAsked | ConversionAnswered | ConversionEnded


def _step(live: LiveScheduler, model: str, plan: ModelPlan) -> PlanStep:
    decision = plan.decide()
    if decision is None:
        return PlanStep(model=model, reason=NOT_KNOWN, unknown=plan.unknown, pd=plan.pd)
    changes, waits_for = _changes(live, plan.pd, decision.thresholds), ""
    if live.settings.follows_plans and not decision.conversions:
        waits_for = plan.converts
        _set(live, plan.pd, plan.to_set())
    return PlanStep(
        model=model,
        reason=decision.reason.value,
        numbers={name: float(value) for name, value in decision.numbers.items()},
        thresholds=dict(decision.thresholds),
        thresholds_after=dict(decision.thresholds_after),
        conversions=decision.conversions,
        goal=(
            None
            if decision.plan is None
            else plan_goal(decision.plan, decision.numbers.get("rate_rps", 0.0), decision.encode)
        ),
        changes=tuple(changes),
        waits_for=waits_for,
        notes=plan.notes,
        pd=plan.pd,
    )


def _set(live: LiveScheduler, pd: str, planned: ThresholdPlan | None) -> list[ThresholdChange]:
    """Let thresholds of links to `pd` follow a plan. Returns those that change."""
    if planned is None:
        return []
    changes = _changes(live, pd, planned.tokens)
    for cluster, tokens in planned.tokens.items():
        live.thresholds.set_base(cluster, tokens, planned.sends.get(cluster, 0.0), pd=pd)
    return changes


def _changes(live: LiveScheduler, pd: str, wanted: Mapping[str, float]) -> list[ThresholdChange]:
    base = live.thresholds.base_tokens(pd)
    return [
        ThresholdChange(cluster, base[cluster], tokens, pd)
        for cluster, tokens in wanted.items()
        if abs(tokens - base[cluster]) >= SAME_TOKENS
    ]


def _facts(
    live: LiveScheduler,
    model: str,
    pd: str,
    measured: MeasuredTraffic | None,
    means: PeriodMeans,
    busy: PdBusy | None,
) -> RegionFacts:
    return RegionFacts(
        model=model,
        pd=live.reports[pd],
        prefill_clusters=[live.reports[name] for name in live.pd(pd).prefill_clusters],
        knowledge=live.knowledge(model),
        means=means,
        thresholds=live.thresholds.base_tokens(pd),
        traffic=None if measured is None else measured.traffic(),
        conversion=None if busy is None else busy.conversion,
        converting=frozenset({pd} if busy is not None and busy.is_busy else ()),
        other_models={other for other, _ in live.plans} - {model},
        pd_places=live.pd_places(pd),
        media=None if measured is None else measured.media,
        cached_before=0.0 if measured is None else measured.cached_before,
    )


def _home(
    plan: ModelPlan, modelled: Modelled | NotModelled, measured: MeasuredTraffic | None
) -> Home | None:
    """A plan's part in the division of what PD clusters share; None if nothing is known of it."""
    if isinstance(modelled, NotModelled) or measured is None:
        return None
    region = measured_region(modelled.region, measured.traffic(), modelled.current)
    bounds = bounds_of(modelled.current)[plan.pd]
    return Home(region, measured.rate_rps, plan.model, bounds)
