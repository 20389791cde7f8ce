"""Spilling: whether another PD cluster than its home decodes a request, and which ones are asked.

`scheduler.routing.spill` has the rule. To make an offer, a cluster must be looked at in full, as a
route would find it. So others are asked only if the rule could prefer one of them, and only the few
that promise most: those with free decode slots first, then the nearest. Pure; time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from scheduler.live.admission import AdmissionRequest, admit
from scheduler.live.settings import PdSettings
from scheduler.live.snapshots import PendingRequest
from scheduler.routing.candidates import RouteConfig, whole_prediction
from scheduler.routing.decision import RequestShape
from scheduler.routing.prediction import Prediction
from scheduler.routing.short_term import RouteDecision
from scheduler.routing.spill import PdOffer, SpillRule, choose_pd
from scheduler.routing.views import RegionSnapshot

if TYPE_CHECKING:
    from scheduler.live.core import LiveScheduler

NUM_OTHERS: Final = 3
"""The most other PD clusters that are looked at for one request."""
RTT_KEPT_S: Final = 10.0
"""How long a round trip between two PD clusters counts as known, seconds."""


class Distances:
    """The round trips between PD clusters, as far as links know them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, dict[str, float]]] = {}

    def nearest(self, live: LiveScheduler, home: str, now_s: float) -> dict[str, float]:
        """The round trips from a PD cluster to each other one, by name, the nearest first.

        A round trip is that of a link between the two or, without one, over the nearest prefill
        cluster that has links to both; 0 where neither is known.
        """
        at_s, found = self._known.get(home, (-RTT_KEPT_S, {}))
        if now_s - at_s >= RTT_KEPT_S:
            names = [pd.name for pd in live.settings.pd_clusters if pd.name != home]
            rtts_s = sorted((_rtt_s(live, home, name), name) for name in names)
            found = {name: rtt_s for rtt_s, name in rtts_s}
            self._known[home] = now_s, found
        return found


class Tried(NamedTuple):
    """The route that a request would take if one PD cluster decoded it.

    `request` has the shape that `pd` sees. The decision rests on `seen` and `config`.
    """

    pd: PdSettings
    request: PendingRequest
    seen: RegionSnapshot
    config: RouteConfig
    decision: RouteDecision


Try = Callable[[PendingRequest, PdSettings], Tried]


def spilled(
    live: LiveScheduler,
    model: str,
    at_home: Tried,
    try_at: Try,
    now_s: float,
    *,
    excluded: Set[str],
) -> Tried:
    """The home's route, or that of the PD cluster that the request spills to.

    `try_at` gives the route in another cluster. PD clusters in `excluded` failed this request.
    """
    home = at_home.pd
    # The prediction decides between clusters as it decides between sides: not while it is a guess.
    routing = live.settings.routing
    margin_s = at_home.config.margin_s
    rule = SpillRule(home.spill, margin_s, routing.margin_share)
    own = _offer(live, model, at_home, 0.0, now_s, is_failed=home.name in excluded)
    if not rule.may_leave(own):
        return at_home
    request, tries = at_home.request, {home.name: at_home}
    offers = []
    nearest = live.distances.nearest(live, home.name, now_s)
    cached_tokens = _most_cached_tokens(request.shape)
    # Prefills may have been found to take less than their predictions.
    least_share = min([1.0, *(item.prefill for item in at_home.config.service.values())])
    for pd in _others(live, model, nearest, excluded):
        rtt_s = nearest[pd.name]
        # To look at a cluster takes long, and its prefill alone may take too long to be sooner.
        prefill_s = _least_prefill_s(live, model, pd, request.shape, cached_tokens)
        least_s = rtt_s + least_share * prefill_s
        if own.is_able and least_s + rule.lead_s(own) >= own.ttft_s:
            continue
        shape = request.shape.at(pd.name)
        found = tries[pd.name] = try_at(msgspec.structs.replace(request, shape=shape), pd)
        offers.append(_offer(live, model, found, rtt_s, now_s))
    chosen, reason = choose_pd(own, offers, rule)
    if chosen is own:
        return at_home
    found = tries[chosen.pd]
    numbers = {**found.decision.numbers, "home_ttft_s": round(own.ttft_s, 4)}
    decision = msgspec.structs.replace(found.decision, pd_reason=reason, numbers=numbers)
    return found._replace(decision=decision)


