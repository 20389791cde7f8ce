"""Where one request is served: by a prefill cluster across the link or inside the PD cluster.

States: none. A snapshot of the region and the shape of one request go in, a `Decision` with a
reason and the numbers it rests on comes out. The same input always gives the same output, so live
traffic, tests and replay may call it alike.

Rules, first match wins:

1. A request that one engine must serve whole (several prompts or choices, prompt logprobs, echo,
   beam search, multimodal parts, embeddings, nothing to hand over) goes `direct`.
2. A prompt whose uncached part is longer than the threshold goes to a healthy prefill cluster that
   still takes jobs, provided the landing has room for it: to the one that has least to compute, the
   least loaded of these. Uncached where: what the PD cluster itself would have to compute decides
   whether the prompt leaves (PrfaaS 3.4: l_total - l_prefix > t), what a prefill cluster would have
   to compute decides which one takes it.
3. Everything else, and what rule 2 could not place, stays `local`: handed from a prefill to a
   decode instance inside the cluster when it has prefill instances and what is uncached is worth
   the hand-off, on one engine otherwise.

This file does not know HTTP, engines, token ids, clocks or what a landing is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal

Route = Literal["prefill_cluster", "local", "direct"]
Number = int | float

ONE_ENGINE: Final = "one_engine"
"""Target: one instance of the PD cluster prefills and decodes."""

HAND_OFF: Final = "hand_off"
"""Target: a prefill instance of the PD cluster prefills, a decode instance decodes."""

MIN_HAND_OFF_TOKENS: Final = 2
"""The last prompt token is always recomputed where decoding happens: one token leaves nothing."""


class Reason(StrEnum):
    """Why a route was taken. Values are stable: they are metric labels and header values."""

    ABOVE_THRESHOLD = "above_threshold"
    BELOW_THRESHOLD = "below_threshold"
    # Against the threshold: the other side is predicted to be clearly sooner.
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
    RENDER_REFUSED = "render_refused"
    RENDER_UNAVAILABLE = "render_unavailable"
    # Long enough, but not now.
    NO_PREFILL_CLUSTER = "no_prefill_cluster"
    PREFILL_UNHEALTHY = "prefill_cluster_unhealthy"
    PREFILL_QUEUE_FULL = "prefill_queue_full"
    NO_LANDING_ROOM = "no_landing_room"
    LINK_DOWN = "link_down"
    LINK_STALE = "link_stale"
    # Tried, and it did not work.
    RESERVE_FAILED = "reserve_failed"
    PREFILL_FAILED = "prefill_failed"
    DECODE_FAILED = "decode_engine_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """What routing needs to know of a request.

    `num_prompt_tokens` is exact when `is_exact`, otherwise an upper bound taken before rendering.
    `transfer_bytes` is what its KVCache takes on the wire, None when the size is not known.
    `local_cached_tokens` is the longest prefix that one node of the PD cluster can resume,
    `prefill_cached_tokens` the same by prefill cluster, both 0 where nothing is known.
    `landing_cached_tokens` need not be sent, because the node that decodes has their KVCache.
    """

    num_prompt_tokens: int
    is_exact: bool = True
    num_prompts: int = 1
    num_choices: int = 1
    has_prompt_logprobs: bool = False
    has_echo: bool = False
    has_beam_search: bool = False
    is_multimodal: bool = False
    has_prompt_embeds: bool = False
    is_unusual: bool = False
    transfer_bytes: int | None = None
    local_cached_tokens: int = 0
    prefill_cached_tokens: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    landing_cached_tokens: int = 0

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 0:
            raise ValueError(f"num_prompt_tokens must not be negative: {self.num_prompt_tokens}")

    @property
    def local_uncached_tokens(self) -> int:
        """What the PD cluster would have to compute."""
        return max(0, self.num_prompt_tokens - self.local_cached_tokens)

    def prefill_uncached_tokens(self, cluster: str) -> int:
        """What that prefill cluster would have to compute."""
        return max(0, self.num_prompt_tokens - self.prefill_cached_tokens.get(cluster, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillClusterView:
    """One prefill cluster as last reported. `max_queue_depth` None means unbounded or unknown."""

    name: str
    is_healthy: bool
    queue_depth: int = 0
    num_running: int = 0
    num_instances: int = 1
    max_queue_depth: int | None = None

    @property
    def takes_jobs(self) -> bool:
        """Whether one more job fits its queue."""
        return self.max_queue_depth is None or self.queue_depth < self.max_queue_depth

    @property
    def load(self) -> float:
        """Jobs queued or running per instance."""
        return (self.queue_depth + self.num_running) / max(1, self.num_instances)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalView:
    """The PD cluster as last reported. `landing_free_bytes` None means not known: try it."""

    is_healthy: bool = True
    has_prefill_instances: bool = False
    landing_free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionView:
    """Everything routing may look at besides the request itself.

    Prompts with more than `threshold_tokens` uncached are offloaded; those with more than
    `hand_off_tokens` use the PD cluster's own prefill instances, where there are any.
    """

    prefill_clusters: tuple[PrefillClusterView, ...]
    local: LocalView
    threshold_tokens: int
    hand_off_tokens: int = MIN_HAND_OFF_TOKENS - 1


@dataclass(frozen=True, slots=True)
class Decision:
    """One routing result.

    `target` is the prefill cluster's name, `ONE_ENGINE` or `HAND_OFF`. `numbers` hold what the
    reason rests on, for the log, the response header and the request's record.
    """

    route: Route
    target: str
    reason: Reason
    numbers: Mapping[str, Number] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def needs_landing(self) -> bool:
        """Whether KVCache will be moved, so that memory must be reserved for it first."""
        return self.target != ONE_ENGINE

    def __str__(self) -> str:
        numbers = "".join(f"; {key}={value}" for key, value in self.numbers.items())
        return f"{self.reason}{numbers}"


def decide(shape: RequestShape, view: RegionView, *, excluded: Set[str] = frozenset()) -> Decision:
    """Route one request, passing over the clusters in `excluded` (they failed this request)."""
    whole = one_engine_reason(shape)
    if whole is not None:
        return Decision("direct", ONE_ENGINE, whole, _prompt_numbers(shape))
    numbers = _prompt_numbers(shape) | {"threshold_tokens": view.threshold_tokens}
    if shape.local_uncached_tokens <= view.threshold_tokens:
        return _stay_local(shape, view, Reason.BELOW_THRESHOLD, numbers)
    obstacle = _obstacle(shape, view, excluded)
    if obstacle is not None:
        reason, seen = obstacle
        return _stay_local(shape, view, reason, numbers | seen)

    def cost(cluster: PrefillClusterView) -> tuple[int, float, str]:
        return shape.prefill_uncached_tokens(cluster.name), cluster.load, cluster.name

    best = min(_usable(view, excluded), key=cost)
    numbers |= _cache_numbers(shape, shape.prefill_cached_tokens.get(best.name, 0))
    numbers |= {"queue_depth": best.queue_depth, "running": best.num_running}
    return Decision("prefill_cluster", best.name, Reason.ABOVE_THRESHOLD, _frozen(numbers))


def decide_early(shape: RequestShape, view: RegionView) -> Decision | None:
    """Route a request whose exact token count is not known yet, or say None: render it first.

    Rendering costs a round trip to an engine. It is only worth that when the KVCache may have to
    move, and then the token ids are needed anyhow; an upper bound shows when it will not. What is
    cached cannot change that: it only ever keeps a prompt where it is.
    """
    decision = decide(shape, view)
    return decision if shape.is_exact or not decision.needs_landing else None


def fall_back(failed: Decision, reason: Reason) -> Decision:
    """The route after `failed` did not work out: one engine of the PD cluster does all the work.

    Also the name for a request whose KVCache did not arrive and whose decode engine prefilled it.
    """
    return Decision("local", ONE_ENGINE, reason, failed.numbers)


def one_engine(shape: RequestShape, reason: Reason) -> Decision:
    """Serve it whole on one engine for a `reason` found outside of routing (no rendering)."""
    return Decision("direct", ONE_ENGINE, reason, _prompt_numbers(shape))


def one_engine_reason(shape: RequestShape) -> Reason | None:
    """Why one engine must serve the request whole, or None when it need not."""
    checks: tuple[tuple[bool, Reason], ...] = (
        (shape.has_prompt_embeds, Reason.PROMPT_EMBEDS),
        (shape.is_multimodal, Reason.MULTIMODAL),
        (shape.num_prompts != 1, Reason.SEVERAL_PROMPTS),
        (shape.num_choices != 1, Reason.SEVERAL_CHOICES),
        (shape.has_beam_search, Reason.BEAM_SEARCH),
        (shape.has_prompt_logprobs, Reason.PROMPT_LOGPROBS),
        (shape.has_echo, Reason.ECHO),
        (shape.is_unusual, Reason.UNUSUAL_BODY),
        (shape.num_prompt_tokens < MIN_HAND_OFF_TOKENS, Reason.NOTHING_TO_HAND_OVER),
    )
    return next((reason for applies, reason in checks if applies), None)


def _obstacle(
    shape: RequestShape, view: RegionView, excluded: Set[str]
) -> tuple[Reason, dict[str, Number]] | None:
    """Why a long prompt cannot be offloaded now, or None when it can."""
    clusters = view.prefill_clusters
    if not clusters:
        return Reason.NO_PREFILL_CLUSTER, {}
    if all(cluster.name in excluded for cluster in clusters):
        return Reason.PREFILL_FAILED, {"clusters_tried": len(clusters)}
    healthy = [c for c in clusters if c.is_healthy and c.name not in excluded]
    if not healthy:
        return Reason.PREFILL_UNHEALTHY, {"clusters": len(clusters)}
    if not any(cluster.takes_jobs for cluster in healthy):
        return Reason.PREFILL_QUEUE_FULL, {"queue_depth": min(c.queue_depth for c in healthy)}
    if not _has_landing_room(shape, view.local):
        return Reason.NO_LANDING_ROOM, {"landing_free_bytes": view.local.landing_free_bytes or 0}
    return None


def _usable(view: RegionView, excluded: Set[str]) -> list[PrefillClusterView]:
    return [
        cluster
        for cluster in view.prefill_clusters
        if cluster.is_healthy and cluster.takes_jobs and cluster.name not in excluded
    ]


def _has_landing_room(shape: RequestShape, local: LocalView) -> bool:
    if local.landing_free_bytes is None:
        return True
    return local.landing_free_bytes >= max(1, shape.transfer_bytes or 1)


def _stay_local(
    shape: RequestShape, view: RegionView, reason: Reason, numbers: Mapping[str, Number]
) -> Decision:
    hands_off = (
        view.local.has_prefill_instances
        and shape.local_uncached_tokens > view.hand_off_tokens
        and _has_landing_room(shape, view.local)
    )
    target = HAND_OFF if hands_off else ONE_ENGINE
    cached = _cache_numbers(shape, shape.local_cached_tokens)
    return Decision("local", target, reason, _frozen(dict(numbers) | cached))


def _prompt_numbers(shape: RequestShape) -> dict[str, Number]:
    name = "prompt_tokens" if shape.is_exact else "prompt_tokens_at_most"
    return {name: shape.num_prompt_tokens}


def _cache_numbers(shape: RequestShape, cached_tokens: int) -> dict[str, Number]:
    """What is cached where the prompt is computed; nothing before it has been counted."""
    if not shape.is_exact:
        return {}
    cached_tokens = min(cached_tokens, shape.num_prompt_tokens)
    return {
        "cached_tokens": cached_tokens,
        "uncached_tokens": shape.num_prompt_tokens - cached_tokens,
    }


def _frozen(numbers: Mapping[str, Number]) -> Mapping[str, Number]:
    return MappingProxyType(dict(numbers))
