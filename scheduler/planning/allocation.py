"""A running region as the planner sees it: its present settings, and its model as measured.

These are values and one pure function. They know neither how anything was measured nor what is
decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scheduler.planning.region_model import Region, Traffic


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """Measured values that replace those of the profiles. What is left out is right already.

    `prefill_factors` are measured over predicted time, by cluster name
    (`scheduler.routing.prediction`). `link_bytes_per_s` are means over the last period, by
    `Link.name`: this loop does not react to what lasts for seconds.
    """

    prefill_factors: Mapping[str, float] = field(default_factory=dict)
    link_bytes_per_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, factor in self.prefill_factors.items():
            if not 0 < factor < math.inf:
                raise ValueError(f"the factor of {name} is {factor!r}; it must be above 0")
        for name, rate in self.link_bytes_per_s.items():
            if not 0 <= rate < math.inf:
                raise ValueError(f"the rate of {name} is {rate!r}; it must not be negative")


UNCORRECTED = Corrections()


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


def measured_region(
    region: Region, traffic: Traffic, current: Allocation, corrections: Corrections = UNCORRECTED
) -> Region:
    """The region as it is: usable instances, corrected profiles, measured links and traffic."""
    prefill, rates = corrections.prefill_factors, corrections.link_bytes_per_s
    return replace(
        region,
        prefill_clusters=tuple(
            replace(c, prefill=c.prefill.scaled(prefill.get(c.name, 1.0)))
            for c in region.prefill_clusters
        ),
        pd_clusters=tuple(
            replace(
                c,
                prefill=c.prefill.scaled(prefill.get(c.name, 1.0)),
                num_instances=current.num_prefill[c.name] + current.num_decode[c.name],
            )
            for c in region.pd_clusters
        ),
        links=tuple(replace(k, bytes_per_s=rates.get(k.name, k.bytes_per_s)) for k in region.links),
        traffic=traffic,
    )
