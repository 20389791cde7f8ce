"""The queueing simulation against closed forms, cases done by hand, and properties of random ones.

Seeds were chosen once; loads and sample sizes leave a standard error of at most 1.2% where 2% are
asked.
"""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.lengths import Floats
from scheduler.queueing import (
    DecodePool,
    Link,
    Requests,
    SimulationResult,
    Spread,
    Station,
    System,
    fluid_backlog,
    poisson_arrivals,
    simulate,
    timeline_in_stages,
)
from scheduler.queueing_events import EventLoop
from scheduler.queueing_model import links_of

ROOMY = DecodePool(num_slots=10**9, step_s=0.0)
MANY = 1_000_000

untimed = settings(deadline=None)
"""Examples take milliseconds; a deadline would measure what else the machine does."""


def requests(arrivals_s: Any, service_s: Any, **fields: Any) -> Requests:
    """Requests of station and pool 0 without KVCache, decode or memory, unless given."""
    num = len(arrivals_s)
    full: dict[str, Any] = {
        "station": np.zeros(num, int),
        "pool": np.zeros(num, int),
        "service_s": np.broadcast_to(np.asarray(service_s, float), num),
        "decode_s": np.zeros(num),
        "kv_token_bytes": np.zeros(num),
        "kv_fixed_bytes": np.zeros(num),
    }
    for name, values in fields.items():
        full[name] = np.broadcast_to(np.asarray(values), num)
    return Requests(arrivals_s=np.asarray(arrivals_s, float), **full)


def one_queue(num_servers: int) -> System:
    return System(stations=(Station(num_servers),), pools=(ROOMY,))


def across(link: Link, num_servers: int = 10**9) -> System:
    return System(stations=(Station(num_servers, {0: 0}),), pools=(ROOMY,), links=(link,))


def service_times(shape: str, num: int, rng: np.random.Generator) -> Floats:
    """Samples with mean 1."""
    match shape:
        case "exponential":
            return rng.exponential(1.0, num)
        case "deterministic":
            return np.ones(num)
        case "log-normal":
            return rng.lognormal(-0.5 * 0.8**2, 0.8, num)
    raise ValueError(shape)


SECOND_MOMENTS = {"exponential": 2.0, "deterministic": 1.0, "log-normal": math.exp(0.8**2)}


def erlang_c_wait_s(num_servers: int, rate_rps: float) -> float:
    """Mean wait of M/M/c with mean service time 1 s."""
    blocked = 1.0
    for servers in range(1, num_servers + 1):
        blocked = rate_rps * blocked / (servers + rate_rps * blocked)
    waits = blocked / (1 - rate_rps / num_servers * (1 - blocked))
    return waits / (num_servers - rate_rps)


# ---- closed forms


@pytest.mark.parametrize("load", [0.5, 0.7])
@pytest.mark.parametrize("shape", ["exponential", "deterministic", "log-normal"])
def test_one_server_waits_as_pollaczek_and_khinchine_say(shape: str, load: float) -> None:
    rng = np.random.default_rng(1)
    result = simulate(
        one_queue(1),
        requests(poisson_arrivals(load, MANY, rng), service_times(shape, MANY, rng)),
        warmup=0.01,
    )
    mean_wait_s = load * SECOND_MOMENTS[shape] / (2 * (1 - load))
    assert np.mean(result.queue_s) == pytest.approx(mean_wait_s, rel=0.02)
    assert result.station_utilisation[0] == pytest.approx(load, rel=0.01)


@pytest.mark.parametrize(("num_servers", "rate_rps"), [(2, 1.0), (4, 2.4)])
def test_several_servers_wait_as_erlang_says(num_servers: int, rate_rps: float) -> None:
    rng = np.random.default_rng(2)
    result = simulate(
        one_queue(num_servers),
        requests(poisson_arrivals(rate_rps, MANY, rng), rng.exponential(1.0, MANY)),
        warmup=0.01,
    )
    assert np.mean(result.queue_s) == pytest.approx(
        erlang_c_wait_s(num_servers, rate_rps), rel=0.02
    )


def test_decode_slots_wait_as_erlang_says() -> None:
    rng = np.random.default_rng(3)
    system = System(stations=(Station(10**9),), pools=(DecodePool(num_slots=5, step_s=0.025),))
    arrivals_s = poisson_arrivals(3.0, MANY, rng)
    result = simulate(
        system, requests(arrivals_s, 1.0, decode_s=rng.exponential(1.0, MANY)), warmup=0.01
    )
    assert np.mean(result.slot_wait_s) == pytest.approx(erlang_c_wait_s(5, 3.0), rel=0.02)
    assert result.pools[0].utilisation == pytest.approx(0.6, rel=0.01)
    assert result.ttft.mean_s == pytest.approx(1.025 + erlang_c_wait_s(5, 3.0), rel=0.02)


