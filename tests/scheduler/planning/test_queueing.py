"""The queueing simulation against closed forms and cases done by hand.

Seeds were chosen once; loads and sample sizes leave a standard error of at most 1.2% where 2% are
asked.
"""

import math
from typing import Any

import numpy as np
import pytest
from queueing_cases import ROOMY, across, one_queue, requests

from scheduler.planning.lengths import Floats
from scheduler.planning.load.queueing import (
    QueueingLink,
    Requests,
    SimulationResult,
    SlotPool,
    Spread,
    Station,
    System,
    poisson_arrivals,
    simulate,
)

MANY = 1_000_000
whole_study = pytest.mark.slow
"""A million requests, some seconds, to come within 2% of a closed form."""


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


@pytest.mark.parametrize("load", [0.5, pytest.param(0.7, marks=whole_study)])
@pytest.mark.parametrize(
    "shape",
    [
        "exponential",
        pytest.param("deterministic", marks=whole_study),
        pytest.param("log-normal", marks=whole_study),
    ],
)
def test_one_server_waits_as_pollaczek_and_khinchine_say(shape: str, load: float) -> None:
    rng = np.random.default_rng(1)
    result = simulate(
        one_queue(1),
        requests(poisson_arrivals(load, MANY, rng), service_times(shape, MANY, rng)),
        warmup=0.01,
    )
    mean_wait_s = load * SECOND_MOMENTS[shape] / (2 * (1 - load))
    assert np.mean(result.queue_s) == pytest.approx(mean_wait_s, rel=0.02)


@whole_study
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


@whole_study
def test_decode_slots_wait_as_erlang_says() -> None:
    rng = np.random.default_rng(3)
    system = System(stations=(Station(10**9),), pools=(SlotPool(num_slots=5, step_s=0.025),))
    arrivals_s = poisson_arrivals(3.0, MANY, rng)
    result = simulate(
        system, requests(arrivals_s, 1.0, decode_s=rng.exponential(1.0, MANY)), warmup=0.01
    )
    assert np.mean(result.slot_wait_s) == pytest.approx(erlang_c_wait_s(5, 3.0), rel=0.02)
    assert result.ttft.mean_s == pytest.approx(1.025 + erlang_c_wait_s(5, 3.0), rel=0.02)


def test_even_arrivals_that_keep_a_server_busy_never_wait() -> None:
    result = simulate(one_queue(1), requests(np.arange(1000.0), 1.0))
    assert not np.any(result.queue_s)
    assert result.ttft == Spread(1.0, 1.0, 1.0, 1.0)


def test_an_overloaded_server_lets_the_queue_grow() -> None:
    result = simulate(one_queue(1), requests(np.arange(1000.0), 1.5), warmup=0)
    np.testing.assert_allclose(result.queue_s, 0.5 * np.arange(1000))


@whole_study
@pytest.mark.parametrize("shape", ["exponential", "deterministic"])
def test_bursts_on_a_link_wait_as_pollaczek_and_khinchine_say(shape: str) -> None:
    """Prefills of equal length that never queue end as a Poisson process: the link is M/G/1."""
    rng = np.random.default_rng(4)
    link = QueueingLink(bytes_per_s=1e9, delay_s=0.01)
    sizes = 1e9 * service_times(shape, MANY, rng)
    result = simulate(
        across(link),
        requests(poisson_arrivals(0.6, MANY, rng), 2.0, kv_fixed_bytes=sizes),
        warmup=0.01,
    )
    mean_tail_s = 1 + 0.6 * SECOND_MOMENTS[shape] / (2 * (1 - 0.6)) + link.delay_s
    assert np.mean(result.tail_s) == pytest.approx(mean_tail_s, rel=0.02)


def test_room_for_one_makes_the_whole_life_one_service() -> None:
    """M/G/1 once more, through the event loop: prefill, tail and decode hold the memory in turn."""
    rng = np.random.default_rng(5)
    num = 120_000
    pool = SlotPool(num_slots=3, step_s=0.0, memory_bytes=10)
    system = System(
        stations=(Station(7, {0: 0}),), pools=(pool,), links=(QueueingLink(bytes_per_s=100.0),)
    )
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


def test_room_for_two_is_a_queue_with_two_servers() -> None:
    rng = np.random.default_rng(6)
    num = 200_000
    pool = SlotPool(num_slots=100, step_s=0.0, memory_bytes=23)
    system = System(stations=(Station(100),), pools=(pool,))
    life = rng.exponential(1.0, num)
    result = simulate(
        system,
        requests(poisson_arrivals(1.0, num, rng), 0.0, decode_s=life, memory_bytes=10.0),
        warmup=0.01,
    )
    assert np.mean(result.queue_s) == pytest.approx(erlang_c_wait_s(2, 1.0), rel=0.02)


# ---- the link, by hand


def test_a_fast_link_leaves_the_fixed_part_and_the_delay() -> None:
    link = QueueingLink(bytes_per_s=1e9, delay_s=0.02)
    sent = requests([0.0, 0.5, 9.0], 2.0, kv_token_bytes=1e8, kv_fixed_bytes=5e6)
    np.testing.assert_allclose(simulate(across(link), sent, warmup=0).tail_s, 0.025)


def test_a_slow_link_has_what_was_not_sent_during_the_prefill_left() -> None:
    result = simulate(
        across(QueueingLink(bytes_per_s=50.0, delay_s=0.5)),
        requests([3.0, 100.0], 1.0, kv_token_bytes=100.0, kv_fixed_bytes=20.0),
        warmup=0,
    )
    np.testing.assert_allclose(result.tail_s, (100 - 50 + 20) / 50 + 0.5)


