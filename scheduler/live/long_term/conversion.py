"""Turning one instance of a PD cluster from one stage to another, step by step: from prefill to
decode or back, or between one of these and encode.

Every instance can prefill and decode, and in a cluster with an encode stage those that have the
whole model can encode, too; the role is only what the cluster front sends to the instance. So a
conversion drains and relabels the instance, without a restart:

    (none) --start--> DRAINING --drained--> RELABELLING --relabelled--> DWELLING --time--> (none)
                         |                       |
                  failed, too slow        failed, too slow
                         |                       |
                      Resume          SetRole(old role, next epoch), Resume

Rules:

- A cluster has one `Converter` and one conversion at a time, dwelling included. The other instances
  of the role keep serving: the last usable instance that prefills, or that decodes, is never
  taken. The last one that encodes may be: the others encode what they prefill.
- An instance takes only roles that its engine was started for.
- The least loaded instance is taken, because it drains soonest.
- Every order of a role carries an epoch, one more than the instance's last. An instance refuses an
  epoch that is not above its own, so a late or repeated order cannot undo a newer one. When nobody
  knows whether a relabelling came through, the old role is ordered with a still later epoch.
- A conversion that ends early gives the instance its old role back.

The same events give the same effects. An event about an instance that is not in that phase does
nothing. No I/O, no clock: the shell performs effects, in order, and reports events. The reasons for
a conversion are in `scheduler.live.long_term.loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal

from scheduler.reports import CONVERTIBLE, Role

PdRole = Literal["encode", "prefill", "decode"]
"""The roles that an instance can be converted from and to. `both` is never converted: the instance
serves either kind of work already, and an operator chose that for it.
"""

DWELL_S: Final = 240.0
MAX_DRAIN_S: Final = 900.0
"""The longest drain, seconds. A front in another process is waited for as long."""


@dataclass(frozen=True, slots=True)
class RoleStatus:
    """The answer to `GET /v1/pd_role`: the instance's role, and the epoch of the order that gave
    it.

    `ready` says whether it is ready for work of that role. It is False while it drains or changes.
    """

    role: Role
    epoch: int
    ready: bool = True


@dataclass(frozen=True, slots=True)
class RoleChange:
    """The body of `POST /v1/pd_role`. Refused (409) unless `epoch` is above the instance's."""

    role: PdRole
    epoch: int


def applied(status: RoleStatus, change: RoleChange) -> RoleStatus | None:
    """The status after a change; None if the order is too old and must be refused.

    The same order again is no error, since its answer may have been lost.
    """
    if change.epoch == status.epoch and change.role == status.role:
        return status
    if change.epoch <= status.epoch:
        return None
    return RoleStatus(change.role, change.epoch)


@dataclass(frozen=True, slots=True)
class ConversionWish:
    """One instance of `cluster` should change its role. It must serve `model`, if that is given."""

    cluster: str
    from_role: PdRole
    to_role: PdRole
    model: str = ""

    def __str__(self) -> str:
        return f"{self.cluster} from {self.from_role} to {self.to_role}"


@dataclass(frozen=True, slots=True)
class RoleView:
    """An instance as a candidate, and the `roles` that it can be given. `num_tokens` counts the
    prompt and output that it has left to do.
    """

    name: str
    role: Role
    epoch: int = 0
    is_usable: bool = True
    num_requests: int = 0
    num_tokens: int = 0
    roles: tuple[Role, ...] = CONVERTIBLE


@dataclass(frozen=True, slots=True)
class Drain:
    """Give the instance no new work. Report `drained` when it has none left."""

    instance: str


@dataclass(frozen=True, slots=True)
class SetRole:
    """Send `POST /v1/pd_role` to the instance and route by it. Report `relabelled` or `failed`."""

    instance: str
    change: RoleChange


@dataclass(frozen=True, slots=True)
class Resume:
    """Give the instance work again, of the role it has."""

    instance: str


class ConversionOutcome(StrEnum):
    """How a conversion ended. Values are stable: they are metric labels."""

    CONVERTED = "converted"
    FAILED = "failed"
    TOO_SLOW = "too_slow"


@dataclass(frozen=True, slots=True)
class Ended:
    """The instance has its new role, or its old one again. This only has to be announced."""

    instance: str
    wish: ConversionWish
    outcome: ConversionOutcome
    detail: str


Effect = Drain | SetRole | Resume | Ended


class ConversionPhase(StrEnum):
    DRAINING = "draining"
    RELABELLING = "relabelling"
    DWELLING = "dwelling"


@dataclass(frozen=True, slots=True)
class Conversion:
    """One conversion in its present phase. `epoch` is that of its order."""

    instance: str
    wish: ConversionWish
    epoch: int
    phase: ConversionPhase
    since_s: float
    """When the phase began, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionConfig:
    drain_limit_s: float = 600.0
    """A drain that takes longer is given up, seconds, at most 900: the longest decodes must fit. It
    also holds for conversions that operators order.
    """
    relabel_limit_s: float = 30.0
    dwell_s: float = DWELL_S
    """The time from the new role until the cluster may convert again, seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.drain_limit_s <= MAX_DRAIN_S:
            raise ValueError(
                f"drain_limit_s {self.drain_limit_s:g} must be above 0 and at most {MAX_DRAIN_S:g}"
            )
        if not (self.relabel_limit_s > 0 and self.dwell_s >= 0):
            raise ValueError(
                f"relabel_limit_s {self.relabel_limit_s:g} must be above 0, dwell_s "
                f"{self.dwell_s:g} not below"
            )


