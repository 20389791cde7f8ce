"""What a monitor makes of samples: rates that were measured, floors, delay, loss and limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from fluid_link import FluidLink
from hypothesis import example, given, settings
from hypothesis import strategies as st
from watched_link import GBIT, MB, FluidWatched, StepWatched

from netmon.estimate import MAX_BACKLOG_S, Limit, LinkEstimate
from netmon.monitor import LinkMonitor
from netmon.samples import LinkSample
from netmon.tcp_info import TcpInfo


def fluid_watched(fluid: FluidLink | None = None) -> FluidWatched:
    return FluidWatched(LinkMonitor("a>b"), fluid)


def step_watched() -> StepWatched:
    return StepWatched(LinkMonitor("a>b"))


def test_nothing_is_assumed_of_a_link_that_never_carried_anything() -> None:
    for estimate in (LinkMonitor("a>b").estimate(5.0), fluid_watched().run(3.0)):
        assert (estimate.available_bytes_per_s, estimate.age_s) == (0, None)
        assert (estimate.limited_by, estimate.backlog_s) == (Limit.IDLE, 0)


def test_a_backlogged_link_is_measured() -> None:
    watched = fluid_watched(FluidLink(GBIT, 0.02, buffer_bytes=MB))
    estimate = watched.run(4.0, 2 * GBIT)
    assert estimate.available_bytes_per_s == pytest.approx(GBIT, rel=0.02)
    assert estimate.achieved_bytes_per_s == pytest.approx(GBIT, rel=0.05)
    assert estimate.utilisation > 0.95
    assert (estimate.age_s, estimate.is_floor) == (0, False)
    assert estimate.limited_by is Limit.LINK
    assert estimate.queueing_delay_s == pytest.approx(MB / GBIT, rel=0.05)
    assert estimate.base_rtt_s == pytest.approx(0.02)
    assert estimate.backlog_s == pytest.approx(watched.fluid.waiting_bytes / GBIT, rel=0.05)


def test_a_link_that_is_never_full_is_known_to_carry_what_it_carried() -> None:
    estimate = fluid_watched(FluidLink(GBIT, num_connections=1)).run(10.0, GBIT / 4)
    assert estimate.is_floor
    assert 0.5 * GBIT < estimate.available_bytes_per_s <= GBIT
    assert estimate.utilisation < 0.5
    assert estimate.limited_by is Limit.IDLE


def test_light_traffic_disproves_an_old_low_measurement() -> None:
    watched = fluid_watched(FluidLink(GBIT / 50, num_connections=1))
    watched.run(3.0, GBIT)
    watched.fluid.bytes_per_s, watched.fluid.waiting_bytes = GBIT, 0.0
    estimate = watched.run(3.0, GBIT / 10)
    assert estimate.available_bytes_per_s > GBIT / 10
    assert estimate.is_floor
    assert estimate.full_age_s == pytest.approx(3)
    assert estimate.age_s is not None
    assert estimate.age_s < 3


def test_the_rate_of_an_idle_link_stands_and_ages() -> None:
    watched = fluid_watched()
    watched.run(2.0, 2 * GBIT)
    before = watched.run(10.0)
    after = watched.run(60.0)
    assert after.available_bytes_per_s == before.available_bytes_per_s
    assert after.age_s is not None
    assert after.age_s > 60
    assert (after.achieved_bytes_per_s < 1, after.queueing_delay_s) == (True, 0)
    assert after.limited_by is Limit.IDLE


def test_a_fall_of_the_rate_shows_within_a_second_and_a_rise_slowly() -> None:
    watched = fluid_watched()
    watched.run(4.0, 2 * GBIT)
    watched.fluid.bytes_per_s = GBIT / 20
    estimate = watched.run(0.8, GBIT)
    assert estimate.available_bytes_per_s == pytest.approx(GBIT / 20, rel=0.05)
    assert estimate.loss > 0.02
    assert estimate.queueing_delay_s > 0.1
    watched.run(3.0, GBIT)
    watched.fluid.bytes_per_s = GBIT
    assert watched.run(0.6, GBIT).available_bytes_per_s < GBIT / 2
    assert watched.run(3.4, GBIT).available_bytes_per_s == pytest.approx(GBIT, rel=0.1)


def test_one_odd_measurement_changes_nothing() -> None:
    watched = step_watched()
    watched.step(20, 10, waiting_bytes=MB)
    for odd in (1, 200):
        watched.step(odd, waiting_bytes=MB)
        assert watched.estimate().available_bytes_per_s == pytest.approx(100 * MB)
        watched.step(20, 3, waiting_bytes=MB)


def test_a_fall_shows_within_two_transfers_with_pauses_between_them() -> None:
    """6 MB twice a second, which the link carries in 50 ms at first."""
    watched = fluid_watched()
    rates: list[tuple[float, float]] = []
    for step in range(100):
        if step == 50:
            watched.fluid.bytes_per_s, watched.fluid.base_rtt_s = GBIT / 10, 0.06
        if step % 5 in (0, 2):
            watched.fluid.offer(6e6)
        rates.append((watched.now_s, watched.run(0.2).available_bytes_per_s))
    assert min(rate for at_s, rate in rates if 5 < at_s <= 9.8) > 25e6
    for _, rate in rates[56:]:
        assert rate == pytest.approx(GBIT / 10, rel=0.1)


def test_an_outage_that_connections_survive_is_a_stall() -> None:
    watched = fluid_watched()
    watched.run(2.0, 2 * GBIT)
    watched.fluid.bytes_per_s = 0
    estimate = watched.run(2.0, GBIT)
    assert (estimate.available_bytes_per_s, estimate.backlog_s) == (0, MAX_BACKLOG_S)
    assert estimate.stalled_s >= 1.8
    watched.fluid.bytes_per_s = GBIT
    assert watched.run(0.4, GBIT).stalled_s == 0


def test_a_link_without_connections_offers_nothing_until_it_is_back() -> None:
    watched = fluid_watched()
    watched.run(2.0, 2 * GBIT)
    watched.fluid.is_up = False
    estimate = watched.run(5.0)
    assert (estimate.is_up, estimate.available_bytes_per_s) == (False, 0)
    watched.fluid.is_up = True
    assert watched.run(1.0).available_bytes_per_s == pytest.approx(GBIT, rel=0.05)


def test_a_ramp_does_not_lower_what_is_known() -> None:
    """Connections that start again are slow at first, and no queue and no loss says otherwise."""
    watched = fluid_watched(FluidLink(GBIT, 0.05))
    watched.run(3.0, 2 * GBIT)
    watched.fluid.waiting_bytes = 0
    known = watched.run(3.0).available_bytes_per_s
    watched.fluid.buffer_bytes, watched.fluid.bytes_per_s = 0, GBIT / 50
    assert watched.run(0.4, GBIT).available_bytes_per_s == known
    assert watched.run(1.0, GBIT).available_bytes_per_s < known / 10


def test_samples_out_of_order_and_too_close_together_are_ignored() -> None:
    watched = fluid_watched()
    before = watched.run(2.0, 2 * GBIT)
    for passed_s in (-1, 0, 0.001):
        watched.monitor.observe(LinkSample(), watched.now_s + passed_s)
    after = watched.estimate()
    assert after.num_ignored_samples == 3
    assert after == replace(before, num_ignored_samples=3)


def test_a_long_silence_is_no_measurement() -> None:
    watched = fluid_watched()
    watched.run(2.0, 2 * GBIT)
    watched.fluid.offer(1e12)
    watched.fluid.bytes_per_s = GBIT / 2
    watched.fluid.run(60.0)
    watched.now_s = watched.fluid.now_s
    assert watched.estimate().sample_age_s == pytest.approx(60)
    assert watched.estimate().achieved_bytes_per_s < 1
    watched.observe(watched.fluid.sample())
    assert watched.estimate().sample_age_s == 0
    assert watched.estimate().available_bytes_per_s == pytest.approx(GBIT, rel=0.05)


def test_coding_makes_the_link_faster_for_transfers() -> None:
    watched = fluid_watched(FluidLink(GBIT / 10))
    for _ in range(50):
        watched.fluid.offer(GBIT)
        watched.fluid.run(0.2)
        watched.now_s, sample = watched.fluid.now_s, watched.fluid.sample()
        watched.observe(replace(sample, acked_bytes=int(sample.acked_bytes * 1.5)))
    rate = watched.estimate().available_bytes_per_s
    assert rate == pytest.approx(GBIT / 10 * 1.5, rel=0.03)


@pytest.mark.parametrize(
    ("limit", "limited"),
    [
        (Limit.RECEIVER_WINDOW, lambda info: replace(info, rwnd_limited_s=0.7 * info.busy_s)),
        (Limit.SEND_BUFFER, lambda info: replace(info, sndbuf_limited_s=0.7 * info.busy_s)),
    ],
)
def test_the_limit_is_told(limit: Limit, limited: Callable[[TcpInfo], TcpInfo]) -> None:
    watched = fluid_watched()
    for _ in range(3):
        watched.fluid.offer(GBIT)
        watched.fluid.run(0.2)
        watched.now_s, sample = watched.fluid.now_s, watched.fluid.sample()
        connections = {number: limited(info) for number, info in sample.connections.items()}
        watched.observe(replace(sample, connections=connections))
    assert watched.estimate().limited_by is limit


# ---- connections that come and go


def connection(mb: float = 0.0, busy_s: float = 0.0) -> TcpInfo:
    num_bytes = int(mb * MB)
    return TcpInfo(acked_bytes=num_bytes, sent_bytes=num_bytes, busy_s=busy_s)


def between(
    before: tuple[TcpInfo, ...], after: tuple[TcpInfo, ...], duration_s: float = 1.0
) -> LinkEstimate:
    """The estimate after two samples of connections with the numbers 1, 2, 3 ..."""
    monitor = LinkMonitor("a>b")
    for now_s, connections in ((9.0, before), (9.0 + duration_s, after)):
        sample = LinkSample(connections=dict(enumerate(connections, start=1)), queued_bytes=MB)
        monitor.observe(sample, now_s)
    return monitor.estimate(9.0 + duration_s)


LOST = replace(connection(1, 0.09), retransmitted_bytes=1448)
ENDED = replace(connection(), unacked_segments=1)


@pytest.mark.parametrize(
    ("before", "after", "sent_mb", "rate_mb"),
    [
        ((connection(10, 3), connection(5, 2)), (connection(12, 3.2), connection(6, 2.1)), 3, 10),
        ((), (connection(1, 0.09),), 1, 10),  # began in the interval: counts from zero
        ((), (connection(900, 80),), 0, 0),  # older than what is known: counts from now on
        ((connection(),), (connection(1, 0.09),), 1, 10),  # over busy time only
        ((connection(),) * 2, (connection(1, 0.09),) * 2, 2, 10),  # perhaps one after the other
        ((connection(),), (connection(1, 0.001),), 1, 20),  # a burst through a shaper
        ((connection(),), (LOST,), 1, 0),  # acknowledgements jump when a loss is mended
    ],
)
def test_connections_that_paused_give_a_floor(
    before: tuple[TcpInfo, ...], after: tuple[TcpInfo, ...], sent_mb: float, rate_mb: float
) -> None:
    estimate = between(before, after)
    assert estimate.sent_bytes == sent_mb * MB
    assert estimate.available_bytes_per_s == pytest.approx(rate_mb * MB, rel=0.1)
    assert estimate.full_age_s is None


def test_a_connection_that_ended_with_bytes_on_their_way_measures_nothing() -> None:
    assert between((connection(),), (connection(20, 1),)).full_age_s == 0
    assert between((connection(), connection()), (connection(20, 1),)).full_age_s == 0
    assert between((connection(), ENDED), (connection(20, 1),)).full_age_s is None


def test_without_connections_the_count_of_the_link_is_used() -> None:
    monitor = LinkMonitor("a>b")
    for step in range(3):
        monitor.observe(LinkSample(acked_bytes=step * MB, queued_bytes=9), step / 2)
    assert monitor.estimate(1.0).available_bytes_per_s == 2 * MB
    assert monitor.estimate(1.0).full_age_s == 0
    monitor.observe(LinkSample(acked_bytes=0, queued_bytes=9), 1.5)
    assert monitor.estimate(1.5).acked_bytes == 2 * MB  # it never falls


def test_round_trips_are_weighted_by_what_they_brought() -> None:
    near = replace(connection(1, 0.1), rtt_s=0.03)
    far = replace(connection(3, 0.1), rtt_s=0.07)
    assert between((), (near, far)).rtt_s == pytest.approx(0.06)
    assert between((far,), (far,)).rtt_s == 0


# ---- whatever is read


COUNTS = st.integers(0, 2**40)
SECONDS = st.floats(0, 1e6)
CONNECTIONS = st.builds(
    TcpInfo,
    rtt_s=SECONDS,
    min_rtt_s=SECONDS,
    unacked_segments=COUNTS,
    notsent_bytes=COUNTS,
    acked_bytes=COUNTS,
    sent_bytes=COUNTS,
    retransmitted_bytes=COUNTS,
    busy_s=SECONDS,
    rwnd_limited_s=SECONDS,
    sndbuf_limited_s=SECONDS,
)
SAMPLES = st.builds(
    LinkSample,
    connections=st.dictionaries(st.integers(0, 3), CONNECTIONS),
    queued_bytes=COUNTS,
    acked_bytes=COUNTS,
    is_up=st.booleans(),
)
STEPS = st.lists(st.tuples(st.floats(-1, 1e4) | st.just(0.2), SAMPLES), max_size=12)


@settings(deadline=None)
@given(STEPS)
def test_whatever_is_read_estimates_are_finite(steps: list[tuple[float, LinkSample]]) -> None:
    monitor, now_s = LinkMonitor("a>b"), 0.0
    for passed_s, sample in steps:
        now_s += passed_s
        monitor.observe(sample, now_s)
        monitor.report(now_s).check()
        estimate = monitor.estimate(now_s)
        assert max(estimate.utilisation, estimate.loss) <= 1


@settings(deadline=None, max_examples=40)
@given(
    rate=st.floats(MB, 20 * MB),
    slower=st.floats(0.05, 0.8),
    rtt_s=st.floats(0.001, 0.05),
    offers=st.lists(st.floats(0, 8 * MB), min_size=5, max_size=40),
)
@example(rate=14e6, slower=0.5, rtt_s=0.03, offers=[3e6, 0.0, 0.0, 0.0, 0.0])
def test_a_slower_link_is_never_thought_faster(
    rate: float, slower: float, rtt_s: float, offers: list[float]
) -> None:
    fast, slow = (
        fluid_watched(FluidLink(bytes_per_s, rtt_s, num_connections=1))
        for bytes_per_s in (rate, rate * slower)
    )
    for offer in offers:
        of_fast, of_slow = fast.run(0.2, 5 * offer), slow.run(0.2, 5 * offer)
        if of_fast.age_s is not None and not of_fast.is_floor:  # not known is not slow
            assert of_slow.available_bytes_per_s <= of_fast.available_bytes_per_s * (1 + 1e-6)
        assert of_slow.available_bytes_per_s <= rate * slower * (1 + 1e-3)