def test_prefills_at_the_same_time_share_a_link_in_the_order_of_emission() -> None:
    """[0, 2) emits 10/s, [1, 2.5) 20/s, rate 10/s: nothing left at 1, 20 at 2, 25 at 2.5."""
    result = simulate(
        across(QueueingLink(bytes_per_s=10.0)),
        requests([0.0, 1.0], [2.0, 1.5], kv_token_bytes=[20.0, 30.0]),
        warmup=0,
    )
    np.testing.assert_allclose(result.tail_s, [2.0, 2.5])


def test_a_link_that_is_too_slow_carries_what_it_can() -> None:
    result = simulate(
        across(QueueingLink(bytes_per_s=1e6), num_servers=4),
        requests(np.arange(20_000) * 0.5, 1.0, kv_token_bytes=9e5, kv_fixed_bytes=1e5),
    )
    landed_s = result.timeline.landed_s
    assert 1 / np.mean(np.diff(landed_s)) == pytest.approx(1.0, rel=0.02)


def test_an_instant_prefill_emits_everything_at_its_end() -> None:
    result = simulate(
        across(QueueingLink(bytes_per_s=10.0)),
        requests([0.0, 1.0], 0.0, kv_token_bytes=20.0, kv_fixed_bytes=1.0),
        warmup=0,
    )
    np.testing.assert_allclose(result.tail_s, [2.1, 3.2])


def test_a_station_reaches_each_pool_over_its_own_link() -> None:
    system = System(
        stations=(Station(2, {0: 1, 1: 0}),),
        pools=(ROOMY, ROOMY, ROOMY),
        links=(QueueingLink(bytes_per_s=10.0), QueueingLink(bytes_per_s=100.0)),
    )
    sent = requests(
        np.arange(3) * 50.0, 1.0, pool=np.arange(3), kv_token_bytes=0.0, kv_fixed_bytes=100.0
    )
    np.testing.assert_allclose(simulate(system, sent, warmup=0).tail_s, [1.0, 10.0, 0.0])


def test_links_do_not_share() -> None:
    system = System(
        stations=(Station(1, {0: 0}), Station(1, {0: 1}), Station(1)),
        pools=(ROOMY,),
        links=(QueueingLink(bytes_per_s=10.0), QueueingLink(bytes_per_s=100.0)),
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
        stations=(Station(4), Station(4)), pools=(SlotPool(9, step_s=0.0, memory_bytes=10),)
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


def test_a_bounded_pool_does_not_hold_up_the_requests_of_another() -> None:
    system = System(
        stations=(Station(4), Station(4)),
        pools=(SlotPool(9, step_s=0.0, memory_bytes=10), SlotPool(9, step_s=0.0)),
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


# ---- what is reported


def two_sided(warmup: float) -> SimulationResult:
    system = System(
        stations=(Station(1, {0: 0}), Station(0), Station(2)),
        pools=(SlotPool(4, step_s=0.5),),
        links=(QueueingLink(bytes_per_s=10.0),),
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


def test_the_warm_up_is_left_out() -> None:
    result = two_sided(warmup=0.2)
    assert len(result.ttft_s) == len(result.tail_s) == 9
    np.testing.assert_allclose(result.ttft_s, [1.2, 1.0] * 4 + [1.2])
    assert result.ttft.p90_s == pytest.approx(1.2)


def test_everything_is_kept_without_a_warm_up() -> None:
    result = two_sided(warmup=0.0)
    assert len(result.ttft_s) == len(result.timeline.start_s) == 11


def test_one_request_alone_is_not_left_out() -> None:
    assert simulate(one_queue(1), requests([3.0], 2.0)).ttft.p99_s == 2.0


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
        pools=(SlotPool(1, 0.0), SlotPool(0, 0.0), SlotPool(1, 0.0, memory_bytes=10.9)),
    )
    fitting = requests([0.0], 1.0, station=[0], pool=[2], memory_bytes=[10.0])
    assert simulate(system, fitting).ttft.mean_s == 1.0
    with pytest.raises(ValueError, match=message):
        simulate(system, requests([0.0], 1.0, station=station, pool=pool, memory_bytes=10.1))


def test_a_limit_needs_requests_with_sizes() -> None:
    system = System(stations=(Station(1),), pools=(SlotPool(1, 0.0, memory_bytes=10),))
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
        QueueingLink(bytes_per_s=0.0)
    with pytest.raises(ValueError, match="delay_s is -1"):
        QueueingLink(bytes_per_s=1.0, delay_s=-1.0)
    with pytest.raises(ValueError, match="num_slots is -1"):
        SlotPool(-1, step_s=0.1)
    with pytest.raises(ValueError, match="step_s is nan"):
        SlotPool(1, step_s=math.nan)
    with pytest.raises(ValueError, match="memory_bytes is -1"):
        SlotPool(1, step_s=0.1, memory_bytes=-1.0)
    with pytest.raises(ValueError, match=r"stations\[0\] names link 0; there are 0"):
        System(stations=(Station(1, {0: 0}),), pools=())
    with pytest.raises(ValueError, match="rate_rps is 0"):
        poisson_arrivals(0.0, 1, np.random.default_rng(0))
    with pytest.raises(ValueError, match="num_requests is 0"):
        poisson_arrivals(1.0, 0, np.random.default_rng(0))
