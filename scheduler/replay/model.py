"""The inputs of a replay: the region as it really is, the objectives, and the policy that runs it.

Values only; `scheduler.replay.driver` uses them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from netmon.detector import DetectorConfig
from scheduler.encoding.line import EncodeLine
from scheduler.encoding.values import EncodeConfig
from scheduler.live.admission import AdmissionConfig
from scheduler.live.long_term.conversion import ConversionConfig
from scheduler.live.long_term.loop import LongTermConfig
from scheduler.live.settings import HAND_OFF_TOKENS, REPORT_EVERY_S
from scheduler.planning.curves import Curve
from scheduler.planning.joint import JointRegion
from scheduler.planning.region_model import Cluster, PdClusterModel, Region, Uplink
from scheduler.replay.links import RateSchedule
from scheduler.routing.candidates import HOME_MARGIN_S, HOME_MARGIN_SHARE, MARGIN_S, MARGIN_SHARE
from scheduler.routing.order_config import OrderConfig
from scheduler.routing.service import ServiceModel
from scheduler.routing.spill import Spill
from scheduler.routing.threshold import ThresholdConfig

MODEL: Final = "replayed"
"""The served name of the one model that all requests are for."""


class Routing(StrEnum):
    """What decides where a request is prefilled."""

    STATIC = "static"
    """The threshold of the plan, whatever the queues and the links do: the paper's model."""
    ROUTER = "router"
    """The live scheduler's router, whose threshold follows links as they are measured."""
    ORACLE = "oracle"
    """The same router, but it knows the links' schedules, and has the best t for every rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The objectives of a request: time to first token, and mean time per further token."""

    ttft_s: float = 30.0
    tbt_s: float = 0.1

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tbt_s > 0):
            raise ValueError(f"ttft_s {self.ttft_s!r} and tbt_s {self.tbt_s!r} must be above 0")


@dataclass(frozen=True, kw_only=True)
class EncodingModel:
    """How media are encoded in each cluster, by its name. `num_instances` are its encode instances,
    beside those of the region. `prefills` are the prefill times without any encoding.
    """

    lines: Mapping[str, EncodeLine]
    prefills: Mapping[str, Curve]
    num_instances: Mapping[str, int] = field(default_factory=dict)
    config: EncodeConfig = field(default_factory=EncodeConfig)


