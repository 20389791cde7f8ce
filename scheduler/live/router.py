"""Routes requests by the short-term core, on snapshots of the region as it is now.

The shell around `scheduler.routing.short_term`: it keeps what was learnt of each model, what is
under way and the thresholds, and asks the watcher for reports and the links for their state. Does
not know HTTP, and performs nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.live.decode_side import is_full
from scheduler.live.knowledge import ModelKnowledge
from scheduler.live.ledger import Ledger
from scheduler.live.snapshots import NO_LINK_KNOWN, Newcomer, Reported, SnapshotMaker
from scheduler.live.thresholds import ThresholdNow, Thresholds
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, Reason, RequestShape, one_engine_reason
from scheduler.routing.profiles import KvProfile
from scheduler.routing.queue_order import OrderConfig
from scheduler.routing.short_term import RouteConfig, RouteDecision, route
from scheduler.routing.threshold import ThresholdConfig
from scheduler.routing.views import RegionSnapshot

_NO_KV: Final = KvProfile(0.0, 0.0)
RETRY_S: Final = 120.0
"""A prefill cluster that nothing was sent to for so long may have become faster."""


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """How the side of one request is chosen.

    "predicted": by the threshold, unless the other side's first token is predicted sooner by more
    than `margin_s` + `margin_share` of it. "threshold": by the threshold alone. Either way a link
    that is down, congested or not heard of for `max_link_age_s` keeps prompts local, as does one
    that would take more than `max_tail_s` after the prefill.
    """

    policy: Literal["predicted", "threshold"] = "predicted"
    margin_s: float = 1.0
    margin_share: float = 0.45
    max_tail_s: float = 20.0
    max_link_age_s: float = 5.0


class Reports(Protocol):
    """The latest report of each cluster; `deploy.gateway.links.watcher.RegionWatcher` is one."""

    def reported_pd(self) -> Reported: ...

    def reported_prefill(self) -> list[Reported]: ...


class RegionScheduler:
    """Of one gateway, single-threaded. Parts are public: requests report to them as they go."""

    def __init__(
        self,
        reports: Reports,
        prefill_clusters: Iterable[str],
        routing: RoutingPolicy,
        threshold: ThresholdConfig,
        *,
        threshold_tokens: int,
        hand_off_tokens: int,
        order: OrderConfig | None = None,
        link: Callable[[str, str], LinkView] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`order` is that of the prefill clusters' queues. `link` gives the state of the link from
        cluster to cluster; without it nothing is known of any.
        """
        self.ledger = Ledger()
        self.thresholds = Thresholds(prefill_clusters, threshold_tokens, threshold)
        self.clock = clock
        self._reports = reports
        self._routing = routing
        self._hand_off_tokens = hand_off_tokens
        self._order = order or OrderConfig()
        self._link = link or _no_link_known
        self._knowledge: dict[str, ModelKnowledge] = {}

    def knowledge(self, model: str) -> ModelKnowledge:
        """What was learnt of a served model."""
        found = self._knowledge.get(model)
        if found is None:
            found = self._knowledge[model] = ModelKnowledge()
        return found

    def models(self) -> Mapping[str, ModelKnowledge]:
        """All models of which anything was asked or learnt."""
        return self._knowledge

    def thresholds_now(self) -> list[ThresholdNow]:
        """All thresholds, for links as they are now: they return without requests, too."""
        pd, now_s = self._reports.reported_pd().name, self.clock()
        for name in self.thresholds.base_tokens():
            self.thresholds.update(name, self._link(name, pd), now_s)
        return self.thresholds.overview()

    def links(self) -> dict[tuple[str, str], LinkView]:
        """Between the PD cluster and each prefill cluster, both ways, as routing sees them."""
        pd = self._reports.reported_pd().name
        pairs = [
            pair for name in self.thresholds.base_tokens() for pair in ((name, pd), (pd, name))
        ]
        return {pair: self._link(*pair) for pair in pairs}

    def snapshot(self, model: str, newcomer: Newcomer | None = None) -> RegionSnapshot:
        """The region as a request for `model` finds it now; as `newcomer` does, if it is given."""
        maker = SnapshotMaker(
            model,
            self.knowledge(model),
            self.ledger,
            self.thresholds,
            self._link,
            order=self._order,
            newcomer=newcomer,
        )
        return maker.make(
            self._reports.reported_pd(), self._reports.reported_prefill(), self.clock()
        )

    def route(
        self,
        model: str,
        shape: RequestShape,
        *,
        excluded: Set[str] = frozenset(),
        snapshot: RegionSnapshot | None = None,
        priority: int = 0,
    ) -> RouteDecision:
        """Where a prompt is computed, passing over the clusters in `excluded`. Without a `snapshot`
        one is taken for a request of this `priority`.
        """
        seen = snapshot or self.snapshot(model, Newcomer(shape, priority))
        config, now_s = self._config(model), self.clock()
        decision = route(shape, seen, config, now_s, excluded=excluded)
        if decision.reason is not Reason.LOCAL_SOONER:
            return decision
        by_threshold = replace(config, margin_s=math.inf)
        tried = route(shape, seen, by_threshold, now_s, excluded=excluded)
        return tried if self._is_worth_a_try(model, tried) else decision

    def _is_worth_a_try(self, model: str, decision: RouteDecision) -> bool:
        """Whether one prompt goes where t sends it though the PD cluster is predicted sooner: the
        prefill cluster was slow when it was last tried, and that was long ago. Otherwise it would
        count as slow for ever. Nothing is tried where waiting is what makes it late.
        """
        remote = decision.remote
        if decision.route != "prefill_cluster" or remote is None:
            return False
        waits_s = remote.queue_s + remote.move_s + remote.tail_s + remote.slot_s
        known, now_s = self.knowledge(model), self.clock()
        if waits_s > self._routing.margin_s or known.untried_s(decision.target, now_s) < RETRY_S:
            return False
        known.tried(decision.target, now_s)
        return True

    def route_early(
        self, model: str, shape: RequestShape, *, snapshot: RegionSnapshot | None = None
    ) -> RouteDecision | None:
        """The route of a prompt that is not counted yet and not looked up, or None: do that first.
        It costs a round trip to an engine, so it is done only where the KVCache may have to move,
        which the upper bound of the length decides; what is cached only ever keeps a prompt where
        it is. Predictions rest on the likely length.
        """
        seen = snapshot or self.snapshot(model)
        if one_engine_reason(shape) is None and self._may_move(shape, seen):
            return None
        # Nothing is worth leaving the local side for: the prompt would have to be counted first.
        config = replace(self._config(model), margin_s=math.inf)
        return route(shape, seen, config, self.clock())

    def is_full(self, instance: str) -> bool:
        """Whether a request given to this decode instance now would wait inside of it."""
        pd = self._reports.reported_pd()
        for item in () if pd.report is None else pd.report.instances:
            if item.name == instance:
                num_since = self.ledger.change_since({instance}, pd.at_s)
                return is_full(item, item.running + num_since)
        return False

    def is_link_clear(self, place: str) -> bool:
        """Whether the link that KVCache takes from `place` is clear; within the PD cluster there
        is none.
        """
        if place in (HAND_OFF, ONE_ENGINE):
            return True
        pd = self._reports.reported_pd().name
        return self._link(place, pd).state is LinkCondition.CLEAR

    def moves_caches(self, decision: RouteDecision, pd: str) -> bool:
        """Whether a longer cached prefix may be brought to the prefill cluster of this route:
        nothing speaks against using the link to there.
        """
        is_remote = decision.route == "prefill_cluster"
        return is_remote and self._link(pd, decision.target).state is LinkCondition.CLEAR

    def _may_move(self, shape: RequestShape, seen: RegionSnapshot) -> bool:
        thresholds = [cluster.threshold_tokens for cluster in seen.prefill_clusters]
        if thresholds and shape.at_most_tokens > min(thresholds):
            return True
        return bool(seen.local.free_s) and shape.at_most_tokens > self._hand_off_tokens

    def _config(self, model: str) -> RouteConfig:
        routing, known = self._routing, self.knowledge(model)
        # What nobody has measured is no reason to leave the side that t gives.
        by_prediction = routing.policy == "predicted" and known.is_known
        return RouteConfig(
            kv=known.kv or _NO_KV,
            margin_s=routing.margin_s if by_prediction else math.inf,
            margin_share=routing.margin_share,
            hand_off_tokens=self._hand_off_tokens,
            max_link_age_s=routing.max_link_age_s,
            max_tail_s=routing.max_tail_s,
            overhead_s=known.overheads(self.clock()),
            # Whether a prefix is moved is decided by measured rates when the route is taken
            # (`moves_caches`): no route may count on a move that is then not made.
            min_move_saving_s=math.inf,
        )


def _no_link_known(source: str, target: str) -> LinkView:
    return NO_LINK_KNOWN
