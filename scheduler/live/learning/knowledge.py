"""What requests have taught about one model: how long things take and how big they are.

Places are a prefill cluster's name, `HAND_OFF` and `ONE_ENGINE` (`scheduler.routing.decision`). A
place with too few observations borrows the profile of the place with the most: the model is the
same, and a route must compare sides before both were tried. Its own first prefills set the level of
the borrowed profile. Pure; time is an argument. This file does not know requests, reports or
routes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from statistics import median
from typing import Final

import msgspec

from scheduler.live.learning.learned_profile import (
    MIN_SEEN,
    LearnedProfile,
    ProfileState,
    profile_through,
)
from scheduler.live.learning.means import Mean, MeanState, StepLine
from scheduler.live.learning.measured_traffic import TrafficMeter, TrafficState
from scheduler.live.learning.media_knowledge import MediaKnowledge, MediaPlaceState
from scheduler.live.learning.place_services import PlaceServices
from scheduler.live.learning.prompt_length import LengthEstimator, LengthsState
from scheduler.live.learning.service_meter import ServiceState
from scheduler.routing.prediction import Prediction
from scheduler.routing.profiles import KvProfile, PrefillProfile
from scheduler.routing.service import ALONE, ServiceModel

FAR_BEYOND: Final = 2.0
"""A place whose longest prompt was this many times shorter than another's is not believed beyond
it: its times grow there as the other's do.
"""
NUM_ERRORS: Final = 64
NUM_SIZES: Final = 64
MAX_CALIBRATIONS: Final = 16
"""The keys that are remembered of a place, the latest ones."""


class PlaceState(msgspec.Struct, frozen=True, array_like=True):
    """The knowledge of one place. An age is None for something that has not happened."""

    profile: ProfileState | None
    service: ServiceState | None
    service_age_s: float | None
    tried_age_s: float | None
    errors: list[float]
    calibrations: list[str] = []
    """What was timed there while it was idle, the keys of `ModelKnowledge.calibrated`."""


class KnowledgeState(msgspec.Struct, frozen=True, array_like=True):
    """The knowledge of one model, as it is kept and sent. `sizes` are the tokens and bytes of
    landings.
    """

    traffic: TrafficState
    lengths: LengthsState
    places: dict[str, PlaceState]
    sizes: list[tuple[int, int]]
    decode: MeanState
    step: MeanState
    homes: dict[str, TrafficState] = {}
    """The traffic of each home, where there are several."""
    media: dict[str, MediaPlaceState] = {}
    """What prompts with media have taught, by place."""
    steps: list[tuple[MeanState, MeanState]] = []
    """What `StepLine` keeps."""


class KvMeter:
    """Fixed and per-token bytes of a prompt's KVCache: a line through the sizes of landings."""

    def __init__(self) -> None:
        self._sizes: deque[tuple[int, int]] = deque()
        # Sums over `_sizes`: x, y, x squared, x times y. Sums of integers do not drift as values
        # leave.
        self._sums = (0, 0, 0, 0)
        self.profile: KvProfile | None = None
        """None before a landing was reserved. With one length only, all bytes count as per token.
        """

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Tokens and bytes of the latest landings, the oldest first."""
        return list(self._sizes)

    def observe(self, sent_tokens: int, nbytes: int) -> None:
        """A landing of `nbytes` for `sent_tokens`, without the tokens that were there before."""
        if sent_tokens <= 0 or nbytes <= 0:
            return
        old_tokens, old_bytes = self._sizes.popleft() if len(self._sizes) == NUM_SIZES else (0, 0)
        self._sizes.append((sent_tokens, nbytes))
        x, y, xx, xy = self._sums
        self._sums = (
            x + sent_tokens - old_tokens,
            y + nbytes - old_bytes,
            xx + sent_tokens * sent_tokens - old_tokens * old_tokens,
            xy + sent_tokens * nbytes - old_tokens * old_bytes,
        )
        self.profile = self._line()

    def _line(self) -> KvProfile:
        num, (x, y, xx, xy) = len(self._sizes), self._sums
        # All landings had one length, so nothing says which bytes are fixed.
        spread = num * xx - x * x
        if not spread:
            return KvProfile(0.0, y / x)
        # Neither part may be negative, and the line goes through the mean in any case.
        slope = min(max((num * xy - x * y) / spread, 0.0), y / x)
        return KvProfile(max(0.0, (y - slope * x) / num), slope)


class ModelKnowledge:
    """What was learnt of one served model."""

    def __init__(self) -> None:
        self.traffic = TrafficMeter()
        self._homes: dict[str, TrafficMeter] = {}
        self.lengths = LengthEstimator()
        self._profiles: dict[str, LearnedProfile] = {}
        # The answers of `prefill`, and the place with the most prefills, from which others borrow.
        self._best: dict[str, PrefillProfile] = {}
        self._most: LearnedProfile | None = None
        self._services = PlaceServices()
        self.media = MediaKnowledge()
        self._tried_s: dict[str, float] = {}
        self._calibrations: dict[str, list[str]] = {}
        self._errors: dict[str, deque[float]] = {}
        self._kv = KvMeter()
        self._decode = Mean()
        self._step = Mean()
        self._steps = StepLine()

    @classmethod
    def restored(cls, state: KnowledgeState, now_s: float) -> ModelKnowledge:
        """The knowledge that `state` was made of, which then was as old as its ages say."""
        found = cls()
        found.traffic = TrafficMeter.restored(state.traffic, now_s)
        for home, prompts in state.homes.items():
            found.traffic_of(home).restore_prompts(prompts, now_s)
        found.lengths = LengthEstimator.restored(state.lengths)
        for place, kept in state.places.items():
            if kept.profile is not None:
                found._profiles[place] = LearnedProfile.restored(kept.profile)
            found._services.restore(place, kept.service, kept.service_age_s, now_s)
            if kept.tried_age_s is not None:
                found._tried_s[place] = now_s - kept.tried_age_s
            if kept.calibrations:
                found._calibrations[place] = list(kept.calibrations)
            if kept.errors:
                found._errors[place] = deque(kept.errors, maxlen=NUM_ERRORS)
        for size in state.sizes:
            found._kv.observe(*size)
        found._decode.restore(state.decode)
        found._step.restore(state.step)
        found._steps.restore(state.steps)
        found.media.restore(state.media.items(), now_s)
        return found

    def state(self, now_s: float) -> KnowledgeState:
        """The argument of `restored`. It has ages, since another process has another clock."""
        places = {*self._profiles, *self._services.places, *self._tried_s}
        return KnowledgeState(
            self.traffic.state(now_s),
            self.lengths.state(),
            {place: self._place_state(place, now_s) for place in sorted(places)},
            self._kv.sizes,
            self._decode.state(),
            self._step.state(),
            {home: traffic.state(now_s) for home, traffic in self._homes.items()},
            self.media.state(now_s),
            self._steps.state(),
        )

    def _place_state(self, place: str, now_s: float) -> PlaceState:
        profile = self._profiles.get(place)
        tried_s = self._tried_s.get(place)
        return PlaceState(
            None if profile is None else profile.state(),
            *self._services.state(place, now_s),
            None if tried_s is None else now_s - tried_s,
            list(self._errors.get(place, ())),
            list(self._calibrations.get(place, ())),
        )

    def traffic_of(self, home: str) -> TrafficMeter:
        """The requests of one home, where the region has several."""
        found = self._homes.get(home)
        if found is None:
            found = self._homes[home] = self.traffic.part()
        return found

    def profile(self, place: str) -> LearnedProfile:
        """The profile that was learnt at this place itself. Only read it: `learn` adds to it."""
        found = self._profiles.get(place)
        if found is None:
            found = self._profiles[place] = LearnedProfile()
        return found

    def believe(self, place: str, profile: PrefillProfile) -> None:
        """Start from a profile that was measured beforehand, such as a plan's."""
        self._profiles[place] = LearnedProfile(profile)
        self._forget_best()

    def is_calibrated(self, place: str, key: str) -> bool:
        """Whether prefills of this key were timed at a place."""
        return key in self._calibrations.get(place, ())

    def calibrated(self, place: str, key: str, prefills: Sequence[tuple[int, float]]) -> None:
        """An idle instance of a place computed these prompts: tokens and seconds of each.

        `key` names what the times are of; a key that is known teaches nothing again. What was
        learnt under other keys is of other weights or another layout, and begins anew.
        """
        keys = self._calibrations.setdefault(place, [])
        line = profile_through(prefills)
        if key in keys or line is None:
            return
        has_changed = bool(keys)
        keys.append(key)
        del keys[:-MAX_CALIBRATIONS]
        if has_changed or not self.profile(place).is_known:
            self.believe(place, line)
        else:
            for num_tokens, seconds in prefills:
                self.learn(place, num_tokens, 0, seconds)

    def prefill(self, place: str) -> PrefillProfile:
        """The best profile for a place: its own, or a borrowed one while its own is not known."""
        found = self._best.get(place)
        if found is None:
            found = self._best[place] = self._own_or_borrowed(place)
        return found

    def _own_or_borrowed(self, place: str) -> PrefillProfile:
        own = self.profile(place)
        if own.is_known:
            # Short prompts say little of long ones.
            widest = max(self._profiles.values(), key=attrgetter("reach_tokens"))
            if widest.is_known and widest.reach_tokens > FAR_BEYOND * own.reach_tokens:
                return own.profile.extended(own.reach_tokens, widest.profile)
            return own.profile
        most = self._most
        if most is None:
            most = self._most = max(self._profiles.values(), key=attrgetter("num_seen"))
        if most.is_known or not own.num_seen:
            return own.scaled(most.profile)
        return own.profile

    def prefilled(
        self,
        place: str,
        num_tokens: int,
        cached_tokens: int,
        seconds: float,
        now_s: float,
        *,
        encoded_tokens: int | None = None,
    ) -> None:
        """A prefill took `seconds` by itself. Media with `encoded_tokens` were encoded during it,
        None if the prompt is text. Those teach nothing about text, unless nothing else has yet: any
        time is nearer than a guess.
        """
        self.tried(place, now_s)
        if encoded_tokens is None or not self.is_known:
            self.learn(place, num_tokens, cached_tokens, seconds)
            return
        text_s = self.prefill(place).prefill_s(num_tokens, cached_tokens)
        self.media.encoded(place, encoded_tokens, seconds - text_s)

    def learn(self, place: str, num_tokens: int, cached_tokens: int, seconds: float) -> None:
        """Take over how long a prefill took, whenever it was."""
        self.profile(place).observe(num_tokens, cached_tokens, seconds)
        self._forget_best()

    def _forget_best(self) -> None:
        """Other places may borrow something else from now on."""
        self._best.clear()
        self._most = None

    def tried(self, place: str, now_s: float) -> None:
        """A request was given to a place, which will show how fast it is."""
        self._tried_s[place] = now_s

    def untried_s(self, place: str, now_s: float) -> float:
        """How long nothing was learnt of a place; infinite for one that was never tried."""
        return now_s - self._tried_s.get(place, -math.inf)

    @property
    def places(self) -> list[str]:
        """All places that prefilled or answered for this model."""
        return sorted({*self._profiles, *self._services.places})

    @property
    def is_known(self) -> bool:
        """Whether enough was measured, or timed in an idle instance, for predictions to overrule
        thresholds and to refuse requests. Before that they are mere guesses.
        """
        return any(learned.is_known for learned in self._profiles.values())

    @property
    def kv(self) -> KvProfile | None:
        """The KVCache of a prompt by length."""
        return self._kv.profile

    @property
    def decode_s(self) -> float | None:
        """Time from the first to the last token of an answer."""
        return self._decode.value

    @property
    def step_s(self) -> float | None:
        """Time from one token to the next, as it was of late."""
        return self._step.value

    def full_step_s(self, batch_size: int) -> float | None:
        """The same in a batch of this size, however small batches are now."""
        return self._steps.at(batch_size) or self._step.value

    def service(self, place: str, now_s: float) -> ServiceModel:
        """How requests are served there beside others; `ALONE` without a recent observation."""
        return self._services.model(place, now_s) or ALONE

    def error(self, place: str) -> float | None:
        """Median of |predicted / measured - 1| of the latest TTFTs; None before the first."""
        errors = self._errors.get(place)
        return median(errors) if errors else None

    def reserved(self, num_tokens: int, cached_tokens: int, nbytes: int) -> None:
        """A landing for `num_tokens`, of which it has `cached_tokens`, took `nbytes`."""
        self._kv.observe(num_tokens - cached_tokens, nbytes)

    def answered(
        self,
        place: str,
        predicted: Prediction,
        measured_s: float,
        now_s: float,
        *,
        teaches_service: bool = True,
        has_media: bool = False,
        waited_s: float = 0.0,
        prompt: tuple[int, int] = (0, 0),
    ) -> None:
        """A first token came, predicted when the request was routed and measured from its arrival.

        It teaches nothing about how the place serves if the profile of another place predicted it,
        or if `teaches_service` is False. With `has_media` it teaches nothing about text. Its waits
        took `waited_s` longer than predicted, which is no matter of the place. `prompt` has its
        tokens, and those that were cached; (0, 0): nobody counted them.
        """
        predicted_s = predicted.ttft_s
        if not (0 < measured_s < math.inf and 0 <= predicted_s < math.inf):
            return
        errors = self._errors.setdefault(place, deque(maxlen=NUM_ERRORS))
        errors.append(abs(predicted_s / measured_s - 1))
        # Without a calibration, another place's profile predicted the first `MIN_SEEN` prefills.
        own = self.profile(place)
        is_borrowed = not own.has_prior and own.num_seen <= MIN_SEEN and not has_media
        if is_borrowed or not teaches_service:
            return
        if prompt[0]:
            # What its prefill time was wrong by is known by now, and no matter of how it is served.
            predicted = predicted._replace(prefill_s=self.prefill(place).prefill_s(*prompt))
        services = self.media if has_media else self._services
        services.observe(place, predicted, measured_s - waited_s, now_s)

    def decoded(
        self, num_tokens: int, seconds: float, now_s: float, batch: int | None = None
    ) -> None:
        """An answer of `num_tokens` ended `seconds` after its first token, in a `batch` of so many
        requests where that is known.
        """
        self.traffic.finished(num_tokens, now_s)
        self._decode.observe(seconds)
        if num_tokens > 1:
            self._step.observe(seconds / (num_tokens - 1))
            self._steps.observe(batch or 0, seconds / (num_tokens - 1))
