"""The region's scheduler: one object that takes events with their time and returns decisions.

    facts      reports of clusters, the state of links          `scheduler.live.events`
    feedback   what each step of a request's life teaches       `scheduler.live.feedback`
    questions  a route with its cache move, admission, t        `scheduler.live.events`
    plans      every few minutes: t, and who prefills           `scheduler.live.long_term.events`

The object reads no clock, calls nobody and waits for nothing. Its answer to an event depends on the
earlier events alone. The gateway's shell, which feeds it events and carries out the answers, and a
player of recorded events therefore get the same decisions, number by number.

This file has the rules that belong to no single core: whether a prompt must be counted at all
(`route_early`), and when a place that was slow is tried again (`_is_worth_a_try`). It does not know
HTTP, token ids or engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import Final, Generic, TypeVar

import msgspec

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.live.decode_side import is_full
from scheduler.live.learning.cache_moves import CacheMoveLedger
from scheduler.live.learning.knowledge import ModelKnowledge
from scheduler.live.learning.measured_traffic import TrafficMeter
from scheduler.live.ledger import Ledger
from scheduler.live.long_term.model_plan import ModelPlan
from scheduler.live.long_term.running_region import PeriodMeter
from scheduler.live.members import Members
from scheduler.live.settings import LiveSettings, PdSettings
from scheduler.live.sharing.peer_work import PeerWork
from scheduler.live.snapshots import (
    NO_LINK_KNOWN,
    LinkPair,
    PendingRequest,
    ReportDigest,
    Reported,
    SnapshotMaker,
)
from scheduler.live.spilling import Distances, Tried, Try, spilled
from scheduler.live.tenants import TenantLedger, TenantLimit
from scheduler.live.thresholds import Thresholds
from scheduler.reports import InstanceReport
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, Reason, RequestShape, one_engine_reason
from scheduler.routing.profiles import KvProfile
from scheduler.routing.service import ServiceModel
from scheduler.routing.short_term import RouteConfig, RouteDecision, route
from scheduler.routing.views import DecodeView, RegionSnapshot

_NO_KV: Final = KvProfile(0.0, 0.0)
RETRY_S: Final = 120.0
"""A prefill cluster that got no request for this long may have become faster."""

R = TypeVar("R")


class Event(msgspec.Struct, Generic[R], frozen=True, tag=True, array_like=True):
    """A fact or a question for the scheduler; R is the type of the answer.

    Events hold counts and names, never a prompt's text or token ids, so that they can be recorded.
    New fields go at the end and have defaults: recordings are arrays, and old ones must still be
    readable.
    """

    def apply(self, live: LiveScheduler, now_s: float) -> R:
        """Change `live` and answer."""
        raise NotImplementedError


class LiveScheduler:
    """Takes events and gives decisions. Single-threaded; `now_s` must not go back."""

    def __init__(self, settings: LiveSettings) -> None:
        self.settings = settings
        self._pds = _by_name(settings)
        self._views = ReportedViews()
        self.ledger = Ledger()
        self.peers = PeerWork(self.ledger)
        self.thresholds = _thresholds(settings)
        self.tenants = TenantLedger(settings.default_tenant, settings.tenants)
        self.admitted: dict[int, tuple[str, int]] = {}
        """Tenant and tokens of each request that was let in and is not over."""
        names = (*(pd.name for pd in settings.pd_clusters), *settings.prefill_clusters)
        self.reports = {name: Reported(name, None, -math.inf) for name in names}
        self.links: dict[LinkPair, LinkView] = {}
        self.distances = Distances()
        self.moves = CacheMoveLedger()
        self.period = PeriodMeter()
        self.members = Members()
        self.plans = {
            (model, pd.name): ModelPlan(model, pd.name)
            for model in settings.models
            for pd in settings.pd_clusters
        }
        self.heard: dict[str, int] = {}
        """How many observations of other gateways were learnt from, by gateway."""
        self._knowledge: dict[str, ModelKnowledge] = {}

    def take(self, event: Event[R], now_s: float) -> R:
        """The answer to `event` at `now_s`."""
        return event.apply(self, now_s)

    def reconfigure(self, settings: LiveSettings) -> None:
        """Go on with other settings for the same clusters.

        What was learnt and planned stays. Only where the settings name another threshold, it
        replaces the planned ones.
        """
        before, planned = self.settings, self.thresholds
        self.settings, self._pds = settings, _by_name(settings)
        self.thresholds = _thresholds(settings)
        if settings.threshold_tokens == before.threshold_tokens:
            for cluster, pd, tokens, sends in planned.planned():
                self.thresholds.set_base(cluster, tokens, sends, pd=pd)
        self.tenants.set_limits(settings.default_tenant, settings.tenants)
        for plan in self.plans.values():
            plan.reconfigure(settings.long_term)

    def limit_tenants(self, default: TenantLimit, limits: Mapping[str, TenantLimit]) -> None:
        """Go on with other limits of tenants."""
        self.settings = replace(self.settings, default_tenant=default, tenants=limits)
        self.tenants.set_limits(default, limits)

    def knowledge(self, model: str) -> ModelKnowledge:
        """The profiles and traffic learnt of a served model."""
        found = self._knowledge.get(model)
        if found is None:
            found = self._knowledge[model] = ModelKnowledge()
        return found

    def replace_knowledge(self, models: Mapping[str, ModelKnowledge]) -> None:
        """Forget what was learnt of models, and go on with what is given."""
        self._knowledge = dict(models)

    def traffic(self, model: str, home: str) -> TrafficMeter:
        """The measured traffic of a model whose home is this PD cluster."""
        known = self.knowledge(model)
        return known.traffic if len(self.settings.pd_clusters) == 1 else known.traffic_of(home)

    def pd_places(self, pd: str) -> tuple[str, str]:
        """The places of a hand-off and of one engine in a PD cluster."""
        return self.place(HAND_OFF, pd), self.place(ONE_ENGINE, pd)

    def models(self) -> Mapping[str, ModelKnowledge]:
        """All models that were asked about or learnt about."""
        return self._knowledge

    def pd(self, name: str = "") -> PdSettings:
        """The PD cluster of this name; the first one for "". KeyError for an unknown name."""
        return self._pds[name]

    def place(self, target: str, pd: str = "") -> str:
        """The place that a route's target means where `pd` decodes: its name in the ledger and in
        what was learnt.

        PD clusters may have other hardware than each other. The first one's places have the bare
        names of their targets.
        """
        first = self._pds[""].name
        if target not in (HAND_OFF, ONE_ENGINE) or pd in ("", first):
            return target
        return f"{target} in {pd}"

    def all_places(self) -> frozenset[str]:
        """The places of all clusters that this gateway has been told of."""
        found = {place for pd in self.settings.pd_clusters for place in self.pd_places(pd.name)}
        return frozenset(found | {name for name, _ in self.settings.pairs})

    def link(self, source: str, target: str) -> LinkView:
        """The link between two clusters as it was last reported."""
        return self.links.get((source, target), NO_LINK_KNOWN)

    def snapshot(
        self, model: str, now_s: float, request: PendingRequest | None = None, pd: str = ""
    ) -> RegionSnapshot:
        """The region for `model` now if `pd` decodes, as `request` finds it where one is given."""
        return self._views.snapshot(self, model, now_s, request, self.pd(pd))

    def decode_side(self, model: str, now_s: float, pd: str = "") -> DecodeView:
        """The instances of `pd` that decode for `model`."""
        return self._views.decode_side(self, model, now_s, self.pd(pd))

    def num_free_slots(self, model: str, pd: PdSettings) -> int | None:
        """About how many more requests `pd` would decode at once for `model`; None if none of its
        instances does.
        """
        return self._views.num_free_slots(self, model, pd)

    def layouts(self, model: str, cluster: str) -> frozenset[str] | None:
        """The layouts that `ReportDigest.layouts` finds in a cluster's last report."""
        return self._views.layouts(self, model, cluster)

    def route(
        self,
        model: str,
        request: PendingRequest,
        now_s: float,
        *,
        excluded: Set[str] = frozenset(),
    ) -> RouteDecision:
        """Where a prompt is computed and decoded. Clusters in `excluded` are passed over."""

        def try_at(request: PendingRequest, pd: PdSettings) -> Tried:
            seen = self.snapshot(model, now_s, request, pd.name)
            config = self._config(model, now_s, pd.name, request.shape)
            decision = route(request.shape, seen, config, now_s, excluded=excluded)
            return Tried(pd, request, seen, config, decision)

        tried = try_at(request, self.pd(request.home))
        tried = self._spilled(model, tried, try_at, now_s, excluded)
        if tried.decision.reason is not Reason.LOCAL_SOONER:
            return tried.decision
        # Infinite margins leave t alone to decide.
        by_threshold = replace(tried.config, margin_s=math.inf, home_margin_s=math.inf)
        found = route(tried.request.shape, tried.seen, by_threshold, now_s, excluded=excluded)
        if not self._is_worth_a_try(model, found, now_s):
            return tried.decision
        return msgspec.structs.replace(found, pd_reason=tried.decision.pd_reason)

    def route_early(
        self, model: str, request: PendingRequest, now_s: float
    ) -> RouteDecision | None:
        """The route of a prompt that was not counted or looked up, or None if it must be first.

        Counting costs a round trip to an engine. It is needed only where the KVCache may have to
        move. The upper bound of the length decides that, because a cached prefix only ever keeps a
        prompt where it is. Predictions use the likely length.
        """

        def try_in(seen: RegionSnapshot, request: PendingRequest, pd: PdSettings) -> Tried:
            config = self._config(model, now_s, pd.name, request.shape)
            # No prediction may send the prompt away from the PD cluster: it would have to be
            # counted first.
            local = replace(config, margin_s=math.inf)
            return Tried(pd, request, seen, config, route(request.shape, seen, local, now_s))

        def try_at(request: PendingRequest, pd: PdSettings) -> Tried:
            return try_in(self.snapshot(model, now_s, request, pd.name), request, pd)

        home = self.pd(request.home)
        seen = self.snapshot(model, now_s, request, home.name)
        if self._must_be_counted(request.shape, seen):
            return None
        at_home = try_in(seen, request, home)
        tried = self._spilled(model, at_home, try_at, now_s, frozenset())
        must_count = tried is not at_home and self._must_be_counted(tried.request.shape, tried.seen)
        return None if must_count else tried.decision

    def is_full(self, instance: str) -> bool:
        """Whether a request given to this decode instance now would wait inside of it."""
        for at_s, item in self._reported(instance):
            num_since = self.ledger.change_since({instance}, at_s)
            return is_full(item, item.running + num_since)
        return False

    def batch_of(self, instance: str) -> int | None:
        """The requests that this decode instance decodes at a time, by the last report; None if
        that does not name it.
        """
        for _, item in self._reported(instance):
            # A front that does not read its engines still knows what it gave them.
            return max(1, item.num_running or item.running)
        return None

    def _reported(self, instance: str) -> Iterator[tuple[float, InstanceReport]]:
        """A PD cluster's instance of this name as last reported, and when that was asked for."""
        for settings in self.settings.pd_clusters:
            pd = self.reports[settings.name]
            for item in () if pd.report is None else pd.report.instances:
                if item.name == instance:
                    yield pd.at_s, item

    def is_link_clear(self, target: str, pd: str = "") -> bool:
        """Whether the link is clear that KVCache takes from a route's target to `pd`. Inside of a
        PD cluster no link is needed.
        """
        if target in (HAND_OFF, ONE_ENGINE):
            return True
        return self.link(target, pd or self.pd().name).state is LinkCondition.CLEAR

    def _is_worth_a_try(self, model: str, decision: RouteDecision, now_s: float) -> bool:
        """Whether one prompt follows t to the prefill cluster, though the PD cluster is predicted
        sooner.

        It does if the prefill cluster was last tried long ago and was slow then; without a new try
        it would count as slow for ever. It does not where waiting makes the cluster late, since a
        try would not change that.
        """
        remote = decision.remote
        if decision.route != "prefill_cluster" or remote is None:
            return False
        waits_s = remote.queue_s + remote.move_s + remote.tail_s + remote.slot_s
        known, margin_s = self.knowledge(model), self.settings.routing.margin_s
        # A request that is taken counts as a try before its result is known: only one prompt is.
        return waits_s <= margin_s and known.untried_s(decision.target, now_s) >= RETRY_S

    def _spilled(
        self, model: str, at_home: Tried, try_at: Try, now_s: float, excluded: Set[str]
    ) -> Tried:
        if len(self.settings.pd_clusters) == 1:
            return at_home
        return spilled(self, model, at_home, try_at, now_s, excluded=excluded)

    def _must_be_counted(self, shape: RequestShape, seen: RegionSnapshot) -> bool:
        """Whether the KVCache of a prompt that was not counted might have to move."""
        if one_engine_reason(shape) is not None:
            return False
        thresholds = [cluster.threshold_tokens for cluster in seen.prefill_clusters]
        if thresholds and shape.at_most_tokens > min(thresholds):
            return True
        hands_off = shape.at_most_tokens > self.settings.hand_off_tokens
        return bool(seen.local.free_s) and hands_off

    def links_in(
        self, target: str, now_s: float, sources: Iterable[str] | None = None
    ) -> dict[str, LinkView]:
        """The links to a cluster from each other cluster, or only from `sources`, by name, as a
        cache move would find them.
        """
        names = self.reports if sources is None else sources
        pairs = [(name, target) for name in names if name != target]
        return {pair[0]: self.moves.completed(self.link(*pair), pair, now_s) for pair in pairs}

    def _services(
        self, known: ModelKnowledge, pd: PdSettings, now_s: float
    ) -> dict[str, ServiceModel]:
        """What was learnt of contention for all targets where `pd` decodes."""
        found = {name: known.service(name, now_s) for name in pd.prefill_clusters}
        for target in (HAND_OFF, ONE_ENGINE):
            found[target] = known.service(self.place(target, pd.name), now_s)
        return found

    def _media_services(
        self, known: ModelKnowledge, pd: PdSettings, now_s: float
    ) -> dict[str, ServiceModel]:
        """The same for prompts with media. Where none was answered lately, text stands for them."""
        found = self._services(known, pd, now_s)
        for target in found:
            own = known.media.service(self.place(target, pd.name), now_s)
            found[target] = own or found[target]
        return found

    def _config(self, model: str, now_s: float, pd: str, shape: RequestShape) -> RouteConfig:
        routing, known = self.settings.routing, self.knowledge(model)
        # Predictions from unmeasured times are no reason to leave the side that t gives.
        kv, is_known = known.kv, known.is_known
        by_prediction = routing.policy == "predicted" and is_known
        services = self._services if shape.media is None else self._media_services
        return RouteConfig(
            kv=kv or _NO_KV,
            margin_s=routing.margin_s if by_prediction else math.inf,
            margin_share=routing.margin_share,
            home_margin_s=routing.home_margin_s if by_prediction else math.inf,
            home_margin_share=routing.home_margin_share,
            stream_weight=routing.stream_weight,
            hand_off_tokens=self.settings.hand_off_tokens,
            max_link_age_s=routing.max_link_age_s,
            max_tail_s=routing.max_tail_s,
            service=services(known, self.pd(pd), now_s),
            is_known=is_known and kv is not None,
        )