def test_even_arrivals_that_keep_a_server_busy_never_wait() -> None:
    result = simulate(one_queue(1), requests(np.arange(1000.0), 1.0))
    assert not np.any(result.queue_s)
    assert result.ttft == Spread(1.0, 1.0, 1.0, 1.0)
    assert result.station_utilisation == (1.0,)


def test_an_overloaded_server_lets_the_queue_grow() -> None:
    result = simulate(one_queue(1), requests(np.arange(1000.0), 1.5), warmup=0)
    np.testing.assert_allclose(result.queue_s, 0.5 * np.arange(1000))


@pytest.mark.parametrize("shape", ["exponential", "deterministic"])
def test_bursts_on_a_link_wait_as_pollaczek_and_khinchine_say(shape: str) -> None:
    """Prefills of equal length that never queue end as a Poisson process: the link is M/G/1."""
    rng = np.random.default_rng(4)
    link = Link(bytes_per_s=1e9, delay_s=0.01)
    sizes = 1e9 * service_times(shape, MANY, rng)
    result = simulate(
        across(link),
        requests(poisson_arrivals(0.6, MANY, rng), 2.0, kv_fixed_bytes=sizes),
        warmup=0.01,
    )
    mean_tail_s = 1 + 0.6 * SECOND_MOMENTS[shape] / (2 * (1 - 0.6)) + link.delay_s
    assert np.mean(result.tail_s) == pytest.approx(mean_tail_s, rel=0.02)
    assert result.links[0].utilisation == pytest.approx(0.6, rel=0.01)


def test_room_for_one_makes_the_whole_life_one_service() -> None:
    """M/G/1 once more, through the event loop: prefill, tail and decode hold the memory in turn."""
    rng = np.random.default_rng(5)
    num = 120_000
    pool = DecodePool(num_slots=3, step_s=0.0, memory_bytes=10)
    system = System(stations=(Station(7, {0: 0}),), pools=(pool,), links=(Link(bytes_per_s=100.0),))
    result = simulate(
        system,
        requests(
            poisson_arrivals(0.5, num, rng),
            0.1,
            kv_fixed_bytes=20.0,
            decode_s=rng.exponential(0.7, num),
            memory_bytes=7.0,
        ),
        warmup=0.01,
    )
    second_moment = (0.1 + 0.2 + 0.7) ** 2 + 0.7**2
    assert np.mean(result.queue_s) == pytest.approx(0.5 * second_moment / (2 * 0.5), rel=0.02)
    assert not np.any(result.slot_wait_s)
    assert result.pools[0].peak_memory_bytes == 7


def test_room_for_two_is_a_queue_with_two_servers() -> None:
    rng = np.random.default_rng(6)
    num = 200_000
    pool = DecodePool(num_slots=100, step_s=0.0, memory_bytes=23)
    system = System(stations=(Station(100),), pools=(pool,))
    life = rng.exponential(1.0, num)
    result = simulate(
        system,
        requests(poisson_arrivals(1.0, num, rng), 0.0, decode_s=life, memory_bytes=10.0),
        warmup=0.01,
    )
    assert np.mean(result.queue_s) == pytest.approx(erlang_c_wait_s(2, 1.0), rel=0.02)
    assert result.pools[0].peak_memory_bytes == 20


# ---- the link, by hand


def test_a_fast_link_leaves_the_fixed_part_and_the_delay() -> None:
    link = Link(bytes_per_s=1e9, delay_s=0.02)
    sent = requests([0.0, 0.5, 9.0], 2.0, kv_token_bytes=1e8, kv_fixed_bytes=5e6)
    np.testing.assert_allclose(simulate(across(link), sent, warmup=0).tail_s, 0.025)


def test_a_slow_link_has_what_was_not_sent_during_the_prefill_left() -> None:
    result = simulate(
        across(Link(bytes_per_s=50.0, delay_s=0.5)),
        requests([3.0, 100.0], 1.0, kv_token_bytes=100.0, kv_fixed_bytes=20.0),
        warmup=0,
    )
    np.testing.assert_allclose(result.tail_s, (100 - 50 + 20) / 50 + 0.5)
    assert result.links[0].peak_backlog_bytes == pytest.approx(70)
    assert result.links[0].sent_bytes == pytest.approx(120)


