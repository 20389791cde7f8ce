"""What the queue of the encode stage holds: media, requests, passes and instances.

Plain state; queue.py is the one that changes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scheduler.encoding.line import EncodeLine
from scheduler.encoding.values import (
    EncodeInstance,
    EncodeRequest,
    Medium,
    MediumEnd,
)
from scheduler.reports import EncodeInstanceReport, same_model

MediumKey = tuple[str, str]
"""Model and identifier."""


@dataclass(slots=True, eq=False)
class Entry:
    """A medium that waits or runs, and the requests that wait for it, the first one first."""

    key: MediumKey
    medium: Medium
    requests: dict[str, None] = field(default_factory=dict)
    nodes: frozenset[str] = frozenset()
    may_delay_decodes: bool = False
    """Whether one of the requests allows it."""
    tried: tuple[str, ...] = ()
    number: int | None = None
    """Its pass; None while it waits."""


@dataclass(slots=True)
class HeldRequest:
    """A request, and what is decided of it."""

    request: EncodeRequest
    since_s: float
    ends: dict[str, MediumEnd] = field(default_factory=dict)
    """By identifier, those that are decided."""

    @property
    def keys(self) -> list[MediumKey]:
        """The media that it still waits for."""
        model = self.request.model
        distinct = dict.fromkeys(one.identifier for one in self.request.media)
        return [(model, name) for name in distinct if name not in self.ends]


@dataclass(slots=True)
class EncodePass:
    """The media that an instance was given at a time; `running` are those that are not over."""

    number: int
    instance: str
    started_s: float
    num_tokens: int
    running: dict[str, Entry]
    is_whole: bool = True
    """Whether all that ended was encoded, so that its time is that of a pass."""


@dataclass(slots=True)
class HeldInstance:
    """An instance and its passes."""

    view: EncodeInstance
    passes: dict[int, EncodePass] = field(default_factory=dict)
    last_used: int = 0
    ended_s: float = -math.inf
    """When its latest pass ended."""

    @property
    def num_tokens(self) -> int:
        """Media tokens of its passes."""
        return sum(one.num_tokens for one in self.passes.values())

    @property
    def num_media(self) -> int:
        """Media of its passes that are not over."""
        return sum(len(one.running) for one in self.passes.values())

    @property
    def is_free(self) -> bool:
        """Whether it may be given a pass."""
        return self.view.healthy and len(self.passes) < self.view.max_passes

    def takes(self, entry: Entry) -> bool:
        """Whether the medium may be given to it, now or later."""
        view = self.view
        is_of = same_model(view.model, entry.key[0])
        may_encode = entry.may_delay_decodes or not view.decodes
        return view.healthy and is_of and may_encode and view.name not in entry.tried

    def report(
        self, line: EncodeLine | None, budget_tokens: int, now_s: float
    ) -> EncodeInstanceReport:
        """The instance as decisions and people see it. `line` is the time of its passes."""
        view, busy_s = self.view, 0.0
        if line is not None and self.passes:
            begun_s = max(self.ended_s, min(one.started_s for one in self.passes.values()))
            total_s = sum(line.seconds(one.num_tokens) for one in self.passes.values())
            busy_s = max(0.0, total_s - (now_s - begun_s))
        return EncodeInstanceReport(
            name=view.name,
            model=view.model,
            node=view.node,
            healthy=view.healthy,
            decodes=view.decodes,
            running_media=self.num_media,
            running_tokens=self.num_tokens,
            budget_tokens=budget_tokens,
            busy_s=busy_s,
            line=line,
        )
