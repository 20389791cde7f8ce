"""Where one request is prefilled, given the present state of the region (the short timescale).

There are no states: a request, a snapshot of the region and a configuration go in, and a
`RouteDecision` comes out, with a target, a reason, the predictions for both sides and the numbers
they rest on. The same input gives the same output, for live traffic and for replay.

Rules, first match wins:

1. A request that one engine must serve whole goes `direct` (`one_engine_reason`).
2. A prefill cluster is left out when it failed this request, is unhealthy or takes no jobs, when no
   memory is free for the KVCache to land in, and when its link is down, was not reported lately or
   would deliver far too late. The others are the candidates. Without any, the request stays local.
3. The threshold t of each candidate gives the request its side. A prompt with more than t uncached
   tokens belongs to the prefill cluster that is predicted to be first; any other prompt is local.
   Uncached are the tokens that the PD cluster would compute, after a cached prefix was moved there
   if that pays (`scheduler.routing.candidates`).
4. The request leaves its side when the other side costs less by more than a margin: a fixed part
   and a share of what its own side costs. A side costs the predicted time to first token, plus what
   the prefill costs the answers of an engine that decodes meanwhile. The margin is lower for
   staying in the PD cluster, which needs no link. The request leaves for a prefill cluster only
   over a link that is up and has a measured rate, so that the prediction contains its backlog and
   rate.

Why both t and predictions: t gives each side the work that it does best, and it is what the plan
balances. Predictions alone would let every small queue drag short prompts over the link, and long
ones away from it. With the margin, waiting counts only where it is worth the compute that is lost.

`route` does not raise: views check themselves when they are made, and a place that cannot serve has
an infinite prediction. No I/O, no clock. This file knows no HTTP, engines, token ids or what an
instance is. `scheduler.routing.instance_choice` chooses the instance within the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Final, NamedTuple

from scheduler.routing.candidates import (
    Candidate,
    RouteConfig,
    hand_off_obstacle,
    is_cheaper,
    local_candidate,
    obstacle,
    remote_candidate,
    wants_hand_off,
    wire_bytes,
)
from scheduler.routing.decision import (
    NO_MOVE,
    CacheMove,
    Decision,
    Number,
    Reason,
    RequestShape,
    length_name,
    one_engine,
    one_engine_reason,
)
from scheduler.routing.prediction import Prediction
from scheduler.routing.spill import PdReason
from scheduler.routing.views import ClusterView, RegionSnapshot

__all__ = ["RouteConfig", "RouteDecision", "route"]

NONE_EXCLUDED: Final[frozenset[str]] = frozenset()

OBSTACLES: Final = (
    Reason.NO_LANDING_ROOM,
    Reason.PREFILL_QUEUE_FULL,
    Reason.LINK_BUSY,
    Reason.LINK_STALE,
    Reason.LINK_DOWN,
    Reason.PREFILL_UNHEALTHY,
    Reason.KVCACHE_UNUSABLE,
    Reason.PREFILL_FAILED,
    Reason.ADAPTER_DIFFERS,
)
"""If several clusters are left out, the reason of the one that was nearest to serving is given.
The order is from nearest to farthest.
"""


class RouteDecision(Decision, frozen=True):
    """A routing result with the predictions it was taken from.

    `local` is None only for `direct`, `remote` (of the best candidate) where there is no candidate.
    `move` is the cached prefix that comes to the target first, or why none does. `pd_reason` says
    why `pd` decodes (`scheduler.routing.spill`).
    """

    local: Prediction | None = None
    remote: Prediction | None = None
    move: CacheMove = NO_MOVE
    pd_reason: PdReason = PdReason.HOME

    @property
    def predicted(self) -> Prediction | None:
        """The prediction of the side that was taken."""
        return self.remote if self.route == "prefill_cluster" else self.local


class _Chosen(NamedTuple):
    """The place that `_choose` took, why, and the best candidate of each side."""

    taken: Candidate
    reason: Reason
    local: Candidate
    remote: Candidate | None


def route(
    request: RequestShape,
    snapshot: RegionSnapshot,
    config: RouteConfig,
    now_s: float,
    *,
    excluded: Set[str] = NONE_EXCLUDED,
) -> RouteDecision:
    """Route one request. Clusters in `excluded` failed this request and are passed over.

    `now_s` is on the clock of `snapshot.taken_s`.
    """
    whole = one_engine_reason(request)
    if whole is not None:
        direct = one_engine(request, whole, snapshot.local.name)
        return RouteDecision(direct.route, direct.target, direct.reason, direct.numbers, direct.pd)
    chosen = _choose(request, snapshot, config, now_s, excluded=excluded)
    # The plan may mean a prompt for a prefill cluster that the raised t keeps back. Then the cause
    # of the raise is the reason, not the prompt's length.
    if chosen.reason is Reason.BELOW_THRESHOLD:
        uncached = request.num_prompt_tokens - chosen.local.cached_tokens
        meant = [c for c in snapshot.prefill_clusters if _is_above_plan(c, uncached)]
        if meant:
            reason = _kept_back(meant, request, snapshot, config, now_s, excluded=excluded)
            chosen = chosen._replace(reason=reason)
    return _decision(request, chosen, _landing_numbers(request, snapshot, config, chosen.reason))


def _choose(
    request: RequestShape,
    snapshot: RegionSnapshot,
    config: RouteConfig,
    now_s: float,
    *,
    excluded: Set[str] = NONE_EXCLUDED,
) -> _Chosen:
    """Rules 2 to 4 for a request that need not be served whole."""
    usable: list[ClusterView] = []
    obstacles: list[tuple[ClusterView, Reason]] = []
    for cluster in snapshot.prefill_clusters:
        reason = _obstacle(request, cluster, snapshot, config, now_s, excluded=excluded)
        if reason is None:
            usable.append(cluster)
        else:
            obstacles.append((cluster, reason))
    local = local_candidate(request, snapshot, config, excluded)
    remotes: list[Candidate] = []
    for cluster in usable:
        remote = remote_candidate(request, cluster, snapshot, config, excluded)
        # The gateway gives up a transfer that goes on for longer, and its prefill would be in vain.
        if remote.prediction.tail_s <= config.max_tail_s:
            remotes.append(remote)
        else:
            obstacles.append((cluster, Reason.LINK_BUSY))
    uncached = request.num_prompt_tokens - local.cached_tokens
    meant = [remote for remote in remotes if uncached > remote.cluster.threshold_tokens]
    if meant:
        return _from_remote(local, _soonest(meant), config)
    # An obstacle is a reason only for prompts that t would have given to its cluster.
    kept_by = [reason for cluster, reason in obstacles if uncached > cluster.threshold_tokens]
    reason = next((r for r in OBSTACLES if r in kept_by), None)
    if reason is None and wants_hand_off(request, snapshot, config):
        reason = hand_off_obstacle(request, snapshot, config)
    if not snapshot.prefill_clusters:
        return _Chosen(local, reason or Reason.NO_PREFILL_CLUSTER, local, None)
    return _from_local(local, remotes, config, reason or Reason.BELOW_THRESHOLD)


def _obstacle(
    request: RequestShape,
    cluster: ClusterView,
    snapshot: RegionSnapshot,
    config: RouteConfig,
    now_s: float,
    *,
    excluded: Set[str],
) -> Reason | None:
    """Why the cluster cannot take this request now, or None when it can."""
    if cluster.name in request.other_adapter_in:
        return Reason.ADAPTER_DIFFERS
    if cluster.name in excluded:
        return Reason.PREFILL_FAILED
    return obstacle(request, cluster, snapshot, config, now_s)


def _is_above_plan(cluster: ClusterView, uncached_tokens: int) -> bool:
    tokens = cluster.plan_threshold_tokens
    return tokens is not None and uncached_tokens > tokens


def _kept_back(
    meant: Sequence[ClusterView],
    request: RequestShape,
    snapshot: RegionSnapshot,
    config: RouteConfig,
    now_s: float,
    *,
    excluded: Set[str],
) -> Reason:
    """Why a prompt that the plan means for these clusters is below their present thresholds."""
    reasons = {
        _obstacle(request, cluster, snapshot, config, now_s, excluded=excluded) for cluster in meant
    }
    # A cluster without an obstacle kept the prompt back only because its link raised t.
    if None in reasons:
        return Reason.LINK_CONGESTED
    return next(reason for reason in OBSTACLES if reason in reasons)


def _from_remote(local: Candidate, remote: Candidate, config: RouteConfig) -> _Chosen:
    """The prompt belongs to this prefill cluster, unless the PD cluster is clearly cheaper."""
    if is_cheaper(local, remote, config.home_margin_s, config.home_margin_share):
        return _Chosen(local, Reason.LOCAL_SOONER, local, remote)
    return _Chosen(remote, Reason.ABOVE_THRESHOLD, local, remote)


def _from_local(
    local: Candidate, remotes: Sequence[Candidate], config: RouteConfig, reason: Reason
) -> _Chosen:
    """The prompt is local for `reason`, unless a prefill cluster is clearly cheaper."""
    if not remotes:
        return _Chosen(local, reason, local, None)
    inviting = [r for r in remotes if _is_inviting(r.cluster)]
    if inviting:
        remote = _soonest(inviting)
        if is_cheaper(remote, local, config.margin_s, config.margin_share):
            return _Chosen(remote, Reason.REMOTE_SOONER, local, remote)
    return _Chosen(local, reason, local, _soonest(remotes))


def _soonest(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate whose first token is predicted first."""
    return min(candidates, key=_first)


