"""The long-term loop in a replay: the shell of `scheduler.live.long_term.events`.

It does what a gateway does: it asks the live scheduler for the plans of every period, and performs
the orders of a conversion on the replay's instances. A drain ends with the instance's last request,
and the new role comes `relabel_s` later. It decides nothing, and does not know what becomes of
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler.live.long_term.conversion import (
    ConversionOutcome,
    ConversionPhase,
    ConversionWish,
    Converter,
    Drain,
    Effect,
    Ended,
    Resume,
    RoleView,
    SetRole,
)
from scheduler.live.long_term.events import (
    LOOK_S,
    ConversionAnswered,
    ConversionEnded,
    PeriodLook,
    PeriodOver,
    PlansAsked,
    PlanStep,
)
from scheduler.replay.deciding import Decider
from scheduler.replay.decode import DecodeInstance
from scheduler.replay.model import Policy
from scheduler.replay.parts import Parts
from scheduler.replay.prefill import PrefillInstance
from scheduler.replay.results import ReplayedRoleChange


class Rebalancer:
    """Converts instances in virtual time.

    It calls `schedule` with (now, instance, epoch); `relabelled` must be called with them once the
    instance has its new role. After each call of a method instances may be usable again.
    """

    def __init__(
        self,
        policy: Policy,
        period_s: float,
        decider: Decider,
        parts: Parts,
        schedule: Callable[[float, str, int], None],
    ) -> None:
        self.look_s = min(LOOK_S, period_s)
        """`look` must be called this often."""
        self.role_changes: list[ReplayedRoleChange] = []
        self.told: list[str] = []
        self._decider = decider
        self._home, self._pool = parts.pds[0].station, parts.pds[0].pool
        self._schedule = schedule
        self._period_s = self._next_s = period_s
        self._converter = Converter(policy.conversion)

    def look(self, now_s: float) -> None:
        """Time passed: plan if a period is over."""
        self._perform(self._converter.tick(now_s), now_s)
        if now_s < self._next_s:
            self._decider.plan(PeriodLook(), now_s)
            return
        self._next_s = now_s + self._period_s
        current = self._converter.current
        self._decider.plan(PeriodOver(current, current is not None), now_s)
        for step in self._decider.plan(PlansAsked(), now_s):
            self.told.append(f"{now_s:.0f} s: {_in_words(step)}")
            for wish in step.conversions:
                self._convert(wish, now_s)

    def idle(self, instance: PrefillInstance | DecodeInstance, now_s: float) -> None:
        """The instance's last request is over."""
        if not instance.is_usable:
            self._perform(self._converter.drained(instance.name, now_s), now_s)

    def relabelled(self, name: str, epoch: int, now_s: float) -> None:
        """The instance has its new role, unless the order is void by now."""
        current = self._converter.current
        if current is None or (current.epoch, current.phase) != (
            epoch,
            ConversionPhase.RELABELLING,
        ):
            return
        self._swap(name, epoch)
        self.role_changes.append(ReplayedRoleChange(now_s, name, current.wish.to_role))
        self._perform(self._converter.relabelled(name, epoch, now_s), now_s)

    def _convert(self, wish: ConversionWish, now_s: float) -> None:
        roles = [
            RoleView(i.name, i.role, i.role_epoch, i.is_usable, i.num_requests, i.num_tokens)
            for i in self._instances()
        ]
        effects = self._converter.start(wish, roles, now_s).effects
        drained = [effect.instance for effect in effects if isinstance(effect, Drain)]
        # Before the effects: an idle instance drains at once, and the live scheduler must know of
        # the conversion before its end.
        self._decider.plan(ConversionAnswered(wish, drained[0] if drained else ""), now_s)
        self._perform(effects, now_s)

    def _perform(self, effects: Iterable[Effect], now_s: float) -> None:
        for effect in effects:
            match effect:
                case Drain(name):
                    instance = self._instance(name)
                    instance.is_usable = False
                    self._pool.recount()
                    if not instance.num_requests:
                        self._perform(self._converter.drained(name, now_s), now_s)
                case SetRole(name, change):
                    # Without a conversion, this undoes one that failed. Here the instance still has
                    # its old role then.
                    if self._converter.current is not None:
                        self._schedule(now_s, name, change.epoch)
                case Resume(name):
                    self._instance(name).is_usable = True
                    self._pool.recount()
                case Ended(name, wish, outcome, detail):
                    self.told.append(f"{now_s:.0f} s: {name} {outcome}: {detail}")
                    is_converted = outcome is ConversionOutcome.CONVERTED
                    self._decider.plan(ConversionEnded(wish, name, is_converted), now_s)

    def _instances(self) -> list[PrefillInstance | DecodeInstance]:
        """All instances of the PD cluster."""
        return [*self._home.instances, *self._pool.instances]

    def _instance(self, name: str) -> PrefillInstance | DecodeInstance:
        return next(instance for instance in self._instances() if instance.name == name)

    def _swap(self, name: str, epoch: int) -> None:
        """Give an idle instance its other role. `Resume` makes it usable."""
        instance = self._instance(name)
        new: PrefillInstance | DecodeInstance
        if isinstance(instance, PrefillInstance):
            self._home.instances.remove(instance)
            new = DecodeInstance(name, epoch)
            self._pool.instances.append(new)
        else:
            self._pool.instances.remove(instance)
            new = PrefillInstance(name, epoch)
            self._home.instances.append(new)
        new.is_usable = False
        self._pool.recount()


def _in_words(step: PlanStep) -> str:
    numbers = "".join(f"; {key}={value:.4g}" for key, value in step.numbers.items())
    if step.conversions:
        wishes = ", ".join(f"{w.cluster}: {w.from_role} to {w.to_role}" for w in step.conversions)
        return f"convert {wishes}{numbers}"
    return f"no conversion because {step.unknown or step.reason}{numbers}"
