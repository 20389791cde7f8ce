"""The long-term loop, live: every few minutes a new plan from what was measured, and its execution.

The shell of `scheduler.live.long_term`. It looks at reports and links every few seconds, models the
region once a period, lets the loop decide off the event loop, sets thresholds and asks for
conversions. t for the new division is set when the conversion has ended well. Whatever is not done
is reported with its reason. Does not know requests, nor how an instance is converted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from deploy.gateway.scheduling.config import LongTermSection
from deploy.gateway.scheduling.plan_overview import (
    PlanDecision,
    PlanOverview,
    RegionModel,
    decision_now,
    region_now,
    traffic_now,
)
from deploy.gateway.scheduling.scheduler import RegionScheduler
from scheduler.live.conversion import (
    Conversion,
    ConversionOutcome,
    ConversionWish,
    Drain,
    Ended,
    Start,
)
from scheduler.live.long_term import LongTermDecision, LongTermLoop, StepReason
from scheduler.live.measured_traffic import MeasuredTraffic
from scheduler.live.running_region import (
    Modelled,
    NotModelled,
    PeriodMeans,
    PeriodMeter,
    RegionFacts,
    division,
    model_region,
)
from scheduler.planning.plan import Plan
from scheduler.planning.throughput import Mode

logger = logging.getLogger("prfaas.deploy.gateway")

LOOK_S: Final = 2.0
"""Between two looks at reports and links."""
NUM_DECISIONS: Final = 50
NOT_KNOWN: Final = "not_known"
ERROR: Final = "error"


class RoleOrders(Protocol):
    """Who converts instances; `deploy.gateway.scheduling.roles.RoleKeeper` is one. `current` dwells
    after it has ended; `converting` names clusters.
    """

    @property
    def current(self) -> Conversion | None: ...

    @property
    def converting(self) -> frozenset[str]: ...

    def ask(self, wish: ConversionWish) -> Start: ...

    def on_ended(self, listener: Callable[[Ended], None]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTermSources:
    """What the service looks at, and through which it acts.

    `models` are the served ones: an instance cannot be divided between several.
    """

    models: Sequence[str]
    scheduler: RegionScheduler
    roles: RoleOrders


class PlanMetrics:
    """`prfaas_gateway_plan_*`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "prfaas_gateway_plan_"
        self.steps = Counter(
            prefix + "steps_total", "Steps of the long-term loop.", ["reason"], registry=registry
        )
        self.threshold = Gauge(
            prefix + "threshold_tokens", "t of the plan.", ["cluster"], registry=registry
        )
        self.instances = Gauge(
            prefix + "instances",
            "Instances by role that the best plan has.",
            ["cluster", "role"],
            registry=registry,
        )
        self.gain = Gauge(
            prefix + "gain_ratio",
            "Throughput of the best plan over that of the present division, less 1.",
            registry=registry,
        )


_Sent = Mapping[str, float]
"""Bytes/s over the link of each prefill cluster."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A conversion that was asked for, and t for when it is done."""

    instance: str
    thresholds: Mapping[str, float]
    sent: _Sent


