"""What scheduling rests on now, for operators: what was learnt, thresholds, links.

These are the values of GET /prfaas/scheduling. They know no HTTP, requests or ways of learning.
"""

from __future__ import annotations

import msgspec

from deploy.gateway.scheduling.plan_overview import TrafficNow, traffic_now
from deploy.gateway.scheduling.scheduler import RegionScheduler
from netmon.region_link import LinkView
from scheduler.live.learning.knowledge import ModelKnowledge
from scheduler.live.thresholds import ThresholdNow
from scheduler.routing.profiles import KvProfile
from scheduler.routing.service import ALONE, ServiceModel


class LearnedPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill at one place: T(n) = constant + linear n + square n^2, from each of `starts` on.

    Until a place `is_known`, the profile of the place with most prefills predicts it. `error` is
    the median of |predicted / measured - 1| of its latest prefills, and `ttft_error` that of its
    latest TTFTs. `service` is what TTFTs take beside their parts, and `calibrated` whether prefills
    were timed there while nothing else ran.
    """

    place: str
    num_seen: int
    is_known: bool
    starts: tuple[float, ...]
    coefficients: tuple[tuple[float, float, float], ...]
    error: float | None = None
    service: ServiceModel = ALONE
    calibrated: bool = False
    ttft_error: float | None = None


class LearnedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What was learnt of one served model; None: nothing yet."""

    model: str
    places: list[LearnedPlace]
    bytes_per_token: float
    kv: KvProfile | None = None
    decode_s: float | None = None
    step_s: float | None = None
    traffic: TrafficNow | None = None


class LinkSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two clusters as routing sees it."""

    source: str
    target: str
    view: LinkView


class SchedulingOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to GET /prfaas/scheduling."""

    models: list[LearnedModel]
    thresholds: list[ThresholdNow]
    links: list[LinkSeen]


def scheduling_overview(scheduler: RegionScheduler) -> SchedulingOverview:
    """What scheduling rests on now."""
    now_s = scheduler.clock()
    return SchedulingOverview(
        models=[_model(name, known, now_s) for name, known in sorted(scheduler.models().items())],
        thresholds=scheduler.thresholds_now(),
        links=[
            LinkSeen(source=source, target=target, view=view)
            for (source, target), view in scheduler.links().items()
        ],
    )


def _model(name: str, known: ModelKnowledge, now_s: float) -> LearnedModel:
    measured = known.traffic.measured(now_s)
    return LearnedModel(
        model=name,
        places=[_place(place, known, now_s) for place in known.places],
        bytes_per_token=known.lengths.bytes_per_token,
        kv=known.kv,
        decode_s=known.decode_s,
        step_s=known.step_s,
        traffic=None if measured is None else traffic_now(measured),
    )


def _place(place: str, known: ModelKnowledge, now_s: float) -> LearnedPlace:
    learned = known.profile(place)
    return LearnedPlace(
        place=place,
        num_seen=learned.num_seen,
        is_known=learned.is_known,
        starts=learned.profile.starts,
        coefficients=learned.profile.coefficients,
        error=learned.error,
        service=known.service(place, now_s),
        calibrated=learned.has_prior,
        ttft_error=known.error(place),
    )