def test_prefills_at_the_same_time_share_a_link_in_the_order_of_emission() -> None:
    """[0, 2) emits 10/s, [1, 2.5) 20/s, rate 10/s: nothing left at 1, 20 at 2, 25 at 2.5."""
    result = simulate(
        across(Link(bytes_per_s=10.0)),
        requests([0.0, 1.0], [2.0, 1.5], kv_token_bytes=[20.0, 30.0]),
        warmup=0,
    )
    np.testing.assert_allclose(result.tail_s, [2.0, 2.5])


def test_a_link_that_is_too_slow_carries_what_it_can() -> None:
    result = simulate(
        across(Link(bytes_per_s=1e6), num_servers=4),
        requests(np.arange(20_000) * 0.5, 1.0, kv_token_bytes=9e5, kv_fixed_bytes=1e5),
    )
    landed_s = result.timeline.landed_s
    assert 1 / np.mean(np.diff(landed_s)) == pytest.approx(1.0, rel=0.02)
    assert result.links[0].utilisation == pytest.approx(1.0)
    assert result.links[0].sent_bytes == pytest.approx(1e6 * result.span_s)


def test_an_instant_prefill_emits_everything_at_its_end() -> None:
    result = simulate(
        across(Link(bytes_per_s=10.0)),
        requests([0.0, 1.0], 0.0, kv_token_bytes=20.0, kv_fixed_bytes=1.0),
        warmup=0,
    )
    np.testing.assert_allclose(result.tail_s, [2.1, 3.2])


def test_a_station_reaches_each_pool_over_its_own_link() -> None:
    system = System(
        stations=(Station(2, {0: 1, 1: 0}),),
        pools=(ROOMY, ROOMY, ROOMY),
        links=(Link(bytes_per_s=10.0), Link(bytes_per_s=100.0)),
    )
    sent = requests(
        np.arange(3) * 50.0, 1.0, pool=np.arange(3), kv_token_bytes=0.0, kv_fixed_bytes=100.0
    )
    np.testing.assert_allclose(simulate(system, sent, warmup=0).tail_s, [1.0, 10.0, 0.0])


def test_links_do_not_share() -> None:
    system = System(
        stations=(Station(1, {0: 0}), Station(1, {0: 1}), Station(1)),
        pools=(ROOMY,),
        links=(Link(bytes_per_s=10.0), Link(bytes_per_s=100.0)),
    )
    result = simulate(
        system, requests([0.0, 0.0, 0.0], 1.0, station=[0, 1, 2], kv_fixed_bytes=100.0), warmup=0
    )
    np.testing.assert_allclose(result.tail_s, [10.0, 1.0, 0.0])


# ---- memory, by hand


def test_without_room_a_prefill_waits_and_holds_its_station_but_no_other() -> None:
    """Room for 10: request 0 has 6 of it until 5, so 1 (5) waits, and 2 (1) behind it; 3 does not.

    At 5 the next in line starts first: 1, and with it 2.
    """
    system = System(
        stations=(Station(4), Station(4)), pools=(DecodePool(9, step_s=0.0, memory_bytes=10),)
    )
    result = simulate(
        system,
        requests(
            [0.0, 1.0, 2.0, 3.0],
            1.0,
            station=[0, 0, 0, 1],
            decode_s=4.0,
            memory_bytes=[6.0, 5.0, 1.0, 1.0],
        ),
        warmup=0,
    )
    np.testing.assert_array_equal(result.timeline.start_s, [0.0, 5.0, 5.0, 3.0])
    assert result.pools[0].peak_memory_bytes == 7


def test_a_bounded_pool_does_not_hold_up_the_requests_of_another() -> None:
    system = System(
        stations=(Station(4), Station(4)),
        pools=(DecodePool(9, step_s=0.0, memory_bytes=10), DecodePool(9, step_s=0.0)),
    )
    result = simulate(
        system,
        requests(
            [0.0, 0.0, 0.0],
            1.0,
            station=[0, 0, 1],
            pool=[0, 0, 1],
            decode_s=4.0,
            memory_bytes=[10.0, 10.0, 1000.0],
        ),
        warmup=0,
    )
    np.testing.assert_array_equal(result.queue_s, [0.0, 5.0, 0.0])


# ---- properties