class LongTermService:
    """See the module text. Use it on one event loop."""

    def __init__(
        self,
        section: LongTermSection,
        sources: LongTermSources,
        metrics: PlanMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is also that of the reports and the measured traffic."""
        self._section = section
        self._sources = sources
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._loop = LongTermLoop(section.loop())
        self._model = sources.models[0] if len(sources.models) == 1 else ""
        self._meter = PeriodMeter(self._model)
        self._means = PeriodMeans()
        self._decisions: deque[PlanDecision] = deque(maxlen=NUM_DECISIONS)
        self._region: RegionModel | None = None
        self._unknown = "no period is over yet"
        self._pending: _Pending | None = None
        self._look_failure = ""
        self._next_s: float | None = None
        self._task: asyncio.Task[None] | None = None
        sources.roles.on_ended(self._conversion_ended)
        for cluster, tokens in sources.scheduler.base_tokens().items():
            metrics.threshold.labels(cluster).set(tokens)

    def start(self) -> None:
        """Look, decide and act from now on, unless the configuration says "off"."""
        if self._section.mode != "off":
            self._next_s = self._clock() + self._section.period_s
            self._task = asyncio.get_running_loop().create_task(self._run(), name="long-term loop")

    async def close(self) -> None:
        """Stop; a conversion that runs is its keeper's to end. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def look(self) -> None:
        """See how reports and links are now."""
        scheduler = self._sources.scheduler
        self._meter.see(scheduler.reports(), scheduler.links())

    async def step(self) -> PlanDecision:
        """A period is over: decide, and act on it where the configuration says so."""
        self.look()
        self._means = self._meter.take()
        now_s, measured = self._clock(), self._measured()
        modelled = self._modelled(measured)
        if isinstance(modelled, NotModelled):
            self._unknown, self._region = modelled.reason, None
            return self._note(NOT_KNOWN, f"did nothing because {modelled.reason}")
        knowledge = self._sources.scheduler.knowledge(self._model)
        self._unknown = ""
        self._region = region_now(modelled.region, knowledge, modelled.notes)
        decision = await asyncio.to_thread(
            self._loop.step, modelled.region, measured, modelled.current, now_s
        )
        done = self._act(decision) or [f"did nothing because {self._why_not(decision)}"]
        found = decision_now(decision, done, self._wall_clock())
        self._remember(found)
        return found

    def overview(self) -> PlanOverview:
        """GET /prfaas/plan."""
        now_s, measured = self._clock(), self._measured()
        current, pd = self._sources.roles.current, self._sources.scheduler.reports()[0]
        present = PeriodMeter(self._model)
        present.see([pd], {})
        num_prefill, num_decode = division(pd, present.take(), current)
        wall_s = self._wall_clock()
        return PlanOverview(
            mode=self._section.mode,
            model=self._model,
            period_s=self._section.period_s,
            next_step_s=None if self._next_s is None else max(0.0, self._next_s - now_s),
            thresholds=dict(self._sources.scheduler.base_tokens()),
            num_prefill={pd.name: num_prefill},
            num_decode={pd.name: num_decode},
            conversion="" if current is None else _told(current),
            traffic=None if measured is None else traffic_now(measured),
            region=self._region,
            unknown=self._unknown,
            decisions=[
                msgspec.structs.replace(item, age_s=max(0.0, wall_s - item.at_s))
                for item in reversed(self._decisions)
            ],
        )

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_S, self._section.period_s))
            if self._next_s is None or self._clock() >= self._next_s:
                self._next_s = self._clock() + self._section.period_s
                await self._try_step()
            else:
                self._try_look()

    async def _try_step(self) -> None:
        try:
            await self.step()
        except Exception as error:
            # The region serves as it is set; the next period may find things in order again.
            logger.exception("the long-term loop failed")
            self._note(ERROR, f"did nothing because of an error: {error!r}")

    def _try_look(self) -> None:
        """Looks are many: one that fails is no decision to be remembered, and is logged if the one
        before did not fail alike.
        """
        try:
            self.look()
        except Exception as error:
            if (failure := repr(error)) != self._look_failure:
                logger.exception("reports and links could not be looked at")
                self._look_failure = failure
        else:
            self._look_failure = ""

    def _measured(self) -> MeasuredTraffic | None:
        if not self._model:
            return None
        return self._sources.scheduler.knowledge(self._model).traffic.measured(self._clock())

    def _modelled(self, measured: MeasuredTraffic | None) -> Modelled | NotModelled:
        sources, scheduler = self._sources, self._sources.scheduler
        if not self._model:
            return NotModelled(
                f"{len(sources.models)} models are served, and instances can be divided for one"
            )
        if measured is None:
            return NotModelled("no request has ended yet")
        pd, *prefill_clusters = scheduler.reports()
        return model_region(
            RegionFacts(
                model=self._model,
                pd=pd,
                prefill_clusters=prefill_clusters,
                knowledge=scheduler.knowledge(self._model),
                means=self._means,
                thresholds=scheduler.base_tokens(),
                traffic=measured.traffic(),
                conversion=sources.roles.current,
                converting=sources.roles.converting,
            )
        )

    def _act(self, decision: LongTermDecision) -> list[str]:
        """What was done, or would be; empty: nothing is to be done."""
        changes = self._changes(decision.thresholds)
        if self._section.mode != "act":
            wishes = [f"convert an instance of {_wished(wish)}" for wish in decision.conversions]
            return [f"advice: {text}" for text in wishes + changes]
        sent, before = _sent(decision.plan), self._pending
        if before is not None and not decision.conversions:
            # The division that this was decided for is not there yet.
            self._pending = replace(before, thresholds=decision.thresholds, sent=sent)
            return [f"once {before.instance} has its new role: {text}" for text in changes]
        done = [self._ask(wish, decision, sent) for wish in decision.conversions]
        is_refused = bool(decision.conversions) and self._pending is before
        if is_refused and (before is not None or decision.conversions[0].from_role == "prefill"):
            return done  # t was meant for another division than the present one
        self._set(decision.thresholds, sent)
        return done + changes

    def _ask(self, wish: ConversionWish, decision: LongTermDecision, sent: _Sent) -> str:
        start = self._sources.roles.ask(wish)
        drained = [effect.instance for effect in start.effects if isinstance(effect, Drain)]
        if not drained:
            return f"did not convert an instance of {_wished(wish)}: {start.reason}"
        self._pending = _Pending(drained[0], decision.thresholds_after, sent)
        logger.info("converting an instance of %s: %s", _wished(wish), decision)
        return f"began to convert {drained[0]} of {_wished(wish)}: {start.reason}"

    def _conversion_ended(self, ended: Ended) -> None:
        """The new division is there, or the old one is again. Others may have asked for it."""
        is_converted = ended.outcome is ConversionOutcome.CONVERTED
        self._loop.ended(ended.wish, self._clock(), is_converted=is_converted)
        pending = self._pending
        if pending is None or pending.instance != ended.instance:
            return
        self._pending = None
        if is_converted:
            for text in self._changes(pending.thresholds):
                logger.info("%s has its new role: %s", pending.instance, text)
            self._set(pending.thresholds, pending.sent)

    def _changes(self, thresholds: Mapping[str, float]) -> list[str]:
        """In words."""
        base = self._sources.scheduler.base_tokens()
        return [
            f"t of {cluster} from {base[cluster]:.0f} to {tokens:.0f} tokens"
            for cluster, tokens in thresholds.items()
            if abs(tokens - base[cluster]) >= 0.5
        ]

    def _set(self, thresholds: Mapping[str, float], sent: _Sent) -> None:
        for cluster, tokens in thresholds.items():
            if cluster in sent or self._changes({cluster: tokens}):
                self._sources.scheduler.set_threshold(cluster, tokens, sent.get(cluster, 0.0))
                self._metrics.threshold.labels(cluster).set(tokens)

    def _why_not(self, decision: LongTermDecision) -> str:
        numbers = decision.numbers
        match decision.reason:
            case StepReason.TOO_FEW_REQUESTS:
                count = f"{numbers['requests']:.0f} requests were measured"
                return f"{count}; {self._section.min_requests} are needed"
            case StepReason.SMALL_GAIN:
                return f"the best division would gain {numbers['gain']:.1%}, which is too little"
            case StepReason.UNSURE:
                return "a step could be a loss, so uncertain is the traffic that was measured"
            case StepReason.DWELLING:
                return "the last conversion, or an attempt at one, was not long ago"
            case StepReason.CONVERTING:
                return "a conversion runs already"
            case StepReason.NO_ROUTE:
                return "no division serves the traffic that was measured"
            case StepReason.BEST_ALREADY | StepReason.CONVERT:
                return "threshold and division are the best for the traffic that was measured"

    def _note(self, reason: str, done: str) -> PlanDecision:
        """Remember a step without a decision."""
        found = PlanDecision(at_s=self._wall_clock(), age_s=0.0, reason=reason, done=[done])
        self._remember(found)
        return found

    def _remember(self, found: PlanDecision) -> None:
        self._decisions.append(found)
        self._metrics.steps.labels(found.reason).inc()
        if (gain := found.numbers.get("gain")) is not None:
            self._metrics.gain.set(gain)
        if found.goal is not None:
            for role, wanted in (
                ("prefill", found.goal.num_prefill),
                ("decode", found.goal.num_decode),
            ):
                for cluster, num in wanted.items():
                    self._metrics.instances.labels(cluster, role).set(num)


def _sent(plan: Plan | None) -> _Sent:
    """What the plan sends from each prefill cluster at the highest load that it can bear."""
    if plan is None:
        return {}
    by_link = plan.link_bytes_per_s(Mode.EXACT, plan.system_rps(Mode.EXACT))
    return {link.source: by_link.get(link.name, 0.0) for link in plan.region.links}


def _wished(wish: ConversionWish) -> str:
    return f"{wish.cluster} from {wish.from_role} to {wish.to_role}"


def _told(conversion: Conversion) -> str:
    return f"{conversion.instance} of {_wished(conversion.wish)}: {conversion.phase}"
