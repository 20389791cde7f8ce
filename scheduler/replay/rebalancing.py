"""The long timescale in a replay: measured traffic in, a new t out, and instances that convert.

Plays the shell of the long-term loop's `model_plan` and `conversion`: it asks the plan every period
and performs a conversion's effects on the replay's instances. A drain takes until the instance's
last request is over, the new role `relabel_s` longer. Knows no requests' fates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler.live.learning.measured_traffic import TrafficMeter
from scheduler.live.long_term.conversion import (
    ConversionOutcome,
    ConversionPhase,
    Converter,
    Drain,
    Effect,
    Ended,
    Resume,
    RoleView,
    SetRole,
)
from scheduler.live.long_term.loop import LongTermConfig
from scheduler.live.long_term.model_plan import ModelPlan, ThresholdPlan
from scheduler.live.long_term.running_region import Modelled
from scheduler.planning.allocation import Allocation, Corrections
from scheduler.replay.deciding import Decider
from scheduler.replay.decode import DecodeInstance, DecodePool
from scheduler.replay.model import Policy, ReplayModel
from scheduler.replay.prefill import PrefillInstance, PrefillStation
from scheduler.replay.results import ReplayedRoleChange


class LinkRates:
    """The mean rate of a link over a period, as it was seen."""

    def __init__(self, configured_bytes_per_s: float) -> None:
        self._configured = configured_bytes_per_s
        self._sum = 0.0
        self._num = 0

    def see(self, bytes_per_s: float, *, is_floor: bool) -> None:
        """One sample. A floor below what the link should carry says nothing against it."""
        self._sum += max(bytes_per_s, self._configured) if is_floor else bytes_per_s
        self._num += 1

    def take(self) -> float:
        """The mean since the last call."""
        mean = self._sum / self._num if self._num else self._configured
        self._sum, self._num = 0.0, 0
        return mean


class Rebalancer:
    """Converts instances in virtual time.

    `schedule` is called with (now, instance, epoch) and calls `relabelled` when the order has come
    through. After each call instances may have come back to work.
    """

    def __init__(
        self,
        model: ReplayModel,
        policy: Policy,
        config: LongTermConfig,
        decider: Decider,
        stations: list[PrefillStation],
        pool: DecodePool,
        schedule: Callable[[float, str, int], None],
    ) -> None:
        self.role_changes: list[ReplayedRoleChange] = []
        self.told: list[str] = []
        self.meter = TrafficMeter()
        self.rates = {link.name: LinkRates(link.bytes_per_s) for link in model.region.links}
        self._model = model
        self._decider = decider
        self._stations = stations
        self._pool = pool
        self._schedule = schedule
        self._config = config
        self._plan = ModelPlan()
        self._converter = Converter(policy.conversion)
        self._epochs: dict[str, int] = {}

    def step(self, now_s: float) -> None:
        """A period is over."""
        name = self._model.pd.name
        corrections = Corrections(
            prefill_factors={s.name: s.believed.factor for s in self._stations},
            link_bytes_per_s={link: rates.take() for link, rates in self.rates.items()},
        )
        current = Allocation(
            thresholds=dict(self._decider.thresholds),
            num_prefill={name: len(self._stations[0].instances) + self._coming("prefill")},
            num_decode={name: len(self._pool.instances) + self._coming("decode")},
            converting=frozenset({name} if self._converter.current else ()),
        )
        self.meter.forget_before_change(now_s)
        self._plan.ask(
            Modelled(self._model.region, current),
            self.meter.measured(now_s),
            self._config,
            now_s,
            corrections,
        )
        decision = self._plan.decide()
        assert decision is not None
        self.told.append(f"{now_s:.0f} s: {decision}")
        self._adopt(self._plan.to_set())
        for wish in decision.conversions:
            effects = self._converter.start(wish, self._roles(), now_s).effects
            drained = [effect.instance for effect in effects if isinstance(effect, Drain)]
            self._adopt(self._plan.answered(wish, drained[0] if drained else ""))
            self._perform(effects, now_s)

    def tick(self, now_s: float) -> None:
        """Time passed."""
        self._perform(self._converter.tick(now_s), now_s)

    def idle(self, instance: PrefillInstance | DecodeInstance, now_s: float) -> None:
        """The instance has nothing left to do."""
        if not instance.is_usable:
            self._perform(self._converter.drained(instance.name, now_s), now_s)

    def relabelled(self, name: str, epoch: int, now_s: float) -> None:
        """The order came through."""
        current = self._converter.current
        if current is None or (current.epoch, current.phase) != (
            epoch,
            ConversionPhase.RELABELLING,
        ):
            return
        self._epochs[name] = epoch
        self._swap(name)
        self.role_changes.append(ReplayedRoleChange(now_s, name, current.wish.to_role))
        self._perform(self._converter.relabelled(name, epoch, now_s), now_s)

    def _perform(self, effects: Iterable[Effect], now_s: float) -> None:
        for effect in effects:
            match effect:
                case Drain(name):
                    instance = self._instance(name)
                    instance.is_usable = False
                    self._pool.recount()
                    if not _is_busy(instance):
                        self._perform(self._converter.drained(name, now_s), now_s)
                case SetRole(name, change):
                    if self._converter.current is not None:
                        self._schedule(now_s, name, change.epoch)
                case Resume(name):
                    self._instance(name).is_usable = True
                    self._pool.recount()
                case Ended(name, wish, outcome, detail):
                    self.told.append(f"{now_s:.0f} s: {name} {outcome}: {detail}")
                    is_converted = outcome is ConversionOutcome.CONVERTED
                    planned = self._plan.ended(wish, name, now_s, is_converted=is_converted)
                    self._adopt(planned)

    def _adopt(self, planned: ThresholdPlan | None) -> None:
        if planned is not None:
            self._decider.thresholds.update(planned.tokens)
            self._decider.plan_sends(max(planned.sends.values(), default=0.0))

    def _coming(self, role: str) -> int:
        """How many more of a role there will be when the conversion that runs is done."""
        current = self._converter.current
        if current is None or current.phase is ConversionPhase.DWELLING:
            return 0
        return 1 if current.wish.to_role == role else -1

    def _roles(self) -> list[RoleView]:
        found = []
        for prefill in self._stations[0].instances:
            job = prefill.job
            tokens = 0 if job is None else job.num_tokens
            found.append(
                RoleView(
                    prefill.name,
                    "prefill",
                    self._epochs.get(prefill.name, 0),
                    prefill.is_usable,
                    int(job is not None),
                    tokens,
                )
            )
        for decode in self._pool.instances:
            left = sum(last - decode.steps for last, _, _ in decode.running)
            found.append(
                RoleView(
                    decode.name,
                    "decode",
                    self._epochs.get(decode.name, 0),
                    decode.is_usable,
                    len(decode.running),
                    int(left),
                )
            )
        return found

    def _instance(self, name: str) -> PrefillInstance | DecodeInstance:
        both: list[PrefillInstance | DecodeInstance] = [
            *self._stations[0].instances,
            *self._pool.instances,
        ]
        return next(instance for instance in both if instance.name == name)

    def _swap(self, name: str) -> None:
        """Give an idle instance its other role; not usable yet."""
        instance = self._instance(name)
        new: PrefillInstance | DecodeInstance
        if isinstance(instance, PrefillInstance):
            self._stations[0].instances.remove(instance)
            new = DecodeInstance(name)
            self._pool.instances.append(new)
        else:
            self._pool.instances.remove(instance)
            new = PrefillInstance(name)
            self._stations[0].instances.append(new)
        new.is_usable = False
        self._pool.recount()


def _is_busy(instance: PrefillInstance | DecodeInstance) -> bool:
    if isinstance(instance, PrefillInstance):
        return instance.job is not None
    return bool(instance.running)
