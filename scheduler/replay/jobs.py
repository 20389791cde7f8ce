"""One request on its way through the replay. Plain and mutable, because there are many."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from scheduler.encoding.values import Medium
from scheduler.replay.links import Emitted
from scheduler.routing.prediction import Prediction

if TYPE_CHECKING:
    from scheduler.replay.decode import DecodeInstance

Way = tuple[int, int]
"""A link, by the places of its prefill cluster (from 1 on) and of its PD cluster."""
NEVER = float("nan")


class Fate(IntEnum):
    """What became of a request."""

    OPEN = 0
    DONE = 1
    REFUSED = 2
    """Refused before anything was computed."""
    REFUSED_LATE = 3
    """Refused after its prefill, which was in vain."""
    LOST = 4
    """Its KVCache never landed, and no other instance could prefill it."""


class Decided(NamedTuple):
    """Where a request was to be prefilled and decoded, and why, in the words of the live scheduler;
    "" where it was not asked.
    """

    target: str = ""
    reason: str = ""
    pd: str = ""
    pd_reason: str = ""
    move: str = ""
    """Why a cached prefix was to move there first, or why none was."""
    admission: str = ""


_UNDECIDED = Decided()


class Job:
    """A request. Times are on the replay's clock, `NEVER` until they are known."""

    # There is one for each request of a replay, so slots save much memory.
    __slots__ = (
        "arrival_s",
        "believed_s",
        "blocks",
        "cached_tokens",
        "computed_tokens",
        "decided",
        "decode_instance",
        "decoder",
        "direct_key",
        "done_s",
        "emit_bytes_per_s",
        "emitted",
        "encode_s",
        "encoded_tokens",
        "fate",
        "fell_back",
        "fixed_bytes",
        "given_s",
        "held_s",
        "home",
        "index",
        "instance",
        "is_whole",
        "landed_s",
        "landing_version",
        "media",
        "media_apart",
        "media_left",
        "move_from",
        "move_s",
        "move_tokens",
        "num_tokens",
        "output_tokens",
        "pd",
        "place",
        "predicted",
        "prefill_end_s",
        "ready_s",
        "service_s",
        "slot_s",
        "start_s",
        "step_s",
        "token_bytes",
        "turn_s",
        "was_full",
    )

    def __init__(
        self, index: int, arrival_s: float, num_tokens: int, output_tokens: int, home: int = 0
    ) -> None:
        self.index = index
        self.arrival_s = arrival_s
        self.num_tokens = num_tokens
        self.output_tokens = output_tokens
        self.home = home
        """The PD cluster that it belongs to."""
        self.pd = home
        """The PD cluster that decodes it."""
        self.decided = _UNDECIDED
        """Its first route, also if another one replaced it."""
        self.blocks: Sequence[int] = ()
        self.place = 0
        """The prefill cluster that prefills it, from 1 on; 0: the PD cluster that decodes it."""
        self.instance = ""
        """The instance that prefills it."""
        self.is_whole = False
        """Whether the instance that decodes it prefills it as well."""
        self.decoder: DecodeInstance | None = None
        """The instance that it was given to, until it is there; None: no such one."""
        self.decode_instance = ""
        """The name of that instance, until the request is over."""
        self.was_full = False
        """Whether that instance was full when it got the request."""
        self.direct_key = 0
        """The live scheduler's key of a prompt that is served whole."""
        self.cached_tokens = 0
        self.computed_tokens = 0
        """How many of the other tokens are computed."""
        self.media: tuple[Medium, ...] = ()
        self.media_apart = 0
        """How many of its media the encode stage had encoded for it."""
        self.media_left = 0
        """How many of its media the instance that prefilled it encoded itself."""
        self.encoded_tokens = 0
        """The tokens of those."""
        self.held_s = NEVER
        """Since when an instance has had it, if it has media."""
        self.encode_s = 0.0
        """By how much its media delayed its prefill once it had an instance, seconds."""
        self.believed_s = 0.0
        """The time of its prefill as predicted when its place was known, seconds."""
        self.service_s = 0.0
        """The real time of its prefill, seconds."""
        self.token_bytes = 0.0
        self.fixed_bytes = 0.0
        self.emit_bytes_per_s = 0.0
        self.emitted: Emitted = ()
        """The bytes that its link had been given altogether when its last byte was emitted."""
        self.landing_version = 0
        """The version of its only valid landing event; events with older versions are ignored."""
        self.move_from = 0
        """The station from which a cached prefix is fetched for it; 0: none."""
        self.move_tokens = 0
        self.move_s = 0.0
        """The time at which the fetched prefix is there."""
        self.given_s = NEVER
        """When an instance got it to prefill."""
        self.turn_s = NEVER
        """When that instance had nothing else to compute before it."""
        self.start_s = NEVER
        self.prefill_end_s = NEVER
        self.landed_s = NEVER
        self.ready_s = NEVER
        """The time at which it can have a decode slot: it has landed, and overheads are over."""
        self.slot_s = NEVER
        self.done_s = NEVER
        self.step_s = 0.0
        """The time of its first decode step, seconds."""
        self.predicted: Prediction | None = None
        self.fate = Fate.OPEN
        self.fell_back = False

    @property
    def uncached_tokens(self) -> int:
        """The tokens that have to be computed."""
        return self.num_tokens - self.cached_tokens

    @property
    def way(self) -> Way:
        """The link that its KVCache crosses."""
        return self.place, self.pd

    @property
    def predicted_ttft_s(self) -> float:
        """The predicted TTFT; `NEVER` if nothing was predicted."""
        return NEVER if self.predicted is None else self.predicted.ttft_s
