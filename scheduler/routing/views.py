"""A region at one moment as the scheduler's decisions see it: its clusters.

Shells fill these values from reports and measurements. Work is given in predicted seconds of one
instance. This file knows neither how anything was measured nor what is decided from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Final

import msgspec

from netmon.region_link import LinkView
from scheduler.routing.media import MediaView
from scheduler.routing.profiles import PrefillProfile
from scheduler.routing.service import Load

_BUSY_STEPS: Final = 2.5


class DecodeView(msgspec.Struct, frozen=True, kw_only=True):
    """The decode side of a PD cluster as one pool of slots.

    A slot is a place in a batch that keeps the time per token within its objective. `decode_s` is
    how long a request decodes on average, None until the first answer has ended; `step_s` is the
    time of one step. Nobody knows how long an answer will be, so slots fall free evenly, one per
    `decode_s` / slots. That holds for any distribution of lengths, while "the average less the
    time so far" would give 0 for every decode that lasts longer than the average. `landing_s` are
    the predicted times until each request now in prefill can decode, ascending, and
    `landing_kv_bytes` is the KV memory that these requests will take together. `num_instances` are
    the engines that the slots belong to.
    """

    slots_total: int
    slots_used: int = 0
    num_waiting: int = 0
    decode_s: float | None = None
    step_s: float = 0.0
    landing_s: tuple[float, ...] = ()
    kv_bytes: float = 0.0
    kv_total_bytes: float | None = None
    landing_kv_bytes: float = 0.0
    num_instances: int = 1

    def __post_init__(self) -> None:
        # A view is made for every route: one comparison usually, names only for the message.
        # One look at all of them, since every route makes one.
        if (
            self.slots_total >= 0
            and self.slots_used >= 0
            and self.num_waiting >= 0
            and 0 <= self.step_s < math.inf
            and 0 <= (self.decode_s or 0.0) < math.inf
            and 0 <= self.kv_bytes < math.inf
            and 0 <= self.landing_kv_bytes < math.inf
        ):
            return
        for name in ("slots_total", "slots_used", "num_waiting", "step_s"):
            _check(name, getattr(self, name))
        _check("decode_s", self.decode_s or 0.0)
        for name in ("kv_bytes", "landing_kv_bytes"):
            _check(name, getattr(self, name))

    @property
    def first_token_s(self) -> float:
        """From a free slot to the first token of KVCache that has landed. An engine that decodes
        ends its step, of which half is left on average, and loads the KVCache during the next one.
        """
        num_requests = self.slots_used + len(self.landing_s)
        return self.step_s * (1.0 if num_requests < self.num_instances else _BUSY_STEPS)

    @property
    def is_empty(self) -> bool:
        """Whether nothing decodes, waits to decode or is on its way here."""
        return not (self.slots_used or self.num_waiting or self.landing_s)


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill cluster, or the prefill side of the PD cluster.

    `free_s` are the times until each usable instance has finished what it has, ascending.
    `ahead_s` are the prefills in the common queue that start before a new request, in their order.
    `link` leads to the PD cluster; it is None inside of it. `links_in` lead here from the clusters
    whose cached prefixes can be received, by their names. Prompts with more than `threshold_tokens`
    uncached tokens are meant for this cluster. `plan_threshold_tokens` is the threshold while the
    link is well, None where the two are not told apart. `can_feed` is False where no instance that
    decodes can use the KVCache of any instance here. `num_busy` instances prefill, also those that
    should be done.
    `media` is None for a request of text alone.
    """

    name: str
    prefill: PrefillProfile
    free_s: tuple[float, ...] = ()
    is_healthy: bool = True
    num_queued: int = 0
    max_queued: int | None = None
    ahead_s: tuple[float, ...] = ()
    link: LinkView | None = None
    links_in: Mapping[str, LinkView] = MappingProxyType({})
    threshold_tokens: float = 0.0
    plan_threshold_tokens: float | None = None
    can_feed: bool = True
    num_busy: int = 0
    media: MediaView | None = None

    def __post_init__(self) -> None:
        free_s = self.free_s
        if (
            self.num_queued >= 0
            and (not self.ahead_s or 0 <= min(self.ahead_s) <= max(self.ahead_s) < math.inf)
            and 0 <= self.threshold_tokens < math.inf
            and (not free_s or 0 <= free_s[0] <= free_s[-1] < math.inf)
        ):
            return
        for name in ("num_queued", "threshold_tokens"):
            _check(name, getattr(self, name))
        for item_s in free_s:
            _check("free_s", item_s)
        for item_s in self.ahead_s:
            _check("ahead_s", item_s)

    @property
    def takes_jobs(self) -> bool:
        """Whether its queue has room for one more job."""
        return self.max_queued is None or self.num_queued < self.max_queued


class RegionSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All that a route may depend on besides the request, as it was at `taken_s`.

    `local` is the prefill side of the PD cluster; if it has no instances, the decode engines
    prefill. `engines` are the instances that can serve a request whole. `landing_room_bytes` is the
    largest landing that fits in the PD cluster, None while that is not known. `moving` are the
    pairs of clusters (from, to) between which a cached prefix is under way, `failed_moves` those
    between which a move has failed lately.
    """

    taken_s: float
    local: ClusterView
    decode: DecodeView
    prefill_clusters: tuple[ClusterView, ...] = ()
    engines: ClusterView | None = None
    landing_room_bytes: float | None = None
    moving: Set[tuple[str, str]] = frozenset()
    failed_moves: Set[tuple[str, str]] = frozenset()

    def load(self, place: ClusterView, render_s: float = 0.0) -> Load:
        """What a request meets besides the queue of `place`, where it is prefilled."""
        num_busy = num_others = 0
        for cluster in (*self.prefill_clusters, self.local, self.engines):
            if cluster is not None and cluster is not place:
                num_busy += cluster.num_busy
                num_others += len(cluster.free_s)
        decodes = self.decode.slots_used / max(1, self.decode.num_instances)
        busy = min(1.0, num_busy / num_others) if num_others else 0.0
        return Load(decodes, busy, render_s)

    def __post_init__(self) -> None:
        if len(self.prefill_clusters) < 2:
            return
        names = [cluster.name for cluster in self.prefill_clusters]
        if len(set(names)) != len(names):
            raise ValueError(f"two prefill clusters have one name: {', '.join(names)}")


def _check(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be finite and not negative")
