"""A running region as the planner sees it: its present settings, and its model as measured.

These are values and one pure function. They know neither how anything was measured nor what is
decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from scheduler.planning.region_model import Region, Traffic


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The present settings of the region.

    Usable instances count by the role that they have, or that they will have after a conversion
    that runs. `converting` names the clusters where one runs or dwells.
    """

    thresholds: Mapping[str, float]
    """The threshold of each prefill cluster by name, tokens."""
    num_prefill: Mapping[str, int]
    """Instances by PD cluster, like `num_decode`."""
    num_decode: Mapping[str, int]
    converting: frozenset[str] = frozenset()


def measured_region(region: Region, traffic: Traffic, current: Allocation) -> Region:
    """The region with the instances that are usable and the traffic that was measured."""
    return replace(
        region,
        pd_clusters=tuple(
            replace(c, num_instances=current.num_prefill[c.name] + current.num_decode[c.name])
            for c in region.pd_clusters
        ),
        traffic=traffic,
    )
