"""The state of a running replay in the shape of `scheduler.routing.views`, without building those.

The scheduler's decisions only read attributes. Frozen views of all instances, built and checked for
every request, would take longer than the decisions; these are filled in place instead. They carry
exactly what `scheduler.routing.short_term.route` and `scheduler.live.admission` look at, which a
test holds against the real views. Valid until the replay goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, cast, overload

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.routing.decision import RequestShape
from scheduler.routing.profiles import PrefillProfile
from scheduler.routing.views import ClusterView, DecodeView, InstanceView, RegionSnapshot

_NO_HITS: Final = MappingProxyType[str, int]({})


class LiveShape:
    """One request, as `RequestShape`; only what differs between requests of a replay."""

    __slots__ = (
        "landing_cached_tokens",
        "local_cached_tokens",
        "num_prompt_tokens",
        "prefill_cached_tokens",
        "sendable_tokens",
        "transfer_bytes",
    )
    is_exact = True
    num_prompts = 1
    num_choices = 1
    has_prompt_logprobs = False
    has_echo = False
    has_beam_search = False
    is_multimodal = False
    has_prompt_embeds = False
    is_unusual = False

    def __init__(self, num_prompt_tokens: int, transfer_bytes: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.transfer_bytes = transfer_bytes
        self.local_cached_tokens = 0
        self.landing_cached_tokens = 0
        self.prefill_cached_tokens: Mapping[str, int] = _NO_HITS
        self.sendable_tokens: Mapping[str, int] = _NO_HITS

    @property
    def local_uncached_tokens(self) -> int:
        return self.num_prompt_tokens - self.local_cached_tokens

    def as_shape(self) -> RequestShape:
        return cast(RequestShape, self)


class LiveLink:
    """One link, as `LinkView`."""

    __slots__ = (
        "age_s",
        "available_bytes_per_s",
        "backlog_bytes",
        "inflow_bytes_per_s",
        "is_floor",
        "rtt_s",
        "state",
    )

    def __init__(self, rtt_s: float) -> None:
        self.state = LinkCondition.CLEAR
        self.age_s = 0.0
        self.available_bytes_per_s: float | None = None
        self.is_floor = False
        self.rtt_s = rtt_s
        self.backlog_bytes = 0.0
        self.inflow_bytes_per_s = 0.0

    def as_view(self) -> LinkView:
        return cast(LinkView, self)


class FromNow(Sequence[float]):
    """Ascending moments as times from now; those that have passed are now."""

    __slots__ = ("_times_s", "now_s")

    def __init__(self, times_s: Sequence[float], now_s: float = 0.0) -> None:
        """Shows the list as it is when it is looked at."""
        self._times_s = times_s
        self.now_s = now_s

    def __len__(self) -> int:
        return len(self._times_s)

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> list[float]: ...
    def __getitem__(self, index: int | slice) -> float | list[float]:
        if isinstance(index, slice):
            return [max(0.0, at - self.now_s) for at in self._times_s[index]]
        left_s = self._times_s[index] - self.now_s
        return left_s if left_s > 0.0 else 0.0


class LiveCluster:
    """One cluster, as `ClusterView`."""

    __slots__ = ("free_s", "link", "links_in", "name", "prefill", "queued_s", "threshold_tokens")
    is_healthy = True
    takes_jobs = True
    num_queued = 0
    instances: tuple[InstanceView, ...] = ()

    def __init__(self, name: str, prefill: PrefillProfile) -> None:
        self.name = name
        self.prefill = prefill
        self.queued_s = 0.0
        self.free_s: Sequence[float] = ()
        self.link: LinkView | None = None
        self.links_in: dict[str, LinkView] = {}
        self.threshold_tokens = 0.0


class LiveDecode:
    """The decode pool, as `DecodeView`."""

    __slots__ = (
        "decode_s",
        "landing_s",
        "left_s",
        "num_waiting",
        "slots_total",
        "slots_used",
        "step_s",
    )
    kv_bytes = 0.0
    kv_total_bytes: float | None = None
    landing_kv_bytes = 0.0

    def __init__(self, step_s: float) -> None:
        self.slots_total = 0
        self.slots_used = 0
        self.num_waiting = 0
        self.decode_s = 0.0
        self.step_s = step_s
        self.left_s: Sequence[float] = ()
        self.landing_s: Sequence[float] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.slots_used or self.num_waiting or self.landing_s)

    def as_view(self) -> DecodeView:
        return cast(DecodeView, self)


class LiveSnapshot:
    """The region, as `RegionSnapshot`."""

    __slots__ = ("decode", "local", "prefill_clusters", "taken_s")
    engines: ClusterView | None = None
    landing_room_bytes: float | None = None
    moving = failed_moves = frozenset[tuple[str, str]]()

    def __init__(
        self, local: LiveCluster, decode: LiveDecode, prefill_clusters: list[LiveCluster]
    ) -> None:
        self.taken_s = 0.0
        self.local = local
        self.decode = decode
        self.prefill_clusters = tuple(prefill_clusters)

    def as_snapshot(self) -> RegionSnapshot:
        return cast(RegionSnapshot, self)
