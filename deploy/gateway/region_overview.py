"""The answer to GET /prfaas/region: what routing sees."""

from __future__ import annotations

import msgspec

from deploy.gateway.scheduling.admission import AdmissionOverview
from scheduler.live.thresholds import ThresholdNow
from scheduler.reports import ClusterReport


class RegionNow(msgspec.Struct, frozen=True, kw_only=True):
    """`pd` is the first one of `pds`. A cluster's report is None if it is missing or too old.
    `links` names the links from each prefill cluster, and `settling` counts requests whose legs
    still run after their end.
    """

    threshold_tokens: int
    in_flight: int
    buffered_bytes: int
    settling: int
    links: dict[str, str]
    thresholds: list[ThresholdNow]
    admission: AdmissionOverview
    pd: ClusterReport | None
    pds: dict[str, ClusterReport | None]
    prefill: dict[str, ClusterReport | None]
