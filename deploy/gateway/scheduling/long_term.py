"""The long-term loop, live: every few minutes new plans from what was measured, and their
execution.

This is the shell of `scheduler.live.long_term.events`. It keeps time, solves in a thread what the
live scheduler asks, and asks for the conversions that the plans want. The scheduler sets thresholds
itself. What is not done is reported with its reason. It does not know requests, nor how an instance
is converted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from deploy.gateway.scheduling.config import LongTermSection
from deploy.gateway.scheduling.plan_metrics import PlanMetrics
from deploy.gateway.scheduling.plan_overview import (
    ModelPlanNow,
    PlanDecision,
    PlanOverview,
    decision_now,
    encode_now,
    region_now,
    traffic_now,
)
from deploy.gateway.scheduling.roles import RoleKeeper
from deploy.gateway.scheduling.scheduler import RegionScheduler, in_region
from scheduler.live.long_term.conversion import (
    Conversion,
    ConversionOutcome,
    ConversionWish,
    Drain,
    Ended,
)
from scheduler.live.long_term.encode_facts import num_encoding
from scheduler.live.long_term.events import (
    LOOK_S,
    ConversionAnswered,
    ConversionEnded,
    PdBusy,
    PeriodLook,
    PeriodOver,
    PlansAsked,
    PlanStep,
    ThresholdChange,
)
from scheduler.live.long_term.loop import StepReason
from scheduler.live.long_term.model_plan import ModelPlan
from scheduler.live.long_term.running_region import PeriodMeter, division
from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.gateway")

NUM_DECISIONS: Final = 50
ERROR: Final = "error"
SETTLE_S: Final = 30.0
"""The time from a change of members to the plan for it, seconds. A plan that rests on one look
would take a disturbance of a moment for the state of a period.
"""


class LongTermService:
    """Runs the long-term loop of one gateway, on one event loop."""

    def __init__(
        self,
        section: LongTermSection,
        scheduler: RegionScheduler,
        roles: Mapping[str, RoleKeeper],
        metrics: PlanMetrics,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`roles` converts the instances of each PD cluster."""
        self._section = section
        self._scheduler = scheduler
        self._roles = roles
        self._metrics = metrics
        self._wall_clock = wall_clock
        self._decisions: deque[PlanDecision] = deque(maxlen=NUM_DECISIONS)
        self._logged: dict[tuple[str, str], str] = {}
        self._look_failure = ""
        self._next_s: float | None = None
        self._task: asyncio.Task[None] | None = None
        for keeper in roles.values():
            keeper.on_ended(self._conversion_ended)
        self._show_thresholds()

    def start(self) -> None:
        """Look, decide and act from now on, unless the configuration says "off"."""
        if self._section.mode != "off":
            self._next_s = self._scheduler.clock() + self._section.period_s
            self._task = start_task(self._run(), "long-term loop")

    async def close(self) -> None:
        """Stop. `roles` ends a conversion that runs. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def step(self) -> list[PlanDecision]:
        """End a period: decide for each model, and act if the configuration says so. Nothing is
        decided while another gateway leads.
        """
        scheduler, roles = self._scheduler, self._roles
        (first_pd, first), *_ = roles.items()
        others = {
            name: PdBusy(_current(keeper, name), bool(keeper.converting))
            for name, keeper in roles.items()
            if keeper is not first
        }
        # Also while it does not lead, so that means do not reach back over many periods later.
        scheduler.ask(PeriodOver(_current(first, first_pd), bool(first.converting), others))
        self._show_thresholds()
        if not first.leads():
            return []
        plans = scheduler.live.plans
        asked = [(plan, plan.question) for plan in plans.values() if plan.question is not None]
        # A solution may take seconds, during which requests are served. `PlansAsked` finds the
        # answer.
        answers = await asyncio.to_thread(lambda: [question.answer() for _, question in asked])
        for (plan, _), answer in zip(asked, answers, strict=True):
            plan.answer = answer
        # Another one may have taken over meanwhile, whose plan holds then.
        if not first.leads():
            return []
        return [self._carry_out(step) for step in scheduler.tell(PlansAsked())]

    def overview(self) -> PlanOverview:
        """The answer to GET /prfaas/plan."""
        now_s, wall_s = self._scheduler.clock(), self._wall_clock()
        conversions = (keeper.current for keeper in self._roles.values())
        return PlanOverview(
            mode=self._section.mode,
            period_s=self._section.period_s,
            next_step_s=None if self._next_s is None else max(0.0, self._next_s - now_s),
            thresholds=self._thresholds(),
            conversion="; ".join(_told(item) for item in conversions if item is not None),
            models=[self._model_now(plan, now_s) for plan in self._scheduler.live.plans.values()],
            decisions=[
                msgspec.structs.replace(item, age_s=max(0.0, wall_s - item.at_s))
                for item in reversed(self._decisions)
            ],
        )

    def _model_now(self, plan: ModelPlan, now_s: float) -> ModelPlanNow:
        live, model = self._scheduler.live, plan.model
        measured = live.traffic(model, plan.pd).measured(now_s)
        # The region now, not its mean over the period: operators compare it with what they see.
        present = PeriodMeter()
        (pd,) = (item for item in self._scheduler.reports() if item.name == plan.pd)
        present.see([pd], {})
        current = self._roles[plan.pd].current
        means = present.take()
        num_prefill, num_decode = division(pd, model, means, current)
        num_encode = num_encoding(pd.report, model, means.lasting(pd.name, model), current)
        region, places = plan.region, live.pd_places(plan.pd)
        known = live.knowledge(model)
        return ModelPlanNow(
            model=model,
            pd=plan.pd,
            num_prefill={pd.name: num_prefill},
            num_decode={pd.name: num_decode},
            traffic=None if measured is None else traffic_now(measured),
            region=None if region is None else region_now(region, known, places, plan.notes),
            unknown=plan.unknown,
            num_encode={pd.name: num_encode} if num_encode else {},
            encode=None if plan.encode is None else encode_now(plan.encode),
        )

    async def _run(self) -> None:
        known = self._scheduler.live.members.num_changes
        while True:
            await asyncio.sleep(min(LOOK_S, self._section.period_s))
            members = self._scheduler.live.members
            now_s, period_s = self._scheduler.clock(), self._section.period_s
            # A plan for instances that are gone, or without new ones, is soon solved anew.
            if members.num_changes != known and self._next_s is not None:
                self._next_s = min(self._next_s, now_s + SETTLE_S)
            known = members.num_changes
            if self._next_s is None or now_s >= self._next_s:
                self._next_s = now_s + period_s
                await self._try_step()
            else:
                self._try_look()

    async def _try_step(self) -> None:
        try:
            await self.step()
        except Exception as error:
            # The region keeps its settings, and the next period may find everything in order again.
            logger.exception("the long-term loop failed")
            done = [f"did nothing because of an error: {error!r}"]
            self._remember(
                PlanDecision(at_s=self._wall_clock(), age_s=0.0, reason=ERROR, done=done)
            )

    def _try_look(self) -> None:
        """Take one look. A failed look is no decision to remember.

        Looks are many, so a failure is logged only if the one before was different.
        """
        try:
            self._scheduler.ask(PeriodLook())
        except Exception as error:
            if (failure := repr(error)) != self._look_failure:
                logger.exception("reports and links could not be looked at")
                self._look_failure = failure
        else:
            self._look_failure = ""

    def _carry_out(self, step: PlanStep) -> PlanDecision:
        """Convert what the step wishes for, and remember what was done."""
        self._log_omissions(step)
        done = self._done(step) or [f"did nothing because {self._why_not(step)}"]
        self._show_thresholds()
        found = decision_now(step, done, self._wall_clock())
        self._remember(found)
        return found

    def _done(self, step: PlanStep) -> list[str]:
        """Sentences on what the step did, or advises; empty if there is nothing to do."""
        if self._section.mode != "act":
            wishes = [f"convert an instance of {wish}" for wish in step.conversions]
            return [f"advice: {text}" for text in [*wishes, *_in_words(step.changes)]]
        if step.waits_for:
            changes = _in_words(step.changes)
            return [f"once {step.waits_for} has its new role: {text}" for text in changes]
        if not step.conversions:
            return _in_words(step.changes)
        return [text for wish in step.conversions for text in self._convert(wish, step)]

    def _convert(self, wish: ConversionWish, step: PlanStep) -> list[str]:
        start = self._roles[wish.cluster].ask(wish)
        drained = [effect.instance for effect in start.effects if isinstance(effect, Drain)]
        instance = drained[0] if drained else ""
        changes = self._scheduler.tell(ConversionAnswered(wish, instance))
        if not instance:
            return [f"did not convert an instance of {wish}: {start.reason}", *_in_words(changes)]
        logger.info("converting an instance of %s; %s", wish, step.numbers)
        return [f"began to convert {instance} of {wish}: {start.reason}", *_in_words(changes)]

    def _conversion_ended(self, ended: Ended) -> None:
        """Tell the scheduler of any conversion: operators may have asked for it."""
        is_converted = ended.outcome is ConversionOutcome.CONVERTED
        event = ConversionEnded(ended.wish, ended.instance, is_converted)
        changes = self._scheduler.tell(event)
        for text in _in_words(changes):
            logger.info("%s has its new role: %s", ended.instance, text)
        self._show_thresholds()

    def _show_thresholds(self) -> None:
        for cluster, pd in self._scheduler.pairs:
            tokens = self._scheduler.base_tokens(pd)[cluster]
            self._metrics.show_threshold(cluster, pd, tokens)

    def _thresholds(self) -> dict[str, float]:
        """The thresholds by prefill cluster, or by link where there are several PD clusters."""
        is_only_pd, found = len(self._roles) == 1, {}
        for cluster, pd in self._scheduler.pairs:
            name = cluster if is_only_pd else f"{cluster} to {pd}"
            found[name] = self._scheduler.base_tokens(pd)[cluster]
        return found

    def _log_omissions(self, step: PlanStep) -> None:
        """Log what a plan lacks when that changes, not every few minutes."""
        told = "; ".join([f"no plan: {step.unknown}"] if step.unknown else step.notes)
        which = step.model, step.pd
        if told != self._logged.get(which, ""):
            words = told or "nothing is left out"
            logger.info("long-term loop, %s in %s: %s", step.model, step.pd, words)
            self._logged[which] = told

    def _why_not(self, step: PlanStep) -> str:
        numbers = step.numbers
        match step.reason:
            case StepReason.TOO_FEW_REQUESTS:
                count = f"{numbers['requests']:.0f} requests were measured"
                return f"{count}; {self._section.min_requests} are needed"
            case StepReason.SMALL_GAIN:
                return f"the best division would gain {numbers['gain']:.1%}, which is too little"
            case StepReason.UNSURE:
                return "a step could be a loss, so uncertain is the traffic that was measured"
            case StepReason.NOT_BUSY:
                return "the instances that would get another one beside them have time to spare"
            case StepReason.DWELLING:
                return "the last conversion, or an attempt at one, was not long ago"
            case StepReason.CONVERTING:
                return "a conversion runs already"
            case StepReason.NO_ROUTE:
                return "no division serves the traffic that was measured"
            case StepReason.BEST_ALREADY | StepReason.CONVERT:
                return "threshold and division are the best for the traffic that was measured"
            case _:
                return step.unknown

    def _remember(self, found: PlanDecision) -> None:
        self._decisions.append(found)
        self._metrics.decided(found)


def _in_words(changes: Iterable[ThresholdChange]) -> list[str]:
    return [
        f"planned threshold of {change.cluster} from {change.before_tokens:.0f} to "
        f"{change.tokens:.0f} tokens where {change.pd} decodes"
        for change in changes
    ]


def _current(keeper: RoleKeeper, pd: str) -> Conversion | None:
    """The conversion that runs, with the instance's name as the live scheduler knows it."""
    now = keeper.current
    return None if now is None else replace(now, instance=in_region(pd, now.instance))


def _told(conversion: Conversion) -> str:
    return f"{conversion.instance} of {conversion.wish}: {conversion.phase}"
