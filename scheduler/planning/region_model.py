"""What a plan is made for: clusters with their profiles, the links between them, the traffic.

These are values only. Prices are in any one currency. They know no files, engines or search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from scheduler.planning.curves import Curve
from scheduler.planning.lengths import Lengths


@dataclass(frozen=True)
class PrefillClusterModel:
    """A stand-alone prefill cluster of equal instances."""

    name: str
    num_instances: float
    """A part of an instance where PD clusters share the cluster (`joint`)."""
    prefill: Curve
    """Prefill time over the prompt length, s."""
    price_per_instance_hour: float = 0.0


@dataclass(frozen=True)
class PdClusterModel:
    """A local PD cluster: its instances are divided between prefill and decode."""

    name: str
    num_instances: int
    prefill: Curve
    """Prefill time over the prompt length, s."""
    batch_size: int
    """Decode slots of an instance: requests that can decode at once within the SLO."""
    step_s: float
    """The time of one decode step of a full batch, s."""
    price_per_instance_hour: float = 0.0
    decode_memory_bytes: float | None = None
    """The KVCache that one decode instance has room for, landings included; None: no limit."""


Cluster = PrefillClusterModel | PdClusterModel


@dataclass(frozen=True)
class Link:
    """A link from a prefill cluster to a PD cluster."""

    source: str
    target: str
    bytes_per_s: float
    rtt_s: float = 0.0
    price_per_gb: float = 0.0
    """The price of 10^9 bytes."""

    @property
    def name(self) -> str:
        return f"{self.source} to {self.target}"


@dataclass(frozen=True)
class Uplink:
    """Bandwidth that all links from a cluster share (egress), or all links to it (ingress)."""

    cluster: str
    way: Literal["egress", "ingress"]
    bytes_per_s: float

    @property
    def name(self) -> str:
        return f"{self.cluster} {self.way}"

    def carries(self, link: Link) -> bool:
        """Whether what crosses the link counts here."""
        return self.cluster == (link.source if self.way == "egress" else link.target)


@dataclass(frozen=True)
class KvSize:
    """KVCache of a prompt, bytes."""

    size: Curve
    fixed_bytes: float
    """The part that is emitted when the prefill ends: recurrent states."""


@dataclass(frozen=True)
class Traffic:
    """What arrives. `lengths` are those of the uncached part of prompts."""

    lengths: Lengths
    output_tokens: float
    input_tokens: float
    """Mean length of whole prompts with their cached part. Only prices need it."""


@dataclass(frozen=True)
class Region:
    """Everything a plan depends on."""

    prefill_clusters: tuple[PrefillClusterModel, ...]
    pd_clusters: tuple[PdClusterModel, ...]
    links: tuple[Link, ...]
    kv: KvSize
    traffic: Traffic

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """All clusters that can prefill; prefill clusters first."""
        return (*self.prefill_clusters, *self.pd_clusters)

    def link(self, source: str, target: str) -> Link | None:
        """The link between two clusters, None where there is none."""
        return next((k for k in self.links if (k.source, k.target) == (source, target)), None)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The present settings of a running region.

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
    pds = tuple(
        replace(c, num_instances=current.num_prefill[c.name] + current.num_decode[c.name])
        for c in region.pd_clusters
    )
    return replace(region, pd_clusters=pds, traffic=traffic)


HomeKey: TypeAlias = tuple[str, str]
"""The model and the PD cluster of a home."""


@dataclass(frozen=True)
class Home:
    """A PD cluster, the requests of one model that decode there, and all that may prefill them.

    `region` has one PD cluster. Prefill clusters of the same name are the same instances for homes
    of one model; other models have instances of their own there. Links of the same name are shared
    by all homes.
    """

    region: Region
    rate_rps: float
    """The requests that arrive, requests/s."""
    model: str = ""
    bounds: tuple[int, int] | None = None
    """The least and the most N_p; None: any, but one instance decodes."""

    @property
    def key(self) -> HomeKey:
        return self.model, self.region.pd_clusters[0].name
