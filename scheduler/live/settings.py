"""Settings of the live scheduler, as plain values.

The gateway turns its configuration into them. This file does not know files, the defaults of
region.yaml or how a setting is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from scheduler.live.admission import AdmissionConfig
from scheduler.live.long_term.loop import LongTermConfig
from scheduler.live.tenants import TenantLimit
from scheduler.planning.region_model import Uplink
from scheduler.routing.candidates import RouteLimits
from scheduler.routing.order_config import OrderConfig
from scheduler.routing.spill import Spill
from scheduler.routing.threshold import ThresholdConfig

HAND_OFF_TOKENS: Final = 256
"""The default of `hand_off_tokens`."""
REPORT_EVERY_S: Final = 0.5
"""How often a gateway asks clusters for their reports by default, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPolicy(RouteLimits):
    """How the side of one request is chosen. A link that is down, stale or congested keeps prompts
    local.
    """

    policy: Literal["predicted", "threshold"] = "predicted"
    """predicted: the threshold decides, unless the other side's first token is predicted sooner by
    more than the margin. threshold: the threshold alone decides, adjusted to the link.
    """


@dataclass(frozen=True, slots=True)
class PdSettings:
    """One PD cluster: its name, and the prefill clusters that have a link to it.

    `spill` says when another PD cluster may decode requests whose home it is.
    """

    name: str
    prefill_clusters: tuple[str, ...] = ()
    spill: Spill = "overflow"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """Everything that an operator may set of `scheduler.live.core.LiveScheduler`.

    `pd_clusters` are the region's PD clusters, at least one. The first is meant where an event
    names none. Until a plan says otherwise, prompts with more than `threshold_tokens` uncached
    tokens are meant for prefill clusters. Prompts with at most `hand_off_tokens` are never handed
    from one engine to another. `order` is the order of the prefill clusters' queues. With
    `refuses_load` False, only limits of tenants refuse a request. `long_term` says how `models` are
    planned for. With `follows_plans` False, plans are advice and set nothing.
    """

    pd_clusters: tuple[PdSettings, ...]
    threshold_tokens: float
    hand_off_tokens: int
    routing: RoutingPolicy = field(default_factory=RoutingPolicy)
    threshold: ThresholdConfig = field(default_factory=ThresholdConfig)
    order: OrderConfig = field(default_factory=OrderConfig)
    refuses_load: bool = True
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    default_tenant: TenantLimit = field(default_factory=TenantLimit)
    """The limits of each tenant that `tenants` does not name."""
    tenants: Mapping[str, TenantLimit] = field(default_factory=dict)
    """Limits by tenant. A tenant is the name of an API key in the file of keys."""
    models: tuple[str, ...] = ()
    long_term: LongTermConfig = field(default_factory=LongTermConfig)
    follows_plans: bool = True
    uplinks: tuple[Uplink, ...] = ()
    """Bandwidth that links share. Plans divide it among them."""

    def __post_init__(self) -> None:
        names = [pd.name for pd in self.pd_clusters]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"PD clusters are {names}; one is needed, and names must differ")

    @property
    def prefill_clusters(self) -> tuple[str, ...]:
        """The prefill clusters of all PD clusters, each once."""
        return tuple(dict.fromkeys(n for pd in self.pd_clusters for n in pd.prefill_clusters))

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Each prefill cluster with each PD cluster that it has a link to."""
        return tuple((name, pd.name) for pd in self.pd_clusters for name in pd.prefill_clusters)
