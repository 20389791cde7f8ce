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

from collections.abc import Set
from typing import Annotated, Final, TypeAlias

import msgspec

from scheduler.live.core import Event, LiveScheduler
from scheduler.live.feedback import ObservationEvent
from scheduler.live.sharing.learned_state import MAX_HEARD, PlanHeard, StateRestored
from scheduler.live.sharing.peer_work import Work

MAX_AGE_S: Final = 86_400.0
"""Older observations teach nothing any more, seconds."""
MAX_AGAIN: Final = 100_000
"""More observations than any gateway tells again. One with a lower number than that is new: the
higher number that was heard was wrong, and must not silence its gateway.
"""


class Observed(msgspec.Struct, frozen=True, array_like=True):
    """An observation of another gateway, made `age_s` ago."""

    age_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_AGE_S)]
    event: ObservationEvent


class ObservationsHeard(Event[int], frozen=True):
    """The observations of a gateway from number `first` on."""

    gateway: str
    first: int
    observed: list[Observed]

    def apply(self, live: LiveScheduler, now_s: float) -> int:
        """Learn from those that were not heard before. Returns how many could not be used."""
        num_heard, num_left_out = live.heard.get(self.gateway, 0), 0
        places = live.all_places()
        if num_heard - self.first > MAX_AGAIN:
            num_heard = 0
        for item in self.observed[max(0, num_heard - self.first) :]:
            try:
                # Of another model or place nothing is asked here, and what is known of it stays.
                if _is_of(live, item.event, places):
                    item.event.learn(live, now_s - item.age_s)
            except Exception:  # whatever another gateway tells must not end this one
                num_left_out += 1
        # Taken out, so that it comes last again: the first names were not heard for longest.
        live.heard.pop(self.gateway, None)
        live.heard[self.gateway] = max(num_heard, self.first + len(self.observed))
        while len(live.heard) > MAX_HEARD:
            del live.heard[next(iter(live.heard))]
        return num_left_out


class WorkHeard(Event[None], frozen=True):
    """A gateway has this under way now; None: it is gone."""

    gateway: str
    work: Work | None

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Instances have its requests and prompts beside those of this gateway."""
        pds = {"", *(pd.name for pd in live.settings.pd_clusters)}
        live.peers.heard(self.gateway, self.work, now_s, places=live.all_places(), pds=pds)


def _is_of(live: LiveScheduler, event: ObservationEvent, places: Set[str]) -> bool:
    if live.settings.models and event.model not in live.settings.models:
        return False
    place = getattr(event, "place", None)
    return place is None or live.place(place, getattr(event, "pd", "")) in places


SharingEvent: TypeAlias = StateRestored | PlanHeard | ObservationsHeard | WorkHeard