def _others(
    live: LiveScheduler, model: str, nearest: Iterable[str], excluded: Set[str]
) -> list[PdSettings]:
    """The PD clusters to ask besides the home, the most promising first. `nearest` are their
    names.
    """
    free: list[PdSettings] = []
    full: list[PdSettings] = []
    for name in nearest:
        if name in excluded:
            continue
        pd = live.pd(name)
        num_free = live.num_free_slots(model, pd)
        if num_free is not None:
            (free if num_free > 0 else full).append(pd)
        # Those with free slots go first, so that the farther ones need not be looked at.
        if len(free) == NUM_OTHERS:
            break
    return [*free, *full][:NUM_OTHERS]


def _most_cached_tokens(shape: RequestShape) -> int:
    """The longest prefix of a request that is cached anywhere."""
    return max(
        shape.local_cached_tokens,
        *shape.prefill_cached_tokens.values(),
        *shape.sendable_tokens.values(),
        *(cached.local_tokens for cached in shape.cached_in_pds.values()),
        0,
    )


def _least_prefill_s(
    live: LiveScheduler, model: str, pd: PdSettings, shape: RequestShape, cached_tokens: int
) -> float:
    """The shortest prefill of any place where `pd` decodes. No first token can beat it."""
    known, num_tokens = live.knowledge(model), shape.num_prompt_tokens
    places = (*live.pd_places(pd.name), *pd.prefill_clusters)
    return min([known.prefill(place).prefill_s(num_tokens, cached_tokens) for place in places])


def _offer(
    live: LiveScheduler,
    model: str,
    tried: Tried,
    rtt_s: float,
    now_s: float,
    *,
    is_failed: bool = False,
) -> PdOffer:
    shape, seen = tried.request.shape, tried.seen
    predicted = tried.decision.predicted
    if predicted is None:
        predicted = whole_prediction(shape, seen, tried.config)
    name = tried.pd.name
    if is_failed:
        return PdOffer(name, float("inf"))
    is_refused = _is_refused(live, model, predicted, shape.num_prompt_tokens, seen, now_s)
    return PdOffer(name, predicted.ttft_s, is_refused, predicted.slot_s > 0, rtt_s)


def _is_refused(
    live: LiveScheduler,
    model: str,
    predicted: Prediction,
    num_tokens: int,
    seen: RegionSnapshot,
    now_s: float,
) -> bool:
    """Whether admission would refuse the request because of the cluster's load."""
    if not live.settings.refuses_load or seen.decode.slots_total <= 0:
        return False
    asked = load_request(live, model, predicted, num_tokens)
    return not admit(asked, seen.decode, live.settings.admission, now_s).admitted


def load_request(
    live: LiveScheduler, model: str, predicted: Prediction | None, num_tokens: int
) -> AdmissionRequest:
    """A request as admission sees it, without its tenant."""
    known = live.knowledge(model)
    # No request is refused because of a guess: before prefills were measured or timed in idle
    # engines, the present load counts, which an empty prediction asks for.
    prediction = predicted if known.is_known else None
    kv_bytes = 0.0 if known.kv is None else known.kv.size_bytes(num_tokens)
    return AdmissionRequest(prediction or Prediction(), kv_bytes)


def _rtt_s(live: LiveScheduler, home: str, other: str) -> float:
    direct = max(live.link(home, other).rtt_s, live.link(other, home).rtt_s)
    if direct:
        return direct
    common = set(live.pd(home).prefill_clusters) & set(live.pd(other).prefill_clusters)
    legs = [(live.link(name, home).rtt_s, live.link(name, other).rtt_s) for name in common]
    # A link that nobody has measured has no round trip.
    return min((sum(pair) for pair in legs if any(pair)), default=0.0)
