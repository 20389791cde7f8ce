"""The routing threshold of every prefill cluster: what the plan says, times what its link asks for.

A base comes from the configuration and later from the long-term loop; one `ThresholdController`
each follows the link. Pure; time is an argument. Does not know requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from netmon.region_link import LinkView
from scheduler.routing.decision import Number
from scheduler.routing.threshold import Threshold, ThresholdConfig, ThresholdController


class ThresholdNow(msgspec.Struct, frozen=True, kw_only=True):
    """t of one prefill cluster, and why, as of the last request or look."""

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
    """Single-threaded."""

    def __init__(
        self, clusters: Iterable[str], base_tokens: float, config: ThresholdConfig
    ) -> None:
        self._kept = {
            name: _Kept(base_tokens, ThresholdController(config)) for name in sorted(clusters)
        }

    def set_base(self, cluster: str, tokens: float, planned_bytes_per_s: float = 0.0) -> None:
        """Set the plan's threshold. `planned_bytes_per_s`: what it sends over the link, 0 when
        it does not say. KeyError for an unknown cluster.
        """
        kept = self._kept[cluster]
        kept.base_tokens, kept.planned_bytes_per_s = tokens, planned_bytes_per_s

    def base_tokens(self) -> Mapping[str, float]:
        """What the plan says, by cluster."""
        return {name: kept.base_tokens for name, kept in self._kept.items()}

    def plan_tokens(self, cluster: str) -> float:
        """What the plan says of one cluster."""
        return self._kept[cluster].base_tokens

    def update(self, cluster: str, link: LinkView, now_s: float) -> float:
        """t of a cluster whose link is seen like this now."""
        kept = self._kept[cluster]
        kept.now = kept.controller.update(kept.base_tokens, link, kept.planned_bytes_per_s, now_s)
        return kept.now.tokens

    def overview(self) -> list[ThresholdNow]:
        """All of them."""
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