@st.composite
def regions(draw: st.DrawFn) -> tuple[System, Requests]:
    """A few stations, links and pools; all amounts are quarters, so that ties are common.

    Rates are powers of two: every time in the simulation is exact in binary.
    """
    links = tuple(
        Link(bytes_per_s=2.0 ** draw(st.integers(-1, 4)), delay_s=draw(st.integers(0, 3)) / 4)
        for _ in range(draw(st.integers(0, 2)))
    )
    pools = tuple(
        DecodePool(draw(st.integers(1, 4)), step_s=0.25) for _ in range(draw(st.integers(1, 2)))
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
    pools = tuple(DecodePool(pool.num_slots, pool.step_s, limit_bytes) for pool in system.pools)
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
    parts = (result.queue_s, result.prefill_s, result.tail_s, result.slot_wait_s)
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
        peak = result.pools[index].peak_memory_bytes
        assert peak is not None
        assert most <= peak


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
    faster_links = tuple(Link(2 * link.bytes_per_s, link.delay_s) for link in system.links)
    more = timeline_in_stages(
        System(stations=system.stations, pools=system.pools, links=faster_links), made
    )
    assert np.all(more.landed_s <= before.landed_s)
    more_servers = tuple(Station(s.num_servers + 1, s.links) for s in system.stations)
    more = timeline_in_stages(
        System(stations=more_servers, pools=system.pools, links=system.links), made
    )
    assert np.all(more.start_s <= before.start_s)
    more_slots = tuple(DecodePool(p.num_slots + 1, p.step_s) for p in system.pools)
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
    backlog, sent = fluid_backlog(
        times_s[order],
        np.concatenate((rates, -rates, [0]))[order],
        np.concatenate((0 * bursts, bursts, [0]))[order],
        bytes_per_s,
    )
    assert np.all(backlog >= 0)
    assert backlog[-1] == pytest.approx(0, abs=1e-6)
    assert sent[-1] == pytest.approx(offered, abs=1e-6)
    assert np.all(np.diff(sent) >= -1e-6)
    assert np.all(np.diff(sent) <= bytes_per_s * np.diff(times_s[order]) + 1e-6)


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
    assert repr(first.links + first.pools) == repr(second.links + second.pools)


# ---- what is reported


def two_sided(warmup: float) -> SimulationResult:
    system = System(
        stations=(Station(1, {0: 0}), Station(0), Station(2)),
        pools=(DecodePool(4, step_s=0.5),),
        links=(Link(bytes_per_s=10.0),),
    )
    return simulate(
        system,
        requests(
            np.arange(11.0),
            0.5,
            station=[0, 2] * 5 + [0],
            kv_fixed_bytes=2.0,
            decode_s=2.0,
            memory_bytes=3.5,
        ),
        warmup=warmup,
    )


def test_loads_are_those_of_the_span_of_the_kept_arrivals() -> None:
    result = two_sided(warmup=0.2)
    assert result.first_kept == 2
    assert result.span_s == 8.0
    assert len(result.ttft_s) == len(result.tail_s) == 9
    assert result.station_utilisation == (4 * 0.5 / 8, 0.0, 4 * 0.5 / (2 * 8))
    assert result.links[0].sent_bytes == pytest.approx(4 * 2.0)
    assert result.links[0].utilisation == pytest.approx(0.1)
    assert result.links[0].peak_backlog_bytes == pytest.approx(2.0)
    assert result.pools[0].utilisation == pytest.approx(2 / 4)
    assert result.pools[0].peak_memory_bytes == 3 * 4
    assert result.pools[0].mean_memory_bytes == pytest.approx(4 * (2.7 + 2.5) / 2)
    np.testing.assert_allclose(result.ttft_s, [1.2, 1.0] * 4 + [1.2])
    assert result.ttft.p90_s == pytest.approx(1.2)


def test_everything_is_kept_without_a_warm_up() -> None:
    result = two_sided(warmup=0.0)
    assert result.first_kept == 0
    assert len(result.ttft_s) == len(result.timeline.start_s) == 11


def test_one_request_has_no_span_to_be_busy_in() -> None:
    result = simulate(one_queue(1), requests([3.0], 2.0))
    assert result.span_s == 0
    assert math.isnan(result.station_utilisation[0])
    assert result.pools[0].mean_memory_bytes is result.pools[0].peak_memory_bytes is None
    assert result.ttft.p99_s == 2.0


def test_poisson_arrivals_are_those_of_their_seed() -> None:
    first = poisson_arrivals(2.0, 100_000, np.random.default_rng(7))
    np.testing.assert_array_equal(first, poisson_arrivals(2.0, 100_000, np.random.default_rng(7)))
    gaps_s = np.diff(first)
    assert np.all(gaps_s >= 0)
    assert np.mean(gaps_s) == pytest.approx(0.5, rel=0.02)
    assert np.std(gaps_s) == pytest.approx(0.5, rel=0.02)


# ---- errors


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"service_s": [1.0, -1.0]}, r"service_s\[1\] is -1"),
        ({"kv_fixed_bytes": [math.nan, 1.0]}, r"kv_fixed_bytes\[0\] is nan"),
        ({"decode_s": [1.0, math.inf]}, r"decode_s\[1\] is inf"),
        ({"memory_bytes": [-1.0, 0.0]}, r"memory_bytes\[0\] is -1"),
        ({"kv_token_bytes": [1.0, 1.0, 1.0]}, r"kv_token_bytes has shape \(3,\)"),
        ({"station": [0]}, r"station has shape \(1,\)"),
        ({"pool": [0.0, 0.0]}, "pool holds float64"),
        ({"arrivals_s": [2.0, 1.0]}, r"arrivals_s\[1\] is 1, before"),
        ({"arrivals_s": [-2.0, 1.0]}, r"arrivals_s\[0\] is -2"),
        ({"arrivals_s": [[1.0, 2.0]]}, r"arrivals_s has shape \(1, 2\)"),
        ({"arrivals_s": []}, r"arrivals_s has shape \(0,\)"),
    ],
)
def test_impossible_requests_are_named(fields: dict[str, Any], message: str) -> None:
    good = requests([1.0, 2.0], 1.0)
    values = {name: getattr(good, name) for name in Requests.__slots__}
    with pytest.raises(ValueError, match=message):
        Requests(**values | {name: np.array(value) for name, value in fields.items()})