def _first(candidate: Candidate) -> tuple[float, str]:
    # The name decides between equals, so that the same input gives the same route.
    return candidate.prediction.ttft_s, candidate.target


def _is_inviting(cluster: ClusterView) -> bool:
    """Whether a prompt below t may go over its link. A rate that is a guess must not fill it up."""
    return cluster.link is not None and cluster.link.available_bytes_per_s is not None


def _landing_numbers(
    request: RequestShape, snapshot: RegionSnapshot, config: RouteConfig, reason: Reason
) -> dict[str, Number]:
    if reason is not Reason.NO_LANDING_ROOM or snapshot.landing_room_bytes is None:
        return {}
    return {
        "landing_bytes": round(sum(wire_bytes(request, config.kv))),
        "landing_room_bytes": round(snapshot.landing_room_bytes),
    }


def _decision(
    request: RequestShape, chosen: _Chosen, landing: Mapping[str, Number]
) -> RouteDecision:
    taken, reason, local, remote = chosen
    is_remote = taken is remote
    found = taken.prediction
    numbers: dict[str, Number] = {
        length_name(request): request.num_prompt_tokens,
        "cached_tokens": taken.cached_tokens,
        "uncached_tokens": request.num_prompt_tokens - taken.cached_tokens,
        "local_uncached_tokens": request.num_prompt_tokens - local.cached_tokens,
        "queue_s": round(found.queue_s, 4),
        "move_s": round(found.move_s, 4),
        "prefill_s": round(found.prefill_s, 4),
        "tail_s": round(found.tail_s, 4),
        "slot_s": round(found.slot_s, 4),
        "local_ttft_s": round(local.prediction.ttft_s, 4),
        **landing,
    }
    if local.harm_s:
        numbers["local_harm_s"] = round(local.harm_s, 4)
    if remote is not None:
        numbers["threshold_tokens"] = round(remote.cluster.threshold_tokens)
        numbers["remote_ttft_s"] = round(remote.prediction.ttft_s, 4)
        link = remote.cluster.link
        if link is not None and link.available_bytes_per_s is not None:
            numbers["link_bytes_per_s"] = link.available_bytes_per_s
            numbers["link_backlog_bytes"] = link.backlog_bytes
    if taken.move.pays:
        numbers["moved_tokens"] = taken.move.saved_tokens
        numbers["moved_bytes"] = taken.move.nbytes
    return RouteDecision(
        "prefill_cluster" if is_remote else "local",
        taken.target,
        reason,
        MappingProxyType(numbers),
        local.cluster.name,
        local.prediction,
        None if remote is None else remote.prediction,
        taken.move,
    )
