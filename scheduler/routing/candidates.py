"""The places where one request could be prefilled, each with its prediction.

It answers three questions for `scheduler.routing.short_term`: which places are available and why
others are not, what of the prompt each has cached, and whether it pays to fetch a longer cached
prefix from another cluster first.

The cache rule (PrfaaS 3.4.3) holds for a prompt computed on either side. The link of a prefill
cluster is abundant when it is clear and carries KVCache with some room faster than all instances of
the cluster would emit it for prompts like this one; compute is then the scarce resource. Between
clusters with abundant links, the best cached prefix moves to where the prompt is computed, if that
makes the first token come sooner. Otherwise each cluster's cache counts alone.

Only measured rates count. Where nobody knows what the link in the needed direction carries, the
move begins and the request does not wait for it. Later requests then know the rate.

This file knows no thresholds and takes no decision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.routing.decision import (
    HAND_OFF,
    NO_MOVE,
    ONE_ENGINE,
    CacheMove,
    MoveReason,
    Reason,
    RequestShape,
)
from scheduler.routing.prediction import Prediction, PrefillTask, predict
from scheduler.routing.profiles import KvProfile
from scheduler.routing.service import ALONE, ServiceModel
from scheduler.routing.views import ClusterView, DecodeView, RegionSnapshot

MOVE_ROUND_TRIPS: Final = 4
"""The round trips of a move beyond its bytes: reserving memory at the destination, the order to the
source, opening the transfer, and the last acknowledgement.
"""

MAX_MOVE_S: Final = 10.0
"""The longest that a request waits for a cached prefix, seconds."""
MIN_MOVE_SAVING_S: Final = 0.1
"""A cached prefix moves only if it makes the first token come sooner by at least this, seconds."""
ABUNDANCE: Final = 1.25
"""Bandwidth is abundant from this ratio of link rate to the cluster's KVCache emission on."""

MARGIN_S: Final = 0.5
MARGIN_SHARE: Final = 0.25
HOME_MARGIN_S: Final = 0.1
HOME_MARGIN_SHARE: Final = 0.3
STREAM_WEIGHT: Final = 0.25


