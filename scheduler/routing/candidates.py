"""The places where one request could be prefilled, each with its prediction.

For `scheduler.routing.short_term`: which places can be had now and if not why, what of the prompt
is cached there, and whether a longer cached prefix is worth fetching from another cluster first.

The cache rule (PrfaaS 3.4.3). A link is abundant when it is clear and carries KVCache faster than
all instances of its cluster would emit it for prompts like this one, with some room; then compute
is what is scarce. Over an abundant link the longest prefix of any cluster may be moved to where the
prompt is computed, and is when the first token comes sooner by that. Over any other link every
cluster has its own cache alone. Prefixes move between the PD cluster and a prefill cluster.

Knows no thresholds and takes no decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, Reason, RequestShape
from scheduler.routing.prediction import Prediction, PrefillTask, predict
from scheduler.routing.profiles import KvProfile
from scheduler.routing.views import ClusterView, RegionSnapshot

MOVE_ROUND_TRIPS: Final = 4
"""Memory at the destination, the order to the source, opening, the last acknowledgement."""


MARGIN_S: Final = 1.0
MARGIN_SHARE: Final = 0.45
MAX_LINK_AGE_S: Final = 5.0
MAX_TAIL_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConfig:
    """What routing knows of the model and how bold it is.

    A request leaves the side that the threshold gives it when the other side's first token is
    predicted sooner by more than `margin_s` + `margin_share` of its predicted TTFT. Prompts with
    more than `hand_off_tokens` uncached use the PD cluster's prefill instances. `overhead_s` is
    measured fixed time by target (`scheduler.routing.prediction.OverheadMeter`).
    """

    kv: KvProfile
    margin_s: float = MARGIN_S
    margin_share: float = MARGIN_SHARE
    hand_off_tokens: int = 1
    max_link_age_s: float = MAX_LINK_AGE_S
    """A link that was last looked at longer ago is not used."""
    max_tail_s: float = MAX_TAIL_S
    """KVCache that would land later than this after its prefill is not sent: transfers are given up
    in the end, and then both were in vain."""
    abundance: float = 1.25
    """Link rate over the cluster's KVCache emission from which on bandwidth is abundant."""
    min_move_saving_s: float = 0.1
    """A prefix is not moved for less."""
    overhead_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for name in ("margin_s", "margin_share", "hand_off_tokens", "min_move_saving_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must not be negative")
        for name in ("max_link_age_s", "max_tail_s", "abundance"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be above 0")


class Candidate(NamedTuple):
    """One place. `cached_tokens` need not be computed there once `cache_from` (a cluster, None: no
    move) has sent what it has more.
    """

    target: str
    cluster: ClusterView
    prediction: Prediction
    cached_tokens: int
    cache_from: str | None = None


def obstacle(
    request: RequestShape,
    cluster: ClusterView,
    snapshot: RegionSnapshot,
    config: RouteConfig,
    now_s: float,
) -> Reason | None:
    """Why a prefill cluster cannot take this request now, or None when it can."""
    link = cluster.link
    if not cluster.is_healthy or not cluster.free_s:
        return Reason.PREFILL_UNHEALTHY
    if link is None or link.age_s + now_s - snapshot.taken_s > config.max_link_age_s:
        return Reason.LINK_STALE
    if link.state is LinkCondition.DOWN or link.available_bytes_per_s == 0:
        return Reason.LINK_DOWN
    if not cluster.takes_jobs:
        return Reason.PREFILL_QUEUE_FULL
    if not has_landing_room(request, snapshot, config.kv):
        return Reason.NO_LANDING_ROOM
    return None


def has_landing_room(request: RequestShape, snapshot: RegionSnapshot, kv: KvProfile) -> bool:
    """Whether the KVCache of the prompt could fit where it would land, as far as known."""
    cap_bytes = snapshot.landing_cap_bytes
    return cap_bytes is None or cap_bytes >= max(1.0, sum(wire_bytes(request, kv)))


def wire_bytes(request: RequestShape, kv: KvProfile) -> tuple[float, float]:
    """(bytes emitted while it is computed, bytes at the end) of what has to be sent."""
    if request.transfer_bytes is not None:
        fixed = min(kv.fixed_bytes, request.transfer_bytes)
        return request.transfer_bytes - fixed, fixed
    missing = max(0, request.num_prompt_tokens - request.landing_cached_tokens)
    return kv.token_bytes * missing, kv.fixed_bytes


def local_candidate(
    request: RequestShape, snapshot: RegionSnapshot, config: RouteConfig, usable: list[ClusterView]
) -> Candidate:
    """The PD cluster. Its prefill instances if it has any that can be used and enough is uncached;
    else one engine, where prefilling holds up decoding.
    """
    cluster, target = _local_place(request, snapshot, config)
    num_tokens = request.num_prompt_tokens
    own = min(request.local_cached_tokens, num_tokens)
    overhead_s = config.overhead_s.get(target, 0.0)
    task = PrefillTask(num_tokens, own)
    prediction = predict(task, cluster, snapshot.decode, overhead_s)
    best = Candidate(target, cluster, prediction, own)
    for source in usable:
        theirs = min(request.prefill_cached_tokens.get(source.name, 0), num_tokens)
        if theirs <= own or source.link is None or not is_abundant(request, source, config):
            continue
        move_s = _move_s(theirs - own, source.link, config.kv)
        task = PrefillTask(num_tokens, theirs, move_s=move_s)
        moved = predict(task, cluster, snapshot.decode, overhead_s)
        if moved.ttft_s + config.min_move_saving_s <= best.prediction.ttft_s:
            best = Candidate(target, cluster, moved, theirs, source.name)
    return best


def remote_candidate(
    request: RequestShape, cluster: ClusterView, snapshot: RegionSnapshot, config: RouteConfig
) -> Candidate:
    """A prefill cluster that can take the request."""
    num_tokens = request.num_prompt_tokens
    own = min(request.prefill_cached_tokens.get(cluster.name, 0), num_tokens)
    overhead_s = config.overhead_s.get(cluster.name, 0.0)
    token_bytes, fixed_bytes = wire_bytes(request, config.kv)
    task = PrefillTask(num_tokens, own, token_bytes, fixed_bytes)
    prediction = predict(task, cluster, snapshot.decode, overhead_s)
    best = Candidate(cluster.name, cluster, prediction, own)
    local = min(request.local_cached_tokens, num_tokens)
    back = cluster.link_back
    if local <= own or not back or not back.available_bytes_per_s:
        return best
    if back.state is not LinkCondition.CLEAR or not is_abundant(request, cluster, config):
        return best
    move_s = _move_s(local - own, back, config.kv)
    task = PrefillTask(num_tokens, local, token_bytes, fixed_bytes, move_s)
    moved = predict(task, cluster, snapshot.decode, overhead_s)
    if moved.ttft_s + config.min_move_saving_s <= prediction.ttft_s:
        return Candidate(cluster.name, cluster, moved, local, snapshot.local.name)
    return best


def is_abundant(request: RequestShape, cluster: ClusterView, config: RouteConfig) -> bool:
    """Whether compute, not the link, limits what the cluster sends for prompts like this one."""
    link = cluster.link
    if link is None or link.state is not LinkCondition.CLEAR or not link.available_bytes_per_s:
        return False
    own = request.prefill_cached_tokens.get(cluster.name, 0)
    prefill_s = cluster.prefill.prefill_s(request.num_prompt_tokens, own)
    emitted = len(cluster.free_s) * sum(wire_bytes(request, config.kv))
    return link.available_bytes_per_s * prefill_s >= config.abundance * emitted


def _local_place(
    request: RequestShape, snapshot: RegionSnapshot, config: RouteConfig
) -> tuple[ClusterView, str]:
    prefill, engines = snapshot.local, snapshot.engines
    hands_off = (
        request.local_uncached_tokens > config.hand_off_tokens
        and prefill.is_healthy
        and prefill.takes_jobs
        and bool(prefill.free_s)
        and has_landing_room(request, snapshot, config.kv)
    )
    if hands_off:
        return prefill, HAND_OFF
    return engines or prefill, ONE_ENGINE


def _move_s(num_tokens: int, link: LinkView, kv: KvProfile) -> float:
    """How long the KVCache of so many tokens, and the state after them, takes over a link."""
    rate = link.available_bytes_per_s
    assert rate, "the caller looks at the rate first"
    nbytes = link.backlog_bytes + kv.size_bytes(num_tokens)
    return nbytes / rate + MOVE_ROUND_TRIPS * link.rtt_s
