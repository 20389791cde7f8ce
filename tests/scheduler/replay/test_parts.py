"""The parts of a replay: schedules and links, decode batches, caches, workloads, what is seen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netmon.estimate import LinkCondition
from scheduler.planning.lengths import EmpiricalLengths
from scheduler.planning.prefix_reuse import TracePrompt, cached_tokens
from scheduler.replay.caching import ReplayCache
from scheduler.replay.decode import DecodeInstance, DecodePool, step_table
from scheduler.replay.jobs import Job
from scheduler.replay.links import LinkChange, OtherTraffic, RateSchedule, ReplayLink
from scheduler.replay.prefill import BY_ARRIVAL, PrefillStation
from scheduler.replay.watching import DirectLink, ForeseenLink, MonitoredLink
from scheduler.replay.workload import Phase, Workload, drawn, traced
from scheduler.routing.order_config import OrderConfig
from scheduler.routing.profiles import PrefillProfile

# ---- schedules


def test_a_schedule_joins_changes_other_traffic_loss_and_outages() -> None:
    schedule = RateSchedule.of(
        100.0,
        [LinkChange(at_s=10, bytes_per_s=50.0), LinkChange(at_s=30, loss=0.1)],
        [OtherTraffic(from_s=20, until_s=40, bytes_per_s=30.0)],
        [(50.0, 60.0)],
    )
    at = {0: 100, 9.9: 100, 10: 50, 20: 20, 30: 18, 40: 45, 50: 0, 59: 0, 60: 45, 1e9: 45}
    assert {t: schedule.rate_at(t) for t in at} == pytest.approx(at)
    assert schedule.loss_at(20) == 0
    assert schedule.loss_at(35) == 0.1
    assert schedule.lowest(0, 15) == 50
    assert schedule.lowest(45, 70) == 0
    assert schedule.since_change_s(5) == math.inf
    assert schedule.since_change_s(12) == 2
    assert not schedule.is_constant
    assert RateSchedule.of(1.0).is_constant


def test_other_traffic_never_takes_everything() -> None:
    schedule = RateSchedule.of(100.0, (), [OtherTraffic(from_s=0, until_s=1, bytes_per_s=500.0)])
    assert schedule.rate_at(0.5) == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinkChange(at_s=-1), "at_s is -1"),
        (lambda: LinkChange(at_s=0, bytes_per_s=-1), "bytes_per_s is -1"),
        (lambda: LinkChange(at_s=0, loss=1.0), "loss is 1.0"),
        (lambda: LinkChange(at_s=0, rate_factor=0), "rate_factor is 0"),
        (lambda: OtherTraffic(from_s=5, until_s=5, bytes_per_s=1), "times must ascend"),
        (lambda: RateSchedule((1.0,), (1.0,), (0.0,)), "must ascend from 0"),
        (lambda: RateSchedule((0.0,), (1.0, 2.0), (0.0,)), "of one length"),
        (lambda: step_table([]), "decode steps"),
        (lambda: step_table([(1, 0.2), (2, 0.1)]), "cannot take less"),
        (lambda: ReplayCache(-1, 16), "max_blocks -1"),
        (lambda: Workload(arrivals_s=[], prompt_tokens=[], output_tokens=[]), "no request"),
        (lambda: Workload(arrivals_s=[0], prompt_tokens=[], output_tokens=[1]), "0 prompt_tokens"),
        (
            lambda: Workload(arrivals_s=[1, 0], prompt_tokens=[1, 1], output_tokens=[1, 1]),
            "go back",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---- links


def test_what_is_emitted_faster_than_the_link_waits() -> None:
    link = ReplayLink(RateSchedule.of(10.0), delay_s=0.5)
    link.change(0.0, 15.0)
    link.change(4.0, -15.0, 20.0)
    assert link.backlog_bytes == pytest.approx(40)
    assert link.landed_s(link.emitted_bytes) == pytest.approx(4 + 4 + 0.5)
    link.advance(6.0)
    assert link.sent_bytes == pytest.approx(60)
    link.advance(100.0)
    assert (link.backlog_bytes, link.sent_bytes) == (0, pytest.approx(80))


def test_landing_passes_through_an_outage() -> None:
    link = ReplayLink(RateSchedule.of(10.0, outages=[(1.0, 5.0)]))
    link.change(0.0, 0.0, 30.0)
    assert link.landed_s(link.emitted_bytes) == pytest.approx(7.0)
    link.advance(3.0)
    assert link.backlog_bytes == pytest.approx(20)


def test_a_link_that_stays_down_never_delivers() -> None:
    link = ReplayLink(RateSchedule.of(10.0, [LinkChange(at_s=1.0, bytes_per_s=0.0)]))
    link.change(0.0, 0.0, 30.0)
    assert link.landed_s(link.emitted_bytes) == math.inf


def test_what_is_given_up_is_not_sent_and_the_rest_comes_sooner() -> None:
    link = ReplayLink(RateSchedule.of(10.0))
    link.change(0.0, 0.0, 100.0)
    first = link.emitted_bytes
    link.change(0.0, 0.0, 50.0)
    second = link.emitted_bytes
    assert (link.landed_s(first), link.landed_s(second)) == (10.0, 15.0)
    link.skip(2.0, first, 100.0)
    assert link.landed_s(second) == pytest.approx(7.0)
    link.advance(20.0)
    assert link.sent_bytes == pytest.approx(70)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 100), st.floats(0, 200)), max_size=20))
def test_bytes_are_neither_lost_nor_made(steps: list[tuple[float, float, float]]) -> None:
    schedule = RateSchedule.of(20.0, [LinkChange(at_s=7, bytes_per_s=5.0)], outages=[(3, 4)])
    link, now_s, given_bytes = ReplayLink(schedule), 0.0, 0.0
    for passed_s, inflow, burst in steps:
        now_s += passed_s
        link.advance(now_s)
        assert link.sent_bytes + link.backlog_bytes == pytest.approx(given_bytes)
        link.change(now_s, inflow, burst)
        landed_s = link.landed_s(link.emitted_bytes)
        assert landed_s >= now_s
        link.change(now_s + 0.5, -inflow)
        now_s += 0.5
        given_bytes += burst + 0.5 * inflow


# ---- what is seen of links


def watched(schedule: RateSchedule, rtt_s: float = 0.02) -> tuple[ReplayLink, MonitoredLink]:
    link = ReplayLink(schedule, rtt_s / 2)
    return link, MonitoredLink("a to b", link, rtt_s)


def test_the_monitor_learns_the_rate_of_a_busy_link_and_sees_it_fall() -> None:
    schedule = RateSchedule.of(1e9, [LinkChange(at_s=30, bytes_per_s=5e7)])
    link, watch = watched(schedule)
    assert watch.view(0.0).available_bytes_per_s is None
    link.change(0.0, 1.2e9)
    for i in range(1, 4 * 34):
        now_s = i / 4
        watch.sample(now_s)
        if now_s == 29:
            seen = watch.view(now_s)
            assert seen.available_bytes_per_s == pytest.approx(1e9, rel=0.05)
        if now_s == 32:
            seen = watch.view(now_s)
            assert seen.available_bytes_per_s == pytest.approx(5e7, rel=0.05)
            assert seen.state is LinkCondition.CONGESTED
            assert seen.backlog_bytes > 0


def test_the_monitor_calls_a_cut_link_down_and_clear_again_afterwards() -> None:
    link, watch = watched(RateSchedule.of(1e9, outages=[(10, 30)]))
    states = {}
    for i in range(1, 4 * 90):
        now_s = i / 4
        link.change(now_s, 0.0, 1e8 if now_s < 40 else 1e7)
        watch.sample(now_s)
        states[now_s] = watch.view(now_s).state
    assert states[9.0] in (LinkCondition.CLEAR, LinkCondition.RISING)
    assert states[15.0] is LinkCondition.DOWN
    assert states[89.0] is LinkCondition.CLEAR


def test_the_direct_view_is_late_and_the_oracle_early() -> None:
    schedule = RateSchedule.of(100.0, [LinkChange(at_s=50, bytes_per_s=10.0)])
    link = ReplayLink(schedule)
    direct, foreseen = DirectLink(link, 0.0, lag_s=2.0), ForeseenLink(link, 0.0, horizon_s=5.0)
    assert foreseen.view(46.0).available_bytes_per_s == 10
    assert direct.view(51.0).available_bytes_per_s == 100
    assert direct.view(52.5).available_bytes_per_s == 10


# ---- decode


def pool_of(slots: int, steps: list[tuple[int, float]], num: int = 1) -> tuple[DecodePool, Any]:
    events: list[tuple[float, DecodeInstance, int]] = []
    instances = [DecodeInstance(f"d{i}") for i in range(num)]
    pool = DecodePool(
        instances,
        slots,
        step_table(steps),
        lambda *event: events.append(event),
        begun=lambda job, now_s: None,
    )
    return pool, events


def play(pool: DecodePool, events: list[Any]) -> dict[int, float]:
    """Everything that is in it, to the end: when each request is done."""
    done: dict[int, float] = {}
    while events:
        events.sort(key=lambda event: (event[0], event[2]))
        at_s, instance, version = events.pop(0)
        done |= {job.index: job.done_s for job in pool.ended(instance, version, at_s)}
    return done


def test_a_fuller_batch_slows_all_its_requests() -> None:
    pool, events = pool_of(2, [(1, 0.1), (2, 0.2)])
    pool.land(Job(0, 0.0, 10, 20), 0.0)
    pool.land(Job(1, 0.0, 10, 5), 1.0)  # 10 steps of the first are done
    done = play(pool, events)
    # Both at 0.2 s a step until the second is over, 5 steps later; then the first alone.
    assert done == {1: pytest.approx(2.0), 0: pytest.approx(2.5)}


def test_requests_wait_for_a_full_batch_and_take_the_least_full() -> None:
    pool, events = pool_of(1, [(1, 0.1)], num=2)
    for index in range(3):
        pool.land(Job(index, 0.0, 10, 10 * (index + 1)), 0.0)
    assert len(pool.waiting) == 1
    assert [len(instance.running) for instance in pool.instances] == [1, 1]
    assert play(pool, events) == {
        0: pytest.approx(1.0),
        1: pytest.approx(2.0),
        2: pytest.approx(4.0),
    }
    assert pool.num_running == 0


def test_an_instance_that_may_not_be_used_takes_nothing() -> None:
    pool, _ = pool_of(4, [(4, 0.1)])
    pool.instances[0].is_usable = False
    pool.recount()
    pool.land(Job(0, 0.0, 10, 10), 0.0)
    assert len(pool.waiting) == 1
    assert pool.slots_total == 0
    pool.instances[0].is_usable = True
    pool.fill(1.0)
    assert not pool.waiting


def test_steps_between_measured_batches_lie_on_straight_lines() -> None:
    assert step_table([(2, 0.1), (4, 0.3)]) == pytest.approx((0.1, 0.1, 0.1, 0.2, 0.3))


# ---- prefill


def test_a_station_serves_by_arrival_or_by_length() -> None:
    profile = PrefillProfile((0.0,), ((0.0, 1e-3, 0.0),))
    for order, expected in ((BY_ARRIVAL, [0, 1, 2]), (OrderConfig(), [0, 2, 1])):
        station = PrefillStation("s", profile, 1, order)
        jobs = [Job(0, 0.0, 100, 1), Job(1, 0.0, 50_000, 1), Job(2, 0.1, 10, 1)]
        for job in jobs:
            job.believed_s = job.service_s = profile.prefill_s(job.num_tokens)
            station.push(job)
            if job.index == 0:
                assert station.start(0.0) is not None
        assert station.queued_s() == pytest.approx(50.01)
        assert station.start(0.1) is None
        assert [found for found, _ in served(station)] == expected


def served(station: PrefillStation) -> list[tuple[int, float]]:
    """The jobs of a station with one instance in the order of their ends, and these."""
    found, now_s, (instance,) = [], 0.0, station.instances
    while True:
        while station.start(now_s) is not None:
            pass
        jobs = station.next_pass(instance, lambda job: False, now_s)
        if not jobs:
            return found
        now_s += station.begin_pass(instance, jobs)
        for job, is_over in list(station.end_pass(instance, now_s)):
            if is_over:
                found.append((job.index, now_s))


def test_the_end_of_a_prompt_and_the_begin_of_the_next_share_a_pass() -> None:
    """As vLLM's chunked prefill. The fixed part of a prompt's time is in its first chunk."""
    profile = PrefillProfile((0.0,), ((0.5, 1e-3, 0.0),))
    station = PrefillStation("s", profile, 1, max_concurrent=3, pass_tokens=1000)
    for index, num_tokens in enumerate((900, 700, 300, 100)):
        job = Job(index, float(index), num_tokens, 1)
        job.service_s = profile.prefill_s(num_tokens)
        station.push(job)
    # The first and 100 of the second; the rest of that and the third; the last, which is given to
    # the instance when those that it has fill no pass.
    assert served(station) == [
        (0, pytest.approx(2.0)),
        (1, pytest.approx(3.4)),
        (2, pytest.approx(3.4)),
        (3, pytest.approx(4.0)),
    ]


# ---- caches and workloads


@given(st.lists(st.lists(st.integers(0, 30), max_size=8, unique=True), max_size=30))
def test_a_cache_that_is_filled_at_once_is_that_of_prefix_reuse(blocks: list[list[int]]) -> None:
    prompts = [TracePrompt(float(i), 16 * len(b) + 3, 1, b) for i, b in enumerate(blocks)]
    cache, found = ReplayCache(20, 16), []
    for prompt in prompts:
        found.append(cache.hit_tokens(prompt.block_ids, prompt.input_tokens))
        cache.add(prompt.block_ids)
        assert len(cache) <= 20
    assert found == cached_tokens(prompts, 16, 20)


LENGTHS = EmpiricalLengths.of([100.0, 1000.0, 5000.0])


def test_drawn_traffic_has_the_rates_and_means_of_its_phases() -> None:
    phases = [
        Phase(duration_s=1000, rate_rps=5.0, lengths=LENGTHS, output_tokens=100, output_sigma=0.5),
        Phase(duration_s=500, rate_rps=20.0, lengths=LENGTHS.scaled(2), output_tokens=300),
    ]
    work = drawn(phases, 7)
    arrivals = np.array(work.arrivals_s)
    assert (arrivals < 1000).sum() == pytest.approx(5000, rel=0.05)
    assert (arrivals >= 1000).sum() == pytest.approx(10_000, rel=0.05)
    assert arrivals.max() < 1500
    outputs = np.array(work.output_tokens)
    assert outputs[arrivals < 1000].mean() == pytest.approx(100, rel=0.05)
    assert set(outputs[arrivals >= 1000]) == {300}
    assert set(np.array(work.prompt_tokens)[arrivals >= 1000]) == {200, 2000, 10_000}
    again, other = drawn(phases, 7), drawn(phases, 8)
    assert again.arrivals_s == work.arrivals_s
    assert other.arrivals_s != work.arrivals_s


def test_a_trace_is_played_faster() -> None:
    prompts = [TracePrompt(10.0, 100, 0, [1, 2]), TracePrompt(4.0, 50, 7, [1])]
    work = traced(prompts, 64, 2.0)
    assert (work.arrivals_s, work.output_tokens) == ([2.0, 5.0], [7, 1])
    assert work.block_ids == [[1], [1, 2]]
    with pytest.raises(ValueError, match="speed is 0"):
        traced(prompts, 64, 0)


def test_a_station_starts_the_jobs_of_pd_clusters_in_turn() -> None:
    profile = PrefillProfile((0.0,), ((0.0, 1e-3, 0.0),))
    station = PrefillStation("far", profile, 1, OrderConfig())
    jobs = [Job(index, 0.0, 1000, 1, home) for index, home in enumerate((0, 0, 0, 0, 1))]
    for job in jobs:
        job.service_s = 1.0
        station.push(job)
    assert [found for found, _ in served(station)] == [0, 4, 1, 2, 3]
