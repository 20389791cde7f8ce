"""A running region as the planner sees it: what it is set to, and its model as measured.

Values and one pure function. Knows neither how anything was measured nor what is decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scheduler.planning.region_model import Region, Traffic


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """What measurement says of the region, over its profiles; what is left out is right already.

    Factors are measured over predicted time by cluster name (`scheduler.routing.prediction`). Link
    rates are means over the last period, by `Link.name`: what lasts for seconds is not for this
    loop.
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
    """What the region is set to now.

    Instances count that are usable, by the role that they have, or will have once a conversion that
    runs is done. `converting` names clusters where one runs or dwells.
    """

    thresholds: Mapping[str, float]
    """t of each prefill cluster by name, tokens."""
    num_prefill: Mapping[str, int]
    """By PD cluster, as `num_decode`."""
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
