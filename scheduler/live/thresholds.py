"""The routing threshold of every link: the plan's, times a factor for the state of the link.

A link leads from a prefill cluster to a PD cluster. The base comes from the configuration, and
later from the long-term loop. One `ThresholdController` follows each link. Pure; time is an
argument. This file does not know requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from netmon.region_link import LinkView
from scheduler.routing.decision import Number
from scheduler.routing.threshold import Threshold, ThresholdConfig, ThresholdController


class ThresholdNow(msgspec.Struct, frozen=True, kw_only=True):
    """The threshold of one prefill cluster for prompts that decode in `pd`, and why, as of the last
    request or query.
    """

    cluster: str
    base_tokens: float
    tokens: float
    reason: str
    numbers: dict[str, Number] = {}
    pd: str = ""


@dataclass(slots=True)
class _Kept:
    base_tokens: float
    controller: ThresholdController
    planned_bytes_per_s: float = 0.0
    now: Threshold | None = None


class Thresholds:
    """The thresholds of all links. Single-threaded. Where `pd` is "", the first PD cluster is
    meant.
    """

    def __init__(
        self,
        clusters: Mapping[str, Iterable[str]],
        base_tokens: float,
        config: ThresholdConfig,
    ) -> None:
        """`clusters` are the prefill clusters with a link to each PD cluster, by its name."""
        self._kept = {
            pd: {name: _Kept(base_tokens, ThresholdController(config)) for name in sorted(names)}
            for pd, names in clusters.items()
        }
        self._first = next(iter(self._kept))

    def set_base(
        self, cluster: str, tokens: float, planned_bytes_per_s: float = 0.0, *, pd: str = ""
    ) -> None:
        """Set the plan's threshold, tokens. KeyError for clusters without a link.

        `planned_bytes_per_s` is what the plan sends over the link, 0 where it does not say.
        """
        kept = self._of(pd)[cluster]
        kept.base_tokens, kept.planned_bytes_per_s = tokens, planned_bytes_per_s

    def base_tokens(self, pd: str = "") -> Mapping[str, float]:
        """The plan's thresholds by prefill cluster, for prompts that decode in `pd`."""
        return {name: kept.base_tokens for name, kept in self._of(pd).items()}

    def plan_tokens(self, cluster: str, pd: str = "") -> float:
        """The plan's threshold of one link."""
        return self._of(pd)[cluster].base_tokens

    def planned(self) -> Iterator[tuple[str, str, float, float]]:
        """The prefill cluster, PD cluster and planned threshold of each link, and the bytes/s that
        the plan sends over it.
        """
        for pd, clusters in self._kept.items():
            for name, kept in clusters.items():
                yield name, pd, kept.base_tokens, kept.planned_bytes_per_s

    def update(self, cluster: str, link: LinkView, now_s: float, *, pd: str = "") -> Threshold:
        """The threshold of a link with its present view."""
        kept = self._of(pd)[cluster]
        kept.now = kept.controller.update(kept.base_tokens, link, kept.planned_bytes_per_s, now_s)
        return kept.now

    def overview(self) -> list[ThresholdNow]:
        """The thresholds of all links."""
        return [
            ThresholdNow(
                cluster=name,
                base_tokens=kept.base_tokens,
                tokens=kept.base_tokens if kept.now is None else kept.now.tokens,
                reason="" if kept.now is None else kept.now.reason.value,
                numbers={} if kept.now is None else dict(kept.now.numbers),
                pd=pd,
            )
            for pd, clusters in self._kept.items()
            for name, kept in clusters.items()
        ]

    def _of(self, pd: str) -> dict[str, _Kept]:
        return self._kept[pd or self._first]
