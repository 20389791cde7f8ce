"""How instances join and leave a cluster that runs: the orders, what a changed list means, and why
an instance may not join.

Pure. It knows no probes and no processes; `departures.py` carries out what leaving means.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from prfaas.engines.command import EncoderRole
from prfaas.engines.instance import (
    DEFAULT_DECODE_SLOTS,
    DEFAULT_MAX_CONCURRENT,
    Instance,
    InstanceSpec,
)
from scheduler.reports import Role, unlike

LEAVE_LIMIT_S: Final = 300.0
"""How long an instance that leaves may finish its work, if nobody says otherwise, seconds."""


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """Add an instance whose engine and node agent run already. The fields are `InstanceSpec`'s."""

    name: str
    url: str
    agent: str
    node: str = ""
    model: str = ""
    role: Role = "both"
    max_concurrent: int = DEFAULT_MAX_CONCURRENT
    decode_slots: int = DEFAULT_DECODE_SLOTS
    encoder_role: EncoderRole | None = None
    encodes: bool = False

    def spec(self) -> InstanceSpec:
        """The instance. ValueError names the field that is wrong."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return InstanceSpec.model_validate(fields)


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """Give an instance no new work, and forget it once it has none and `LetGo` has come. After
    `limit_s` it is forgotten in any case, and what still runs there fails over.
    """

    name: str
    limit_s: float = LEAVE_LIMIT_S


class LetGo(msgspec.Struct, frozen=True, kw_only=True, tag="let_go"):
    """Nothing that its node has cached is needed any more: a leaving instance may go."""

    name: str


MemberOrder = Join | Leave | LetGo


class MemberRequest(msgspec.Struct, frozen=True):
    """An order to a front over gRPC."""

    order: MemberOrder


class MemberRefused(Exception):
    """The instance may not join. `message` is for a person."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True, slots=True)
class MemberChanges:
    """What a new list of instances changes. A changed instance is in both: it leaves, and joins
    when it is gone.
    """

    leaving: tuple[str, ...]
    joining: tuple[InstanceSpec, ...]


def member_changes(before: Sequence[InstanceSpec], after: Sequence[InstanceSpec]) -> MemberChanges:
    """The changes from one list to another, in their orders."""
    known = {spec.name: spec for spec in before}
    wanted = {spec.name: spec for spec in after}
    return MemberChanges(
        leaving=tuple(name for name, spec in known.items() if wanted.get(name) != spec),
        joining=tuple(spec for name, spec in wanted.items() if known.get(name) != spec),
    )


def cannot_join(instance: Instance, others: Iterable[Instance]) -> str:
    """Why an instance whose engine has said what it has may not work beside `others`, with both
    values; "" if it may. One that works already is enough to compare with.
    """
    new = instance.report(0)
    for other in others:
        if other is instance or other.joining or not other.layout_fingerprint:
            continue
        if why := unlike(new, other.report(0)):
            return why
    return ""