@pytest.mark.parametrize(
    ("station", "pool", "message"),
    [
        (1, 0, "station 1 has num_servers 0; requests for it: 1"),
        (2, 0, "names station 2; there are 2"),
        (-1, 0, "names station -1"),
        (0, 1, "pool 1 has num_slots 0; requests for it: 1"),
        (0, 3, "names pool 3; there are 3"),
        (0, 2, "memory_bytes of a request is 11, the limit of pool 2 10; it could never start"),
    ],
)
def test_requests_that_do_not_fit_the_region_are_named(
    station: int, pool: int, message: str
) -> None:
    system = System(
        stations=(Station(1), Station(0)),
        pools=(DecodePool(1, 0.0), DecodePool(0, 0.0), DecodePool(1, 0.0, memory_bytes=10.9)),
    )
    fitting = requests([0.0], 1.0, station=[0], pool=[2], memory_bytes=[10.0])
    assert simulate(system, fitting).ttft.mean_s == 1.0
    with pytest.raises(ValueError, match=message):
        simulate(system, requests([0.0], 1.0, station=station, pool=pool, memory_bytes=10.1))


def test_a_limit_needs_requests_with_sizes() -> None:
    system = System(stations=(Station(1),), pools=(DecodePool(1, 0.0, memory_bytes=10),))
    with pytest.raises(ValueError, match="pool 0 has a memory limit"):
        simulate(system, requests([0.0], 1.0))


@pytest.mark.parametrize("warmup", [-0.1, 1.0, math.nan])
def test_a_warm_up_leaves_something(warmup: float) -> None:
    with pytest.raises(ValueError, match="warmup is"):
        simulate(one_queue(1), requests([0.0], 1.0), warmup=warmup)


def test_impossible_regions_are_named() -> None:
    with pytest.raises(ValueError, match="num_servers is -1"):
        Station(-1)
    with pytest.raises(ValueError, match="bytes_per_s is 0"):
        Link(bytes_per_s=0.0)
    with pytest.raises(ValueError, match="delay_s is -1"):
        Link(bytes_per_s=1.0, delay_s=-1.0)
    with pytest.raises(ValueError, match="num_slots is -1"):
        DecodePool(-1, step_s=0.1)
    with pytest.raises(ValueError, match="step_s is nan"):
        DecodePool(1, step_s=math.nan)
    with pytest.raises(ValueError, match="memory_bytes is -1"):
        DecodePool(1, step_s=0.1, memory_bytes=-1.0)
    with pytest.raises(ValueError, match=r"stations\[0\] names link 0; there are 0"):
        System(stations=(Station(1, {0: 0}),), pools=())
    with pytest.raises(ValueError, match="rate_rps is 0"):
        poisson_arrivals(0.0, 1, np.random.default_rng(0))
    with pytest.raises(ValueError, match="num_requests is 0"):
        poisson_arrivals(1.0, 0, np.random.default_rng(0))
