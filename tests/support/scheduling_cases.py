"""Regions for the tests of the scheduler's decisions: built by hand, and drawn at random."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.routing.candidates import RouteConfig
from scheduler.routing.decision import RequestShape
from scheduler.routing.profiles import KvProfile, PrefillProfile
from scheduler.routing.views import ClusterView, DecodeView, RegionSnapshot

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Examples take milliseconds; a limit would measure what else the machine does."""

FAST = PrefillProfile((0.0,), ((0.5, 1e-4, 0.0),))
SLOW = PrefillProfile((0.0,), ((0.5, 2e-4, 0.0),))
KV = KvProfile(fixed_bytes=1e6, token_bytes=1000.0)
CONFIG = RouteConfig(kv=KV, hand_off_tokens=1)
IDLE_DECODE = DecodeView(slots_total=20, decode_s=10.0, step_s=0.025)
GOOD_LINK = LinkView(available_bytes_per_s=1e9)


def far(name: str = "far", link: LinkView | None = GOOD_LINK, **fields: object) -> ClusterView:
    """A prefill cluster of two idle instances, t at 10,000 tokens."""
    given: dict[str, object] = {
        "prefill": FAST,
        "free_s": (0.0, 0.0),
        "threshold_tokens": 10_000,
    }
    return ClusterView(name=name, link=link, **(given | fields))  # type: ignore[arg-type]


def near(**fields: object) -> ClusterView:
    """The PD cluster's prefill instances: two, idle."""
    given: dict[str, object] = {"prefill": SLOW, "free_s": (0.0, 0.0)}
    return ClusterView(name="pd", **(given | fields))  # type: ignore[arg-type]


def region(
    *clusters: ClusterView,
    local: ClusterView | None = None,
    decode: DecodeView = IDLE_DECODE,
    **fields: object,
) -> RegionSnapshot:
    links_in = {cluster.name: cluster.link for cluster in clusters if cluster.link is not None}
    return RegionSnapshot(
        taken_s=0.0,
        local=replace(local or near(), links_in=links_in),
        decode=decode,
        prefill_clusters=clusters,
        **fields,  # type: ignore[arg-type]
    )


def prompt(num_tokens: int, **fields: Any) -> RequestShape:
    """What is cached in a cluster can be sent to others."""
    local = {"pd": fields.get("local_cached_tokens", 0)}
    sendable = {"sendable_tokens": local | fields.get("prefill_cached_tokens", {})}
    return RequestShape(num_prompt_tokens=num_tokens, **(sendable | fields))


seconds = st.floats(0, 1000)
nbytes = st.floats(0, 1e12)
rates = st.one_of(st.just(0.0), st.floats(1.0, 1e11))

links = st.builds(
    LinkView,
    state=st.sampled_from(LinkCondition),
    available_bytes_per_s=st.one_of(st.none(), rates),
    rtt_s=st.floats(0, 1),
    backlog_bytes=nbytes,
    inflow_bytes_per_s=rates,
    age_s=st.floats(0, 10),
)

_PAIRS = st.sampled_from([("x", "pd"), ("pd", "x"), ("y", "pd"), ("x", "y")])

_free_times = st.lists(seconds, max_size=4).map(lambda found: tuple(sorted(found)))


@st.composite
def decode_views(draw: st.DrawFn) -> DecodeView:
    """Any pool, with or without knowledge of how long a decode takes."""
    return DecodeView(
        slots_total=draw(st.integers(0, 8)),
        slots_used=draw(st.integers(0, 8)),
        num_waiting=draw(st.integers(0, 5)),
        decode_s=draw(st.one_of(st.none(), seconds)),
        step_s=draw(st.floats(0, 1)),
        landing_s=tuple(sorted(draw(st.lists(seconds, max_size=6)))),
        kv_bytes=draw(nbytes),
        kv_total_bytes=draw(st.one_of(st.none(), nbytes)),
        landing_kv_bytes=draw(nbytes),
    )


@st.composite
def clusters(draw: st.DrawFn, name: str, *, is_far: bool) -> ClusterView:
    link = st.one_of(st.none(), links)
    return ClusterView(
        name=name,
        prefill=draw(st.sampled_from([FAST, SLOW])),
        free_s=draw(_free_times),
        is_healthy=draw(st.booleans()),
        num_queued=draw(st.integers(0, 5)),
        max_queued=draw(st.one_of(st.none(), st.integers(0, 5))),
        ahead_s=tuple(draw(st.lists(seconds, max_size=6))),
        link=draw(link) if is_far else None,
        links_in=draw(st.dictionaries(st.sampled_from(["pd", "x", "y"]), links)),
        threshold_tokens=draw(st.floats(0, 1e6)),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> RegionSnapshot:
    names = ["x", "y", "z"][: draw(st.integers(0, 3))]
    return RegionSnapshot(
        taken_s=0.0,
        local=draw(clusters("pd", is_far=False)),
        decode=draw(decode_views()),
        prefill_clusters=tuple(draw(clusters(name, is_far=True)) for name in names),
        engines=draw(st.one_of(st.none(), clusters("pd", is_far=False))),
        landing_room_bytes=draw(st.one_of(st.none(), st.integers(0, 10**10))),
        moving=draw(st.sets(_PAIRS)),
        failed_moves=draw(st.sets(_PAIRS)),
    )


shapes = st.builds(
    RequestShape,
    num_prompt_tokens=st.integers(0, 10**6),
    local_cached_tokens=st.integers(0, 10**6),
    prefill_cached_tokens=st.dictionaries(st.sampled_from(["x", "y"]), st.integers(0, 10**6)),
    landing_cached_tokens=st.integers(0, 10**6),
    sendable_tokens=st.dictionaries(st.sampled_from(["pd", "x", "y"]), st.integers(0, 10**6)),
    num_choices=st.sampled_from([1, 1, 2, 0]),
)
