"""The long-term loop as events: a period and what it was like, plans, and conversions.

    PeriodLook ... PeriodOver -> PlansAsked -> ConversionAnswered for each wish ... ConversionEnded

Solving a plan may take seconds, too long for an event. So `PeriodOver` poses each model's question
and `PlansAsked` answers it. Between the two, the caller may compute `LongTermQuestion.answer`
elsewhere and leave it in the model's plan. If it does not, as in the replay of a recording,
`PlansAsked` computes the answer, which is the same.

A region can serve several models, each with instances of its own. Every model has its own question,
plan and conversions. Thresholds belong to prefill clusters, so a cluster that serves several models
is in no plan, and the step of each of its models says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec

from scheduler.live.core import Event, LiveScheduler
from scheduler.live.long_term.conversion import Conversion, ConversionWish
from scheduler.live.long_term.model_plan import ModelPlan, PlanGoal, ThresholdPlan, plan_goal
from scheduler.live.long_term.running_region import RegionFacts, model_region

NOT_KNOWN: Final = "not_known"
"""The reason of a step when something is missing to plan with."""
LOOK_S: Final = 2.0
"""The time between two looks at reports and links, seconds."""
SAME_TOKENS: Final = 0.5
"""Thresholds closer than this are the same, because prompts have whole tokens."""


class ThresholdChange(msgspec.Struct, frozen=True):
    """The threshold of a prefill cluster, before and from now on."""

    cluster: str
    before_tokens: float
    tokens: float


class PlanStep(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan of one model says for the next period.

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


class PeriodLook(Event[None], frozen=True):
    """A sample of reports and links, taken every `LOOK_S`."""

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Their present values count for the means of the period."""
        live.period.see(live.reports.values(), live.links)


class PeriodOver(Event[None], frozen=True):
    """A period is over.

    The PD cluster is busy with `conversion`, dwelling included. `is_busy` is also True without one
    while an instance gets its old role back.
    """

    conversion: Conversion | None
    is_busy: bool

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Pose the question of each model's plan."""
        live.period.see(live.reports.values(), live.links)
        means, settings = live.period.take(), live.settings
        for model, plan in live.plans.items():
            known = live.knowledge(model)
            # A plan must not rest on traffic from both before and after a change.
            known.traffic.forget_before_change(now_s)
            measured = known.traffic.measured(now_s)
            facts = RegionFacts(
                model=model,
                pd=live.reports[live.pd().name],
                prefill_clusters=[live.reports[name] for name in live.pd().prefill_clusters],
                knowledge=known,
                means=means,
                thresholds=live.thresholds.base_tokens(),
                traffic=None if measured is None else measured.traffic(),
                conversion=self.conversion,
                converting=frozenset({live.pd().name} if self.is_busy else ()),
                other_models=live.plans.keys() - {model},
            )
            plan.ask(model_region(facts), measured, settings.long_term, now_s)


class PlansAsked(Event[list[PlanStep]], frozen=True):
    """Asks what the plans of the last period say.

    The steps with the greatest gain come first, since only one conversion can begin.
    """

    def apply(self, live: LiveScheduler, now_s: float) -> list[PlanStep]:
        """The step of each model. Thresholds that need no conversion first are set, if plans are
        followed.
        """
        steps = [_step(live, model, plan) for model, plan in live.plans.items()]
        return sorted(steps, key=lambda step: -step.numbers.get("gain", 0.0))


class ConversionAnswered(Event[list[ThresholdChange]], frozen=True):
    """The conversion of `instance` has begun for a wish, or the wish was refused ("")."""

    wish: ConversionWish
    instance: str

    def apply(self, live: LiveScheduler, now_s: float) -> list[ThresholdChange]:
        """The thresholds that are set until the conversion has ended."""
        plan = live.plans.get(self.wish.model)
        return [] if plan is None else _set(live, plan.answered(self.wish, self.instance))


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
        for model, plan in live.plans.items():
            if self.wish.model in ("", model):
                planned = plan.ended(
                    self.wish, self.instance, now_s, is_converted=self.is_converted
                )
                changes += _set(live, planned)
        return changes


PlanEvent: TypeAlias = PeriodLook | PeriodOver | PlansAsked | ConversionAnswered | ConversionEnded
PlanDecisionEvent: TypeAlias = PlansAsked | ConversionAnswered | ConversionEnded


def _step(live: LiveScheduler, model: str, plan: ModelPlan) -> PlanStep:
    decision = plan.decide()
    if decision is None:
        return PlanStep(model=model, reason=NOT_KNOWN, unknown=plan.unknown)
    changes, waits_for = _changes(live, decision.thresholds), ""
    if live.settings.follows_plans and not decision.conversions:
        waits_for = plan.converts
        _set(live, plan.to_set())
    return PlanStep(
        model=model,
        reason=decision.reason.value,
        numbers={name: float(value) for name, value in decision.numbers.items()},
        thresholds=dict(decision.thresholds),
        thresholds_after=dict(decision.thresholds_after),
        conversions=decision.conversions,
        goal=None if decision.plan is None else plan_goal(decision.plan),
        changes=tuple(changes),
        waits_for=waits_for,
        notes=plan.notes,
    )


def _set(live: LiveScheduler, planned: ThresholdPlan | None) -> list[ThresholdChange]:
    """Let thresholds follow a plan. Returns those that change."""
    if planned is None:
        return []
    changes = _changes(live, planned.tokens)
    for cluster, tokens in planned.tokens.items():
        live.thresholds.set_base(cluster, tokens, planned.sends.get(cluster, 0.0))
    return changes


def _changes(live: LiveScheduler, wanted: Mapping[str, float]) -> list[ThresholdChange]:
    base = live.thresholds.base_tokens()
    return [
        ThresholdChange(cluster, base[cluster], tokens)
        for cluster, tokens in wanted.items()
        if abs(tokens - base[cluster]) >= SAME_TOKENS
    ]
