"""The terms of routing: what a request needs, where it can go and why, and what a decision says.

Some requests must be served whole by one engine, whatever the state of the region: several prompts
or choices, prompt logprobs, echo, beam search, multimodal parts, embeddings, nothing to hand over.
Their route is `direct`. `scheduler.routing.short_term` decides about all others. This file is pure
and knows no HTTP, engines, token ids, clocks or what a landing is made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from scheduler.routing.media import MediaShape

Route = Literal["prefill_cluster", "local", "direct"]
Number = int | float

ONE_ENGINE: Final = "one_engine"
"""Target: one instance of the PD cluster prefills and decodes."""

HAND_OFF: Final = "hand_off"
"""Target: a prefill instance of the PD cluster prefills, a decode instance decodes."""

MIN_HAND_OFF_TOKENS: Final = 2
"""The decoding engine always recomputes the last prompt token, so one token leaves nothing."""


class Reason(StrEnum):
    """Why a route was taken. Values are stable: they are metric labels and header values."""

    ABOVE_THRESHOLD = "above_threshold"
    BELOW_THRESHOLD = "below_threshold"
    # The other side is predicted to cost clearly less than the side that the threshold gives.
    REMOTE_SOONER = "remote_sooner"
    LOCAL_SOONER = "local_sooner"
    # One engine must serve it whole.
    SEVERAL_PROMPTS = "several_prompts"
    SEVERAL_CHOICES = "several_choices"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ECHO = "echo"
    BEAM_SEARCH = "beam_search"
    MULTIMODAL = "multimodal"
    PROMPT_EMBEDS = "prompt_embeds"
    NOTHING_TO_HAND_OVER = "nothing_to_hand_over"
    UNUSUAL_BODY = "unusual_body"
    # Its endpoint generates no text (embeddings, tokens of a text), so nothing is prefilled.
    FORWARDED = "forwarded"
    RENDER_REFUSED = "render_refused"
    RENDER_UNAVAILABLE = "render_unavailable"
    # Above the threshold, but not possible at this moment.
    NO_PREFILL_CLUSTER = "no_prefill_cluster"
    PREFILL_UNHEALTHY = "prefill_cluster_unhealthy"
    KVCACHE_UNUSABLE = "kvcache_unusable"
    PREFILL_QUEUE_FULL = "prefill_queue_full"
    NO_LANDING_ROOM = "no_landing_room"
    LINK_BUSY = "link_busy"
    LINK_CONGESTED = "link_congested"
    LINK_DOWN = "link_down"
    LINK_STALE = "link_stale"
    # The cluster has other weights of the request's LoRA adapter, or they are not known.
    ADAPTER_DIFFERS = "adapter_differs"
    # A route was tried and failed.
    RESERVE_FAILED = "reserve_failed"
    PREFILL_FAILED = "prefill_failed"
    DECODE_FAILED = "decode_engine_failed"


class MoveReason(StrEnum):
    """Why a cached prefix of another cluster moves to where a prompt is computed, or does not.

    Values are stable: they are metric labels.
    """

    PAYS = "pays"
    # The move begins and no request waits for it: it measures the link.
    LINK_RATE_UNKNOWN = "link_rate_unknown"
    # Nothing is moved.
    NOTHING_SAVED = "nothing_saved"
    NO_AGENT = "no_agent"
    PREFILL_RATE_UNKNOWN = "prefill_rate_unknown"
    LINK_NOT_CLEAR = "link_not_clear"
    BANDWIDTH_SCARCE = "bandwidth_scarce"
    FAILED_LATELY = "failed_lately"
    LINK_BEING_MEASURED = "link_being_measured"
    TOO_SLOW = "too_slow"
    TOO_LONG = "too_long"


class CacheMove(msgspec.Struct, frozen=True, kw_only=True):
    """A cached prefix that another cluster could send to where a prompt is computed.

    `source` is that cluster, "" if none has a longer prefix. Its prefix has `num_tokens`,
    `saved_tokens` more than the place has itself. They take about `nbytes` and, where the rate of
    the link is known, `seconds`.
    """

    reason: MoveReason
    source: str = ""
    num_tokens: int = 0
    saved_tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether the request waits for the move."""
        return self.reason is MoveReason.PAYS

    @property
    def begins(self) -> bool:
        """Whether the move is made."""
        return self.pays or self.reason is MoveReason.LINK_RATE_UNKNOWN

    def __str__(self) -> str:
        return (
            f"{self.saved_tokens} tokens more in {self.source}, {self.nbytes} bytes, "
            f"{self.seconds:.3g} s: {self.reason}"
        )


NO_MOVE: Final = CacheMove(reason=MoveReason.NOTHING_SAVED)


class PdCached(msgspec.Struct, frozen=True):
    """The cached part of a prompt in a PD cluster: the longest prefix that one of its nodes can
    resume, and the part that is not sent because the node that would decode has it. Tokens.
    """

    local_tokens: int = 0
    landing_tokens: int = 0


NOTHING_CACHED: Final = PdCached()


