"""Facts that the live scheduler is told, and questions that it is asked.

What each event changes and answers is its `apply`. Does not know where facts come from, nor how an
answer is carried out.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import TypeAlias

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
from scheduler.live.snapshots import PendingRequest, Reported
from scheduler.live.thresholds import ThresholdNow
from scheduler.reports import ClusterReport
from scheduler.routing.decision import RequestShape
from scheduler.routing.prediction import Prediction
from scheduler.routing.short_term import RouteDecision
from scheduler.routing.views import DecodeView

# ---- facts


class ReportHeard(Event[None], frozen=True):
    """A cluster's report, asked for at `at_s`; None: there is none, or the last is too old."""

    cluster: str
    report: ClusterReport | None
    at_s: float

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """It replaces the one before."""
        live.reports[self.cluster] = Reported(self.cluster, self.report, self.at_s)


class LinkHeard(Event[None], frozen=True):
    """How a link is now."""

    source: str
    target: str
    view: LinkView

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """It replaces what was heard before."""
        live.links[self.source, self.target] = self.view


class ThresholdPlanned(Event[None], frozen=True):
    """A plan says t of a prefill cluster, and what it sends over the link (0: it does not say)."""

    cluster: str
    tokens: float
    bytes_per_s: float

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """The link's state multiplies this t from now on."""
        live.thresholds.set_base(self.cluster, self.tokens, self.bytes_per_s)


# ---- questions


class RouteEarly(Event[RouteDecision | None], frozen=True):
    """Where does a prompt go that nobody has counted; None: count it and look it up first."""

    model: str
    shape: RequestShape
    priority: int = 0

    def apply(self, live: LiveScheduler, now_s: float) -> RouteDecision | None:
        """Answers as `LiveScheduler.route_early`."""
        return live.route_early(self.model, PendingRequest(self.shape, self.priority), now_s)


class RouteAsked(Event[RouteDecision], frozen=True):
    """Where does a prompt go, not to the clusters in `excluded`: they failed it."""

    model: str
    shape: RequestShape
    priority: int = 0
    excluded: Set[str] = frozenset()

    def apply(self, live: LiveScheduler, now_s: float) -> RouteDecision:
        """Answers as `LiveScheduler.route`."""
        request = PendingRequest(self.shape, self.priority)
        return live.route(self.model, request, now_s, excluded=self.excluded)


class ThresholdsAsked(Event[list[ThresholdNow]], frozen=True):
    """All thresholds, for links as they are now: t returns to the plan's without requests, too."""

    def apply(self, live: LiveScheduler, now_s: float) -> list[ThresholdNow]:
        """t of each prefill cluster and why."""
        for name in live.settings.prefill_clusters:
            live.thresholds.update(name, live.link(name, live.settings.pd), now_s)
        return live.thresholds.overview()


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict, and the decode load that the request would meet; None: no slot is known."""

    verdict: Verdict
    decode_load: float | None


class AdmitAsked(Event[Judged], frozen=True):
    """Is a request let in that would take the route of `predicted`?

    `request` numbers it for `AdmissionOver`. `num_tokens` is its prompt's length, and `work_tokens`
    what counts for its tenant: the answers that it asks for, too (0: its prompt alone). `predicted`
    None: its route predicts nothing.
    """

    request: int
    tenant: str
    model: str
    num_tokens: int
    predicted: Prediction | None
    work_tokens: int = 0

    def apply(self, live: LiveScheduler, now_s: float) -> Judged:
        """One that is let in counts for its tenant until it is over."""
        known, decode = live.knowledge(self.model), live.decode_side(self.model, now_s)
        # Nobody is refused for a guess: before any prefill was seen, the present load counts.
        prediction = self.predicted if known.is_measured else None
        prediction = prediction or Prediction()
        kv_bytes = 0.0 if known.kv is None else known.kv.size_bytes(self.num_tokens)
        work_tokens = self.work_tokens or self.num_tokens
        asked = AdmissionRequest(prediction, kv_bytes, work_tokens, self.tenant)
        verdict = _verdict(live, asked, decode, now_s)
        if verdict.admitted:
            live.tenants.started(self.tenant, work_tokens, now_s)
            live.admitted[self.request] = self.tenant, work_tokens
        return Judged(verdict, _decode_load(prediction, decode))


class TenantAsked(Event[Judged], frozen=True):
    """Would a request of at least so much work break a limit of its tenant, on any route? Asked
    before anything is spent on it; nothing is held.
    """

    tenant: str
    model: str
    work_tokens: int

    def apply(self, live: LiveScheduler, now_s: float) -> Judged:
        """Asks nothing of the load."""
        decode = live.decode_side(self.model, now_s)
        asked = AdmissionRequest(Prediction(), 0.0, self.work_tokens, self.tenant)
        refusal = tenant_refusal(asked, decode, live.settings.admission, now_s, live.tenants)
        return Judged(refusal or Verdict(True, AdmissionReason.ADMITTED), None)


class AdmissionOver(Event[None], frozen=True):
    """A request that was let in is over; `used_tokens` is the work that it was, None: not known."""

    request: int
    used_tokens: int | None = None

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """Its tenant has one less in flight. Of a request that was refused this says nothing."""
        found = live.admitted.pop(self.request, None)
        if found is not None:
            live.tenants.ended(*found, self.used_tokens)


def _verdict(
    live: LiveScheduler, asked: AdmissionRequest, decode: DecodeView, now_s: float
) -> Verdict:
    """Where no decode slot is known, load is no reason: whether there is an engine at all is for
    the PD cluster to say. Limits of tenants hold all the same.
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
FactEvent: TypeAlias = ReportHeard | LinkHeard | ThresholdPlanned | AdmissionOver
