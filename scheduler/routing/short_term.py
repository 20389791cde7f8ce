"""Where one request is prefilled, given what the region looks like now (the short timescale).

States: none. A request, a snapshot of the region and a configuration go in, a `RouteDecision` comes
out: a target, a reason, the predictions for both sides and the numbers they rest on. The same input
gives the same output; live traffic and replay call it alike.

Rules, first match wins:

1. What one engine must serve whole goes `direct` (the rules of `scheduler.routing.decision`).
2. A prefill cluster is out of the question when it failed this request, is unhealthy, takes no
   jobs, or there is no room for the KVCache to land; and when its link is down, was not looked at
   lately, or would carry it far too late. What is left are the candidates. Without any the request
   stays local.
3. The threshold t of each candidate gives the request its side: more than t uncached tokens, at the
   PD cluster and after a cached prefix was moved there if that pays (`candidates`), belongs
   to the prefill cluster that is predicted to be first; anything else is local.
4. It leaves that side when the other side's first token is predicted sooner by more than a margin,
   a fixed part and a share of the prediction. Towards a prefill cluster only over a link that is up
   and whose rate was measured: its backlog and its present rate are part of the prediction then.

Why both t and predictions. t keeps each side to what it does best and is what the plan balances;
predicted finish alone would let every queue drag short prompts over the link and long ones away
from it. The margin lets waiting count only where it is worth the compute that is lost.

`route` does not raise: views check themselves when they are made, and a place that cannot serve has
an infinite prediction. No I/O, no clock. This file does not know HTTP, engines, token ids or what
an instance is; the instance within the cluster is `scheduler.routing.instance_choice`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from scheduler.routing.candidates import (
    Candidate,
    RouteConfig,
    has_landing_room,
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
    Reason.PREFILL_FAILED,
)
"""With several clusters out of the question, the reason of the one that was nearest to serving."""


@dataclass(frozen=True, slots=True)
class RouteDecision(Decision):
    """A routing result with the predictions it was taken from.

    `local` is None only for `direct`, `remote` (of the best candidate) wherever there is none.
    `move`: the cached prefix of another cluster that comes to the target first, or why none does.
    """

    local: Prediction | None = None
    remote: Prediction | None = None
    move: CacheMove = NO_MOVE

    @property
    def predicted(self) -> Prediction | None:
        """The prediction of the side that was taken."""
        return self.remote if self.route == "prefill_cluster" else self.local


class _Chosen(NamedTuple):
    """The place that `_choose` took, why, and the best of each side."""

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
    """Route one request, passing over the clusters in `excluded` (they failed this request).

    `now_s` is on the clock of `snapshot.taken_s`.
    """
    whole = one_engine_reason(request)
    if whole is not None:
        direct = one_engine(request, whole)
        return RouteDecision(direct.route, direct.target, direct.reason, direct.numbers)
    chosen = _choose(request, snapshot, config, now_s, excluded=excluded)
    # The plan's t may have sent it away: then what raised t is the reason, not its length.
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
        # A transfer that goes on for longer is given up in the end, and its prefill was in vain.
        if remote.prediction.tail_s <= config.max_tail_s:
            remotes.append(remote)
        else:
            obstacles.append((cluster, Reason.LINK_BUSY))
    uncached = request.num_prompt_tokens - local.cached_tokens
    meant = [remote for remote in remotes if uncached > remote.cluster.threshold_tokens]
    if meant:
        return _from_remote(local, _soonest(meant), config)
    # An obstacle is a reason only for prompts that its cluster would have taken.
    kept_by = [reason for cluster, reason in obstacles if uncached > cluster.threshold_tokens]
    reason = next((r for r in OBSTACLES if r in kept_by), None)
    if reason is None and _lacks_room_for_hand_off(request, snapshot, config):
        reason = Reason.NO_LANDING_ROOM
    if not snapshot.prefill_clusters:
        return _Chosen(local, reason or Reason.NO_PREFILL_CLUSTER, local, None)
    return _from_local(local, remotes, config, reason or Reason.BELOW_THRESHOLD)


def _lacks_room_for_hand_off(
    request: RequestShape, snapshot: RegionSnapshot, config: RouteConfig
) -> bool:
    """Whether only a full landing arena keeps a prompt from the PD cluster's prefill instances."""
    return wants_hand_off(request, snapshot, config) and not has_landing_room(
        request, snapshot, config.kv
    )


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
    if None in reasons:
        return Reason.LINK_CONGESTED
    return next(reason for reason in OBSTACLES if reason in reasons)


def _from_remote(local: Candidate, remote: Candidate, config: RouteConfig) -> _Chosen:
    """t says that this prefill cluster takes it: unless the PD cluster is clearly sooner."""
    if _is_clearly_sooner(local, remote, config):
        return _Chosen(local, Reason.LOCAL_SOONER, local, remote)
    return _Chosen(remote, Reason.ABOVE_THRESHOLD, local, remote)


def _from_local(
    local: Candidate, remotes: Sequence[Candidate], config: RouteConfig, reason: Reason
) -> _Chosen:
    """It belongs to the PD cluster for `reason`: unless a prefill cluster is clearly sooner."""
    if not remotes:
        return _Chosen(local, reason, local, None)
    inviting = [r for r in remotes if _is_inviting(r.cluster)]
    if inviting:
        remote = _soonest(inviting)
        if _is_clearly_sooner(remote, local, config):
            return _Chosen(remote, Reason.REMOTE_SOONER, local, remote)
    return _Chosen(local, reason, local, _soonest(remotes))


def _soonest(candidates: Sequence[Candidate]) -> Candidate:
    """Whose first token is predicted first."""
    return min(candidates, key=_first)


def _first(candidate: Candidate) -> tuple[float, str]:
    return candidate.prediction.ttft_s, candidate.target


def _is_inviting(cluster: ClusterView) -> bool:
    """Whether more than t asks for may be sent over its link: a guess must not fill it up."""
    return cluster.link is not None and cluster.link.available_bytes_per_s is not None


def _is_clearly_sooner(other: Candidate, own: Candidate, config: RouteConfig) -> bool:
    """Whether leaving `own` gains more than the margin; any finite time is less than none."""
    other_s, own_s = other.prediction.ttft_s, own.prediction.ttft_s
    if own_s == math.inf:
        return other_s < math.inf
    return other_s + config.margin_s + config.margin_share * own_s < own_s


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
        local.prediction,
        None if remote is None else remote.prediction,
        taken.move,
    )