@dataclass(frozen=True, slots=True)
class Start:
    """The result of a wish: effects, or none and the reason."""

    effects: tuple[Effect, ...]
    reason: str


def never_converted(names: Sequence[str]) -> str:
    """Says why instances with the role `both` keep it."""
    have = "has" if len(names) == 1 else "have"
    return f"{', '.join(names)} {have} the role both, which is never converted"


class Converter:
    """The conversions of one PD cluster, one after the other."""

    def __init__(self, config: ConversionConfig | None = None) -> None:
        self._config = config or ConversionConfig()
        self._current: Conversion | None = None

    @property
    def current(self) -> Conversion | None:
        """The present conversion, dwelling included. None: a wish would be taken."""
        return self._current

    def start(
        self,
        wish: ConversionWish,
        instances: Sequence[RoleView],
        now_s: float,
        *,
        only: str = "",
    ) -> Start:
        """Convert the cluster's least loaded instance, or `only`; else say why not."""
        if self._current is not None:
            return Start((), f"{self._current.instance} is {self._current.phase}")
        usable = [view for view in instances if view.role == wish.from_role and view.is_usable]
        if len(usable) < (1 if wish.from_role == "encode" else 2):
            both = [view.name for view in instances if view.role == "both"]
            count = f"{len(usable)} usable {wish.from_role} instances"
            count += "" if wish.from_role == "encode" else "; one must stay"
            why = f", and {never_converted(both)}" if both else ""
            return Start((), f"{wish.cluster} has {count}{why}")
        asked_for = [view for view in usable if only in ("", view.name)]
        if not asked_for:
            return Start((), f"{only} is no usable {wish.from_role} instance of {wish.cluster}")
        able = [view for view in asked_for if wish.to_role in view.roles]
        if not able:
            names = ", ".join(view.name for view in asked_for)
            return Start((), f"{names} cannot be given the role {wish.to_role}")
        chosen = min(able, key=lambda view: (view.num_requests, view.num_tokens, view.name))
        self._current = Conversion(
            chosen.name, wish, chosen.epoch + 1, ConversionPhase.DRAINING, now_s
        )
        said = f"has the fewest requests ({chosen.num_requests}) of {len(usable)}"
        return Start((Drain(chosen.name),), f"{chosen.name} {'was asked for' if only else said}")

    def drained(self, instance: str, now_s: float) -> tuple[Effect, ...]:
        """The instance has no work left."""
        found = self._at(instance, ConversionPhase.DRAINING)
        if found is None:
            return ()
        self._current = replace(found, phase=ConversionPhase.RELABELLING, since_s=now_s)
        return (SetRole(instance, RoleChange(found.wish.to_role, found.epoch)),)

    def relabelled(self, instance: str, epoch: int, now_s: float) -> tuple[Effect, ...]:
        """The instance confirmed the role of this epoch."""
        found = self._at(instance, ConversionPhase.RELABELLING)
        if found is None or epoch != found.epoch:
            return ()
        self._current = replace(found, phase=ConversionPhase.DWELLING, since_s=now_s)
        detail = f"now {found.wish.to_role}, epoch {epoch}"
        return (Resume(instance), Ended(instance, found.wish, ConversionOutcome.CONVERTED, detail))

    def failed(self, instance: str, detail: str) -> tuple[Effect, ...]:
        """The instance died, or an effect failed. After the conversion this means nothing."""
        found = self._at(instance, ConversionPhase.DRAINING) or self._at(
            instance, ConversionPhase.RELABELLING
        )
        return () if found is None else self._give_back(found, ConversionOutcome.FAILED, detail)

    def tick(self, now_s: float) -> tuple[Effect, ...]:
        """Give up a phase that took too long, and end a dwelling that was long enough."""
        found = self._current
        if found is None:
            return ()
        spent_s, limit_s = now_s - found.since_s, self._limit_s(found.phase)
        if spent_s < limit_s:
            return ()
        if found.phase is ConversionPhase.DWELLING:
            self._current = None
            return ()
        detail = f"{found.phase} for {spent_s:.0f} s; at most {limit_s:g} s"
        return self._give_back(found, ConversionOutcome.TOO_SLOW, detail)

    def _limit_s(self, phase: ConversionPhase) -> float:
        if phase is ConversionPhase.DRAINING:
            return self._config.drain_limit_s
        if phase is ConversionPhase.RELABELLING:
            return self._config.relabel_limit_s
        return self._config.dwell_s

    def _give_back(
        self, found: Conversion, outcome: ConversionOutcome, detail: str
    ) -> tuple[Effect, ...]:
        self._current = None
        ended = Ended(found.instance, found.wish, outcome, detail)
        if found.phase is ConversionPhase.DRAINING:
            return (Resume(found.instance), ended)
        # The first order may have arrived, so the old role needs an epoch above it.
        undo = SetRole(found.instance, RoleChange(found.wish.from_role, found.epoch + 1))
        return (undo, Resume(found.instance), ended)

    def _at(self, instance: str, phase: ConversionPhase) -> Conversion | None:
        found = self._current
        return found if found and (found.instance, found.phase) == (instance, phase) else None
