"""The queueing simulation under random requests and regions: what holds whatever they are."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queueing_cases import requests

from scheduler.planning.lengths import Floats
from scheduler.planning.load.queueing import (
    QueueingLink,
    Requests,
    SlotPool,
    Station,
    System,
    fluid_backlog,
    simulate,
    timeline_in_stages,
)
from scheduler.planning.load.queueing_events import EventLoop
from scheduler.planning.load.queueing_model import links_of

untimed = settings(deadline=None)
"""Examples take milliseconds; a deadline would measure what else the machine does."""


@st.composite
def regions(draw: st.DrawFn) -> tuple[System, Requests]:
    """A few stations, links and pools; all amounts are quarters, so that ties are common.

    Rates are powers of two: every time in the simulation is exact in binary.
    """
    links = tuple(
        QueueingLink(
            bytes_per_s=2.0 ** draw(st.integers(-1, 4)), delay_s=draw(st.integers(0, 3)) / 4
        )
        for _ in range(draw(st.integers(0, 2)))
    )
    pools = tuple(
        SlotPool(draw(st.integers(1, 4)), step_s=0.25) for _ in range(draw(st.integers(1, 2)))
    )
    of_pool = st.sampled_from(range(len(pools)))
    which_links = (
        st.dictionaries(of_pool, st.sampled_from(range(len(links)))) if links else st.just({})
    )
    stations = tuple(
        Station(draw(st.integers(1, 3)), draw(which_links)) for _ in range(draw(st.integers(1, 3)))
    )
    num = draw(st.integers(1, 25))

    def amounts(low: int, high: int) -> Floats:
        return np.array(draw(st.lists(st.integers(low, high), min_size=num, max_size=num))) / 4

    service_s = 2.0 ** np.round(amounts(-8, 8))
    made = requests(
        np.cumsum(amounts(0, 8)),
        service_s,
        station=(4 * amounts(0, len(stations) - 1)).astype(int),
        pool=(4 * amounts(0, len(pools) - 1)).astype(int),
        kv_token_bytes=amounts(0, 40) * service_s,
        kv_fixed_bytes=amounts(0, 40),
        decode_s=amounts(0, 40),
        memory_bytes=4 * amounts(0, 40),
    )
    return System(stations=stations, pools=pools, links=links), made


def with_limits(system: System, limit_bytes: float) -> System:
    pools = tuple(SlotPool(pool.num_slots, pool.step_s, limit_bytes) for pool in system.pools)
    return System(stations=system.stations, pools=pools, links=system.links)


def highest(start_s: Floats, end_s: Floats, amounts: Any) -> float:
    """The most that is held at any start, ends at that instant not counted: by definition."""
    held = (start_s[:, None] >= start_s) & (start_s[:, None] < end_s)
    return float(np.max(held @ np.broadcast_to(amounts, len(start_s)), initial=0))


@untimed
@given(regions())
def test_both_ways_give_the_same_timeline_where_no_limit_binds(
    case: tuple[System, Requests],
) -> None:
    in_stages, by_events = timeline_in_stages(*case), EventLoop(*case).run()
    for name in ("start_s", "prefill_end_s", "landed_s", "slot_s", "done_s"):
        np.testing.assert_array_equal(getattr(in_stages, name), getattr(by_events, name), name)


@untimed
@given(regions(), st.sampled_from([None, 40, 60, 1000]))
def test_every_request_goes_through_every_part_once(
    case: tuple[System, Requests], limit_bytes: float | None
) -> None:
    system, made = case
    if limit_bytes is not None:
        system = with_limits(system, limit_bytes)
    result = simulate(system, made, warmup=0)
    parts = (result.queue_s, made.service_s, result.tail_s, result.slot_wait_s)
    assert all(np.all(part >= 0) for part in parts)
    np.testing.assert_allclose(result.ttft_s, sum(parts) + 0.25)
    line = result.timeline
    np.testing.assert_array_equal(line.prefill_end_s, line.start_s + made.service_s)
    np.testing.assert_array_equal(line.done_s, line.slot_s + made.decode_s)
    for index, station in enumerate(system.stations):
        at = made.station == index
        assert highest(line.start_s[at], line.prefill_end_s[at], 1) <= station.num_servers
    for index, pool in enumerate(system.pools):
        at = made.pool == index
        assert highest(line.slot_s[at], line.done_s[at], 1) <= pool.num_slots
        assert made.memory_bytes is not None
        most = highest(line.start_s[at], line.done_s[at], made.memory_bytes[at])
        assert most <= (limit_bytes or math.inf)


@untimed
@given(regions(), st.sampled_from([None, 40, 60]))
def test_nobody_overtakes(case: tuple[System, Requests], limit_bytes: float | None) -> None:
    system, made = case
    if limit_bytes is not None:
        system = with_limits(system, limit_bytes)
    line = simulate(system, made).timeline
    for index in range(len(system.stations)):
        assert np.all(np.diff(line.start_s[made.station == index]) >= 0)
    for index in range(len(system.pools)):
        at = np.flatnonzero(made.pool == index)
        by_landing = at[np.argsort(line.landed_s[at], kind="stable")]
        assert np.all(np.diff(line.slot_s[by_landing]) >= 0)
    for index in range(len(system.links)):
        at = np.flatnonzero(links_of(system, made) == index)
        by_end = at[np.argsort(line.prefill_end_s[at], kind="stable")]
        assert np.all(np.diff(line.landed_s[by_end]) >= 0)


@untimed
@given(regions())
def test_more_of_anything_makes_nothing_start_or_land_later(case: tuple[System, Requests]) -> None:
    system, made = case
    before = timeline_in_stages(system, made)
    faster_links = tuple(QueueingLink(2 * link.bytes_per_s, link.delay_s) for link in system.links)
    more = timeline_in_stages(
        System(stations=system.stations, pools=system.pools, links=faster_links), made
    )
    assert np.all(more.landed_s <= before.landed_s)
    more_servers = tuple(Station(s.num_servers + 1, s.links) for s in system.stations)
    more = timeline_in_stages(
        System(stations=more_servers, pools=system.pools, links=system.links), made
    )
    assert np.all(more.start_s <= before.start_s)
    more_slots = tuple(SlotPool(p.num_slots + 1, p.step_s) for p in system.pools)
    more = timeline_in_stages(
        System(stations=system.stations, pools=more_slots, links=system.links), made
    )
    assert np.all(more.slot_s <= before.slot_s)


@untimed
@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0, 5), st.floats(0, 1e3), st.floats(0, 1e3)),
        min_size=1,
        max_size=20,
    ),
    st.floats(1, 1e3),
)
def test_every_byte_that_goes_into_a_link_comes_out(
    emissions: list[tuple[float, float, float, float]], bytes_per_s: float
) -> None:
    begin_s, lasts_s, rates, bursts = (np.array(column) for column in zip(*emissions, strict=True))
    offered = float(np.sum(lasts_s * rates + bursts))
    at_last_s = 15 + offered / bytes_per_s + 1
    times_s = np.concatenate((begin_s, begin_s + lasts_s, [at_last_s]))
    order = np.argsort(times_s, kind="stable")
    times_s = times_s[order]
    changes = np.concatenate((rates, -rates, [0]))[order]
    at_once = np.concatenate((0 * bursts, bursts, [0]))[order]
    backlog = fluid_backlog(times_s, changes, at_once, bytes_per_s)
    inflow = np.cumsum(changes) - changes
    sent = np.cumsum(inflow * np.diff(times_s, prepend=times_s[:1]) + at_once) - backlog
    assert np.all(backlog >= 0)
    assert backlog[-1] == pytest.approx(0, abs=1e-6)
    assert sent[-1] == pytest.approx(offered, abs=1e-6)
    assert np.all(np.diff(sent) >= -1e-6)
    assert np.all(np.diff(sent) <= bytes_per_s * np.diff(times_s) + 1e-6)


@settings(max_examples=20, deadline=None)
@given(regions(), st.sampled_from([None, 40]))
def test_the_same_again_is_the_same(
    case: tuple[System, Requests], limit_bytes: float | None
) -> None:
    system, made = case
    if limit_bytes is not None:
        system = with_limits(system, limit_bytes)
    first, second = simulate(system, made, warmup=0.2), simulate(system, made, warmup=0.2)
    np.testing.assert_array_equal(first.ttft_s, second.ttft_s)
    np.testing.assert_array_equal(first.timeline.done_s, second.timeline.done_s)
