"""The routing threshold of every prefill cluster: the plan's, times a factor for its link.

The base comes from the configuration, and later from the long-term loop. One `ThresholdController`
for each cluster follows its link. Pure; time is an argument. This file does not know requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from netmon.region_link import LinkView
from scheduler.routing.decision import Number
from scheduler.routing.threshold import Threshold, ThresholdConfig, ThresholdController


class ThresholdNow(msgspec.Struct, frozen=True, kw_only=True):
    """The threshold of one prefill cluster, and why, as of the last request or query."""

    cluster: str
    base_tokens: float
    tokens: float
    reason: str
    numbers: dict[str, Number] = {}


@dataclass(slots=True)
class _Kept:
    base_tokens: float
    controller: ThresholdController
    planned_bytes_per_s: float = 0.0
    now: Threshold | None = None


class Thresholds:
    """The thresholds of all prefill clusters. Single-threaded."""

    def __init__(
        self, clusters: Iterable[str], base_tokens: float, config: ThresholdConfig
    ) -> None:
        self._kept = {
            name: _Kept(base_tokens, ThresholdController(config)) for name in sorted(clusters)
        }

    def set_base(self, cluster: str, tokens: float, planned_bytes_per_s: float = 0.0) -> None:
        """Set the plan's threshold, tokens. KeyError for an unknown cluster.

        `planned_bytes_per_s` is what the plan sends over the link, 0 where it does not say.
        """
        kept = self._kept[cluster]
        kept.base_tokens, kept.planned_bytes_per_s = tokens, planned_bytes_per_s

    def base_tokens(self) -> Mapping[str, float]:
        """The plan's thresholds by cluster."""
        return {name: kept.base_tokens for name, kept in self._kept.items()}

    def plan_tokens(self, cluster: str) -> float:
        """The plan's threshold of one cluster."""
        return self._kept[cluster].base_tokens

    def update(self, cluster: str, link: LinkView, now_s: float) -> float:
        """The threshold of a cluster with the present view of its link."""
        kept = self._kept[cluster]
        kept.now = kept.controller.update(kept.base_tokens, link, kept.planned_bytes_per_s, now_s)
        return kept.now.tokens

    def overview(self) -> list[ThresholdNow]:
        """The thresholds of all clusters."""
        return [
            ThresholdNow(
                cluster=name,
                base_tokens=kept.base_tokens,
                tokens=kept.base_tokens if kept.now is None else kept.now.tokens,
                reason="" if kept.now is None else kept.now.reason.value,
                numbers={} if kept.now is None else dict(kept.now.numbers),
            )
            for name, kept in self._kept.items()
        ]
