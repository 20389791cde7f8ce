"""The events by which a live scheduler hears of the other gateways of its region.

    ObservationsHeard   what they have observed, so that all gateways learn from all requests
    WorkHeard           what they have under way, between two reports of the clusters
    PlanHeard           what the one that leads has planned   `learned_state`
    StateRestored       what the region had learnt before this gateway started

Gateways exchange observations and not what they made of them. So the samples of two gateways add
up, and each counts once in every gateway: observations are numbered, and numbers that were heard
are passed over. This file does not know how gateways reach each other.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from scheduler.live.core import Event, LiveScheduler
from scheduler.live.feedback import ObservationEvent
from scheduler.live.sharing.learned_state import PlanHeard, StateRestored
from scheduler.live.sharing.peer_work import Work

MAX_HEARD: Final = 1000
"""The gateways whose numbers are remembered, those that were heard last. A gateway has another name
after each start.
"""


class Observed(msgspec.Struct, frozen=True, array_like=True):
    """An observation of another gateway, made `age_s` ago."""

    age_s: float
    event: ObservationEvent


class ObservationsHeard(Event[None], frozen=True):
    """The observations of a gateway from number `first` on."""

    gateway: str
    first: int
    observed: list[Observed]

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Learn from those that were not heard before."""
        num_heard = live.heard.get(self.gateway, 0)
        for item in self.observed[max(0, num_heard - self.first) :]:
            item.event.learn(live, now_s - item.age_s)
        # Taken out, so that it comes last again: the first names were not heard for longest.
        live.heard.pop(self.gateway, None)
        live.heard[self.gateway] = max(num_heard, self.first + len(self.observed))
        while len(live.heard) > MAX_HEARD:
            del live.heard[next(iter(live.heard))]


class WorkHeard(Event[None], frozen=True):
    """A gateway has this under way now; None: it is gone."""

    gateway: str
    work: Work | None

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Instances have its requests and prompts beside those of this gateway."""
        live.peers.heard(self.gateway, self.work, now_s)


SharingEvent: TypeAlias = StateRestored | PlanHeard | ObservationsHeard | WorkHeard