class ReportedViews:
    """The region according to the latest reports, the links, the ledger and what was learnt."""

    def __init__(self) -> None:
        # By cluster and model, and only of the latest report of each cluster.
        self._digests: dict[str, tuple[Reported, dict[str, ReportDigest]]] = {}

    def snapshot(
        self,
        live: LiveScheduler,
        model: str,
        now_s: float,
        request: PendingRequest | None,
        pd: PdSettings,
    ) -> RegionSnapshot:
        """The region at `now_s`, with older reports brought up to date."""
        sources = [self._digest(live, model, name) for name in pd.prefill_clusters]
        home = self._digest(live, model, pd.name)
        return self._maker(live, model, request).make(home, sources, now_s)

    def decode_side(
        self, live: LiveScheduler, model: str, now_s: float, pd: PdSettings
    ) -> DecodeView:
        """The decoding instances as reported, with what they were given since."""
        return self._maker(live, model).decode_side(self._digest(live, model, pd.name), now_s)

    def num_free_slots(self, live: LiveScheduler, model: str, pd: PdSettings) -> int | None:
        """The free decode slots of the last report."""
        return self._digest(live, model, pd.name).decoding.num_free

    def layouts(self, live: LiveScheduler, model: str, cluster: str) -> frozenset[str] | None:
        """The layouts that `ReportDigest.layouts` finds in the last report."""
        return self._digest(live, model, cluster).layouts

    def _digest(self, live: LiveScheduler, model: str, cluster: str) -> ReportDigest:
        source = live.reports[cluster]
        kept = self._digests.get(cluster)
        if kept is None or kept[0] is not source:
            kept = self._digests[cluster] = source, {}
        found = kept[1].get(model)
        if found is None:
            found = kept[1][model] = ReportDigest(source, model)
        return found

    def _maker(
        self, live: LiveScheduler, model: str, request: PendingRequest | None = None
    ) -> SnapshotMaker:
        return SnapshotMaker(
            model,
            live.knowledge(model),
            live.ledger,
            live.thresholds,
            live.link,
            live.links_in,
            live.place,
            live.moves,
            first_pd=live.pd().name,
            order=live.settings.order,
            request=request,
        )


def _by_name(settings: LiveSettings) -> dict[str, PdSettings]:
    """The PD clusters by name; "" is the first one's, too."""
    return {"": settings.pd_clusters[0]} | {pd.name: pd for pd in settings.pd_clusters}


def _thresholds(settings: LiveSettings) -> Thresholds:
    clusters = {pd.name: pd.prefill_clusters for pd in settings.pd_clusters}
    return Thresholds(clusters, settings.threshold_tokens, settings.threshold)
