"""Facts that the live scheduler is told, and questions that it is asked.

The `apply` of an event says what it changes and answers. This file does not know where facts come
from, nor how an answer is carried out.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import TypeAlias

import msgspec

from netmon.region_link import LinkView
from scheduler.live.admission import (
    AdmissionReason,
    AdmissionRequest,
    Verdict,
    admit,
    decode_load_at,
    tenant_refusal,
)
from scheduler.live.core import Event, LiveScheduler
from scheduler.live.ledger import PrefillLeg
from scheduler.live.snapshots import PendingRequest, Reported
from scheduler.live.spilling import load_request
from scheduler.live.tenants import TenantLimit
from scheduler.live.thresholds import ThresholdNow
from scheduler.reports import ClusterReport
from scheduler.routing.decision import RequestShape
from scheduler.routing.prediction import Prediction
from scheduler.routing.short_term import RouteDecision
from scheduler.routing.views import DecodeView

# ---- facts


class ReportHeard(Event[None], frozen=True):
    """A cluster's report, asked for at `at_s`. None: there is no report, or the last is too old."""

    cluster: str
    report: ClusterReport | None
    at_s: float

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """The report replaces the one before. When instances have joined or left, the means of
        health begin anew, so that the next plan is one for the instances that there are.
        """
        num_changes = live.members.num_changes
        if left := live.members.heard(self.report):
            live.ledger.forget(left)
        if live.members.num_changes != num_changes:
            live.period.forget_health()
        live.reports[self.cluster] = Reported(self.cluster, self.report, self.at_s)


class LinkHeard(Event[None], frozen=True):
    """The present state of a link."""

    source: str
    target: str
    view: LinkView

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """The view replaces the one before."""
        live.links[self.source, self.target] = self.view


class ThresholdPlanned(Event[None], frozen=True):
    """A plan's threshold for the link from a prefill cluster to `pd`, and what it sends over that
    link (0: unknown).
    """

    cluster: str
    tokens: float
    bytes_per_s: float
    pd: str = ""

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """The state of the link multiplies this threshold from now on."""
        live.thresholds.set_base(self.cluster, self.tokens, self.bytes_per_s, pd=self.pd)


