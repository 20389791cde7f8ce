"""What every request needs and none owns."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.gateway.cache.caches import RegionCaches
from deploy.gateway.cache.upkeep import CacheUpkeep
from deploy.gateway.config import TimeoutConfig
from deploy.gateway.metrics import GatewayMetrics
from deploy.gateway.proxy.engine import EngineDoor
from deploy.gateway.scheduling.admission import Admission
from deploy.gateway.scheduling.feedback import Feedback
from deploy.gateway.scheduling.scheduler import RegionScheduler
from deploy.gateway.serving.background import Background
from local_pd.cluster import PdCluster
from prfaas.cluster import PrefillCluster


@dataclass(frozen=True, slots=True)
class Services:
    """Without `caches` nothing is known to be cached, and without `upkeep` nothing cached is
    moved.
    """

    pd: PdCluster
    prefill_clusters: dict[str, PrefillCluster]
    door: EngineDoor
    metrics: GatewayMetrics
    background: Background
    timeouts: TimeoutConfig
    scheduler: RegionScheduler
    admission: Admission
    caches: RegionCaches | None = None
    upkeep: CacheUpkeep | None = None

    @property
    def feedback(self) -> Feedback:
        """To be told how requests go."""
        return Feedback(self.scheduler)

    def tell_ended(self, instance: str) -> None:
        """Let the PD cluster's front know, in the background, that what an instance was given is
        over.
        """
        self.background.spawn(self.pd.ended(instance), f"end at {instance}")
