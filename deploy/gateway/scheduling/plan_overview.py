"""The answer to `GET /prfaas/plan`: the plan in force, what it rests on, and the last decisions.

These are values for people and programs, made from the scheduler's own. They do not know how they
came about.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from scheduler.live.learning.knowledge import ModelKnowledge
from scheduler.live.learning.measured_traffic import MeasuredTraffic
from scheduler.live.long_term.encode_step import EncodeStage
from scheduler.live.long_term.events import PlanStep
from scheduler.live.long_term.model_plan import PlanGoal
from scheduler.live.long_term.running_region import pd_profile
from scheduler.planning.region_model import Cluster, PdClusterModel, Region

_SHOWN_TOKENS = (1024, 8192, 32_768, 131_072)


class TrafficNow(msgspec.Struct, frozen=True, kw_only=True):
    """Measured traffic. Lengths are tokens. It rests on `num_requests` of the last `window_s`."""

    num_requests: float
    rate_rps: float
    window_s: float
    input_tokens: float
    uncached_tokens: float
    uncached_p90_tokens: float
    output_tokens: float
    hit_ratio: float
    media_tokens_per_s: float = 0.0
    """Tokens of images and other media that have to be encoded."""


class EncodeNow(msgspec.Struct, frozen=True, kw_only=True):
    """The mean time that the media of a request take, requests without media included, in seconds:
    of an instance that encodes, and of one that prefills.
    """

    stage_s: float
    own_s: float


class ClusterModel(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster as it is planned with.

    `prefill` is the learnt curve: constant, per token and per token squared, seconds. `prefill_s`
    is its value at some lengths. `error` is the median of |predicted / measured - 1| of `num_seen`
    prefills. `decode_slots` are those of one instance; 0: it does not decode.
    """

    name: str
    num_instances: int
    prefill: tuple[float, float, float]
    prefill_s: list[tuple[int, float]]
    num_seen: int
    error: float | None = None
    decode_slots: int = 0
    step_s: float = 0.0


class LinkModel(msgspec.Struct, frozen=True, kw_only=True):
    """A link as it is planned with: its mean rate over the last period."""

    source: str
    target: str
    bytes_per_s: float
    rtt_s: float


class RegionModel(msgspec.Struct, frozen=True, kw_only=True):
    """The region as it is planned with, as of the last step."""

    clusters: list[ClusterModel]
    links: list[LinkModel]
    kv_fixed_bytes: float
    kv_token_bytes: float
    notes: list[str] = []


class PlanDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one model's plan for the PD cluster `pd`.

    `at_s` is Unix time. `numbers` are what the reason rests on (requests/s for `*_rps`). `done`
    says in words what was done, or why nothing was. `notes` say what the plan leaves out.
    """

    model: str = ""
    at_s: float
    age_s: float
    reason: str
    done: list[str]
    numbers: dict[str, float] = {}
    thresholds: dict[str, float] = {}
    thresholds_after: dict[str, float] = {}
    conversions: list[str] = []
    goal: PlanGoal | None = None
    notes: list[str] = []
    pd: str = ""


class ModelPlanNow(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one served model for the PD cluster `pd`.

    `num_prefill` and `num_decode` count its usable instances there, as they will be after the
    conversion that runs, and so does `num_encode` where there are any. `unknown` says why there is
    no plan. `encode` is None where no encode stage is planned.
    """

    model: str
    num_prefill: dict[str, int]
    num_decode: dict[str, int]
    traffic: TrafficNow | None = None
    region: RegionModel | None = None
    unknown: str = ""
    pd: str = ""
    num_encode: dict[str, int] = {}
    encode: EncodeNow | None = None


class PlanOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The long-term loop of one gateway.

    `thresholds` are those of the plans; the router multiplies them by what a link's state asks for.
    `decisions` begin with the newest.
    """

    mode: str
    period_s: float
    next_step_s: float | None
    thresholds: dict[str, float]
    conversion: str = ""
    models: list[ModelPlanNow] = []
    decisions: list[PlanDecision] = []


def traffic_now(measured: MeasuredTraffic) -> TrafficNow:
    """The traffic in numbers that people want to see."""
    uncached = measured.uncached
    return TrafficNow(
        num_requests=measured.num_requests,
        rate_rps=measured.rate_rps,
        window_s=uncached.window_s,
        input_tokens=measured.input_tokens,
        uncached_tokens=uncached.mean_tokens,
        uncached_p90_tokens=float(uncached.lengths.quantile([0.9])[0]),
        output_tokens=measured.output.mean_tokens,
        hit_ratio=measured.hit_ratio,
        media_tokens_per_s=(
            0.0 if measured.media is None else measured.media.mean_tokens * measured.rate_rps
        ),
    )


def encode_now(stage: EncodeStage) -> EncodeNow:
    """The encode stage in numbers that people want to see."""
    return EncodeNow(stage_s=stage.stage_s, own_s=stage.own_s)


def region_now(
    region: Region, knowledge: ModelKnowledge, places: tuple[str, str], notes: tuple[str, ...]
) -> RegionModel:
    """The region in numbers that people want to see. Learnt curves have one piece. `places` are
    those of its PD cluster.
    """
    return RegionModel(
        clusters=[_cluster_model(cluster, knowledge, places) for cluster in region.clusters],
        links=[
            LinkModel(
                source=link.source,
                target=link.target,
                bytes_per_s=link.bytes_per_s,
                rtt_s=link.rtt_s,
            )
            for link in region.links
        ],
        kv_fixed_bytes=region.kv.fixed_bytes,
        kv_token_bytes=float(region.kv.size.coefficients[0][1]),
        notes=list(notes),
    )


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers without infinities and nan, which JSON does not have."""
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def decision_now(step: PlanStep, done: list[str], at_s: float) -> PlanDecision:
    """A step and its result, just now."""
    return PlanDecision(
        model=step.model,
        at_s=at_s,
        age_s=0.0,
        reason=step.reason,
        done=done,
        numbers=_finite(step.numbers),
        thresholds=_finite(step.thresholds),
        thresholds_after=_finite(step.thresholds_after),
        conversions=[f"{w.cluster}: {w.from_role} to {w.to_role}" for w in step.conversions],
        goal=step.goal,
        notes=list(step.notes),
        pd=step.pd,
    )


def _cluster_model(
    cluster: Cluster, knowledge: ModelKnowledge, places: tuple[str, str]
) -> ClusterModel:
    is_pd = isinstance(cluster, PdClusterModel)
    learned = pd_profile(knowledge, places) if is_pd else knowledge.profile(cluster.name)
    constant, linear, square = (float(value) for value in cluster.prefill.coefficients[0])
    return ClusterModel(
        name=cluster.name,
        num_instances=int(cluster.num_instances),
        prefill=(constant, linear, square),
        prefill_s=[(tokens, float(cluster.prefill(tokens))) for tokens in _SHOWN_TOKENS],
        num_seen=learned.num_seen,
        error=learned.error,
        decode_slots=cluster.batch_size if isinstance(cluster, PdClusterModel) else 0,
        step_s=cluster.step_s if isinstance(cluster, PdClusterModel) else 0.0,
    )