class TenantsLimited(Event[None], frozen=True):
    """An operator gave tenants other limits: `default` for those that `limits` does not name."""

    default: TenantLimit
    limits: dict[str, TenantLimit]

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Requests in flight count towards the new limits."""
        live.limit_tenants(self.default, self.limits)


# ---- questions


class RouteEarly(Event[RouteDecision | None], frozen=True):
    """Asks for the route of a prompt that was not counted. `home` is the PD cluster that it belongs
    to.

    The answer None means: count it and look it up first.
    """

    model: str
    shape: RequestShape
    priority: int = 0
    home: str = ""

    def apply(self, live: LiveScheduler, now_s: float) -> RouteDecision | None:
        """The answer of `LiveScheduler.route_early`."""
        request = PendingRequest(self.shape, self.priority, self.home)
        return live.route_early(self.model, request, now_s)


class RouteAsked(Event[RouteDecision], frozen=True):
    """Asks for the route of a prompt. The clusters in `excluded` failed it. `home` is the PD
    cluster that it belongs to.
    """

    model: str
    shape: RequestShape
    priority: int = 0
    excluded: Set[str] = frozenset()
    home: str = ""

    def apply(self, live: LiveScheduler, now_s: float) -> RouteDecision:
        """The answer of `LiveScheduler.route`. Asking changes nothing: `RequestTaken` says what is
        done.
        """
        request = PendingRequest(self.shape, self.priority, self.home)
        return live.route(self.model, request, now_s, excluded=self.excluded)


class RequestTaken(Event[None], frozen=True):
    """A request that was let in goes this way from now on: its prompt is computed at `target`, and
    decoded in `pd` after `lands_s`. A later event for the same number replaces this one.

    `request` is its number in `AdmitAsked`. It counts until `InstanceGiven` or `AdmissionOver`.
    """

    request: int
    model: str
    target: str
    num_tokens: int
    uncached_tokens: int
    lands_s: float
    priority: int = 0
    pd: str = ""

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """It is work ahead of those that come next, and will need a decode slot."""
        known = live.knowledge(self.model)
        leg = PrefillLeg(
            place=live.place(self.target, self.pd),
            num_tokens=self.num_tokens,
            uncached_tokens=self.uncached_tokens,
            begun_s=now_s,
            lands_at_s=now_s + self.lands_s,
            kv_bytes=0.0 if known.kv is None else known.kv.size_bytes(self.num_tokens),
            model=self.model,
            priority=self.priority,
            pd=live.pd(self.pd).name,
        )
        live.ledger.take(self.request, leg)
        known.tried(leg.place, now_s)


class ThresholdsAsked(Event[list[ThresholdNow]], frozen=True):
    """Asks for all thresholds with links as they are now.

    A threshold returns to the plan's with time, also while no request asks for it.
    """

    def apply(self, live: LiveScheduler, now_s: float) -> list[ThresholdNow]:
        """The threshold of each link, and why."""
        for name, pd in live.settings.pairs:
            live.thresholds.update(name, live.link(name, pd), now_s, pd=pd)
        return live.thresholds.overview()


class Judged(msgspec.Struct, frozen=True):
    """A verdict, and the decode load that the request would meet (None: no slot is known)."""

    verdict: Verdict
    decode_load: float | None


class AdmitAsked(Event[Judged], frozen=True):
    """Asks whether a request is let in that would take the route of `predicted`.

    `request` is its number for `AdmissionOver`, `num_tokens` the length of its prompt.
    `work_tokens` counts for its tenant: the prompt and the answers that it asks for (0: the prompt
    alone). `predicted` is None where the route has no prediction. `pd` is the PD cluster that would
    decode it.
    """

    request: int
    tenant: str
    model: str
    num_tokens: int
    predicted: Prediction | None
    work_tokens: int = 0
    pd: str = ""

    def apply(self, live: LiveScheduler, now_s: float) -> Judged:
        """The verdict. A request that is let in counts for its tenant until it is over. What
        `TenantAsked` counted for it does not count any more.
        """
        AdmissionOver(self.request, used_tokens=0).apply(live, now_s)
        decode = live.decode_side(self.model, now_s, self.pd)
        work_tokens = self.work_tokens or self.num_tokens
        load = load_request(live, self.model, self.predicted, self.num_tokens)
        asked = msgspec.structs.replace(load, num_tokens=work_tokens, tenant=self.tenant)
        verdict = _verdict(live, asked, decode, now_s)
        if verdict.admitted:
            live.tenants.started(self.tenant, work_tokens, now_s)
            live.admitted[self.request] = self.tenant, work_tokens
        return Judged(verdict, _decode_load(load.prediction, decode))


class TenantAsked(Event[Judged], frozen=True):
    """Would a request of at least so much work break a limit of its tenant, on any route? Asked
    before anything is spent on it. Its work counts until `AdmitAsked` or `AdmissionOver`, so that
    many requests at one moment do not pass a limit together. `home` is the PD cluster that the
    request belongs to.
    """

    request: int
    tenant: str
    model: str
    work_tokens: int
    home: str = ""

    def apply(self, live: LiveScheduler, now_s: float) -> Judged:
        """Asks nothing of the load."""
        decode = live.decode_side(self.model, now_s, self.home)
        asked = AdmissionRequest(Prediction(), 0.0, self.work_tokens, self.tenant)
        refusal = tenant_refusal(asked, decode, live.settings.admission, now_s, live.tenants)
        if refusal is None:
            live.tenants.started(self.tenant, self.work_tokens, now_s)
            live.admitted[self.request] = self.tenant, self.work_tokens
        return Judged(refusal or Verdict(True, AdmissionReason.ADMITTED), None)


class AdmissionOver(Event[None], frozen=True):
    """A request that was let in is over; `used_tokens` is the work that it was, None: not known.
    Whatever ended it, nothing of it is to come.
    """

    request: int
    used_tokens: int | None = None

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Its tenant has one request less in flight. A request that was refused changes nothing."""
        live.ledger.drop(self.request)
        found = live.admitted.pop(self.request, None)
        if found is not None:
            live.tenants.ended(*found, self.used_tokens)


def _verdict(
    live: LiveScheduler, asked: AdmissionRequest, decode: DecodeView, now_s: float
) -> Verdict:
    """The verdict for one request.

    Where no decode slot is known, load is no reason to refuse: the PD cluster itself says whether
    there is an engine at all. Limits of tenants hold in any case.
    """
    config = live.settings.admission
    if live.settings.refuses_load and decode.slots_total > 0:
        return admit(asked, decode, config, now_s, live.tenants)
    refusal = tenant_refusal(asked, decode, config, now_s, live.tenants)
    is_known = not live.settings.refuses_load
    reason = AdmissionReason.ADMITTED if is_known else AdmissionReason.NO_DECODE_SLOTS
    return refusal or Verdict(True, reason)


def _decode_load(prediction: Prediction, decode: DecodeView) -> float | None:
    if decode.slots_total <= 0 or prediction.landed_s == math.inf:
        return None
    return (decode_load_at(decode, prediction.landed_s).occupied + 1) / decode.slots_total


DecisionEvent: TypeAlias = RouteEarly | RouteAsked | ThresholdsAsked | AdmitAsked | TenantAsked
FactEvent: TypeAlias = (
    ReportHeard | LinkHeard | ThresholdPlanned | TenantsLimited | RequestTaken | AdmissionOver
)