@dataclass(frozen=True, kw_only=True)
class ReplayModel:
    """A region over time.

    `region` has the profiles that the scheduler believes, the links' rates at the start, and the
    traffic of the plans. Where it has several PD clusters, `joint` has the homes of the requests of
    each, in their order, and the uplinks.
    """

    region: Region
    joint: JointRegion | None = None
    lost: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """From when until when a cluster is lost, with all that it has under way."""
    slo: Slo = field(default_factory=Slo)
    schedules: Mapping[str, RateSchedule] = field(default_factory=dict)
    """The schedule of each link by `Link.name`. A link without one never changes."""
    decode_steps: tuple[tuple[int, float], ...] = ()
    """(batch, seconds of a step) of one decode instance, ascending. Empty: the region's step time
    at any batch. An engine runs up to the largest of these batches, or the region's if larger."""
    cache_blocks: Mapping[str, int] | None = None
    """Size of the prefix cache of each cluster, blocks of the workload. None: nothing is cached."""
    prefill_factors: Mapping[str, float] = field(default_factory=dict)
    """Real prefill time / believed prefill time, by cluster."""
    prefill_jitter: float = 0.0
    """Standard deviation of the logarithm of real prefill times."""
    services: Mapping[str, ServiceModel] = field(default_factory=dict)
    """How what each cluster prefills is really served. `prefill`, `decode_s` and `busy_s` lengthen
    the prefill; `overhead_s` passes between the landing and the first decode step; `render` does
    not count. A cluster without one serves each prompt as if alone and without overhead.
    """
    transfer_timeout_s: float = 30.0
    """How long after its prefill a request's KVCache may land. Later it is given up, and the PD
    cluster prefills the request itself. Bytes that were not sent by then never are."""
    encoding: EncodingModel | None = None
    """Needed for a workload with media."""
    max_concurrent: int = 1
    """The most prompts that an instance is given at a time. It computes them in that order."""
    pass_tokens: int | None = None
    """The most tokens that one forward pass computes, so that two prompts may share a pass. None: a
    pass is one prompt."""
    load_steps: int | None = None
    """The steps that an engine which decodes begins between the end of the step in which KVCache
    lands and the first step of its request. None: a request joins the batch in the middle of a
    step."""
    relabel_s: float = 1.0
    """The time from the end of an instance's drain until it has its new role."""

    def __post_init__(self) -> None:
        names = [pd.name for pd in self.region.pd_clusters]
        homes = names[:1] if self.joint is None else [home.key[1] for home in self.joint.homes]
        if not names or homes != names:
            raise ValueError(
                f"the region has the PD clusters {', '.join(names)}; the homes of requests are "
                f"{', '.join(homes)}: a replay of several needs one home in each"
            )
        links = {link.name for link in self.region.links}
        for name in self.schedules:
            if name not in links:
                raise ValueError(f"no link {name!r}; known here: {', '.join(sorted(links))}")
        clusters = [cluster.name for cluster in self.region.clusters]
        for name, (from_s, until_s) in self.lost.items():
            if name not in clusters:
                raise ValueError(f"no cluster {name!r}; known here: {', '.join(clusters)}")
            if not 0 <= from_s < until_s < math.inf:
                raise ValueError(
                    f"{name} is lost from {from_s:g} to {until_s:g} s: times must ascend and end"
                )
        if not (0 <= self.prefill_jitter < math.inf and self.transfer_timeout_s > 0):
            raise ValueError(
                f"prefill_jitter {self.prefill_jitter!r} must not be negative, "
                f"transfer_timeout_s {self.transfer_timeout_s!r} above 0"
            )

    def prefill(self, cluster: Cluster) -> Curve:
        """The prefill time of a cluster without the encoding that plans count with it."""
        return cluster.prefill if self.encoding is None else self.encoding.prefills[cluster.name]

    @property
    def pd(self) -> PdClusterModel:
        """The first PD cluster."""
        return self.region.pd_clusters[0]

    @property
    def uplinks(self) -> tuple[Uplink, ...]:
        return () if self.joint is None else self.joint.uplinks


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Everything that decides. A part that is None is left out, or taken from the best plan."""

    name: str = "router"
    routing: Routing = Routing.ROUTER
    thresholds: Mapping[str, float] | None = None
    """t of each prefill cluster at the start, tokens."""
    num_prefill: int | None = None
    """Instances of the PD cluster that prefill at the start."""
    order: OrderConfig | None = field(default_factory=OrderConfig)
    """The order of prefills that wait in a prefill cluster. None: first come, first served, as
    always inside of a PD cluster.
    """
    hand_off_tokens: int = HAND_OFF_TOKENS
    """Prompts with at most so many uncached tokens are served whole by an instance that decodes."""
    margin_s: float = MARGIN_S
    margin_share: float = MARGIN_SHARE
    home_margin_s: float = HOME_MARGIN_S
    home_margin_share: float = HOME_MARGIN_SHARE
    spill: Spill = "overflow"
    """When another PD cluster than its home decodes a request."""
    threshold: ThresholdConfig = field(default_factory=ThresholdConfig)
    admission: AdmissionConfig | None = None
    long_term: LongTermConfig | None = None
    conversion: ConversionConfig = field(default_factory=ConversionConfig)
    report_every_s: float = REPORT_EVERY_S
    """Routing sees each cluster by its last report, and a lost cluster until its next report is
    missing.
    """
    monitor: DetectorConfig | None = field(default_factory=DetectorConfig)
    """The monitor of links with a schedule. None: routing sees the true rate, late by a sample."""
