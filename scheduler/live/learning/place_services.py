"""How all places serve beside others: a service model for each, while it is believed.

Pure; time is an argument. This file does not know what is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scheduler.live.learning.service_meter import ServiceMeter, ServiceState
from scheduler.routing.prediction import Prediction
from scheduler.routing.service import ALONE, ServiceModel

SERVICE_KEPT_S: Final = 300.0
"""How long a service model is believed after its last observation, seconds."""
FRESH_S: Final = 30.0
HALF_LIFE_S: Final = 30.0
"""A model without an observation for `FRESH_S` loses half of what it says in each `HALF_LIFE_S`. A
place that a bad moment made look slow is soon tried again: no request that goes elsewhere shows
that it is not.
"""


@dataclass(slots=True)
class _Service:
    """How one place serves, and when that was last observed."""

    meter: ServiceMeter
    at_s: float


class PlaceServices:
    """The service models of places."""

    def __init__(self) -> None:
        self._found: dict[str, _Service] = {}

    @property
    def places(self) -> list[str]:
        """The places that were observed."""
        return list(self._found)

    def model(self, place: str, now_s: float) -> ServiceModel | None:
        """How requests are served there beside others; None without a recent observation."""
        found = self._found.get(place)
        if found is None or (age_s := now_s - found.at_s) > SERVICE_KEPT_S:
            return None
        model = found.meter.model
        if age_s <= FRESH_S or model is ALONE:
            return model
        return model.aged(0.5 ** ((age_s - FRESH_S) / HALF_LIFE_S))

    def observe(self, place: str, predicted: Prediction, measured_s: float, now_s: float) -> None:
        """A first token came at a place, as `ServiceMeter.observe` takes it."""
        found = self._found.get(place)
        # After a long pause the old observations describe another state, so a new meter starts.
        if found is None or now_s - found.at_s > SERVICE_KEPT_S:
            found = self._found[place] = _Service(ServiceMeter(), now_s)
        found.at_s = now_s
        found.meter.observe(predicted, measured_s)

    def state(self, place: str, now_s: float) -> tuple[ServiceState | None, float | None]:
        """What `restore` takes: the state of a place and its age; None if it was not observed."""
        found = self._found.get(place)
        return (None, None) if found is None else (found.meter.state(), now_s - found.at_s)

    def restore(
        self, place: str, state: ServiceState | None, age_s: float | None, now_s: float
    ) -> None:
        """Go on from a state. ValueError for a state that is none."""
        if state is not None and age_s is not None:
            self._found[place] = _Service(ServiceMeter.restored(state), now_s - age_s)