class RequestShape(msgspec.Struct, frozen=True, kw_only=True):
    """What routing needs to know of a request.

    `num_prompt_tokens` is exact if `is_exact`. Otherwise it is an estimate before rendering, and
    `bound_tokens` is an upper bound, None where no bound is known (media).
    `local_cached_tokens` is the longest prefix that one node of the PD cluster can resume, and
    `prefill_cached_tokens` the same for each prefill cluster; both are 0 where nothing is known.
    `landing_cached_tokens` are not sent, because the node that decodes has their KVCache.
    `sendable_tokens` is the longest prefix that a node of each cluster, PD clusters included, could
    send to another cluster. Clusters that could send nothing may be left out.
    The PD cluster is the request's home. `cached_in_pds` has the same numbers for each other PD
    cluster that has something cached, by name; `at` gives the shape for one of them.
    `other_adapter_in` names the prefill clusters that do not have the request's LoRA adapter with
    the weights that decode it, as far as is known. `render_s` is how long an engine took to turn it
    into tokens, seconds; 0 if none did. With `has_bound_media` only the engine that serves it can
    read its media. `media` are its images and other media, None for text.
    """

    num_prompt_tokens: int
    is_exact: bool = True
    bound_tokens: int | None = None
    num_prompts: int = 1
    num_choices: int = 1
    has_prompt_logprobs: bool = False
    has_echo: bool = False
    has_beam_search: bool = False
    has_bound_media: bool = False
    has_prompt_embeds: bool = False
    is_unusual: bool = False
    local_cached_tokens: int = 0
    prefill_cached_tokens: Mapping[str, int] = MappingProxyType({})
    landing_cached_tokens: int = 0
    sendable_tokens: Mapping[str, int] = MappingProxyType({})
    cached_in_pds: Mapping[str, PdCached] = MappingProxyType({})
    other_adapter_in: frozenset[str] = frozenset()
    render_s: float = 0.0
    media: MediaShape | None = None

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 0:
            raise ValueError(f"num_prompt_tokens must not be negative: {self.num_prompt_tokens}")

    @property
    def at_most_tokens(self) -> float:
        """The most tokens that the prompt can have; infinite where no bound is known."""
        if self.is_exact:
            return self.num_prompt_tokens
        return math.inf if self.bound_tokens is None else self.bound_tokens

    def at(self, pd: str) -> RequestShape:
        """The shape for a PD cluster other than the request's home."""
        cached = self.cached_in_pds.get(pd, NOTHING_CACHED)
        return msgspec.structs.replace(
            self,
            local_cached_tokens=cached.local_tokens,
            landing_cached_tokens=cached.landing_tokens,
        )

    @property
    def local_uncached_tokens(self) -> int:
        """The tokens that the PD cluster would have to compute."""
        return max(0, self.num_prompt_tokens - self.local_cached_tokens)

    def prefill_uncached_tokens(self, cluster: str) -> int:
        """The tokens that this prefill cluster would have to compute."""
        return max(0, self.num_prompt_tokens - self.prefill_cached_tokens.get(cluster, 0))


class Decision(msgspec.Struct, frozen=True):
    """One routing result.

    `target` is the name of the prefill cluster, `ONE_ENGINE` or `HAND_OFF`. `numbers` are the
    values that the reason rests on, for the log, the response header and the request's record.
    `pd` is the name of the PD cluster that decodes.
    """

    route: Route
    target: str
    reason: Reason
    numbers: Mapping[str, Number] = MappingProxyType({})
    pd: str = ""

    @property
    def needs_landing(self) -> bool:
        """Whether KVCache is sent, so that memory must be reserved for it first."""
        return self.target != ONE_ENGINE

    def __str__(self) -> str:
        numbers = "".join(f"; {key}={value}" for key, value in self.numbers.items())
        return f"{self.reason}{numbers}"


def fall_back(failed: Decision, reason: Reason) -> Decision:
    """The route after `failed` did not work out: one engine of its PD cluster does all the work.

    It also names the outcome of a request whose KVCache did not arrive, so that its decode engine
    prefilled it.
    """
    return Decision("local", ONE_ENGINE, reason, failed.numbers, failed.pd)


def one_engine(shape: RequestShape, reason: Reason, pd: str = "") -> Decision:
    """Serve it whole on one engine of `pd`, for a `reason` found outside of routing (no
    rendering).
    """
    return Decision("direct", ONE_ENGINE, reason, _prompt_numbers(shape), pd)


def one_engine_reason(shape: RequestShape) -> Reason | None:
    """Why one engine must serve the request whole, or None when it need not."""
    if shape.has_prompt_embeds:
        return Reason.PROMPT_EMBEDS
    if shape.has_bound_media:
        return Reason.MULTIMODAL
    if shape.num_prompts != 1:
        return Reason.SEVERAL_PROMPTS
    if shape.num_choices < 1:
        return Reason.SEVERAL_CHOICES
    if shape.has_beam_search:
        return Reason.BEAM_SEARCH
    if shape.has_prompt_logprobs:
        return Reason.PROMPT_LOGPROBS
    if shape.has_echo:
        return Reason.ECHO
    if shape.is_unusual:
        return Reason.UNUSUAL_BODY
    return Reason.NOTHING_TO_HAND_OVER if shape.at_most_tokens < MIN_HAND_OFF_TOKENS else None


def _prompt_numbers(shape: RequestShape) -> dict[str, Number]:
    return {length_name(shape): shape.num_prompt_tokens}


def length_name(shape: RequestShape) -> str:
    """The key under which a decision's numbers give the length of the prompt."""
    return "prompt_tokens" if shape.is_exact else "prompt_tokens_about"