_NOT_NEGATIVE: Final = (
    *("margin_s", "margin_share", "home_margin_s", "home_margin_share"),
    *("stream_weight", "hand_off_tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteLimits:
    """When a request may leave the side that the threshold gives it, and use a link."""

    margin_s: float = MARGIN_S
    """How much less a prefill cluster must cost for a prompt that belongs to the PD cluster,
    seconds; added to `margin_share`.
    """
    margin_share: float = MARGIN_SHARE
    """The same as a share of what the PD cluster costs; added to `margin_s`."""
    # Lower than the margin of the other direction: staying needs no link.
    home_margin_s: float = HOME_MARGIN_S
    """How much less the PD cluster must cost for a prompt that belongs to a prefill cluster,
    seconds; added to `home_margin_share`.
    """
    home_margin_share: float = HOME_MARGIN_SHARE
    """The same as a share of what the prefill cluster costs; added to `home_margin_s`."""
    stream_weight: float = STREAM_WEIGHT
    """What a second costs by which a prefill holds up a running answer, in seconds of TTFT."""
    # Transfers are given up in the end, and then prefill and transfer were in vain.
    max_tail_s: float = 20.0
    """A link that would take longer after the prefill keeps the prompt local, seconds."""
    max_link_age_s: float = 5.0
    """A link without a report for this long keeps prompts local, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConfig(RouteLimits):
    """What routing knows of the model, and its limits.

    Prompts with more than `hand_off_tokens` uncached tokens use the PD cluster's prefill instances.
    `service` is what was learnt of contention, by target.
    """

    kv: KvProfile
    hand_off_tokens: int
    is_known: bool = True
    """Whether prefill times and `kv` were measured. No prefix moves because of a guess."""
    service: Mapping[str, ServiceModel] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        least = min(
            *(self.margin_s, self.margin_share, self.home_margin_s, self.home_margin_share),
            *(self.stream_weight, self.hand_off_tokens),
        )
        # One comparison for all of them on the usual path: every route makes a configuration.
        if least >= 0 and min(self.max_link_age_s, self.max_tail_s) > 0:
            return
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must not be negative")
        for name in ("max_link_age_s", "max_tail_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be above 0")


class Candidate(NamedTuple):
    """One place. It need not compute `cached_tokens`, which include those of a `move` that pays.

    `harm_s` is what the prefill costs running answers, in seconds of TTFT.
    """

    target: str
    cluster: ClusterView
    prediction: Prediction
    cached_tokens: int
    move: CacheMove = NO_MOVE
    harm_s: float = 0.0

    @property
    def cost_s(self) -> float:
        """What sides are compared by: the time to first token, and what others lose by it."""
        return self.prediction.ttft_s + self.harm_s


class _Asked(NamedTuple):
    """The arguments shared by all candidates of one request. Clusters in `excluded` send no
    cache.
    """

    request: RequestShape
    snapshot: RegionSnapshot
    config: RouteConfig
    excluded: Set[str]


def obstacle(
    request: RequestShape,
    cluster: ClusterView,
    snapshot: RegionSnapshot,
    config: RouteConfig,
    now_s: float,
) -> Reason | None:
    """Why a prefill cluster cannot take this request now, or None when it can."""
    link = cluster.link
    # First, since instances whose KVCache nobody in the region can use do not count as healthy.
    if not cluster.can_feed:
        return Reason.KVCACHE_UNUSABLE
    if not cluster.is_healthy or not cluster.free_s:
        # `free_s` is empty when every instance is down or draining, also while the front still
        # answers.
        return Reason.PREFILL_UNHEALTHY
    # `age_s` is the age of the link's view at `taken_s`.
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
    """Whether the KVCache of the prompt fits into the landing memory, as far as that is known."""
    room_bytes = snapshot.landing_room_bytes
    # Every landing takes memory, so a full arena (0) has no room even where nothing is known of
    # sizes.
    return room_bytes is None or room_bytes >= max(1.0, sum(wire_bytes(request, kv)))


def wants_hand_off(request: RequestShape, snapshot: RegionSnapshot, config: RouteConfig) -> bool:
    """Whether a prefill instance of the PD cluster should compute it, if there is no
    `hand_off_obstacle`.
    """
    prefill = snapshot.local
    return (
        request.local_uncached_tokens > config.hand_off_tokens
        and prefill.is_healthy
        and prefill.takes_jobs
        and bool(prefill.free_s)
    )


def hand_off_obstacle(
    request: RequestShape, snapshot: RegionSnapshot, config: RouteConfig
) -> Reason | None:
    """Why the KVCache of one of the PD cluster's instances cannot be given to another one now."""
    if not snapshot.local.can_feed:
        return Reason.KVCACHE_UNUSABLE
    return None if has_landing_room(request, snapshot, config.kv) else Reason.NO_LANDING_ROOM


def wire_bytes(request: RequestShape, kv: KvProfile) -> tuple[float, float]:
    """What the transfer sends: (bytes during the prefill, bytes when it has ended)."""
    missing = max(0, request.num_prompt_tokens - request.landing_cached_tokens)
    return kv.token_bytes * missing, kv.fixed_bytes


def local_candidate(
    request: RequestShape,
    snapshot: RegionSnapshot,
    config: RouteConfig,
    excluded: Set[str] = frozenset(),
) -> Candidate:
    """The PD cluster as a candidate.

    That is its prefill instances, if one is usable and enough of the prompt is uncached. It is one
    engine, whose prefill delays the decodes that run there, if not, or if that was measured and
    costs less by the margin of staying at home. No cache comes from clusters in `excluded`.
    """
    asked = _Asked(request, snapshot, config, excluded)
    whole = snapshot.engines or snapshot.local
    if not (
        wants_hand_off(request, snapshot, config)
        and hand_off_obstacle(request, snapshot, config) is None
    ):
        return _local(ONE_ENGINE, whole, asked)
    handed = _local(HAND_OFF, snapshot.local, asked)
    # A prompt holds up all answers of a decode engine, so it does not go there on a guess.
    is_measured = config.service.get(ONE_ENGINE, ALONE) is not ALONE
    if snapshot.engines is None or not is_measured:
        return handed
    direct = _local(ONE_ENGINE, whole, asked)
    is_sooner = is_cheaper(direct, handed, config.home_margin_s, config.home_margin_share)
    return direct if is_sooner else handed


def is_cheaper(other: Candidate, own: Candidate, margin_s: float, margin_share: float) -> bool:
    """Whether leaving `own` gains more than the margin. Any finite cost beats an infinite one."""
    other_s, own_s = other.cost_s, own.cost_s
    if own_s == math.inf:
        return other_s < math.inf
    return other_s + margin_s + margin_share * own_s < own_s


def _local(target: str, cluster: ClusterView, asked: _Asked) -> Candidate:
    request = asked.request
    num_tokens = request.num_prompt_tokens
    cached_tokens = min(request.local_cached_tokens, num_tokens)
    task = PrefillTask(num_tokens, cached_tokens)
    if request.media is not None:
        task = task._replace(media=request.media.task(cluster.name, cached_tokens))
    return _with_best_cache(task, target, cluster, asked)


def whole_prediction(
    request: RequestShape, snapshot: RegionSnapshot, config: RouteConfig
) -> Prediction:
    """The prediction for a request that one engine of the PD cluster must serve whole."""
    num_tokens = request.num_prompt_tokens
    cached_tokens = min(request.local_cached_tokens, num_tokens)
    cluster = snapshot.engines or snapshot.local
    task = PrefillTask(num_tokens, cached_tokens)
    if request.media is not None:
        task = task._replace(media=request.media.task(cluster.name, cached_tokens))
    service = config.service.get(ONE_ENGINE, ALONE)
    load = snapshot.load(cluster, request.render_s)
    return predict(task, cluster, snapshot.decode, service, load)


def remote_candidate(
    request: RequestShape,
    cluster: ClusterView,
    snapshot: RegionSnapshot,
    config: RouteConfig,
    excluded: Set[str] = frozenset(),
) -> Candidate:
    """A prefill cluster that can take the request, as a candidate."""
    num_tokens = request.num_prompt_tokens
    cached_tokens = min(request.prefill_cached_tokens.get(cluster.name, 0), num_tokens)
    task = PrefillTask(num_tokens, cached_tokens, *wire_bytes(request, config.kv))
    if request.media is not None:
        task = task._replace(media=request.media.task(cluster.name, cached_tokens))
    asked = _Asked(request, snapshot, config, excluded)
    return _with_best_cache(task, cluster.name, cluster, asked)


def is_abundant(request: RequestShape, cluster: ClusterView, config: RouteConfig) -> bool:
    """Whether compute, not the link, limits what the cluster sends for prompts like this one."""
    link = cluster.link
    if link is None or link.state is not LinkCondition.CLEAR:
        return False
    rate = link.available_bytes_per_s
    # Nobody asked this link for more than it carried, so its rate is no limit that was observed.
    if rate is None or link.is_floor:
        return not link.backlog_bytes
    own = request.prefill_cached_tokens.get(cluster.name, 0)
    # PrfaaS equation 2 for this prompt: all instances emit its KVCache once per prefill time.
    prefill_s = cluster.prefill.prefill_s(request.num_prompt_tokens, own)
    emitted = len(cluster.free_s) * sum(wire_bytes(request, config.kv))
    return rate > 0 and rate * prefill_s >= ABUNDANCE * emitted


def _with_best_cache(
    task: PrefillTask, target: str, cluster: ClusterView, asked: _Asked
) -> Candidate:
    """The place with the cache that makes its first token come first: its own or one that moves.

    Without a move, `move` has the reason of the longest prefix elsewhere.
    """
    service = asked.config.service.get(target, ALONE)
    load = asked.snapshot.load(cluster, asked.request.render_s)
    prediction = predict(task, cluster, asked.snapshot.decode, service, load)
    harm_s = _harm_s(target, prediction, asked.snapshot.decode, asked.config)
    own = Candidate(target, cluster, prediction, task.cached_tokens, harm_s=harm_s)
    if not asked.request.sendable_tokens:
        return own
    others = [
        _with_cache_of(source, min(sendable, task.num_tokens), own, task, asked)
        for source, sendable in asked.request.sendable_tokens.items()
        if min(sendable, task.num_tokens) > task.cached_tokens
        and source != cluster.name
        and source not in asked.excluded
    ]
    return min(others, key=_by_first_token, default=own)


def _harm_s(target: str, prediction: Prediction, decode: DecodeView, config: RouteConfig) -> float:
    """What others lose by a prefill on an engine that decodes: each of its batch gets one token a
    chunk of the prefill, so it comes later by about the whole prefill. Where requests wait for
    slots, or will, all of them come later, too.
    """
    if target != ONE_ENGINE:
        return 0.0
    delayed = config.stream_weight * prediction.load.decodes
    num_coming = decode.num_waiting + len(decode.landing_s)
    if decode.slots_used + num_coming >= decode.slots_total:
        delayed += num_coming / max(1, decode.num_instances)
    return prediction.prefill_s * delayed


def _by_first_token(candidate: Candidate) -> tuple[bool, float, int]:
    move = candidate.move
    return not move.pays, candidate.prediction.ttft_s, -move.num_tokens


def _with_cache_of(
    source: str, num_tokens: int, own: Candidate, task: PrefillTask, asked: _Asked
) -> Candidate:
    """The place after `source` has sent it the prefix if that pays; else the place with why not."""
    cluster, before = own.cluster, own.prediction
    saved_tokens = num_tokens - own.cached_tokens
    nbytes = asked.config.kv.size_bytes(saved_tokens)
    link = cluster.links_in.get(source)
    rate = None if link is None else link.available_bytes_per_s
    seconds = 0.0
    if link is not None and rate:
        seconds = (link.backlog_bytes + nbytes) / rate + MOVE_ROUND_TRIPS * link.rtt_s
    latest_s = before.ttft_s - MIN_MOVE_SAVING_S

    def after(move_s: float) -> Prediction:
        moved = task._replace(cached_tokens=num_tokens, move_s=move_s)
        if asked.request.media is not None:
            moved = moved._replace(media=asked.request.media.task(cluster.name, num_tokens))
        service = asked.config.service.get(own.target, ALONE)
        return predict(moved, cluster, asked.snapshot.decode, service, before.load)

    # The order of the reasons: what forbids a move at all, what no link could mend, then the
    # link.
    moved = after(seconds)
    if link is None:
        reason = MoveReason.NO_AGENT
    elif (against := _move_obstacle(source, cluster.name, link, asked)) is not None:
        reason = against
    # Even a move that takes no time must pay. It never does at a place that cannot serve (inf).
    elif not after(0.0).ttft_s <= latest_s < math.inf:
        reason = MoveReason.NOTHING_SAVED
    elif rate and seconds <= MAX_MOVE_S and moved.ttft_s <= latest_s:
        reason = MoveReason.PAYS
    # A floor may be far below what the link carries. A trial move measures it, one per pair.
    elif not rate or link.is_floor:
        is_moving = (source, cluster.name) in asked.snapshot.moving
        reason = MoveReason.LINK_BEING_MEASURED if is_moving else MoveReason.LINK_RATE_UNKNOWN
    else:
        reason = MoveReason.TOO_LONG if seconds > MAX_MOVE_S else MoveReason.TOO_SLOW
    move = CacheMove(
        reason=reason,
        source=source,
        num_tokens=num_tokens,
        saved_tokens=saved_tokens,
        nbytes=round(nbytes),
        seconds=seconds,
    )
    if not move.pays:
        return own._replace(move=move)
    harm_s = _harm_s(own.target, moved, asked.snapshot.decode, asked.config)
    return Candidate(own.target, cluster, moved, num_tokens, move, harm_s)


def _move_obstacle(source: str, target: str, link: LinkView, asked: _Asked) -> MoveReason | None:
    """Why no cached prefix may move between these clusters, whatever it would save, or None."""
    request, snapshot, config, _ = asked
    pair = source, target
    if not config.is_known:
        return MoveReason.PREFILL_RATE_UNKNOWN
    if link.state is not LinkCondition.CLEAR or link.age_s > config.max_link_age_s:
        return MoveReason.LINK_NOT_CLEAR
    # The paper's bandwidth is the one from a prefill cluster to the PD cluster. Both directions of
    # a move, and moves between two prefill clusters, are judged by the links of these clusters.
    ends = [item for item in snapshot.prefill_clusters if item.name in pair]
    if not all(is_abundant(request, end, config) for end in ends):
        return MoveReason.BANDWIDTH_SCARCE
    return MoveReason.FAILED_LATELY if pair in snapshot.failed_moves else None
