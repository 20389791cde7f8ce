"""What prompts with media have taught of one model: how long they take beyond their tokens.

An instance that prefills such a prompt encodes the media that have no embedding yet, and prepares
all of them. How long that takes is measured as what the prefill took beyond the same tokens of
text, over the media tokens that were encoded. What is learnt here never changes a prediction for
text: neither prefill times nor how a place serves text.

Pure; time is an argument. This file does not know requests or routes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from scheduler.encoding.line import EncodeLine
from scheduler.encoding.times import line_through
from scheduler.live.learning.place_services import PlaceServices
from scheduler.live.learning.service_meter import ServiceState
from scheduler.routing.prediction import Prediction
from scheduler.routing.service import ServiceModel

MIN_ENCODED: Final = 3
"""The number of prefills after which a place has a line of its own."""
_NUM_ENCODED: Final = 32
"""The prefills that are remembered of a place. All pairs of them are compared after each."""


class MediaPlaceState(msgspec.Struct, frozen=True, array_like=True):
    """What is known of one place: (media tokens, seconds) of the latest prefills, the oldest first,
    and the service model with its age.
    """

    encoded: list[tuple[int, float]]
    service: ServiceState | None = None
    service_age_s: float | None = None


class MediaKnowledge:
    """What was learnt of the prompts with media of one model."""

    def __init__(self) -> None:
        self._encoded: dict[str, deque[tuple[int, float]]] = {}
        self._lines: dict[str, EncodeLine] = {}
        self._services = PlaceServices()

    @property
    def places(self) -> list[str]:
        """The places that something was learnt of."""
        return sorted({*self._encoded, *self._services.places})

    def line(self, place: str) -> EncodeLine | None:
        """How long an instance that prefills there takes to encode: as learnt there, or where most
        was learnt while that is too little. None before anything was.
        """
        found = self._encoded.get(place, ())
        if len(found) < MIN_ENCODED and self._encoded:
            # The name decides between equals, so that the same events give the same line.
            place = max(self._encoded, key=lambda name: (len(self._encoded[name]), name))
        return self._lines.get(place)

    def encoded(self, place: str, num_tokens: int, seconds: float) -> None:
        """A prefill during which media of so many tokens were encoded took `seconds` longer than
        text. Values that cannot be are ignored.
        """
        if num_tokens <= 0 or not math.isfinite(seconds):
            return
        found = self._encoded.setdefault(place, deque(maxlen=_NUM_ENCODED))
        # What text would take is a prediction too, and may be above what was measured.
        found.append((num_tokens, max(0.0, seconds)))
        line = line_through(list(found))
        if line is not None:
            self._lines[place] = line

    def service(self, place: str, now_s: float) -> ServiceModel | None:
        """How prompts with media are served there; None without a recent observation."""
        return self._services.model(place, now_s)

    def observe(self, place: str, predicted: Prediction, measured_s: float, now_s: float) -> None:
        """The first token of a prompt with media came, as `PlaceServices.observe` takes it."""
        self._services.observe(place, predicted, measured_s, now_s)

    def state(self, now_s: float) -> dict[str, MediaPlaceState]:
        """The argument of `restore`."""
        return {
            place: MediaPlaceState(
                list(self._encoded.get(place, ())), *self._services.state(place, now_s)
            )
            for place in self.places
        }

    def restore(self, states: Iterable[tuple[str, MediaPlaceState]], now_s: float) -> None:
        """Go on from a state. ValueError for a service model that is none."""
        for place, kept in states:
            for num_tokens, seconds in kept.encoded:
                self.encoded(place, num_tokens, seconds)
            self._services.restore(place, kept.service, kept.service_age_s, now_s)
